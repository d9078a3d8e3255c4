# SPDX-License-Identifier: Apache-2.0
"""Backends that come and go, from a file, a name, or a cluster."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import orjson
import pytest
import yaml
from routing import NO_CHECKS, Answer, ask, routing

from headrace.core.errors import InvalidArgument
from headrace.fleet.router.backend import Outcome
from headrace.fleet.router.backends import Backends
from headrace.fleet.router.discovery import Discoverer, DnsSource, FileSource, connect_pods, read_backends
from headrace.fleet.router.policies import SmoothWeighted
from headrace.fleet.router.settings import BackendAddress, DiscoverySettings, HealthSettings, RouterSettings
from headrace.net.http.exchange import Exchange
from headrace.net.http.heads import OK_JSON
from headrace.net.http.routes import Routes
from headrace.net.site import Site
from support.serving import EchoHandlers, echo_site, serving
from support.waiting import eventually, eventually_async


def _put(path: Path, content: Any) -> None:
    """Replace the file in one step."""
    text = content if isinstance(content, str) else json.dumps(content)
    beside = path.with_suffix(".new")
    beside.write_text(text)
    os.replace(beside, path)


def _url(port: int) -> str:
    return f"http://127.0.0.1:{port}"


def _addresses(*texts: str) -> list[BackendAddress]:
    return [BackendAddress.parse(text) for text in texts]


def test_backends_are_added_and_removed_by_a_file(tmp_path: Path) -> None:
    path = tmp_path / "backends.json"
    _put(path, [])
    settings = DiscoverySettings(file=str(path), interval_seconds=0.02)
    with serving(echo_site()) as one, serving(echo_site()) as two, routing(discovery=settings) as router:

        def urls() -> list[str]:
            return [
                backend["url"] for backend in json.loads(ask(router.port, "GET", "/router/status").body)["backends"]
            ]

        nobody = ask(router.port, "GET", "/hello")
        assert nobody.status == 503 and "retry-after" in nobody.fields and b"there is none yet" in nobody.body
        _put(path, [{"url": _url(one.port), "weight": 2}])
        eventually(lambda: urls() == [_url(one.port)])
        assert ask(router.port, "GET", "/hello").body == b"hello"
        _put(path, [{"url": _url(one.port), "weight": 5}, _url(two.port)])
        eventually(lambda: len(urls()) == 2)
        assert router.proxy.backends.all[0].weight == 5
        for bad in ("", "{", "[5]", '[{"url": "ftp://x"}]', '{"a": 1}'):
            _put(path, bad)
            eventually(lambda: router.proxy._discoverer.failures())  # type: ignore[union-attr]
            assert len(urls()) == 2
            _put(path, [{"url": _url(one.port), "weight": 5}, _url(two.port)])
            eventually(lambda: not router.proxy._discoverer.failures())  # type: ignore[union-attr]
        _put(path, [_url(two.port)])
        eventually(lambda: urls() == [_url(two.port)])
        assert ask(router.port, "GET", "/hello").status == 200


def test_a_removed_backend_finishes_its_requests_and_gets_no_more(tmp_path: Path) -> None:
    path = tmp_path / "backends.yaml"
    handlers = EchoHandlers()
    settings = DiscoverySettings(file=str(path), interval_seconds=0.02)
    with serving(echo_site(handlers=handlers)) as one, serving(echo_site()) as two:
        _put(path, yaml.safe_dump([_url(one.port)]))
        with routing(discovery=settings) as router:
            answers: list[Answer] = []
            waiting = threading.Thread(target=lambda: answers.append(ask(router.port, "POST", "/hold", b"x")))
            waiting.start()
            eventually(lambda: handlers.held)
            _put(path, yaml.safe_dump([_url(two.port)]))
            backends = router.proxy.backends
            eventually(lambda: [backend.name for backend in backends.all] == [_url(two.port)])
            old = backends.draining[0]
            status = json.loads(ask(router.port, "GET", "/router/status").body)
            assert status["leaving"] == [{"url": _url(one.port), "outstanding": 1}]
            for _ in range(5):
                assert ask(router.port, "GET", "/hello").body == b"hello"
            assert old.stats.requests == 1
            one.call(lambda: handlers.echo(handlers.held[0]))
            waiting.join(60)
            assert answers[0].body == b"x"
            eventually(lambda: not backends.draining)
            assert old not in router.proxy.pools
            assert backends.removed_requests == 1
            assert _url(one.port).encode() not in ask(router.port, "GET", "/router/metrics").body


def test_nothing_is_lost_while_backends_are_added_and_removed(tmp_path: Path) -> None:
    path = tmp_path / "backends.json"
    settings = DiscoverySettings(file=str(path), interval_seconds=0.01)
    with serving(echo_site()) as one, serving(echo_site()) as two, serving(echo_site()) as three:
        urls = [_url(item.port) for item in (one, two, three)]
        _put(path, urls)
        with routing(discovery=settings) as router:
            stop = threading.Event()
            bad: list[Any] = []
            count = [0] * 4

            def load(place: int) -> None:
                while not stop.is_set():
                    answer = ask(router.port, "POST", "/echo", b"abc")
                    count[place] += 1
                    if (answer.status, answer.body) != (200, b"abc"):
                        bad.append(answer)

            threads = [threading.Thread(target=load, args=(place,)) for place in range(4)]
            for thread in threads:
                thread.start()
            try:
                for turn in range(30):
                    wanted = [urls[turn % 3], urls[(turn + 1) % 3]]
                    _put(path, wanted)
                    eventually(lambda wanted=wanted: [backend.name for backend in router.proxy.backends.all] == wanted)  # type: ignore[misc]
                eventually(lambda: sum(count) > 20)
            finally:
                stop.set()
            for thread in threads:
                thread.join(60)
            assert not bad
            assert sum(count) > 20


def test_a_new_one_waits_for_its_first_check_and_starts_slowly() -> None:
    settings = RouterSettings(tuple(_addresses("http://a:1")), slow_start_seconds=10.0)
    backends = Backends(settings)
    backends.set_addresses(_addresses("http://a:1", "http://b:1"), 5.0)
    first, new = backends.all
    assert backends.live == [first] and new.state == "down"
    backends.checked(new, True, 6.0)
    assert backends.live == [first, new] and new.state == "starting" and new.share == pytest.approx(0.1)
    backends.tick(16.0)
    assert new.share == 1.0
    # Without checks it gets requests at once.
    backends = Backends(RouterSettings(tuple(_addresses("http://a:1")), health=NO_CHECKS))
    backends.set_addresses(_addresses("http://b:1"), 5.0)
    assert [backend.name for backend in backends.live] == ["http://b:1"]


def test_a_backend_that_returns_while_it_drains_is_a_new_one() -> None:
    backends = Backends(RouterSettings(tuple(_addresses("http://a:1")), health=NO_CHECKS))
    left: list[Any] = []
    backends.on_removed.append(left.append)
    old = backends.all[0]
    backends.begin(old)
    backends.set_addresses([], 1.0)
    assert backends.pick() is None and backends.draining == [old]
    backends.set_addresses(_addresses("http://a:1,weight=2"), 2.0)
    assert backends.pick() is not old and not left
    backends.end(old, Outcome.OK, 3.0)
    backends.tick(3.0)
    assert left == [old] and not backends.draining


def test_adding_and_removing_backends_forever_leaks_nothing() -> None:
    backends = Backends(RouterSettings((), policy="weighted", health=NO_CHECKS))
    for number in range(200):
        backends.set_addresses(_addresses(f"http://a{number}:1", f"http://a{number + 1}:1,weight=3"), float(number))
        for _ in range(4):
            backend = backends.pick()
            assert backend is not None
            backends.begin(backend)
            backends.end(backend, Outcome.OK, float(number))
    policy = backends.policy
    assert isinstance(policy, SmoothWeighted) and len(policy._credit) == 2
    assert backends.removed_requests + sum(backend.stats.requests for backend in backends.all) == 800


def test_with_checks_a_new_one_that_is_not_there_gets_nothing(tmp_path: Path) -> None:
    path = tmp_path / "backends.json"
    settings = DiscoverySettings(file=str(path), interval_seconds=0.02)
    health = HealthSettings(path="/hello", interval_seconds=0.05)
    with serving(echo_site()) as one:
        _put(path, [_url(one.port)])
        with routing(discovery=settings, health=health) as router:
            _put(path, [_url(one.port), "http://127.0.0.1:1"])
            eventually(lambda: len(router.proxy.backends.all) == 2)
            eventually(lambda: router.proxy.backends.all[1].health.checks > 0)
            assert all(ask(router.port, "GET", "/hello").status == 200 for _ in range(10))
            assert router.proxy.backends.all[1].stats.requests == 0


def _follow(source: Any, count: int) -> list[Any]:
    async def run() -> list[Any]:
        received: list[Any] = []
        async with asyncio.timeout(30):
            async for update in source.watch():
                received.append(update)
                if len(received) == count:
                    return received
        return received

    return asyncio.run(run())


def test_a_name_has_a_backend_for_each_address() -> None:
    answers: list[Any] = [["10.0.0.2", "10.0.0.1", "10.0.0.1"], OSError("no such name"), ["10.0.0.2", "fd00::1"]]

    async def resolve(host: str, port: int) -> Sequence[str]:
        assert (host, port) == ("engine", 8080)
        answer = answers.pop(0)
        if isinstance(answer, OSError):
            raise answer
        return list(answer)

    reported = _follow(DnsSource("engine:8080,weight=2", 0.001, resolve), 3)
    assert [report.url for report in reported[0]] == ["http://10.0.0.1:8080", "http://10.0.0.2:8080"]
    assert {(report.host, report.grpc_host, report.weight) for report in reported[0]} == {
        ("10.0.0.1", "10.0.0.1", 2.0),
        ("10.0.0.2", "10.0.0.2", 2.0),
    }
    assert isinstance(reported[1], InvalidArgument)
    assert [item.url for item in reported[2]] == ["http://10.0.0.2:8080", "http://[fd00::1]:8080"]
    with pytest.raises(InvalidArgument, match="only http"):
        DnsSource("https://engine", 1.0)


def test_the_systems_resolver_is_used() -> None:
    with serving(echo_site()) as one:
        settings = DiscoverySettings(dns=f"localhost:{one.port}", interval_seconds=0.05)
        with routing(discovery=settings) as router:
            assert ask(router.port, "GET", "/hello").body == b"hello"


def _pod(name: str, host: str, *, ready: bool = True, deleting: bool = False, port: int = 8080) -> dict[str, Any]:
    return {
        "metadata": {"name": name, **({"deletionTimestamp": "2026-01-01T00:00:00Z"} if deleting else {})},
        "spec": {"containers": [{"ports": [{"containerPort": port}]}]},
        "status": {"podIP": host, "conditions": [{"type": "Ready", "status": "True" if ready else "False"}]},
    }


def test_ready_pods_that_stay_are_backends(tmp_path: Path) -> None:
    requests: list[tuple[bytes, bytes]] = []
    items = [
        _pod("a", "10.0.0.1"),
        _pod("b", "10.0.0.2", ready=False),
        _pod("c", "10.0.0.3", deleting=True),
        _pod("d", "fd00::4"),
        {"metadata": {}, "status": {}},
    ]

    def pods(exchange: Exchange) -> None:
        requests.append((exchange.head.query, exchange.head.get(b"authorization") or b""))
        exchange.respond(OK_JSON, orjson.dumps({"kind": "PodList", "items": items}))

    routes = Routes()
    routes.add("GET", "/api/v1/namespaces/models/pods", pods)
    routes.add("GET", "/api/v1/namespaces/odd/pods", lambda exchange: exchange.respond(OK_JSON, b"{}"))
    with serving(Site(routes)) as server:
        config = tmp_path / "kubeconfig"
        config.write_text(
            yaml.safe_dump(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "current-context": "c",
                    "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u", "namespace": "other"}}],
                    "clusters": [{"name": "k", "cluster": {"server": _url(server.port)}}],
                    "users": [{"name": "u", "user": {"token": "secret"}}],
                }
            )
        )

        async def first_update(namespace: str, port: int, role: str = "") -> Any:
            source = connect_pods("app=chat", namespace, port, 0.01, str(config), role=role)
            follow = source.watch()
            try:
                return await anext(follow)
            finally:
                await follow.aclose()  # type: ignore[attr-defined]

        result = asyncio.run(first_update("models", 0))
        assert [item.url for item in result] == ["http://10.0.0.1:8080", "http://[fd00::4]:8080"]
        assert [item.port for item in asyncio.run(first_update("models", 9000))] == [9000, 9000]
        assert [item.role for item in asyncio.run(first_update("models", 0, "prefill"))] == ["prefill", "prefill"]
        assert b"labelSelector=app%3Dchat" in requests[0][0] and requests[0][1] == b"Bearer secret"
        assert isinstance(asyncio.run(first_update("secret", 0)), InvalidArgument)
        assert isinstance(asyncio.run(first_update("odd", 0)), InvalidArgument), (
            "not a list: the pods from before count on"
        )


def test_the_last_result_of_a_source_is_used_while_it_cannot_be_read() -> None:
    class Source:
        def __str__(self) -> str:
            return "a test"

        async def watch(self) -> AsyncIterator[Sequence[BackendAddress] | InvalidArgument]:
            yield _addresses("http://b:1")
            yield InvalidArgument("gone")
            yield _addresses("http://b:1", "http://a:1,weight=9")
            await asyncio.Event().wait()

    async def run() -> list[list[str]]:
        received: list[list[str]] = []
        named = _addresses("http://a:1")
        discoverer = Discoverer(
            named, [Source()], lambda found: received.append([f"{e.url} {e.weight}" for e in found])
        )
        await discoverer.start()
        await eventually_async(lambda: received and not discoverer.failures())
        await discoverer.close()
        return received

    # The one that is named is as it is named, so that the last list is nothing new.
    assert [sorted(item) for item in asyncio.run(run())] == [["http://a:1 1.0", "http://b:1 1.0"]]


def test_files_as_people_write_them(tmp_path: Path) -> None:
    path = tmp_path / "list"
    for text in ('["http://a:1"]', "- http://a:1", "backends:\n- url: a:1", "- {url: a, weight: 1.5, grpc: a:2}"):
        path.write_text(text)
        assert read_backends(str(path))[0].host == "a"
    path.write_text("- {url: a, weight: 1.5, grpc: a:2}")
    assert read_backends(str(path)) == _addresses("http://a:80,weight=1.5,grpc=a:2")
    for bad, says in (
        ("- 5", "is not a backend"),
        ("x: y", "no list"),
        ("- {url: a, name: b}", "is not a backend"),
        ("[", "YAML"),
    ):
        path.write_text(bad)
        with pytest.raises(InvalidArgument, match=says):
            read_backends(str(path))
    with pytest.raises(InvalidArgument, match="cannot be read"):
        read_backends(str(tmp_path / "none"))
    assert isinstance(_follow(FileSource(str(tmp_path / "none"), 0.01), 1)[0], InvalidArgument)
