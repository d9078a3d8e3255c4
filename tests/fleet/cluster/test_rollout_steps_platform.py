# SPDX-License-Identifier: Apache-2.0
"""A rollout by steps on a real API server: the operator asks real routers, through which real requests go."""

from __future__ import annotations

import threading
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.platform, pytest.mark.timeout(900)]
NAME = "llama-steps"


class NamedBackend:
    """What answers for a Service: with its name, or with 500."""

    def __init__(self, name: str) -> None:
        self.broken = False

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(handler) -> None:  # noqa: N805  self is who it answers for
                body = name.encode()
                handler.send_response(500 if self.broken else 200)
                handler.send_header("content-length", str(len(body)))
                handler.end_headers()
                handler.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever)

    def __enter__(self) -> NamedBackend:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@contextmanager
def asking(nodes: Any) -> Iterator[Counter[str]]:
    """Ask one front after the other all the time, as a Service would; what was answered, and how often."""
    seen: Counter[str] = Counter()
    stop = threading.Event()

    def run() -> None:
        turn = 0
        while not stop.wait(0.01):
            fronts = sorted(nodes.addresses.values())
            if not fronts:
                continue
            turn += 1
            try:
                with urllib.request.urlopen(f"http://{fronts[turn % len(fronts)]}:8080/hello", timeout=60) as answer:
                    seen[answer.read().decode()] += 1
            except urllib.error.HTTPError as error:
                with error:
                    seen[f"{error.code} {error.read().decode()}"] += 1
            except OSError:
                seen["gone"] += 1  # it ended as it was asked; a Service would have known

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield seen
    finally:
        stop.set()
        thread.join()


def _said(site: Any) -> str:
    return " | ".join(each["message"] for each in site.events(NAME))


def test_a_good_revision_is_promoted_and_a_bad_one_rolled_back(clean: Any, tmp_path: Path) -> None:
    from controller_site import Running, until
    from router_pods import Nodes

    def edit(value: str) -> None:
        documents[-1]["spec"]["engine"]["runner"] = {
            "name": "ome-container",
            "env": [{"name": "REVISION", "value": value}],
        }
        clean.apply(*documents)

    def rollout() -> dict[str, Any]:
        components = (clean.service(NAME) or {}).get("status", {}).get("components", {})
        found: dict[str, Any] = components.get("engine", {}).get("rollout", {})
        return found

    documents = clean.sample("rollout-steps")
    documents[-1]["metadata"]["annotations"] |= {
        "ome.io/rollout-steps": "25,50",
        "ome.io/rollout-step-seconds": "2",
        "ome.io/rollout-min-requests": "40",
        "ome.io/rollout-max-latency-ratio": "0",
    }
    services = {each: NamedBackend(each) for each in (f"{NAME}-engine", f"{NAME}-engine-canary")}
    addresses = {name: each.url for name, each in services.items()}
    with (
        services[f"{NAME}-engine"],
        services[f"{NAME}-engine-canary"] as canary,
        Running(clean.server.kubeconfig),
        Nodes(clean, NAME, addresses, tmp_path) as nodes,
        asking(nodes) as seen,
    ):
        edit("1")
        until(lambda: clean.ready(NAME).get("status") == "True", 180)
        edit("2")
        until(lambda: rollout().get("phase") == "Stepping", 180)
        until(lambda: seen[f"{NAME}-engine-canary"] > 0, 180)
        until(lambda: rollout().get("phase") == "Promoted", 180)
        until(lambda: "promoted: step 50 %" in _said(clean))  # it is told after the status is written
        assert "25 %" in _said(clean)
        until(lambda: clean.ready(NAME).get("status") == "True", 180)

        canary.broken = True
        edit("3")
        until(lambda: rollout().get("phase") == "RolledBack", 180)
        until(lambda: "rolled back" in _said(clean))
        until(lambda: seen[f"500 {NAME}-engine-canary"] > 0)
        until(lambda: _only_old_ones(clean), 180)
        until(lambda: clean.ready(NAME).get("status") == "True", 180)  # what was there before serves


def _only_old_ones(site: Any) -> bool:
    """Whether the fronts split nothing any more."""
    found = site.fetch(f"/api/v1/namespaces/default/configmaps/{NAME}-front")
    return found is None or "canary" not in found["data"]["router.yaml"]
