# SPDX-License-Identifier: Apache-2.0
"""Streams whose backend dies: the router continues them at another one, and the client sees what it would have seen.

A real router, and a real server with a tiny model behind two relays. One relay cuts its connections after so many bytes of
a response, as a backend that is killed does.
"""

from __future__ import annotations

import http.client
import json
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import pytest
from routing import Answer, Routing, ScriptedBackend, ask, routing, scripted_backend

from headrace.api.openai.http import OpenAiHttp
from headrace.api.openai.settings import OpenAiSettings
from headrace.core.continuation import CONTINUATION_HEADER, CONTINUE_PATH, RECORD, continuation_proof
from headrace.engine.engine import Engine, EngineSettings, open_engine
from headrace.engine.repository.settings import RepositorySettings
from headrace.fleet.router.continuation import RecordFilter
from headrace.fleet.router.settings import ContinuationSettings, FairnessSettings
from headrace.net.http.routes import Routes
from headrace.net.site import Site
from support.llm_models import tiny_llama
from support.serving import Serving, serving
from support.waiting import eventually

KEY = b"the key of this fleet, 16 or more"
CONFIG = """
backend: "llm"
parameters { key: "max_model_len" value { string_value: "1024" } }
parameters { key: "kv_cache_bytes" value { string_value: "8388608" } }
instance_group [ { kind: KIND_CPU } ]
"""
USER = {"role": "user", "content": "the quick brown fox"}
WEATHER = {"type": "object", "properties": {"town": {"enum": ["Delft", "Rome"]}}, "required": ["town"]}
GREEDY = {"model": "tiny", "stream": True, "temperature": 0, "max_tokens": 40}
STREAMS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {**GREEDY, "messages": [USER], "stream_options": {"include_usage": True}}),
    "seeded": ("/v1/chat/completions", {**GREEDY, "messages": [USER], "temperature": 1.0, "seed": 7, "n": 2}),
    "logprobs": ("/v1/chat/completions", {**GREEDY, "messages": [USER], "logprobs": True, "top_logprobs": 2}),
    "penalties": ("/v1/completions", {**GREEDY, "prompt": "the river", "presence_penalty": 1, "frequency_penalty": 1}),
    "completions": ("/v1/completions", {**GREEDY, "prompt": "the quick brown fox", "logprobs": 1, "stop": ["zzzz"]}),
    "tools": (
        "/v1/chat/completions",
        {
            **GREEDY,
            "messages": [USER],
            "tools": [{"type": "function", "function": {"name": "weather", "parameters": WEATHER}}],
            "tool_choice": "required",
            "max_tokens": 200,
        },
    ),
    "responses": ("/v1/responses", {**GREEDY, "input": "the quick brown fox", "max_output_tokens": 40}),
    "messages": ("/v1/messages", {**GREEDY, "messages": [USER]}),
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("models")
    tiny_llama(folder / "tiny" / "1")
    (folder / "tiny" / "config.pbtxt").write_text(CONFIG)
    engines: list[Engine] = []

    async def site() -> Site:
        engines.append(open_engine(EngineSettings(repositories=(folder,), repository=RepositorySettings(), gpus=0)))
        await engines[0].start()
        routes = Routes()
        OpenAiHttp(engines[0].plane, OpenAiSettings(continuation_key=KEY)).add_to(routes)
        return Site(routes)

    with serving(site) as running:
        yield running
        running.call(engines[0].close, 5)


class Relay:
    """Passes connections on to a server. Those of its first requests are cut after so many bytes of the response."""

    def __init__(self, port: int, cut_after: list[int]) -> None:
        self._target = port
        self._cuts = cut_after
        self.requests: list[bytes] = []
        self.on_cut: Callable[[], None] = lambda: None
        self.closed = False
        self.has_cut = 0
        """Responses that were cut; a shorter one ends before."""
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._relay, args=(client,), daemon=True).start()

    def _relay(self, client: socket.socket) -> None:
        server = socket.create_connection(("127.0.0.1", self._target))

        def forward() -> None:
            with suppress(OSError):  # the connection was cut meanwhile
                while data := _received(client):
                    if b" HTTP/1.1\r\n" in data:
                        self.requests.append(data)
                    server.sendall(data)

        threading.Thread(target=forward, daemon=True).start()
        left = self._cuts.pop(0) if self._cuts else 1 << 60
        while left > 0 and (data := _received(server)):
            client.sendall(data[:left])
            left -= len(data)
        if left <= 0:
            self.has_cut += 1
            self.on_cut()
        for sock in (client, server):
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)  # another thread reads it, so that closing alone would not reach it
            sock.close()

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()


def _received(sock: socket.socket) -> bytes:
    try:
        return sock.recv(1 << 16)
    except OSError:
        return b""


@contextmanager
def cutting(tiny: Serving, *cuts: int, **changes: Any) -> Iterator[tuple[Routing, Relay]]:
    """A router before two relays. The one that cuts connections gets the first request."""
    first, second = Relay(tiny.port, list(cuts)), Relay(tiny.port, [])
    with ExitStack() as opened:
        opened.callback(first.close)
        opened.callback(second.close)
        router = opened.enter_context(
            routing(second.port, first.port, policy="round-robin", transfer_key=KEY, **changes)
        )
        yield router, first
        assert router.proxy.continuations.record_bytes == 0


def undisturbed(tiny: Serving, kind: str) -> bytes:
    path, document = STREAMS[kind]
    answer = ask(tiny.port, "POST", path, json.dumps(document).encode())
    assert answer.status == 200, answer
    return answer.body


def events_of(body: bytes) -> list[Any]:
    return [json.loads(line[6:]) for line in body.split(b"\n") if line.startswith(b"data: {")]


_IDS = re.compile(r'"(id|item_id|call_id)":"([a-z]+[-_])[0-9a-f]{16,}"')


def meaning_of(body: bytes) -> Any:
    """What a stream says, however its text was cut into events: its texts by place, and everything else, each once."""
    assert b"\n:" not in body and not body.startswith(b":")
    texts: dict[str, str] = {}
    rest: list[Any] = []
    for event in events_of(body):
        shown = json.loads(_IDS.sub(r'"\1":"\2"', json.dumps(event, separators=(",", ":"))))
        shown.pop("sequence_number", None)
        for name in ("created", "created_at"):
            shown.pop(name, None)
            if isinstance(shown.get("response"), dict):
                shown["response"].pop(name, None)
        if isinstance(shown.get("usage"), dict):
            shown["usage"].pop("prompt_tokens_details", None)  # the second time, the prompt is in the cache
        _take_texts(shown, texts)
        if shown not in rest:
            rest.append(shown)
    return texts, rest


def _take_texts(event: dict[str, Any], texts: dict[str, str]) -> None:
    for choice in event.get("choices") or []:
        delta = choice.get("delta", choice)
        for name in ("content", "reasoning_content", "text"):
            if isinstance(delta.get(name), str):
                place = f"{choice['index']} {name}"
                texts[place] = texts.get(place, "") + delta.pop(name)
        for call in delta.get("tool_calls") or []:
            place = f"{choice['index']} arguments {call['index']}"
            texts[place] = texts.get(place, "") + call["function"].pop("arguments")
            call["function"].pop("name", None)
            call.pop("id", None)
            call.pop("type", None)
        logprobs = choice.pop("logprobs", None)
        if logprobs:
            place = f"{choice['index']} logprobs"
            tokens = logprobs.get("content") or list(zip(logprobs["tokens"], logprobs["text_offset"], strict=True))
            texts[place] = texts.get(place, "") + "".join(
                str(token if isinstance(token, tuple) else token["token"]) for token in tokens
            )
    if isinstance(event.get("delta"), str):
        place = f"{event['type']} {event['item_id']} {event['output_index']}"
        texts[place] = texts.get(place, "") + event.pop("delta")
    elif isinstance(event.get("delta"), dict):
        for name in ("text", "thinking", "partial_json"):
            if name in event["delta"]:
                place = f"{event['index']} {name}"
                texts[place] = texts.get(place, "") + event["delta"].pop(name)
    event.get("response", {}).pop("usage", None)
    event.pop("usage", None) if event.get("type") == "message_delta" else None


def stream(router: Routing, kind: str) -> Answer:
    path, document = STREAMS[kind]
    return router.get(path, "POST", json.dumps(document).encode(), content_type="application/json")


def usages(body: bytes) -> list[int]:
    """Completion tokens of each event that has a usage."""
    counts = []
    for event in events_of(body):
        usage = event.get("usage") or (event.get("response") or {}).get("usage") or {}
        counts += [usage[name] for name in ("completion_tokens", "output_tokens") if usage.get(name)]
    return counts


@pytest.mark.parametrize("kind", STREAMS)
def test_a_stream_that_is_cut_says_the_same(tiny: Serving, kind: str) -> None:
    whole = undisturbed(tiny, kind)
    expected = meaning_of(whole)
    continued = 0
    for part in (0.0, 0.2, 0.55, 0.9):
        cut = 600 + int(len(whole) * part)
        with cutting(tiny, cut) as (router, relay):
            answer = stream(router, kind)
            assert answer.status == 200
            assert meaning_of(answer.body) == expected, (kind, cut)
            assert usages(answer.body) == usages(whole)
            ids = set(re.findall(rb'"id":"((?:chatcmpl|cmpl|resp)[^"]*)"', answer.body))
            assert len(ids) == (kind != "messages")
            numbers = [event["sequence_number"] for event in events_of(answer.body) if "sequence_number" in event]
            assert numbers == list(range(len(numbers)))
            assert CONTINUATION_HEADER in relay.requests[0] and RECORD not in answer.body
            assert router.proxy.continuations.continued == relay.has_cut
            continued += relay.has_cut
    assert continued >= 2


def test_a_continued_stream_is_counted_once_for_its_tenant(tiny: Serving) -> None:
    whole = undisturbed(tiny, "chat")
    fairness = FairnessSettings(tenant_header="x-tenant")
    with cutting(tiny, 600 + len(whole) // 2, max_outstanding=4, fairness=fairness) as (router, relay):
        assert meaning_of(stream(router, "chat").body) == meaning_of(whole)
        assert relay.has_cut and router.proxy.fairness is not None
        (tenant,) = router.proxy.fairness.tenants.values()
        assert (tenant.requests, [tenant.output_tokens]) == (1, usages(whole))


def test_it_may_be_cut_again_and_again(tiny: Serving) -> None:
    whole = undisturbed(tiny, "responses")
    first, second = Relay(tiny.port, [900, 1500]), Relay(tiny.port, [1200, 1800])
    try:
        with routing(first.port, second.port, policy="round-robin", transfer_key=KEY) as router:
            answer = stream(router, "responses")
            assert meaning_of(answer.body) == meaning_of(whole)
            assert router.proxy.continuations.continued >= 3
            assert [event["sequence_number"] for event in events_of(answer.body)] == list(
                range(len(events_of(answer.body)))
            )
            metrics = router.get("/router/metrics").body
            assert b'headrace_router_continuations_total{outcome="continued"}' in metrics
            assert b"headrace_router_continuation_bytes 0" in metrics
    finally:
        first.close()
        second.close()


def test_a_backend_that_dies_before_it_answers_costs_nothing(tiny: Serving) -> None:
    whole = undisturbed(tiny, "chat")
    for cut in (0, 40):
        with cutting(tiny, cut) as (router, _):
            assert meaning_of(stream(router, "chat").body) == meaning_of(whole)
            assert router.proxy.continuations.continued == 0


def cut_off(router: Routing, kind: str = "chat") -> bytes:
    """What a client gets of a stream that is cut."""
    with pytest.raises(http.client.IncompleteRead) as cut:
        stream(router, kind)
    return cut.value.partial


def test_without_the_key_a_stream_is_cut_as_it_always_was(tiny: Serving) -> None:
    with cutting(tiny, 1500) as (router, _):
        router.proxy.continuations._key = b"another key of 16 bytes or more"
        assert undisturbed(tiny, "chat")[:20] == cut_off(router)[:20]
        assert (router.proxy.continuations.lost, router.proxy.continuations.record_bytes) == (1, 0)


@pytest.mark.parametrize(
    "settings",
    [ContinuationSettings(stream_bytes=80), ContinuationSettings(total_bytes=80), ContinuationSettings(tries=0)],
)
def test_the_limits_hold(tiny: Serving, settings: ContinuationSettings) -> None:
    with cutting(tiny, 3000, continuation=settings) as (router, _):
        assert cut_off(router)
        assert router.proxy.continuations.continued == 0
        assert router.proxy.continuations.too_long == (settings.tries > 0)


def test_it_can_be_switched_off(tiny: Serving) -> None:
    with cutting(tiny, 1500, continuation=ContinuationSettings(enabled=False)) as (router, relay):
        assert cut_off(router)
        assert CONTINUATION_HEADER not in relay.requests[0]


def test_a_stream_waits_for_a_backend_that_comes_back(tiny: Serving) -> None:
    whole = undisturbed(tiny, "chat")
    relay = Relay(tiny.port, [1500])
    try:
        with routing(relay.port, transfer_key=KEY) as router:
            # The only backend: it was tried, and is tried again.
            assert meaning_of(stream(router, "chat").body) == meaning_of(whole)
            assert router.proxy.continuations.continued == 1
    finally:
        relay.close()


def test_no_backend_to_continue_it_ends_the_wait(tiny: Serving) -> None:
    relay = Relay(tiny.port, [1500])
    with routing(relay.port, transfer_key=KEY, continuation=ContinuationSettings(wait_seconds=0.3)) as router:
        relay.on_cut = relay.close
        assert cut_off(router)
        assert router.proxy.continuations.lost == 1


def test_a_client_that_leaves_ends_the_search(tiny: Serving) -> None:
    relay = Relay(tiny.port, [1500])
    with routing(relay.port, transfer_key=KEY, continuation=ContinuationSettings(wait_seconds=600)) as router:
        relay.on_cut = relay.close
        path, document = STREAMS["chat"]
        body = json.dumps(document).encode()
        with socket.create_connection(("127.0.0.1", router.port)) as client:
            client.sendall(
                b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (path.encode(), len(body), body)
            )
            eventually(lambda: relay.closed)
            eventually(lambda: router.proxy.backends.all[0].stats.failed > 0)
            assert router.proxy.continuations.record_bytes > 0
        eventually(lambda: router.proxy.continuations.record_bytes == 0)


def events(*texts: str) -> list[bytes]:
    return [
        b"data: %b\n\n" % json.dumps({"choices": [{"index": 0, "delta": {"content": text}}]}).encode() for text in texts
    ]


@pytest.mark.parametrize(
    ("status", "expected"), [(b"200 OK", ["one ", "two"]), (b"403 Forbidden", ["one ", "an error"])], ids=["200", "403"]
)
@pytest.mark.parametrize("at_once", [True, False])
def test_a_backend_that_cannot_go_on_says_so_and_another_one_does(
    status: bytes, expected: list[str], at_once: bool
) -> None:
    started = b':r {"id":"%b","created":1}\n:r {"i":0,"t":[1]}\n' % (b"a" * 32)
    chunks = [started + events("one ")[0], b':r "failed"\n' + events("an error")[0]]
    first_arrived = threading.Event()

    def dying(sock: socket.socket, backend: ScriptedBackend) -> None:
        backend.read_request(sock)
        head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        one, two = (b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks)
        sock.sendall(head + one + (two + b"0\r\n\r\n" if at_once else b""))
        if not at_once:
            first_arrived.wait(30)
            sock.sendall(two + b"0\r\n\r\n")

    def going_on(sock: socket.socket, backend: ScriptedBackend) -> None:
        backend.read_request(sock)
        body = events("two")[0]
        head = b"content-type: text/event-stream\r\ncontent-length: %d\r\n\r\n" % len(body)
        sock.sendall(b"HTTP/1.1 %b\r\n%b%b" % (status, head, body))

    with (
        scripted_backend(dying) as one,
        scripted_backend(going_on) as other,
        routing(other.port, one.port, policy="round-robin", transfer_key=KEY) as router,
        socket.create_connection(("127.0.0.1", router.port)) as client,
    ):
        path, document = STREAMS["chat"]
        body = json.dumps(document).encode()
        client.sendall(
            b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (path.encode(), len(body), body)
        )
        answered = b""
        while not answered.endswith(b"0\r\n\r\n"):
            piece = client.recv(1 << 16)
            assert piece, answered
            answered += piece
            if b"one " in answered:
                first_arrived.set()
        texts = [event["choices"][0]["delta"]["content"] for event in events_of(answered)]
        assert texts == expected
        asked = other.seen[0]
        assert asked.startswith(b"POST %b HTTP/1.1" % CONTINUE_PATH.encode())
        told = json.loads(asked.partition(b"\r\n\r\n")[2])
        assert (told["path"], told["sent"]) == (path, len(events("one ")[0]))
        assert told["records"] == [{"id": "a" * 32, "created": 1}, {"i": 0, "t": [1]}]
        assert told["request"] == document


def test_a_stream_without_records_is_passed_on_and_cut_as_it_is() -> None:
    def foreign(sock: socket.socket, backend: ScriptedBackend) -> None:
        backend.read_request(sock)
        sock.sendall(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        for chunk in events("one ", "two"):
            sock.sendall(b"%x\r\n%b\r\n" % (len(chunk), chunk))

    with scripted_backend(foreign) as one, scripted_backend(foreign) as other:
        with routing(one.port, other.port, transfer_key=KEY) as router:
            assert cut_off(router) == b"".join(events("one ", "two"))
            assert one.connections + other.connections == 1


def test_a_client_cannot_ask_for_records_or_continue(tiny: Serving) -> None:
    with routing(tiny.port, continuation=ContinuationSettings(enabled=False)) as router:
        path, document = STREAMS["chat"]
        answer = router.get(path, "POST", json.dumps(document).encode(), x_headrace_continuation="track")
        assert RECORD not in answer.body
    body = json.dumps(
        {
            "path": path,
            "sent": 0,
            "records": [{"id": "a" * 32, "created": 1}, {"i": 0, "t": [1]}],
            "request": document,
        }
    ).encode()
    wrong = continuation_proof(b"another key of 16 bytes or more", body, time.time()).decode()
    old = continuation_proof(KEY, body, time.time() - 600).decode()
    other = continuation_proof(KEY, body + b" ", time.time()).decode()
    for fields in ({}, *({"x_headrace_continuation": proof} for proof in (wrong, old, other, "track"))):
        assert ask(tiny.port, "POST", CONTINUE_PATH, body, fields).status == 403


def test_a_document_that_no_router_sends_is_refused(tiny: Serving) -> None:
    path, document = STREAMS["chat"]
    first, reply = {"id": "a" * 32, "created": 1}, {"i": 0, "t": [1]}
    right = {"path": path, "sent": 0, "records": [first, reply], "request": document}
    wrong: list[Any] = [
        [],
        {**right, "path": "/v1/embeddings"},
        {**right, "path": 3},
        {**right, "records": []},
        {**right, "records": [first]},
        {**right, "records": [{**first, "id": "x"}, reply]},
        {**right, "records": [first, {"i": 0, "t": ["x"]}]},
        {**right, "records": [first, {"i": -1, "t": [1]}]},
        {**right, "records": [first, 7]},
        {**right, "sent": -1},
        {**right, "request": None},
        {**right, "request": {**document, "stream": False}},
        right,  # without the tokenizer
    ]
    for each in wrong:
        body = json.dumps(each).encode()
        proof = continuation_proof(KEY, body, time.time()).decode()
        answer = ask(tiny.port, "POST", CONTINUE_PATH, body, {"x_headrace_continuation": proof})
        assert answer.status == 400, (each, answer)


@pytest.mark.parametrize("failed", [False, True])
def test_records_are_found_wherever_a_stream_is_cut(failed: bool) -> None:
    shown = [b"data: a :r b\n\n", b"data: :r\n:x\n\n", b"event: e\ndata: 3\n\n"]
    records = [b'{"i":0}', b'{"t":[1]}', b"3"]
    end = b':r "failed"\ndata: error\n\n' if failed else b""
    text = b"".join(b":r %b\n%b" % pair for pair in zip(records, shown, strict=True)) + b":r 4\n" + end
    for first in range(len(text)):
        for second in range(first, len(text), 7):
            stream = RecordFilter(100)
            pieces = (text[:first], text[first:second], text[second:])
            assert b"".join(map(stream.feed, pieces)) == b"".join(shown)
            assert stream.fresh == [*records, b"4"]
            assert (stream.failed, stream.error, stream.sent) == (failed, b"data: error\n\n" if failed else b"", 0)
