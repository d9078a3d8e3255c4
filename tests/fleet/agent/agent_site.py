# SPDX-License-Identifier: Apache-2.0
"""A node with an agent, for tests: the real API server, a Node that nobody runs, the agent as a process of its own."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import httpx2
from controller_site import Site, until

from headrace.fleet.agent.model_status import ModelStatuses
from headrace.platforms.kubernetes_client.api import connect
from support.ports import free_port

NAMESPACE = "headrace-system"
PROGRAM = "import typer; from headrace.cli.model_agent import model_agent; typer.run(model_agent)"


class Node:
    """A Node of the cluster, its disk, and the agent that runs there when told."""

    def __init__(self, site: Site, folder: Path, name: str, environment: dict[str, str] | None = None) -> None:
        self.site, self.name, self.root = site, name, folder / "models"
        self.log = folder / f"{name}.log"
        self.environment = {**os.environ, "NODE_NAME": name, "KUBECONFIG": str(site.server.kubeconfig)}
        self.environment |= {"HF_HOME": str(folder / "hf"), "HF_HUB_OFFLINE": "0", **(environment or {})}
        self.environment.pop("HF_TOKEN", None)
        self.port = 0
        self.process: subprocess.Popen[bytes] | None = None
        site.apply({"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}})

    def start(self, *words: str) -> None:
        self.port = free_port()
        received = [
            "--models-root",
            str(self.root),
            "--listen",
            f"127.0.0.1:{self.port}",
            "--private-host",
            "127.0.0.1",
        ]
        received += ["--look-seconds", "0.5", "--progress-seconds", "0.2", "--retry-seconds", "1", "--keep-free", "0"]
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-c", PROGRAM, *received, *words], stdout=output, stderr=output, env=self.environment
            )
        until(self._is_ready, 120)

    def kill(self, number: int = signal.SIGKILL) -> int:
        assert self.process is not None
        self.process.send_signal(number)
        code = self.process.wait(90)
        self.process = None
        return code

    def close(self) -> None:
        if self.process is not None:
            self.kill()
        self.site.server.kubectl("delete", "node", self.name)
        # It goes with its node, a moment later: the next node of this name would find it, and then lose it.
        until(lambda: self.site.fetch(f"/api/v1/namespaces/{NAMESPACE}/configmaps/{self.name}") is None)

    def labels(self) -> dict[str, str]:
        result = self.site.server.kubectl("get", "node", self.name, "-o", "json")
        labels = json.loads(result)["metadata"].get("labels", {})
        return {name: value for name, value in labels.items() if name.startswith("models.ome.io/")}

    def entries(self) -> dict[str, Any]:
        result = self.site.server.kubectl("get", "configmap", self.name, "-n", NAMESPACE, "-o", "json", check=False)
        data = json.loads(result).get("data", {}) if result.startswith("{") else {}
        return {name: json.loads(value) for name, value in data.items()}

    def entry(self, key: str) -> Any:
        return self.entries().get(key, {})

    def is_ready(self, *names: str) -> bool:
        """Whether all these ClusterBaseModels are there, by label and entry."""
        labels, told = self.labels(), self.entries()
        return all(
            labels.get(f"models.ome.io/clusterbasemodel.{name}") == "Ready"
            and told.get(f"clusterbasemodel.{name}", {}).get("status") == "Ready"
            for name in names
        )

    def writes(self) -> int:
        """How many writes the agent says it has made."""
        output = httpx2.get(f"http://127.0.0.1:{self.port}/metrics", timeout=60).text
        line = next(line for line in output.splitlines() if 'api_calls_total{kind="write"}' in line)
        return int(float(line.split()[-1]))

    def _is_ready(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, self.log.read_text()
        try:
            return httpx2.get(f"http://127.0.0.1:{self.port}/readyz").status_code == 200
        except httpx2.HTTPError:
            return False


class Summing:
    """The operator's side, in a thread of its own."""

    def __init__(self, kubeconfig: Path) -> None:
        self._kubeconfig = kubeconfig
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="summing")
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self.statuses: ModelStatuses | None = None
        self.api: Any = None

    def __enter__(self) -> Summing:
        self._thread.start()
        until(lambda: self.statuses is not None)
        return self

    def __exit__(self, *told: object) -> None:
        assert self._loop is not None and self._stop is not None
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    async def _run(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        self.api = connect(str(self._kubeconfig))
        self.statuses = ModelStatuses(self.api, NAMESPACE)
        work = asyncio.create_task(self.statuses.run())
        await self._stop.wait()
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
        await self.api.close()


def cluster_model(name: str, uri: str, path: Path | str, **storage: Any) -> dict[str, Any]:
    """A ClusterBaseModel."""
    return {
        "apiVersion": "ome.io/v1beta1",
        "kind": "ClusterBaseModel",
        "metadata": {"name": name},
        "spec": {"storage": {"storageUri": uri, **({"path": str(path)} if path else {}), **storage}},
    }
