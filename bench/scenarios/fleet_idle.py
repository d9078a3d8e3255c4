# SPDX-License-Identifier: Apache-2.0
"""Measure an operator with many services on a real API server: calls at start, CPU and writes when idle.

Called by `fleet.py idle`. The API server is that of the platform tests (`scripts/platforms/kubernetes.sh install`);
there is no kubelet: pods are marked ready by this program, as they come.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import socket
import ssl
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "fleet" / "cluster"))

HEADRACE = Path(sys.executable).parent / "headrace"
_FLEET = Path(__file__).parents[2] / "headrace" / "fleet"
_SPACE = "/namespaces/default"
_SERVICES = f"/apis/ome.io/v1beta1{_SPACE}/inferenceservices"
_AT_ONCE = 8


class Operator:
    """`headrace operator run`, as a process."""

    def __init__(self, kubeconfig: Path, log: Path, *, elect: bool) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._port = free.getsockname()[1]
        arguments = ["operator", "run", "--kubeconfig", str(kubeconfig), "--listen", f"127.0.0.1:{self._port}"]
        arguments += ["--namespace", "default", *([] if elect else ["--no-elect"])]
        with log.open("wb") as file:
            self._process = subprocess.Popen([HEADRACE, *arguments], stdout=file, stderr=file)

    def calls(self) -> dict[str, int]:
        """Reads and writes of the API server so far, and looks at services."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/metrics") as answer:
            metrics = answer.read().decode()
        matches = re.findall(r'^headrace_operator_api_calls_total\{kind="(\w+)"\} (\S+)', metrics, re.M)
        reconciles = sum(
            float(count) for count in re.findall(r"^headrace_operator_reconciles_total\{.*\} (\S+)", metrics, re.M)
        )
        return {name: int(float(value)) for name, value in matches} | {"looks": int(reconciles)}

    def cpu_seconds(self) -> float:
        """Of all its threads."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def rss_mib(self) -> int:
        """Memory that it holds."""
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        return int(re.findall(r"VmRSS:\s+(\d+)", status)[0]) // 1024

    def quiet(self, seconds: float = 3.0, most: float = 600.0) -> dict[str, int]:
        """Return when it has called for nothing for a while; what it had called until then."""
        limit, since, last_calls = time.monotonic() + most, time.monotonic(), {"": 0}
        while time.monotonic() < limit and time.monotonic() - since < seconds:
            with contextlib.suppress(OSError):
                now = self.calls()
                if now != last_calls:
                    last_calls, since = now, time.monotonic()
            time.sleep(0.25)
        return last_calls

    def close(self) -> None:
        """End it."""
        self._process.terminate()
        self._process.wait(30)


@contextlib.contextmanager
def running(kubeconfig: Path, log: Path, *, elect: bool) -> Iterator[Operator]:
    """An operator that ends with the block."""
    operator = Operator(kubeconfig, log, elect=elect)
    try:
        yield operator
    finally:
        operator.close()


async def _each(server: Any, work: Any, count: int) -> None:
    """`work(client, number)` for all numbers, a few at a time."""
    import httpx2
    import yaml

    cluster = yaml.safe_load(server.kubeconfig.read_text())["clusters"][0]["cluster"]
    context = ssl.create_default_context(cafile=cluster["certificate-authority"])
    numbers = iter(range(count))
    headers = {"Authorization": "Bearer admintoken"}
    async with httpx2.AsyncClient(base_url=cluster["server"], verify=context, headers=headers, timeout=60) as client:

        async def worker() -> None:
            for number in numbers:
                await work(client, number)

        await asyncio.gather(*(worker() for _ in range(_AT_ONCE)))


def apply_services(server: Any, count: int) -> None:
    """So many services of the sample `cpu`, with its model and our runtimes."""
    import yaml

    model, service = yaml.safe_load_all((_FLEET / "samples" / "cpu.yaml").read_text())
    server.kubectl("apply", "-f", str(_FLEET / "runtimes"))
    server.kubectl("apply", "-f", "-", input=yaml.safe_dump(model))

    async def make(client: Any, number: int) -> None:
        document = {**service, "metadata": {"name": f"service-{number}", "namespace": "default"}}
        answer = await client.post(_SERVICES, json=document)
        answer.raise_for_status()

    asyncio.run(_each(server, make, count))


def mark_ready(server: Any, count: int, seconds: float = 1200.0) -> None:
    """Mark pods as they come, until every service is ready."""
    status = {
        "phase": "Running",
        "conditions": [
            {"type": condition, "status": "True"} for condition in ("PodScheduled", "ContainersReady", "Ready")
        ],
    }
    marked: set[str] = set()
    ready = 0

    async def mark(client: Any, _: int) -> None:
        nonlocal ready
        limit = time.monotonic() + seconds
        while ready < count and time.monotonic() < limit:
            pods = (await client.get(f"/api/v1{_SPACE}/pods")).json()["items"]
            for name in [pod["metadata"]["name"] for pod in pods if pod["metadata"]["name"] not in marked]:
                marked.add(name)
                kind = {"Content-Type": "application/merge-patch+json"}
                path = f"/api/v1{_SPACE}/pods/{name}/status"
                (await client.patch(path, json={"status": status}, headers=kind)).raise_for_status()
            services = (await client.get(_SERVICES)).json()["items"]
            ready = sum(_ready(service) for service in services)
            await asyncio.sleep(1)

    asyncio.run(_each(server, mark, 1))
    if ready < count:
        raise SystemExit(f"only {ready} of {count} services are ready")


def _ready(service: dict[str, Any]) -> bool:
    conditions = service.get("status", {}).get("conditions", [])
    return any(condition["type"] == "Ready" and condition["status"] == "True" for condition in conditions)


def measure_idle(count: int, seconds: float, *, elect: bool) -> int:
    """Print a line for each number; 1 if an idle operator writes, or takes more than 2% of a core."""
    from controller_site import install

    from support.kubernetes_server import KubernetesServer

    with tempfile.TemporaryDirectory(prefix="headrace-idle-") as folder:
        log = Path(folder) / "operator.log"
        with KubernetesServer(Path(folder) / "server") as server:
            install(server)
            since = time.monotonic()
            with running(server.kubeconfig, log, elect=False) as first:
                apply_services(server, count)
                applied = time.monotonic() - since
                planned = first.quiet(5.0)
                took = time.monotonic() - since - 5.0
                _say(
                    f"{count} services applied in {applied:.0f} s, all objects made after {took:.0f} s", planned, count
                )
                mark_ready(server, count)
                _say(f"all ready after {time.monotonic() - since:.0f} s", first.quiet(5.0), count)
            since = time.monotonic()
            with running(server.kubeconfig, log, elect=elect) as second:
                fresh = second.quiet(5.0, 120.0)
                _say(f"fresh start, quiet after {time.monotonic() - since - 5.0:.1f} s", fresh, count)
                before, cpu = second.calls(), second.cpu_seconds()
                time.sleep(seconds)
                after, used = second.calls(), second.cpu_seconds() - cpu
                wrote = after["write"] - before["write"]
                print(
                    f"idle for {seconds:.0f} s: {used / seconds:.2%} of a core, {wrote} writes, "
                    f"{after['read'] - before['read']} reads, {after['looks'] - before['looks']} looks; "
                    f"{second.rss_mib()} MiB" + (" (with a Lease)" if elect else "")
                )
        bad = log.read_text().count("Traceback")
        if bad:
            print(f"{bad} tracebacks in the operator's log", file=sys.stderr)
        return 1 if bad or used / seconds > 0.02 or (wrote and not elect) or fresh["write"] > (1 if elect else 0) else 0


def _say(subject: str, calls: dict[str, int], count: int) -> None:
    counts = ", ".join(f"{value} {name} ({value / count:.2f} a service)" for name, value in calls.items())
    print(f"{subject}: {counts}", flush=True)
