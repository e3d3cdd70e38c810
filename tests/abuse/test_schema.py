"""Requests made from the OpenAPI schema, right and wrong ones, with a session and without: every answer is one that the schema announces."""

from __future__ import annotations

import pytest
import schemathesis
from fastapi import FastAPI
from hypothesis import HealthCheck, settings
from schemathesis.config import SchemathesisConfig
from schemathesis.specs.openapi.checks import positive_data_acceptance

from blocktrain.swarm.server import Service
from tests.swarm_net import join, make_coordinator

EXAMPLES = 15
BEYOND = [positive_data_acceptance]  # that every well-formed request is granted: the rules and signatures say no, too


def make_app() -> tuple[FastAPI, str, str]:
    limits = {"joins_per_minute": 1 << 20, "requests_per_s": 1 << 20}
    coordinator = make_coordinator(limits=limits, round={"inner_steps": 4, "strikes": 1 << 20, "quorum": 1, "deadline_s": 2.0, "deadline_min_s": 2.0})
    token = coordinator.token_named("first") or ""
    session = join(coordinator, "w", token).session
    return Service(coordinator).app, token, session


APP, TOKEN, SESSION = make_app()
schema = schemathesis.openapi.from_asgi("/v1/openapi.json", APP, config=SchemathesisConfig())
quick = settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)


@schema.parametrize()
@quick
def test_with_a_secret(case: schemathesis.Case):
    secret = TOKEN if case.path in ("/v1/run", "/v1/join") else SESSION
    case.call_and_validate(headers={"Authorization": f"Bearer {secret}"}, excluded_checks=BEYOND)


@schema.parametrize()
@quick
def test_without_one(case: schemathesis.Case):
    case.call_and_validate(excluded_checks=BEYOND)


@pytest.mark.parametrize("path", ["/v1/join", "/v1/ask", "/v1/commit"])
def test_every_answer_is_announced(path: str):
    responses = APP.openapi()["paths"][path]["post"]["responses"]
    assert {"200", "400", "401", "413", "422", "429", "503", "507"} <= set(responses)
