# SPDX-License-Identifier: Apache-2.0
"""What a router counts by revision: over real sockets, with backends that come and go."""

from __future__ import annotations

import json
import socket
from typing import Any

import pytest
from routing import ScriptedBackend, routing

from headrace.core.errors import InvalidArgument
from headrace.fleet.router.discovery import read_backends
from headrace.fleet.router.settings import BackendAddress
from support.ports import free_port
from support.serving import echo_site, serving


def status_of(code: int) -> Any:
    """A backend that answers every request with this status."""

    def script(connection: socket.socket, scripted_backend: ScriptedBackend) -> None:
        while connection.recv(65536):
            connection.sendall(b"HTTP/1.1 %d Such\r\nContent-Length: 2\r\n\r\nno" % code)

    return script


def revision_counts(router: Any) -> dict[str, Any]:
    revisions: dict[str, Any] = json.loads(router.get("/router/status").body)["revisions"]
    return revisions


def test_requests_and_errors_are_counted_by_revision_and_kept_when_a_backend_is_removed() -> None:
    scripted_backend = ScriptedBackend(status_of(500))
    with serving(echo_site()) as one, serving(echo_site()) as two:
        texts = [f"http://127.0.0.1:{item.port},revision=old" for item in (one, two)]
        bad = f"http://127.0.0.1:{scripted_backend.port},revision=new"
        with routing(*texts, bad, policy="round-robin") as router:
            answers = [router.get("/hello").status for _ in range(30)]
            assert sorted(set(answers)) == [200, 500] and answers.count(500) == 10
            result = revision_counts(router)
            assert {name: (item["requests"], item["errors"]) for name, item in result["counts"].items()} == {
                "old": (20, 0),
                "new": (10, 10),
            }
            assert sum(result["counts"]["new"]["times"]) == 10 and result["counts"]["new"]["seconds"] > 0
            assert len(result["bounds"]) + 1 == len(result["counts"]["old"]["times"])
            # 500 is an error, but nothing that speaks against its health.
            stats = router.proxy.backends.all[2].stats
            assert (stats.erred, stats.failed, stats.refused, stats.healthy) == (10, 0, 0, 10)
            assert router.proxy.backends.all[2].state == "up"
            addresses = [BackendAddress.parse(text) for text in texts]
            router.server.call(lambda: router.proxy.backends.set_addresses(addresses, 0.0))
            assert revision_counts(router)["counts"]["new"]["errors"] == 10
            metrics = router.get("/router/metrics").body.decode()
    assert 'headrace_router_revision_requests_total{revision="new",outcome="error"} 10' in metrics
    assert 'headrace_router_revision_requests_total{revision="old",outcome="ok"} 20' in metrics


def test_who_cannot_be_reached_counts_as_an_error_of_its_revision() -> None:
    port = free_port()
    with serving(echo_site()) as one:
        texts = [f"http://127.0.0.1:{one.port},revision=old", f"http://127.0.0.1:{port},revision=new"]
        with routing(*texts, policy="round-robin") as router:
            # Tried again elsewhere: no client notices, but whoever decides about the new revision has to.
            assert {router.get("/hello").status for _ in range(8)} == {200}
            counts = revision_counts(router)["counts"]
    assert counts["new"]["errors"] == counts["new"]["requests"] > 0
    assert counts["old"] == {**counts["old"], "requests": 8, "errors": 0}


def test_without_revisions_nothing_is_reported() -> None:
    with serving(echo_site()) as one, routing(one.port) as router:
        assert router.get("/hello").status == 200
        assert revision_counts(router)["counts"] == {}


def test_a_revision_is_a_valid_label(tmp_path: Any) -> None:
    assert BackendAddress.parse("http://a:1,weight=2,revision=9f-0.b_c").revision == "9f-0.b_c"
    for bad in ("", "a b", "-a", "x" * 64, 'a"'):
        with pytest.raises(InvalidArgument, match="a revision is up to 63"):
            BackendAddress.parse(f"http://a:1,revision={bad}")
    path = tmp_path / "backends.json"
    path.write_text(json.dumps([{"url": "http://a:1", "weight": 3, "revision": "r1"}]))
    (found,) = read_backends(str(path))
    assert (found.weight, found.revision) == (3.0, "r1")
