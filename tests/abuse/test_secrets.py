"""Who gets in, what is kept of secrets, and what is never done with bytes from outside."""

from __future__ import annotations

import ast
import os
import pickle
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

import blocktrain
from blocktrain.errors import ProtocolError
from blocktrain.swarm import identity
from blocktrain.swarm.host import Host
from blocktrain.swarm.protocol import BlobRef, PartFiles, join_text, parse_join_line
from tests.conftest import tiny_config
from tests.swarm_net import Served, hand_in, join, join_request, make_coordinator, make_update, member, serve

SOURCE = Path(blocktrain.__file__).parent
WIRE_PATH = sorted([*(SOURCE / "swarm").rglob("*.py"), *(SOURCE / f"{name}.py" for name in ("codecs", "streams", "serialization"))])
FORBIDDEN_NAMES = {"eval", "exec", "compile", "__import__"}
FORBIDDEN_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "yaml", "joblib"}


@pytest.mark.parametrize("path", WIRE_PATH, ids=lambda path: str(path.relative_to(SOURCE)))
def test_nothing_on_the_way_from_the_wire_can_run_code(path: Path):
    for node in ast.walk(ast.parse(path.read_text())):
        where = f"{path}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = {alias.name.partition(".")[0] for alias in node.names} | {(getattr(node, "module", "") or "").partition(".")[0]}
            assert not names & FORBIDDEN_MODULES, where
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            assert called not in FORBIDDEN_NAMES and called not in ("torch.load", "torch.save", "numpy.load", "np.load", "os.system"), where
            assert not any(word.arg in ("shell", "allow_pickle") for word in node.keywords), where


class MakesAFile:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str, ...]]:
        return os.mkdir, (str(self.path),)


def test_a_pickle_handed_in_as_an_update_is_refused_and_never_loaded(tmp_path: Path):
    coordinator = make_coordinator()
    who = member(coordinator, "a")
    work = coordinator.ask(who, "a").work
    assert work is not None
    trap = tmp_path / "trap"
    data = pickle.dumps(MakesAFile(trap))
    data += bytes(len(make_update(coordinator.layout, work)) - len(data))
    answer = hand_in(coordinator, who, work, data)
    assert answer.kind == "invalid" and not trap.exists()
    pickle.loads(data)
    assert trap.exists(), "and it would have"


# --- What is kept ---


def test_secrets_are_kept_as_hashes_and_only_the_owner_reads_the_folder(tmp_path: Path, text: Path):
    made = Host(tmp_path / "run", tiny_config(data={"corpus": str(text)}), evaluate=False)
    made.open()
    made.socket.close()
    token = made.line.token
    session = join(made.coordinator, "w", token).session
    made.coordinator.beat(made.coordinator.session(session))
    folder = made.run / "swarm"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder / "join-line").stat().st_mode) == 0o600
    kept = [path for path in made.run.rglob("*") if path.is_file() and path.name != "join-line"]
    assert any(path.name.startswith("state.db") for path in kept)
    for path in kept:
        data = path.read_bytes()
        assert token.encode() not in data and session.encode() not in data, path
    database = b"".join(path.read_bytes() for path in folder.glob("state.db*"))
    assert identity.hashed(token).encode() in database and identity.hashed(session).encode() in database
    assert parse_join_line((folder / "join-line").read_text()) == made.line


def test_a_workers_key_is_its_owners_alone(tmp_path: Path):
    key = identity.worker_key(tmp_path / "w" / "key.pem")
    assert stat.S_IMODE((tmp_path / "w" / "key.pem").stat().st_mode) == 0o600
    assert identity.worker_key(tmp_path / "w" / "key.pem").public == key.public


# --- Who gets in ---


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serve(make_coordinator(limits={"joins_per_minute": 100_000}, round={"inner_steps": 4})) as found:
        yield found


def post_join(served: Served, token: str | None = None, **changes: object) -> tuple[int, str]:
    body = join_request(served.coordinator, "w").model_dump() | changes
    with served.http() as http:
        reply = http.post("/v1/join", json=body, headers={"authorization": f"Bearer {token or served.token}"})
    return reply.status_code, reply.text


def test_a_right_join_is_let_in(served: Served):
    assert post_join(served)[0] == 200


@pytest.mark.parametrize(
    ("changes", "code", "said"),
    [
        ({"protocol": 2}, 422, "speaks 2, the coordinator 1"),
        ({"run_id": "ffffffffffff"}, 422, "ffffffffffff is not this run"),
        ({"config_digest": "00" * 32}, 422, "0000000000000000 here is"),
        ({"challenge": "00" * 16}, 422, "challenge"),
        ({"signature": "00" * 64}, 422, "signature"),
        ({"public_key": identity.new_worker_key().public}, 422, "signature"),
        ({"public_key": "abc" * 5}, 422, "signature"),
        ({"process": "another"}, 422, "signature"),
        ({"capacity": 10**9}, 422, "capacity"),
        ({"capacity": "4"}, 422, "capacity"),
        ({"capacity": True}, 422, "capacity"),
        ({"name": "../../x"}, 422, "name"),
        ({"name": "a\nb"}, 422, "name"),
        ({"more": 1}, 422, "more"),
    ],
)
def test_a_join_that_is_wrong_in_one_place_is_refused_by_its_name(changes: dict[str, object], code: int, said: str, served: Served):
    before = len(served.coordinator.machine.state.workers)
    found, text = post_join(served, **changes)
    assert found == code and said in text
    assert len(served.coordinator.machine.state.workers) == before


def test_a_wrong_token_and_a_revoked_one_are_refused_alike(served: Served):
    lent = served.coordinator.token_named("lent") or ""
    assert post_join(served, lent)[0] == 200
    served.coordinator.revoke_token("lent")
    replies = {post_join(served, token) for token in (lent, "0" * 32, "x", served.token[:-1], served.token + "0")}
    assert len(replies) == 1 and next(iter(replies))[0] == 401


def test_a_join_replayed_after_its_challenge_has_passed_is_refused():
    from tests.swarm_net import Clock

    clock = Clock()
    coordinator = make_coordinator(clock=clock)
    token = coordinator.token_named("t") or ""
    request = join_request(coordinator, "w")
    coordinator.join(token, request)
    clock.pass_s(3 * identity.CHALLENGE_S)
    with pytest.raises(ProtocolError, match="challenge"):
        coordinator.join(token, request)


def test_every_route_but_the_open_ones_needs_a_session_and_not_a_token(served: Served):
    key, digest = "000000000000", "0" * 64
    routes = [
        *(("POST", f"/v1/{name}") for name in ("beat", "ask", "begin", "commit", "give-back", "leave")),
        ("PUT", f"/v1/updates/{key}/{digest}/parts/0?part_sha256={digest}"),
        ("GET", "/v1/blobs/text/train.txt"),
    ]
    for secret in ("", served.token, "0" * 32, "Basic x"):
        with served.http(secret) as http:
            for method, path in routes:
                reply = http.request(method, path, json={} if method == "POST" else None)
                assert reply.status_code == 401 and reply.headers["www-authenticate"] == "Bearer", (method, path, secret, reply.text)


def test_a_session_of_one_worker_gets_nothing_done_on_anothers_assignment(served: Served):
    coordinator = served.coordinator
    sessions = [join(coordinator, name, served.token).session for name in ("one", "two")]
    with served.http(sessions[0]) as one, served.http(sessions[1]) as two:
        work = one.post("/v1/ask", json={"ask": "x"}).json()["work"]
        data = b"x" * 10
        digest = "0" * 64
        attempts = [
            two.post("/v1/begin", json={"key": work["key"], "size": len(data), "sha256": digest}),
            two.put(f"/v1/updates/{work['key']}/{digest}/parts/0?part_sha256={digest}", content=data),
            two.post("/v1/commit", json={"key": work["key"], "size": len(data), "sha256": digest, "num_samples": 1}),
            two.post("/v1/give-back", json={"key": work["key"], "why": "mischief"}),
        ]
        assert [reply.status_code for reply in attempts] == [403] * 4
        assert one.post("/v1/ask", json={"ask": "x"}).json()["work"] == work


def test_a_revoked_worker_is_out_at_the_next_call(served: Served):
    session = join(served.coordinator, "doomed", served.token).session
    with served.http(session) as http:
        assert http.post("/v1/beat").status_code == 200
        served.coordinator.revoke(served.coordinator.session(session).worker)
        reply = http.post("/v1/beat")
        assert reply.status_code == 401 and "may not take part" in reply.json()["reason"]


def test_requests_beyond_the_rate_of_a_worker_or_an_address_are_told_when_to_come_back():
    with serve(make_coordinator(limits={"requests_per_s": 1, "joins_per_minute": 30})) as served:
        session = join(served.coordinator, "w", served.token).session
        other = join(served.coordinator, "v", served.token).session
        with served.http(session) as http:
            codes = [http.post("/v1/beat").status_code for _ in range(12)]
            assert codes[:10] == [200] * 10 and codes[-1] == 429
            reply = http.post("/v1/beat")
            assert float(reply.headers["retry-after"]) >= 1
        with served.http(other) as http:
            assert http.post("/v1/beat").status_code == 200, "others are not held up"
        with served.http("f" * 32) as http:
            codes = [http.post("/v1/beat").status_code for _ in range(40)]
            assert codes[0] == 401 and codes[-1] == 429, "guessing is held to a rate, before anything is looked up"
            assert http.get("/v1/hello?nonce=00112233").status_code == 429
        with served.http(other) as http:
            assert http.post("/v1/beat").status_code == 200, "known sessions at the same address go on"


def test_a_body_is_limited_before_it_is_parsed(served: Served):
    session = join(served.coordinator, "w2", served.token).session
    long = b'{"ask": "' + b"x" * 70_000 + b'"}'
    with served.http(session) as http:
        assert http.post("/v1/ask", content=long).status_code == 413
        assert http.post("/v1/ask", content=iter([long[:40_000], long[40_000:]])).status_code == 413
        assert http.post("/v1/ask", content=b"{}", headers={"content-encoding": "gzip"}).status_code == 415
        assert http.post("/v1/ask", json={"ask": "y"}).status_code == 200


def test_what_a_worker_writes_cannot_begin_a_line_of_the_log(served: Served):
    session = join(served.coordinator, "w3", served.token).session
    with served.http(session) as http:
        reply = http.post("/v1/ask", json={"ask": "z"}).json()
        if reply["work"]:
            http.post("/v1/give-back", json={"key": reply["work"]["key"], "why": "x\n2026-01-01 run finished\x1b[2J"})
    assert "\x1b" not in served.log() and all("\n" not in text for _, text in served.coordinator.logged())


def test_measurements_that_are_no_numbers_are_refused_and_the_page_stays_readable(served: Served):
    session = join(served.coordinator, "w4", served.token).session
    with served.http(session) as http:
        for value in ("NaN", "1e999", "-Infinity", "1e300"):
            body = f'{{"key": "0", "size": 1, "sha256": "{"0" * 64}", "num_samples": 1, "metrics": {{"ce": {value}}}}}'
            assert http.post("/v1/commit", content=body, headers={"content-type": "application/json"}).status_code == 422
        assert http.get("/v1/status").status_code == 200


def test_a_worker_takes_no_names_from_a_coordinator_that_lead_out_of_its_folder():
    blob = {"name": "versions/block-000/x.safetensors", "size": 1, "sha256": "0" * 64}
    PartFiles(part="block-000", version=0, full=BlobRef(**blob))
    for name in ("../x", "versions/../../x", "/etc/passwd", "updates/1/x", "versions/a/../b", "versions//x", "text/"):
        with pytest.raises(ValueError, match="name"):
            BlobRef(**{**blob, "name": name})
    for part in ("../../x", "block-0", "interface/..", ""):
        with pytest.raises(ValueError, match="part"):
            PartFiles(part=part, version=0, full=BlobRef(**blob))


def test_the_signed_text_covers_what_a_join_is_about():
    texts = {join_text("r", "c", "k", "p"), join_text("r2", "c", "k", "p"), join_text("r", "c2", "k", "p"), join_text("r", "c", "k", "p2")}
    assert len(texts) == 4
