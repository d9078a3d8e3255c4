# SPDX-License-Identifier: Apache-2.0
"""To zero and back on a real API server: the controller's own files, `headrace router` as it runs in the front's pod."""

from __future__ import annotations

import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.platform, pytest.mark.timeout(900)]

_DEPLOYMENT = "/apis/apps/v1/namespaces/default/deployments/llama-sleeper-engine"


def _get(port: int, path: str) -> bytes:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=60) as answer:
            return bytes(answer.read())
    except urllib.error.HTTPError as refused:
        with refused:
            return bytes(refused.read())


def test_a_request_wakes_a_deployment_and_quiet_puts_it_to_sleep(clean: Any, tmp_path: Path) -> None:
    from controller_site import Running, until
    from router_pods import router_run

    from support.ports import free_port

    def replicas() -> str:
        return str(clean.server.kubectl("get", "deployment", "llama-sleeper-engine", "-o", "jsonpath={.spec.replicas}"))

    def wrote(running: Any, count: int) -> list[str]:
        return [each for each in running.writes[count:] if "deployments/llama-sleeper-engine" in each]

    with Running(clean.server.kubeconfig) as running:
        documents = clean.sample("scale-to-zero")
        documents[-1]["metadata"]["annotations"]["ome.io/scale-to-zero-idle-seconds"] = "2"
        clean.apply(*documents)
        running.settle()
        settings = json.loads(
            clean.fetch("/api/v1/namespaces/default/configmaps/llama-sleeper-front")["data"]["router.yaml"]
        )
        [target] = settings["activation"]["targets"]
        assert (target["name"], settings["activation"]["idle_seconds"]) == ("llama-sleeper-engine", 2)
        # There are no Services that work here, and no name in the DNS: a process of ours stands in for both.
        port = free_port()
        config = tmp_path / "router.yaml"
        config.write_text(
            json.dumps(
                {
                    **settings,
                    "host": "127.0.0.1",
                    "port": 0,
                    "grace_seconds": 3,
                    "backends": [f"http://127.0.0.1:{port}"],
                }
            )
        )
        # What the front's own Role allows has to be enough.
        nobody = clean.server.kubeconfig_of_nobody()
        clean.server.kubectl("create", "rolebinding", "as-front", "--role=llama-sleeper-front", "--user=nobody")
        count = len(running.writes)
        try:
            with router_run(config, nobody) as router:
                until(lambda: replicas() == "0")
                until(lambda: not clean.pods("llama-sleeper") or _only_front(clean.pods("llama-sleeper")))
                assert json.loads(_get(router, "/router/status"))["active"] == 0

                answers: list[bytes] = []
                asking = threading.Thread(target=lambda: answers.append(_get(router, "/hello")))
                asking.start()
                until(lambda: replicas() == "1")
                time.sleep(0.5)
                assert not answers, "nobody is there yet"
                status = json.loads(_get(router, "/router/status"))
                assert (status["active"], status["waking"]["held"]) == (1, 1)
                with _backend(port):
                    clean.mark_pods("llama-sleeper")
                    asking.join(60)
                    assert answers == [b"hello"]
                    assert _get(router, "/hello") == b"hello"
                    running.settle()
                    assert wrote(running, count) == [], "whoever scales is not undone"
                    until(lambda: replicas() == "0")
                running.settle()
                assert wrote(running, count) == []
                count = len(running.writes)
                clean.apply(*documents)
                running.settle()
                assert running.writes[count:] == []
                assert clean.fetch(_DEPLOYMENT)["spec"]["replicas"] == 0

                asking = threading.Thread(target=lambda: answers.append(_get(router, "/too-late")))
                asking.start()
                until(lambda: replicas() == "1")
            # The router has ended, in time and well, and has told who was waiting.
            asking.join(60)
            assert b"shutting down" in answers[-1]
            assert replicas() == "1", "the next router decides what sleeps"
        finally:
            clean.server.kubectl("delete", "rolebinding", "as-front")


def test_a_service_that_may_not_sleep_any_more_is_woken_by_the_controller(clean: Any) -> None:
    from controller_site import Running, until

    with Running(clean.server.kubeconfig) as running:
        documents = clean.sample("scale-to-zero")
        clean.apply(*documents)
        running.settle()
        # As the front does when nobody asks.
        clean.server.kubectl("scale", "deployment", "llama-sleeper-engine", "--replicas=0")
        running.settle()
        assert clean.fetch(_DEPLOYMENT)["spec"]["replicas"] == 0
        documents[-1]["spec"]["engine"] = {"minReplicas": 2, "maxReplicas": 4}
        clean.apply(*documents)
        until(lambda: clean.fetch(_DEPLOYMENT)["spec"]["replicas"] == 2)
        running.settle()
        assert not any("front" in name for name in clean.children())
        count = len(running.writes)
        clean.apply(*documents)
        running.settle()
        assert running.writes[count:] == []


def _only_front(pods: list[Any]) -> bool:
    return all(each["metadata"]["labels"].get("app", "").endswith("-front") for each in pods)


@contextmanager
def _backend(port: int) -> Iterator[None]:
    from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", "5")
            self.end_headers()
            self.wfile.write(b"hello")

        def log_message(self, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
