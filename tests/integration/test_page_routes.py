"""The status page's routes without a browser: the stream and who may listen, headers and files, the metrics."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import threading
import time
import urllib.error
import urllib.request
from typing import Any

import pytest

from blocktrain.swarm.dashboard import stream
from blocktrain.swarm.dashboard.metrics import prometheus_text
from tests.swarm_status import EVIL, Swarm, make_status, make_worker


def read_events(swarm: Swarm, count: int) -> list[dict[str, Any]]:
    with urllib.request.urlopen(f"{swarm.url}/v1/events", timeout=10) as response:
        assert response.headers["Content-Type"].startswith("text/event-stream")
        found: list[dict[str, Any]] = []
        while len(found) < count:
            line = response.readline().decode()
            if line.startswith("data: "):
                found.append(json.loads(line[6:]))
        return found


def test_the_status_is_made_once_for_all_listeners():
    swarm = Swarm(make_status())
    with swarm.serve(interval_s=0.25):
        began = time.monotonic()
        threads = [threading.Thread(target=read_events, args=(swarm, 4)) for _ in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert swarm.calls <= (time.monotonic() - began) / 0.25 + 2


def test_the_sixty_fifth_listener_is_turned_away_and_a_place_comes_free(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(stream, "MAX_LISTENERS", 2)
    swarm = Swarm(make_status())
    with swarm.serve():
        first, second = (urllib.request.urlopen(f"{swarm.url}/v1/events", timeout=10) for _ in range(2))
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(f"{swarm.url}/v1/events", timeout=10)
        assert refused.value.code == 503 and "2 readers" in json.loads(refused.value.read())["error"]
        first.close()
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline:
            with contextlib.suppress(urllib.error.HTTPError):
                urllib.request.urlopen(f"{swarm.url}/v1/events", timeout=10).close()
                break
            time.sleep(0.05)
        else:
            pytest.fail("the place of a listener who left was not given to another")
        second.close()


def test_a_status_that_fails_is_told_and_passes():
    swarm = Swarm({})
    with swarm.serve(), urllib.request.urlopen(f"{swarm.url}/v1/events", timeout=10) as response:
        lines = [response.readline().decode().strip() for _ in range(4)]
        assert "event: trouble" in lines and not any("KeyError" in line for line in lines)
        swarm.said = make_status()
        while not (line := response.readline()).startswith(b'data: {"run'):
            assert line


def test_a_quiet_stream_says_that_it_is_there(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(stream, "KEEP_ALIVE_S", 0.0)

    async def first_three() -> list[bytes]:
        events = stream.Watch(lambda: {"run": "first"}, 0.01).events()
        return [await anext(events) for _ in range(3)]

    retry, data, comment = asyncio.run(first_three())
    assert retry.startswith(b"retry: ") and comment.startswith(b": ")
    assert json.loads(data.removeprefix(b"data: ")) == {"run": "first", "blocks": [], "headline": []}


def test_long_curves_are_thinned_and_infinities_are_null():
    look = stream.take_look(lambda: {"headline_ce": math.inf, "headline": [[at, 1.0] for at in range(5001)]})
    assert look.status is not None and look.status["headline_ce"] is None
    curve = look.status["headline"]
    assert len(curve) <= stream.CURVE_POINTS + 1 and curve[0][0] == 0 and curve[-1][0] == 5000
    longer = stream.thin_curve([[at, 1.0] for at in range(5002)])
    assert curve[:-1] == longer[:-1], "a curve that grows keeps its points"


def test_headers_and_files():
    swarm = Swarm(make_status())
    with swarm.serve():
        for path in ("/", "/metrics", "/static/page.js", "/static/plotly.min.js"):
            with urllib.request.urlopen(swarm.url + path) as response:
                policy = response.headers["Content-Security-Policy"]
                assert "default-src 'none'" in policy and "unsafe" not in policy and "frame-ancestors 'none'" in policy
                assert response.headers["X-Content-Type-Options"] == "nosniff"
        request = urllib.request.Request(f"{swarm.url}/static/plotly.min.js", headers={"Accept-Encoding": "gzip"})
        with urllib.request.urlopen(request) as response:
            assert "immutable" in response.headers["Cache-Control"] and response.headers["Content-Encoding"] == "gzip"
            tag = response.headers["ETag"]
        with pytest.raises(urllib.error.HTTPError, match="304"):
            urllib.request.urlopen(urllib.request.Request(f"{swarm.url}/static/page.js", headers={"If-None-Match": read_tag(swarm)}))
        assert tag != read_tag(swarm)
        for name in ("page.html", "..%2f__init__.py", "nothing.js"):
            with pytest.raises(urllib.error.HTTPError, match="404"):
                urllib.request.urlopen(f"{swarm.url}/static/{name}")


def read_tag(swarm: Swarm) -> str:
    with urllib.request.urlopen(f"{swarm.url}/static/page.js") as response:
        return response.headers["ETag"]


def test_metrics():
    status = make_status()
    status["blocks"][1]["loss"] = math.nan
    status["workers"].append(make_worker(9, EVIL, "suspended"))
    text = prometheus_text(status).decode()
    lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert float(lines['blocktrain_block_version{block="0"}']) == 12
    assert float(lines['blocktrain_workers{state="live"}']) == 5 and float(lines['blocktrain_workers{state="suspended"}']) == 1
    assert float(lines['blocktrain_bytes_total{direction="down",kind="all"}']) == 812_000_000
    assert float(lines['blocktrain_updates_total{result="late"}']) == 2
    assert float(lines["blocktrain_refusals_total"]) == 3 and float(lines["blocktrain_headline_ce"]) == 1.612
    assert 'blocktrain_block_loss{block="1"}' not in lines and EVIL not in text
    assert "# TYPE blocktrain_updates_total counter" in text
