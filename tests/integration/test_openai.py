"""The API as the official client and plain HTTP meet it: texts, streams, logprobs, limits, errors, readers who leave, blocks that are gone."""

from __future__ import annotations

import concurrent.futures
import json
import re
import socket
import time
from typing import Any

import openai
import pytest
import torch

from blocktrain import web
from blocktrain.errors import ServingError
from blocktrain.serving.compute import Settings
from blocktrain.serving.decoding import Plan
from blocktrain.serving.engine import Engine
from blocktrain.serving.fields import chat_prompt
from blocktrain.serving.sampling import Sampling, log_probabilities
from tests.integration.test_decoding import texts
from tests.serving_net import WINDOWED, Script, Served, local_engine, serve, wait_until

ASK: dict[str, Any] = {"model": "tiny", "prompt": "once upon", "max_tokens": 30, "seed": 5}
SAID = "DATA: so it goes 😀 and 語 on. ABCDEFGHIJ klm" * 3
MODES = [{}, {"mode": "speculative"}, {"mode": "speculative", "draft_bytes": 5}]


@pytest.fixture(scope="module")
def local():
    with serve(local_engine()) as served:
        yield served


@pytest.fixture
def script():
    return Script(SAID.encode(), prompt=len("tell"))


@pytest.fixture
def told(script: Script):
    """A server that says SAID after the prompt `tell`."""
    with serve(Engine(script, "tiny"), buffer=8192) as served:
        yield served


def events(served: Served, body: dict[str, Any], path: str = "/v1/completions") -> list[Any]:
    """The events of a stream, decoded; checks that it is framed as it must be."""
    with served.http() as http:
        answer = http.post(path, json=body | {"stream": True})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    *lines, last = answer.text.split("\n\n")
    assert last == "" and all(line.startswith("data: ") and "\n" not in line for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line[6:]) for line in lines[:-1]]


def streamed(served: Served, body: dict[str, Any]) -> tuple[str, str | None]:
    found = events(served, body)
    choices = [event["choices"][0] for event in found if event["choices"]]
    assert all("\ufffd" not in c["text"] for c in choices[:-1]) or body["model"] == "tiny"
    return "".join(c["text"] for c in choices), choices[-1]["finish_reason"]


# --- Texts ---


@pytest.mark.parametrize("extra", MODES)
def test_the_client_gets_the_bytes_of_generate_whole_and_streamed(local: Served, extra: dict[str, Any]):
    (wanted,) = texts(local.engine.chain, (Plan("exact", Sampling(1.0, seed=5), 30, Settings("bfloat16")), b"once upon"))
    client = local.client()
    answer = client.completions.create(**ASK, extra_body=extra)
    assert answer.choices[0].text == wanted.decode("utf-8", "replace")
    assert answer.choices[0].finish_reason == "length"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (9, 30, 39)  # type: ignore[union-attr]
    chunks = list(client.completions.create(**ASK, stream=True, extra_body=extra))
    assert "".join(chunk.choices[0].text for chunk in chunks) == answer.choices[0].text
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "length"
    assert len({chunk.id for chunk in chunks}) == 1


def test_prompts_may_be_text_a_list_of_one_or_bytes(local: Served):
    found = {local.post(ASK | {"prompt": p}).json()["choices"][0]["text"] for p in ("once upon", ["once upon"], list(b"once upon"))}
    assert len(found) == 1
    assert local.post(ASK | {"prompt": []}).json()["usage"]["prompt_tokens"] == 0
    assert local.post(ASK | {"echo": True}).json()["choices"][0]["text"] == "once upon" + found.pop()


def test_a_chat_is_the_template(local: Served):
    client, turns = local.client(), [("system", "Be kind."), ("user", "hi"), ("assistant", "ho"), ("user", "now")]
    assert chat_prompt(turns) == "Be kind.\nUser: hi\nAssistant: ho\nUser: now\nAssistant:"
    messages: Any = [{"role": role, "content": [{"type": "text", "text": text}]} for role, text in turns]
    answer = client.chat.completions.create(model="blocktrain", messages=messages, max_tokens=20, seed=3)
    plain = client.completions.create(model="tiny", prompt=chat_prompt(turns), max_tokens=20, seed=3, stop="\nUser:")
    assert answer.choices[0].message.content == plain.choices[0].text
    assert answer.choices[0].message.role == "assistant"
    chunks = list(
        client.chat.completions.create(
            model="tiny", messages=messages, max_completion_tokens=20, seed=3, stream=True, stream_options={"include_usage": True}
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks[:-1]) == plain.choices[0].text
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 20  # type: ignore[union-attr]
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_choices_have_seeds_of_their_own_and_the_first_has_the_requests(local: Served):
    one, three = (local.post(ASK | {"n": n}).json() for n in (1, 3))
    found = [choice["text"] for choice in three["choices"]]
    assert found[0] == one["choices"][0]["text"] and len(set(found)) == 3
    assert three["usage"]["completion_tokens"] == 90
    parts = dict.fromkeys(range(3), "")
    for event in events(local, ASK | {"n": 3}):
        for choice in event["choices"]:
            parts[choice["index"]] += choice["text"]
    assert list(parts.values()) == found


def test_a_sweep_and_what_a_run_does_not_allow(told: Served, local: Served):
    answer = told.post(ASK | {"prompt": "tell", "mode": "sweep", "window": 8, "max_tokens": 24, "temperature": 0}).json()
    assert answer["usage"]["traversals"] == 3 and answer["choices"][0]["text"] == SAID.encode()[:24].decode()
    for server, extra, field in ((told, {"window": 9}, "window"), (local, {}, "mode")):
        error = server.post(ASK | {"mode": "sweep"} | extra).json()["error"]
        assert error["param"] == field and "window" in error["message"] and "--" not in error["message"].partition(":")[0]
    assert told.post(ASK | {"mode": "speculative"}).json()["error"]["param"] == "mode"


@pytest.mark.parametrize("temperature", [0, 1e-6, 1e-4, 5e-324])
def test_tiny_temperatures_are_greedy_with_finite_logprobs(local: Served, temperature: float):
    greedy = local.post(ASK | {"temperature": 0, "seed": 1}).json()["choices"][0]["text"]
    choice = local.post(ASK | {"temperature": temperature, "logprobs": 5, "seed": 9}).json()["choices"][0]
    assert choice["text"] == greedy != ""
    assert all(value <= 0 for value in choice["logprobs"]["token_logprobs"])


def test_the_same_request_gives_the_same_bytes_alone_and_under_load(local: Served):
    ask = ASK | {"temperature": 0, "max_tokens": 15}
    alone = [local.post(ask).content for _ in range(2)]
    with concurrent.futures.ThreadPoolExecutor(7) as pool:
        loaded = list(pool.map(lambda i: local.post(ask | MODES[i % 3]).content, range(20)))
    texts_ = {json.loads(answer)["choices"][0]["text"] for answer in alone + loaded}
    assert len(texts_) == 1


# --- Stops and characters ---


@pytest.mark.parametrize("extra", [{}, {"mode": "sweep", "window": 8}, {"mode": "sweep", "window": 5}])
def test_nothing_of_a_stop_is_streamed_wherever_it_lies_in_a_traversal(told: Served, extra: dict[str, Any]):
    body = {"model": "blocktrain", "prompt": "tell", "max_tokens": 100, "temperature": 0, "stop": ["DEFGHIJ", "never"]} | extra
    wanted = SAID.partition("DEFGHIJ")[0]
    assert streamed(told, body) == (wanted, "stop")
    answer = told.post(body).json()
    assert answer["choices"][0] == {"index": 0, "text": wanted, "logprobs": None, "finish_reason": "stop"}
    assert answer["usage"]["completion_tokens"] == len(wanted.encode()) + 7, "the same in every mode"
    assert wait_until(lambda: told.engine.streams == 0) < 1


@pytest.mark.parametrize("extra", [{}, {"mode": "sweep", "window": 8}, {"mode": "sweep", "window": 3}])
def test_characters_come_whole_and_a_cut_one_is_one_replacement_at_the_end(told: Served, extra: dict[str, Any]):
    body = {"model": "blocktrain", "prompt": "tell", "temperature": 0} | extra
    at = len(SAID.partition("😀")[0].encode())
    for cut in range(1, 5):
        wanted = SAID.encode()[: at + cut].decode("utf-8", "replace")
        assert wanted.count("\ufffd") == (cut < 4)
        assert streamed(told, body | {"max_tokens": at + cut}) == (wanted, "length")
        assert told.post(body | {"max_tokens": at + cut}).json()["choices"][0]["text"] == wanted


# --- Logprobs ---


def test_logprobs_are_of_what_is_sampled_from(local: Served):
    body = ASK | {"logprobs": 5, "temperature": 0.7, "top_p": 0.9, "max_tokens": 12}
    choice = local.post(body).json()["choices"][0]
    found, seen = choice["logprobs"], list(b"once upon")
    sampling = Sampling(0.7, 0.9, 5)
    chain: Any = local.engine.chain
    for token, logprob, top in zip(found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True):
        byte = int(token[-2:], 16) if token.startswith("bytes:") else ord(token)
        (row,) = logits_after(chain, bytes(seen))
        exact = torch.log_softmax(log_probabilities(row, sampling), 0)
        assert logprob == pytest.approx(float(exact[byte]), abs=1e-9)
        assert len(top) in (5, 6) and max(top.values()) == pytest.approx(float(exact.max()))
        assert top[token] == logprob
        seen.append(byte)
    assert bytes(seen[9:]).decode("utf-8", "replace") == choice["text"]
    assert [o for o in found["text_offset"] if not 0 <= o < len(choice["text"])] == []
    assert len(local.post(body | {"logprobs": 0}).json()["choices"][0]["logprobs"]["top_logprobs"][0]) == 1


def logits_after(chain: Any, data: bytes) -> torch.Tensor:
    """(1, V) after a text."""
    import asyncio

    from blocktrain.serving.chain import Step

    async def go() -> torch.Tensor:
        text = await chain.open(Settings("bfloat16"))
        return await text.step(Step(0, 0, list(data), len(data) - 1))

    return asyncio.run(go())


def test_chat_logprobs_have_bytes_and_stops_leave_none_behind(told: Served):
    client = told.client()
    stream: Any = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "x"}],
        temperature=0,
        max_tokens=60,
        logprobs=True,
        top_logprobs=2,
        stop="goes",
        stream=True,
    )
    text, data = "", b""
    for chunk in stream:
        text += chunk.choices[0].delta.content or ""
        for one in chunk.choices[0].logprobs.content if chunk.choices[0].logprobs else []:
            assert len(one.top_logprobs) == 2 and one.top_logprobs[0].bytes == one.bytes
            data += bytes(one.bytes)
        assert data.decode() == text, "logprobs come with their characters"
    assert text.endswith("so it ")


# --- Refusals ---

BAD: list[tuple[dict[str, Any], str]] = [
    ({"n": 1.0}, "n"),
    ({"n": 0}, "n"),
    ({"n": 9}, "n"),
    ({"n": True}, "n"),
    ({"temperature": float("nan")}, "temperature"),
    ({"temperature": float("inf")}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": -1}, "temperature"),
    ({"top_p": float("nan")}, "top_p"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.1}, "top_p"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 10**30}, "max_tokens"),
    ({"max_tokens": 5, "max_completion_tokens": 6}, "max_completion_tokens"),
    ({"logit_bias": {str(i): 1 for i in range(2000)}}, "logit_bias"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"best_of": 3}, "best_of"),
    ({"tools": []}, "tools"),
    ({"__proto__": 1}, "__proto__"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a", ""]}, "stop"),
    ({"stop": list("abcde")}, "stop"),
    ({"stop": 5}, "stop"),
    ({"seed": 1.5}, "seed"),
    ({"seed": 1 << 64}, "seed"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
    ({"logprobs": 6}, "logprobs"),
    ({"logprobs": 1, "max_tokens": 9000}, "logprobs"),
    ({"logprobs": 1, "echo": True}, "echo"),
    ({"prompt": ["a", "b"]}, "prompt"),
    ({"prompt": [256]}, "prompt"),
    ({"prompt": [1.0]}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"prompt": "\ud800"}, "prompt"),
    ({"prompt": [[1, 2]]}, "prompt"),
    ({"mode": "fast"}, "mode"),
    ({"wire": "float8"}, "wire"),
    ({"draft_bytes": 33}, "draft_bytes"),
    ({"window": 0}, "window"),
    ({"model": 7}, "model"),
    ({"model": "\ud800"}, "model"),
    ({"stop": "\ud800"}, "stop"),
    ({"user": "\ud800"}, "user"),
]


def test_each_wrong_field_is_one_clear_400_and_a_good_request_beside_them_finishes(local: Served):
    with concurrent.futures.ThreadPoolExecutor(1) as pool, local.http() as http:
        good = pool.submit(local.post, ASK | {"max_tokens": 300})
        for extra, field in BAD:
            answer = http.post("/v1/completions", content=json.dumps(ASK | extra), headers={"content-type": "application/json"})
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (400, field), (extra, error)
            assert set(error) == {"message", "type", "param", "code"} and error["message"].startswith(field) and "\n" not in error["message"]
            assert len(error["message"]) < 300
        assert good.result(30).json()["usage"]["completion_tokens"] == 300


@pytest.mark.parametrize(
    ("extra", "field"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": "x", "name": "me"}]}, "messages.0.name"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": 3}, "logprobs"),
        ({"prompt": "x"}, "prompt"),
    ],
)
def test_each_wrong_field_of_a_chat_is_named(local: Served, extra: dict[str, Any], field: str):
    answer = local.post({"model": "tiny", "messages": [{"role": "user", "content": "x"}]} | extra, "/v1/chat/completions")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)


def test_what_is_ignored_and_what_may_be_null(local: Served):
    ignored = {"user": "me", "metadata": {"a": "b"}, "store": False}
    nulls = dict.fromkeys(["temperature", "top_p", "n", "stream", "stop", "logprobs", "echo", "max_completion_tokens", "mode", "window", "wire"])
    assert local.post(ASK | ignored | nulls).json()["choices"][0]["text"] == local.post(ASK).json()["choices"][0]["text"]


def test_bodies_that_are_no_bodies(local: Served):
    kind = {"content-type": "application/json"}
    with local.http() as http:
        for content in (b"", b"{", b"[]", b"nul", b"\xff\xfe", b"[" * 100_000, b'{"a":' * 50_000, b'{"seed": ' + b"9" * 5000 + b"}"):
            answer = http.post("/v1/completions", content=content, headers=kind)
            assert answer.status_code == 400 and answer.json()["error"]["message"], content[:20]
        for headers in ({}, {"content-type": "text/plain"}, {"content-type": "multipart/form-data"}):
            assert http.post("/v1/completions", content=json.dumps(ASK), headers=headers).status_code == 415
        assert http.post("/v1/completions", content=b"x" * (2 << 20), headers=kind).status_code == 413
        assert http.get("/v1/completions").status_code == 405
        answer = http.get("/v1/nothing")
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")
        assert "access-control-allow-origin" not in http.get("/v1/models", headers={"origin": "http://evil"}).headers


def test_a_prompt_that_is_too_long_is_refused_at_once(local: Served):
    began = time.monotonic()
    with pytest.raises(openai.BadRequestError) as caught:
        local.client().completions.create(model="tiny", prompt="x" * 65, max_tokens=1)
    assert caught.value.code == "context_length_exceeded" and "65 bytes" in str(caught.value) and time.monotonic() - began < 2
    assert local.post(ASK | {"prompt": "x" * 64}).status_code == 200
    chat = local.post({"model": "tiny", "messages": [{"role": "user", "content": "é" * 25}]}, "/v1/chat/completions")
    assert (chat.status_code, chat.json()["error"]["code"], chat.json()["error"]["param"]) == (400, "context_length_exceeded", "messages")


def test_there_is_one_model(local: Served):
    client = local.client()
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError) as caught:
        client.completions.create(model="gpt-4", prompt="x")
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other/name")


def test_keys_are_asked_for(script: Script):
    with serve(Engine(script, "tiny"), key="k" * 20) as served:
        assert served.client().models.list().data[0].id == "tiny"
        served.key = "wrong" * 5
        with pytest.raises(openai.AuthenticationError) as caught:
            served.client().completions.create(model="tiny", prompt="x")
        assert caught.value.code == "invalid_api_key"
        with served.http(authorization="") as http:
            codes = {path: http.get(path).status_code for path in ("/", "/health", "/static/chat.js", "/metrics", "/v1/models", "/v1/cluster", "/x")}
        assert codes == {"/": 200, "/health": 200, "/static/chat.js": 200, "/metrics": 401, "/v1/models": 401, "/v1/cluster": 401, "/x": 401}


def test_an_error_of_our_own_has_an_id_and_nothing_else(script: Script, told: Served, caplog: pytest.LogCaptureFixture):
    script.error = RuntimeError("/etc/secret-path is broken")
    with pytest.raises(openai.InternalServerError) as caught:
        told.client().completions.create(model="tiny", prompt="tell")
    assert "secret" not in str(caught.value) and "Traceback" not in str(caught.value)
    script.error_at = 3
    with pytest.raises(openai.APIError) as streamed_:
        list(told.client().completions.create(model="tiny", prompt="tell", stream=True, temperature=0))
    assert "secret" not in str(streamed_.value)
    for error in (caught.value, streamed_.value):
        found = re.search(r"id (\w{12})", str(error))
        assert found and f"error {found[1]}" in caplog.text
    assert "secret-path" in caplog.text
    script.error = None
    assert told.post(ASK).status_code == 200


# --- Blocks that are gone ---


def test_missing_blocks_are_a_503_at_once_and_show_everywhere(script: Script, told: Served):
    with told.http() as http:
        assert http.get("/health").json() == {"status": "ok", "reason": ""}
        script.missing = (2,)
        began = time.monotonic()
        answer = told.post(ASK)
        assert answer.status_code == 503 and "block 2" in answer.json()["error"]["message"] and time.monotonic() - began < 2
        assert "connection refused" in answer.json()["error"]["message"]
        assert told.post(ASK | {"stream": True}).status_code == 503
        health, cluster = http.get("/health"), http.get("/v1/cluster").json()
        assert health.status_code == 503 and "block 2" in health.json()["reason"]
        assert (cluster["healthy"], cluster["missing"], cluster["blocks"]) == (False, [2], 3)
        assert [(s["address"], s["blocks"], s["up"], s["reason"]) for s in cluster["stages"]] == [
            ("10.0.0.7:7801", [0, 1], True, ""),
            ("10.0.0.8:7801", [2], False, "connection refused"),
        ]
        assert "blocktrain_healthy 0.0" in http.get("/metrics").text
        script.missing = ()
        assert told.post(ASK).status_code == 200 and http.get("/health").status_code == 200


def test_missing_blocks_may_be_left_out_but_not_all_of_them(script: Script):
    with serve(Engine(script, "tiny", allow_missing=True)) as served:
        script.missing, script.allow_missing = (2,), True
        assert served.post(ASK).json()["usage"]["missing_blocks"] == [2]
        with served.http() as http:
            assert http.get("/health").status_code == 200
        script.missing = (0, 1, 2)
        assert served.post(ASK).status_code == 503


def test_a_stage_that_goes_in_the_middle_is_an_event_and_a_stall_makes_it_unhealthy(script: Script, told: Served):
    script.error, script.error_at = ServingError("the stage of block 1 is gone"), 4
    with pytest.raises(openai.APIError, match="block 1 is gone"):
        list(told.client().completions.create(model="tiny", prompt="tell", stream=True, temperature=0))
    assert told.post(ASK).status_code == 503
    script.stalled_s = 31.0
    with told.http() as http:
        assert http.get("/health").status_code == 503
        assert "31 s" in http.get("/health").json()["reason"]
    assert script.opened == script.closed == 2


# --- Readers ---


def raw_stream(served: Served, body: dict[str, Any], *, buffer: int = 0) -> socket.socket:
    data = json.dumps(body | {"stream": True}).encode()
    connection = socket.socket()
    if buffer:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    connection.settimeout(30)
    connection.connect(("127.0.0.1", served.port))
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    connection.sendall(head.encode() + data)
    return connection


def test_who_leaves_frees_the_stream_fifty_times_and_a_real_request_works(script: Script, told: Served):
    script.step_s = 0.002
    for i in range(50):
        connection = raw_stream(told, ASK | {"prompt": "tell", "max_tokens": 20_000})
        seen = b""
        while seen.count(b"data: ") < 1 + i % 3:
            seen += connection.recv(4096)
        connection.close()
        wait_until(lambda i=i: script.closed == i + 1, 0.25 + script.step_s + 2)
    steps = script.steps
    time.sleep(0.1)
    assert script.steps == steps, "nothing is generated for nobody"
    assert told.engine.streams == 0 and script.opened == script.closed == 50
    assert told.post(ASK | {"prompt": "tell"}).status_code == 200
    with told.http() as http:
        assert http.get("/health").status_code == 200
        assert 'outcome="cancelled"} 50.0' in http.get("/metrics").text


def test_who_leaves_before_a_whole_answer_frees_the_stream_too(script: Script, told: Served):
    script.step_s = 0.02
    data = json.dumps(ASK | {"prompt": "tell", "max_tokens": 20_000}).encode()
    with socket.create_connection(("127.0.0.1", told.port)) as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
        connection.sendall(head.encode() + data)
        wait_until(lambda: script.steps > 2)
    assert wait_until(lambda: script.closed == 1) < 0.5


def test_half_of_the_streams_leave_and_the_others_are_as_alone(local: Served):
    bodies = [ASK | {"seed": seed, "max_tokens": 20} for seed in range(8)]
    golden = [local.post(body).json()["choices"][0]["text"] for body in bodies]

    def read(i: int) -> str:
        if i % 2 == 0:
            return streamed(local, bodies[i])[0]
        connection = raw_stream(local, bodies[i])
        connection.recv(100 * i)
        connection.close()
        return ""

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        found = list(pool.map(read, range(8)))
    assert found[::2] == golden[::2]
    assert wait_until(lambda: local.engine.streams == 0) < 2


def test_who_finds_no_place_is_told_at_once(script: Script):
    script.step_s = 0.05
    engine = Engine(script, "tiny", max_streams=2)
    with serve(engine) as served, concurrent.futures.ThreadPoolExecutor(2) as pool:
        running = [pool.submit(served.post, ASK | {"max_tokens": 15}) for _ in range(2)]
        wait_until(lambda: engine.streams == 2)
        began = time.monotonic()
        answer = served.post(ASK)
        assert time.monotonic() - began < 0.5
        assert answer.status_code == 429 and int(answer.headers["retry-after"]) >= 1
        assert answer.json()["error"]["code"] == "rate_limit_exceeded"
        assert [one.result(20).status_code for one in running] == [200, 200]
        assert served.post(ASK | {"n": 3}).json()["error"]["param"] == "n"
        assert served.post(ASK | {"n": 2, "max_tokens": 2}).status_code == 200
        with served.http() as http:
            metrics = http.get("/metrics").text
        assert 'blocktrain_requests_total{endpoint="completions",outcome="busy"} 1.0' in metrics
        assert "blocktrain_streams 0.0" in metrics and "blocktrain_generated_bytes_total 34.0" in metrics


def test_a_slow_reader_slows_only_itself_and_misses_nothing(script: Script, told: Served):
    body = ASK | {"prompt": "tell", "max_tokens": 2500, "temperature": 0}
    slow = raw_stream(told, body, buffer=4096)
    assert slow.recv(1)
    stalled = 0
    while script.steps != stalled:  # until its generation waits for it
        stalled = script.steps
        time.sleep(0.3)
    assert stalled < 2000, "it does not run ahead of who does not read"
    assert told.post(ASK | {"max_tokens": 50}).json()["usage"]["completion_tokens"] == 50
    seen = b"H"
    while not seen.endswith(b"0\r\n\r\n"):
        seen += slow.recv(1 << 20)
    found = re.findall(rb'"text":"((?:[^"\\]|\\.)*)"', seen)
    assert "".join(json.loads(b'"' + one + b'"') for one in found) == (SAID.encode() * 50)[:2500].decode("utf-8", "replace")
    assert b"data: [DONE]" in seen
    slow.close()


def test_a_reader_who_has_stopped_reading_is_let_go(script: Script, told: Served, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(web, "STALL_S", 0.5)
    stopped = raw_stream(told, ASK | {"prompt": "tell", "max_tokens": 32_768}, buffer=4096)
    wait_until(lambda: script.closed == 1, 20)
    assert wait_until(lambda: told.engine.streams == 0) < 1
    stopped.close()


def test_the_end_cuts_what_runs_and_tells_its_reader(script: Script):
    script.step_s = 0.02
    engine = Engine(script, "tiny")
    with serve(engine) as served:
        connection = raw_stream(served, ASK | {"prompt": "tell", "max_tokens": 20_000})
        connection.recv(10)
    seen = b""
    while data := connection.recv(1 << 16):
        seen += data
    assert b"the server is stopping" in seen and b"[DONE]" not in seen
    assert script.opened == script.closed == 1


def test_figures_of_drafts(local: Served):
    local.post(ASK | {"mode": "speculative", "temperature": 0})
    with local.http() as http:
        text = http.get("/metrics").text
    for name in ("requests_total", "generated_bytes_total", "traversals_total", "acceptance", "streams", "first_byte_seconds", "per_byte_seconds"):
        assert f"blocktrain_{name}" in text
    share = float(re.search(r"^blocktrain_acceptance (\S+)", text, re.M)[1])  # type: ignore[index]
    assert 0 < share <= 1


def test_continuous_usage(told: Served):
    found = events(told, ASK | {"prompt": "tell", "stream_options": {"continuous_usage_stats": True, "include_usage": True}, "max_tokens": 5})
    assert [event["usage"]["completion_tokens"] for event in found] == [1, 2, 3, 4, 5, 5, 5]
    assert WINDOWED["window"] == 7


def test_a_head_that_came_during_a_long_answer_is_not_too_slow(script: Script, told: Served, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(web, "HEAD_S", 0.1)
    script.step_s = 0.02
    data = json.dumps(ASK | {"prompt": "tell", "max_tokens": 25}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n".encode()
    with socket.create_connection(("127.0.0.1", told.port), timeout=20) as connection:
        connection.sendall(head + data + b"GET /health HTTP/1.1\r\nhost: ")
        seen = connection.recv(1 << 16)
        connection.sendall(b"x\r\n\r\n")
        while seen.count(b"HTTP/1.1 ") < 2:
            more = connection.recv(1 << 16)
            assert more, "the connection was ended"
            seen += more
    assert seen.count(b"HTTP/1.1 200 OK") == 2
