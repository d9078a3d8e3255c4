# SPDX-License-Identifier: Apache-2.0
"""A router with prefill and decode backends: which backend gets what, and what happens when one fails.

Real routers and sockets; the backends are a `FakeServer` each, which says what it was asked. The real ones are in
tests/fleet/local/test_local_prefill_decode.py.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from routing import ask, routing

from headrace.core.errors import InvalidArgument
from headrace.core.kv_transfer import PREFILL_PATH, TRANSFER_HEADER, is_valid_prefill_proof
from headrace.fleet.router.discovery import read_backends
from headrace.fleet.router.settings import (
    BackendAddress,
    DiscoverySettings,
    HedgingSettings,
    PrefillDecodeSettings,
    RetrySettings,
    RouterSettings,
    check_settings,
)
from headrace.net.http.exchange import Exchange
from headrace.net.http.heads import OK_JSON, ResponseHead
from headrace.net.http.routes import Routes
from headrace.net.site import Site
from support.ports import free_port
from support.serving import Serving, serving
from support.waiting import eventually

CHAT = "/v1/chat/completions"
BODY = json.dumps({"model": "m", "messages": [{"role": "user", "content": "the quick brown fox " * 200}]}).encode()
LARGE = json.dumps({"model": "m", "prompt": "the quick brown fox " * 20_000}).encode()


@dataclass
class FakeServer:
    """A backend, and what it was asked."""

    name: str
    answer: Callable[[Exchange], None] | None = None
    """In place of its own for prompts and requests."""
    asked: list[tuple[str, bytes, dict[bytes, bytes]]] = field(default_factory=list)
    server: Serving | None = None

    @property
    def paths(self) -> list[str]:
        return [path for path, _, _ in self.asked]

    @property
    def port(self) -> int:
        assert self.server is not None
        return self.server.port

    def handle(self, exchange: Exchange) -> None:
        head = exchange.head
        self.asked.append((head.path.decode(), bytes(exchange.body), dict(head.by_name)))
        if self.answer is not None:
            self.answer(exchange)
        elif head.path.decode() == PREFILL_PATH:
            exchange.respond(OK_JSON, b'{"ticket": "said.by-%b", "prompt_tokens": 800}' % self.name.encode())
        else:
            exchange.respond(OK_JSON, json.dumps({"by": self.name}).encode())


@contextmanager
def fake(name: str, answer: Callable[[Exchange], None] | None = None) -> Iterator[FakeServer]:
    created = FakeServer(name, answer)

    async def build() -> Site:
        routes = Routes()
        routes.fallback(created.handle, created.handle, whole_bytes=1 << 26)
        return Site(routes)

    with serving(build) as server:
        created.server = server
        yield created


@contextmanager
def paired(
    prefill: Callable[[Exchange], None] | None = None,
    decode: Callable[[Exchange], None] | None = None,
    **changes: Any,
) -> Iterator[tuple[Any, FakeServer, FakeServer]]:
    with fake("prefill", prefill) as one, fake("decode", decode) as other:
        texts = (f"http://127.0.0.1:{one.port},role=prefill", f"http://127.0.0.1:{other.port},role=decode")
        with routing(*texts, **changes) as router:
            yield router, one, other


def counts(router: Any) -> dict[str, int]:
    return dict(router.proxy.prefill_decode.counts)


def by(answer: Any) -> str:
    assert answer.status == 200, answer
    return str(json.loads(answer.body)["by"])


@pytest.mark.parametrize(("path", "body"), [(CHAT, BODY), ("/v1/completions", BODY), ("/v1/completions", LARGE)])
def test_a_prefill_gets_the_body_and_the_decoder_the_ticket(path: str, body: bytes) -> None:
    with paired() as (router, prefill, decode):
        answer = router.get(path, "POST", body, authorization="Bearer key", accept_encoding="gzip")
        assert by(answer) == "decode"
        [(asked, got, fields)] = prefill.asked
        assert (asked, got) == (PREFILL_PATH, body)
        assert fields[b"authorization"] == b"Bearer key" and b"accept-encoding" not in fields
        [(asked, got, fields)] = decode.asked
        assert (asked, got, fields[TRANSFER_HEADER]) == (path, body, b"said.by-prefill")
        assert counts(router) == {"handed": 1}
        told = ask(router.port, "GET", "/router/metrics").body
        assert b'headrace_router_handings_total{outcome="handed"} 1' in told
        roles = [
            backend.get("role") for backend in json.loads(ask(router.port, "GET", "/router/status").body)["backends"]
        ]
        assert roles == ["prefill", "decode"]


def test_short_requests_and_those_without_a_prompt_skip_prefill() -> None:
    with paired() as (router, prefill, decode):
        assert by(router.get(CHAT, "POST", b'{"messages": []}')) == "decode"
        assert by(router.get("/v1/embeddings", "POST", BODY)) == "decode"
        assert by(router.get("/v2/models/m")) == "decode"
        assert prefill.asked == []
        assert len(decode.asked) == 3
        assert counts(router) == {"short": 1}


def test_a_clients_own_ticket_is_not_passed_on() -> None:
    with paired() as (router, prefill, decode):
        router.get(CHAT, "POST", b"{}", x_headrace_handing="mine")
        assert TRANSFER_HEADER not in decode.asked[0][2]


def test_a_router_without_roles_passes_tickets_on_and_runs_no_prefill() -> None:
    with fake("plain") as plain, routing(plain.port) as router:
        router.get(CHAT, "POST", BODY, x_headrace_handing="theirs")
        assert plain.paths == [CHAT]
        assert plain.asked[0][2][TRANSFER_HEADER] == b"theirs"
        assert router.proxy.chooser is None


def test_the_router_proves_that_it_has_the_key() -> None:
    key = b"a key of more than 16 bytes"
    with paired(transfer_key=key) as (router, prefill, _):
        router.get(CHAT, "POST", BODY)
        [(_, body, fields)] = prefill.asked
        now = int(fields[TRANSFER_HEADER].partition(b".")[0])
        assert is_valid_prefill_proof(key, fields[TRANSFER_HEADER], body, now)
        assert not is_valid_prefill_proof(key, fields[TRANSFER_HEADER], body + b" ", now)
        assert not is_valid_prefill_proof(key, fields[TRANSFER_HEADER], body, now + 61)
        assert not is_valid_prefill_proof(b"another key of 16 and more", fields[TRANSFER_HEADER], body, now)
        assert not is_valid_prefill_proof(key, b"", body, now)


def _error(status: int) -> Callable[[Exchange], None]:
    return lambda exchange: exchange.respond(ResponseHead(status), b"no")


def _json(body: bytes) -> Callable[[Exchange], None]:
    return lambda exchange: exchange.respond(OK_JSON, body)


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [
        (_error(503), "refused"),
        (_error(500), "refused"),
        (_error(400), "refused"),
        (_error(403), "refused"),
        (_json(b'{"ticket": ""}'), "nothing"),
        (_json(b'{"ticket": 5}'), "failed"),
        (_json(b'{"ticket": "a\\r\\nb: c"}'), "failed"),
        (_json(b"[]"), "failed"),
        (_json(b"nonsense"), "failed"),
        (_json(b'{"ticket": "' + b"x" * 100_000 + b'"}'), "failed"),
        (lambda exchange: exchange.abort(), "failed"),
    ],
)
def test_whatever_a_prefill_does_the_decoder_answers(answer: Callable[[Exchange], None], outcome: str) -> None:
    with paired(answer) as (router, prefill, decode):
        assert by(router.get(CHAT, "POST", BODY)) == "decode"
        assert TRANSFER_HEADER not in decode.asked[0][2]
        assert counts(router) == {outcome: 1}
        assert [backend.outstanding for backend in router.proxy.backends.all] == [0, 0]


def test_a_prefill_that_takes_too_long_is_not_waited_for() -> None:
    with paired(lambda _: None, pairing=PrefillDecodeSettings(prefill_seconds=0.05)) as (router, prefill, decode):
        assert by(router.get(CHAT, "POST", BODY)) == "decode"
        assert counts(router) == {"late": 1}
        assert router.stats(0).failed == 1


def test_a_prefill_that_hangs_times_out() -> None:
    with paired(lambda _: None, pairing=PrefillDecodeSettings(prefill_seconds=0.5)) as (router, prefill, decode):
        for _ in range(20):
            assert by(router.get(CHAT, "POST", BODY)) == "decode"
        reported = counts(router)
        assert reported["late"] < 20 and reported["late"] + reported["no_prefill"] == 20
        eventually(lambda: len(prefill.asked) == reported["late"])  # it may read the last one after it was given up


def test_a_callers_error_does_not_count_against_a_prefills_health() -> None:
    with paired(_error(500)) as (router, prefill, decode):
        for _ in range(20):
            assert by(router.get(CHAT, "POST", BODY)) == "decode"
        assert counts(router) == {"refused": 20} and router.stats(0).erred == 20


def test_a_client_that_disconnects_cancels_all_work() -> None:
    with paired(lambda _: None) as (router, prefill, decode):
        with socket.create_connection(("127.0.0.1", router.port)) as client:
            client.sendall(b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % (CHAT.encode(), len(BODY)))
            client.sendall(BODY)
            eventually(lambda: prefill.asked)
        eventually(lambda: router.stats(0).cancelled == 1)
        assert decode.asked == []
        assert [backend.outstanding for backend in router.proxy.backends.all] == [0, 0]


def test_without_a_prefill_decoders_do_all_of_it() -> None:
    with fake("decode") as decode:
        gone = free_port()
        with routing(f"http://127.0.0.1:{gone},role=prefill", f"http://127.0.0.1:{decode.port},role=decode") as router:
            assert by(router.get(CHAT, "POST", BODY)) == "decode"
            assert counts(router) == {"failed": 1}
            router.server.call(_take_down, router, 0)
            assert by(router.get(CHAT, "POST", BODY)) == "decode"
            assert counts(router) == {"failed": 1, "no_prefill": 1}


async def _take_down(router: Any, place: int) -> None:
    """As checks would."""
    for _ in range(3):
        router.proxy.backends.checked(router.proxy.backends.all[place], False, 0.0, "for a test")


def test_without_a_decoder_prefills_do_all_of_it() -> None:
    with fake("prefill") as prefill:
        gone = free_port()
        with routing(f"http://127.0.0.1:{prefill.port},role=prefill", f"http://127.0.0.1:{gone},role=decode") as router:
            assert by(router.get(CHAT, "POST", BODY)) == "prefill"
            assert prefill.paths == [PREFILL_PATH, CHAT]
            assert by(router.get("/v2/models/m")) == "prefill"
            router.server.call(_take_down, router, 1)
            assert by(router.get(CHAT, "POST", BODY)) == "prefill"
            assert counts(router) == {"handed": 1, "no_decoder": 1}
            body = ask(router.port, "GET", "/router/metrics").body
            assert b'why="aggregated"} 1' in body


@pytest.mark.parametrize("answer", [_error(503), _error(502), lambda exchange: exchange.abort()])
def test_a_failed_transfer_is_not_an_error_for_the_client(answer: Callable[[Exchange], None]) -> None:
    with paired(None, answer) as (router, prefill, decode):
        assert by(router.get(CHAT, "POST", BODY)) == "prefill"
        assert prefill.paths == [PREFILL_PATH, CHAT]
        assert by(router.get("/v1/models")) == "prefill"
        assert [backend.outstanding for backend in router.proxy.backends.all] == [0, 0]


def test_a_decoder_that_cannot_is_replaced_only_while_there_is_budget() -> None:
    with paired(None, _error(503), retries=RetrySettings(budget=0.0, reserve=1)) as (router, prefill, decode):
        assert by(router.get(CHAT, "POST", BODY)) == "prefill"
        assert router.get(CHAT, "POST", BODY).status == 503
        assert prefill.paths == [PREFILL_PATH, CHAT, PREFILL_PATH] and decode.paths == [CHAT, CHAT]
        assert router.proxy.budget.refused == 1


def test_a_callers_error_is_returned() -> None:
    with paired(_error(400), _error(400)) as (router, prefill, decode):
        assert router.get(CHAT, "POST", BODY).status == 400
        assert (prefill.paths, decode.paths) == ([PREFILL_PATH], [CHAT])


def test_the_explanation_of_a_choice() -> None:
    with paired() as (router, prefill, decode):
        question = {"path": CHAT, "body": json.loads(BODY)}

        def explain_choice() -> dict[str, Any]:
            document: dict[str, Any] = json.loads(
                ask(router.port, "POST", "/router/explain", json.dumps(question).encode()).body
            )
            return document

        result = explain_choice()
        assert result["backend"].endswith(str(decode.port))
        assert result["details"]["prefill"].endswith(str(prefill.port))
        assert result["details"]["handing"] == "handed"
        assert [backend["role"] for backend in result["backends"]] == ["prefill", "decode"]
        router.server.call(_take_down, router, 1)
        result = explain_choice()
        assert (result["why"], result["details"]["handing"]) == ("aggregated", "no_decoder")
        assert prefill.asked == decode.asked == []


def test_prompts_with_a_common_prefix_go_to_the_same_prefill() -> None:
    with fake("a") as one, fake("b") as two, fake("decode") as decode:
        texts = [f"http://127.0.0.1:{item.port},role=prefill" for item in (one, two)]
        with routing(*texts, f"http://127.0.0.1:{decode.port},role=decode", policy="cache_aware") as router:
            for _ in range(6):
                router.get(CHAT, "POST", BODY)
            assert sorted((len(one.asked), len(two.asked))) == [0, 6]
            assert len(decode.asked) == 6


def test_roles_in_addresses_and_files(tmp_path: Any) -> None:
    assert BackendAddress.parse("http://a:1,role=decode").role == "decode"
    with pytest.raises(InvalidArgument, match="role=prefill"):
        BackendAddress.parse("http://a:1,role=cook")
    file = tmp_path / "backends.yaml"
    file.write_text("- {url: http://a:1, role: prefill}\n- http://b:1,role=decode\n- http://c:1\n")
    assert [read_backend.role for read_backend in read_backends(str(file))] == ["prefill", "decode", ""]


def test_incompatible_settings() -> None:
    backends = (BackendAddress.parse("http://a:1,role=decode"),)
    with pytest.raises(InvalidArgument, match="hedging and backend roles"):
        check_settings(RouterSettings(backends, hedging=HedgingSettings(after_seconds=1)))
    assert RouterSettings((), discovery=DiscoverySettings(prefill_pods="a=b")).paired
    assert RouterSettings((), pairing=PrefillDecodeSettings(enabled=True)).paired
    assert not RouterSettings((BackendAddress.parse("http://a:1"),)).paired
