# SPDX-License-Identifier: Apache-2.0
"""A fleet of this machine for tests: the daemon as a process of its own, which can be killed, and documents for it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from headrace.core.errors import HeadraceError
from headrace.core.files import read_json
from headrace.fleet.client.contract import kind_named
from headrace.fleet.local.api_client import LocalFleet
from headrace.platforms.kubernetes_client.objects import Document, get_list, get_str
from headrace.platforms.processes import read_stat
from support.ports import service_ports
from support.waiting import eventually

T = TypeVar("T")
STUB = Path(__file__).with_name("stub_server.py")
_SERVICES = 30
"""Ports of a test process that are for services; the others of its range are for pods."""
_DAEMON = """
import json, sys
from pathlib import Path
from headrace.programs.fleet_daemon import run_local
from headrace.fleet.local.settings import LocalSettings
from headrace.core.telemetry.logs import configure_logging
configure_logging("info", "text")
more = json.loads(sys.argv[4])
if more.pop("without_cgroups", False):
    from headrace.fleet.local import process_runtime
    from headrace.fleet.local.cgroups import Cgroups
    process_runtime.find_cgroups = lambda: Cgroups({})
sys.exit(run_local(LocalSettings(
    Path(sys.argv[1]), int(sys.argv[2]), back_off_seconds=0.2, retry_seconds=0.2, forget_seconds=60.0,
    pod_ports=tuple(json.loads(sys.argv[3])), **more)))
"""


def document(kind: str, name: str, spec: dict[str, Any], **metadata: Any) -> dict[str, Any]:
    cluster = kind.startswith("Cluster")
    space = {} if cluster else {"namespace": "default"}
    return {
        "apiVersion": "ome.io/v1beta1",
        "kind": kind,
        "metadata": {"name": name, **space, **metadata},
        "spec": spec,
    }


def runtime(name: str = "stub", **container: Any) -> dict[str, Any]:
    """A runtime whose container is the stub server."""
    runner = {
        "name": "ome-container",
        "image": "example/stub:1",
        "command": ["python3", str(STUB)],
        "args": ["--host=0.0.0.0", "--port=8080", "--text={{ .Name }}"],
        "ports": [{"name": "http", "containerPort": 8080, "protocol": "TCP"}],
        "readinessProbe": {"httpGet": {"path": "/ready", "port": "http"}, "periodSeconds": 1, "timeoutSeconds": 30},
        **container,
    }
    spec = {
        "supportedModelFormats": [{"name": "stub", "modelFormat": {"name": "stub"}, "autoSelect": False}],
        "engineConfig": {"terminationGracePeriodSeconds": 2, "runner": runner},
    }
    return document("ClusterServingRuntime", name, spec)


def service(name: str, uses: str = "stub", **engine: Any) -> dict[str, Any]:
    spec = {
        "model": {"name": "stub"},
        "runtime": {"name": uses},
        "engine": {"minReplicas": 1, "maxReplicas": 5, **engine},
    }
    return document("InferenceService", name, spec)


class LocalSite:
    """A daemon and its folder. `settings`: more of them; `without_cgroups`: a machine that lets it have none.

    `port`: of its first service; if it is not said, all its ports are those of this test process.
    """

    def __init__(self, root: Path, port: int = 0, **settings: Any) -> None:
        self.root = root / "state"
        self._settings = settings
        self.fleet = LocalFleet(self.root)
        first, last = service_ports()
        self._port = port or first
        self._pod_ports = (port + 1000, port + 1999) if port else (first + _SERVICES, last)
        self._log = (root / "daemon.log").open("ab")
        self.process: subprocess.Popen[bytes] | None = None
        model = root / "model"
        model.mkdir(exist_ok=True)
        storage = {"storageUri": f"local://{model}", "path": "/mnt/models/stub"}
        self.model = document("ClusterBaseModel", "stub", {"modelFormat": {"name": "stub"}, "storage": storage})

    def up(self) -> None:
        arguments = [sys.executable, "-c", _DAEMON, str(self.root), str(self._port), json.dumps(self._pod_ports)]
        arguments.append(json.dumps(self._settings))
        self.process = subprocess.Popen(arguments, stdout=self._log, stderr=self._log)
        eventually(self._answers)

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        if self.process is not None:
            self.process.send_signal(number)
            self.process.wait(90)
            self.process = None

    def close(self) -> None:
        """Delete all services, end the daemon; whoever is left is killed."""
        try:
            if self.process is None:
                self.up()
            for document in self.ask(lambda fleet: fleet.list(kind_named("InferenceService"))):
                self.delete(get_str(document, "metadata", "name"))
            self.kill(signal.SIGTERM)
        finally:
            self.kill()
            for path in (
                *self.root.glob("pods/*/containers/*/process.json"),
                *self.root.glob("routers/*/*/process.json"),
            ):
                result = read_json(path) or {}
                stat = read_stat(int(result.get("pid", 0)))
                if stat is not None and stat.started == result.get("started"):
                    os.kill(stat.pid, signal.SIGKILL)
            self._log.close()

    def ask(self, work: Callable[[LocalFleet], Awaitable[T]]) -> T:
        async def run() -> T:
            return await work(self.fleet)

        return asyncio.run(run())

    def apply(self, *documents: Document) -> None:
        for document in documents:
            self.ask(lambda fleet, item=document: fleet.apply(item))  # type: ignore[misc]

    def get(self, name: str) -> Document:
        answer = self.ask(lambda fleet: fleet.get(kind_named("InferenceService"), "default", name))
        assert answer is not None
        return answer

    def condition(self, name: str, kind: str = "Ready") -> Document:
        reported = get_list(self.get(name), "status", "conditions")
        return next((item for item in reported if item["type"] == kind), {})

    def ready(self, name: str, replicas: int = 1, engines: int | None = None) -> str:
        """The URL, once it is ready with so many pods and no others; `engines` of them are no routers.

        By the status and by the pods themselves: what has happened to one of them is in the status only a little later.
        """

        def phase() -> str:
            result = self.get(name)
            engine = result.get("status", {}).get("components", {}).get("engine", {})
            whole = (engine.get("readyReplicas"), engine.get("replicas")) == (engines or replicas,) * 2
            generation = result.get("status", {}).get("observedGeneration") == result["metadata"]["generation"]
            # The last revision is there, and the one before it gone.
            conditions = {
                condition["type"]: condition["status"] for condition in get_list(result, "status", "conditions")
            }
            there = conditions.get("Ready") == conditions.get("LatestDeploymentReady") == "True"
            pods = [pod for pod in self.pods(name) if "deletionTimestamp" not in pod["metadata"]]
            up = len(pods) == replicas and all(_is_ready(pod) for pod in pods)
            return get_str(result, "status", "url") if whole and generation and there and up else ""

        url: str = eventually(phase)
        return url

    def url(self, name: str) -> str:
        """Where it is, once its router is there: asleep or not."""
        url: str = eventually(lambda: get_str(self.get(name), "status", "url"))
        return url

    def wait_for_message(self, name: str, words: str, kind: str = "Ready") -> Document:
        """The condition, once its message has these words."""
        result: Document = eventually(
            lambda: condition if words in get_str(condition := self.condition(name, kind), "message") else {}
        )
        return result

    def pods(self, name: str) -> Sequence[Document]:
        return self.ask(lambda fleet: fleet.pods(document("InferenceService", name, {})))

    def pids(self, name: str) -> set[int]:
        """The processes of all pods of a service."""
        results = set()
        for path in self.root.glob("pods/*/pod.json"):
            if (read_json(path) or {}).get("service") == ["default", name]:
                for item in path.parent.glob("containers/*/process.json"):
                    results.add(int((read_json(item) or {}).get("pid", 0)))
        return results - {0}

    def router(self, name: str) -> int:
        return int((read_json(self.root / "routers" / "default" / name / "process.json") or {})["pid"])

    def delete(self, name: str) -> None:
        self.ask(lambda fleet: fleet.delete(document("InferenceService", name, {})))
        request = kind_named("InferenceService")
        eventually(lambda: self.ask(lambda fleet: fleet.get(request, "default", name)) is None)

    def _answers(self) -> bool:
        assert self.process is not None and self.process.poll() is None, "the daemon ended"
        try:
            return bool(self.ask(lambda fleet: fleet.list(kind_named("InferenceService"))) is not None)
        except HeadraceError:
            return False


def _is_ready(pod: Document) -> bool:
    received = {condition["type"]: condition["status"] for condition in get_list(pod, "status", "conditions")}
    return received.get("Ready") == "True"


def fetch_text(url: str, path: str = "/name", seconds: float = 60.0) -> str:
    """What a server answers; its status where that is an error."""
    try:
        with urllib.request.urlopen(url + path, timeout=seconds) as answer:
            return str(answer.read().decode())
    except urllib.error.HTTPError as error:
        return f"{error.code}"
