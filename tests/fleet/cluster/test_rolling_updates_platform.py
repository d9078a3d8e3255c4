# SPDX-License-Identifier: Apache-2.0
"""Updates of a service on a slow cluster: pods take seconds to start, and requests reach pods that are already ending."""

from __future__ import annotations

import json
import sys
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from headrace.fleet.cluster.reconciler import UNCONFIRMED_SECONDS

pytestmark = [pytest.mark.platform, pytest.mark.timeout(900)]
ENGINE = """
import os, signal, sys, threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        body = os.environ["REVISION"].encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *_):
        pass

class Server(ThreadingHTTPServer):
    daemon_threads = False

server = Server(("0.0.0.0", 9000), Handler)

def stop(*_):
    threading.Thread(target=lambda: (server.shutdown(), server.server_close())).start()

signal.signal(signal.SIGTERM, stop)
server.serve_forever()
"""
"""Refuses connections once it has SIGTERM, and finishes the requests that it has."""
IDLE = [sys.executable, "-c", "import signal, sys; signal.signal(15, lambda *_: sys.exit(0)); signal.pause()"]


def documents(revision: str, **engine: Any) -> list[dict[str, Any]]:
    """A runtime with a small program, and a service of two replicas."""
    head = {"apiVersion": "ome.io/v1beta1"}
    runtime = {
        **head,
        "kind": "ServingRuntime",
        "metadata": {"name": "small", "namespace": "default"},
        "spec": {"supportedModelFormats": [], "engineConfig": {}},
    }
    runner = {
        "name": "ome-container",
        "image": "small:1",
        "command": [sys.executable, "-c", ENGINE],
        "env": [{"name": "REVISION", "value": revision}],
        "ports": [{"name": "http", "containerPort": 9000}],
        "readinessProbe": {"httpGet": {"path": "/", "port": 9000}, "periodSeconds": 1},
    }
    service = {
        **head,
        "kind": "InferenceService",
        "metadata": {"name": "slow", "namespace": "default"},
        "spec": {
            "runtime": {"name": "small"},
            "engine": {"minReplicas": 2, "maxReplicas": 2, "runner": runner, **engine},
        },
    }
    return [runtime, service]


@contextmanager
def asking(kubelet: Any) -> Iterator[Counter[str]]:
    """Ask the pods of the service all the time, each by a new connection, as kube-proxy spreads them: what answered."""
    seen: Counter[str] = Counter()
    stop = threading.Event()

    def run() -> None:
        turn = 0
        while not stop.wait(0.005):
            places = kubelet.endpoints("slow-engine")
            if not places:
                continue
            turn += 1
            host, port = places[turn % len(places)]
            try:
                with urllib.request.urlopen(f"http://{host}:{port}/", timeout=30) as answer:
                    seen[answer.read().decode()] += 1
            except OSError as error:
                seen[f"lost: {error}"] += 1

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield seen
    finally:
        stop.set()
        thread.join()


@contextmanager
def slow_cluster(site: Any, folder: Path) -> Iterator[Any]:
    """A node whose pods take 2 s to be ready, and requests that reach a pod up to 2 s after it left its Service."""
    from support.fake_kubelet import FakeKubelet, Slowness

    slow = Slowness(start=2.0, stop=0.5, forget=2.0)
    with FakeKubelet(site.server, folder, networks=True, slow=slow, entrypoints={"headrace": IDLE}) as kubelet:
        try:
            yield kubelet
        finally:
            from controller_site import until

            site.server.kubectl("delete", "isvc", "slow", "--ignore-not-found")
            until(lambda: not site.pods("slow"))
            site.server.kubectl("delete", "servingruntime", "small", "--ignore-not-found")
        assert kubelet.errors == []


def revisions(site: Any) -> Counter[str]:
    """How many pods that are not ending there are of each revision."""
    pods = [each for each in site.pods("slow") if "deletionTimestamp" not in each["metadata"]]
    engines = [each for each in pods if each["metadata"]["labels"]["component"] == "engine"]
    return Counter(each["spec"]["containers"][0]["env"][0]["value"] for each in engines)


def test_an_update_loses_no_request(clean: Any, tmp_path: Path) -> None:
    from controller_site import Running, until

    with slow_cluster(clean, tmp_path) as kubelet, Running(clean.server.kubeconfig), asking(kubelet) as seen:
        clean.apply(*documents("one"))
        until(lambda: clean.ready("slow").get("status") == "True" and revisions(clean) == {"one": 2})
        until(lambda: seen["one"] > 10)
        clean.apply(*documents("two"))
        until(lambda: revisions(clean) == {"two": 2} and len(clean.pods("slow")) == 2)
        until(lambda: clean.ready("slow").get("status") == "True")
        count = seen["two"]
        until(lambda: seen["two"] > count + 10)
        assert set(seen) == {"one", "two"}, seen


def test_the_share_of_a_promoted_revision_does_not_go_back(clean: Any, tmp_path: Path) -> None:
    from controller_site import Running, until

    looks: list[tuple[int, str, int]] = []

    def look() -> None:
        """Note the old pods that serve, where clients are sent, and the canary's share there."""
        old = revisions(clean)["one"]
        service = clean.fetch("/api/v1/namespaces/default/services/slow")
        front = clean.fetch("/api/v1/namespaces/default/configmaps/slow-front")
        backends = json.loads(front["data"]["router.yaml"])["backends"] if front is not None else []
        weights = [each.partition(",weight=")[2].partition(",")[0] for each in backends if "-canary." in each]
        looks.append((old, service["spec"]["selector"].get("app", ""), int(weights[0]) if weights else 0))

    def has_share(wanted: int) -> bool:
        look()
        return looks[-1][1:] == ("slow-front", wanted)

    with slow_cluster(clean, tmp_path), Running(clean.server.kubeconfig):
        clean.apply(*documents("one"))
        until(lambda: clean.ready("slow").get("status") == "True")
        clean.apply(*documents("two", canaryTrafficPercent=50))
        until(lambda: has_share(50))
        looks.clear()
        clean.apply(*documents("two"))  # as `rollout promote` does
        # The front of this test is a program that confirms nothing, so the operator goes on after a while.
        end = time.monotonic() + 2 * UNCONFIRMED_SECONDS + 60
        while not looks or looks[-1][0] or looks[-1][1] == "slow-front":
            assert time.monotonic() < end, looks[-1]
            look()
            time.sleep(0.05)
        until(lambda: clean.ready("slow").get("status") == "True")
    with_old_pods = [each for each in looks if each[0]]
    assert len(with_old_pods) > 5, "the old pods serve while the new ones start"
    assert {each[1] for each in with_old_pods} == {"slow-front"}, looks
    assert all(share >= 50 for _, _, share in with_old_pods), looks
