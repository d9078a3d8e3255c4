# SPDX-License-Identifier: Apache-2.0
"""Logs that grow and disks that are full: what serves goes on, and what cannot begin says why."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from local_site import LocalSite, fetch_text, runtime, service

from headrace.core.clock import SystemClock
from headrace.core.errors import FailedPrecondition
from headrace.fleet.local.container import Container
from headrace.fleet.local.container_command import CommandContext, ContainerCommand
from headrace.fleet.local.container_runtime import LOG, PREVIOUS, ContainerSpec
from headrace.fleet.local.process_runtime import ProcessRuntime
from headrace.fleet.local.settings import LocalSettings
from headrace.fleet.local.system import System
from headrace.platforms.kubernetes_client.objects import Document, get_list
from support.waiting import eventually, eventually_async

pytestmark = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs Linux")


class OnePod:
    """A pod of one container, which runs a line for a shell."""

    system = System(SystemClock())
    ports: Mapping[int, int] = {}
    grace_seconds = 1.0

    def __init__(self, line: str, policy: str = "Always") -> None:
        self.line = line
        self.restart_policy = policy
        self.events: list[tuple[str, str]] = []
        self.moved = asyncio.Event()

    def container_spec(self, container: Document, folder: Path) -> ContainerSpec:
        folder.mkdir(parents=True, exist_ok=True)
        return ContainerSpec("uid", "main", folder, ContainerCommand(("sh", "-c", self.line), {}, False), folder)

    def command_context(self, container: Document) -> CommandContext:
        return CommandContext({}, "node")

    def changed(self) -> None:
        self.moved.set()

    def container_ended(self, container: Container) -> None:
        pass

    def record_event(self, kind: str, reason: str, message: str) -> None:
        self.events.append((reason, message))

    def container(self, folder: Path, **settings: Any) -> Container:
        created = LocalSettings(folder, retry_seconds=0.01, back_off_seconds=0.01, **settings)
        return Container(folder / "main", {"name": "main"}, "main", self, created, ProcessRuntime())


def test_a_log_stays_bounded_and_so_does_the_one_before(tmp_path: Path) -> None:
    async def run() -> None:
        pod = OnePod("i=0; while [ $i -lt 3000 ]; do echo line $i; i=$((i+1)); done; exit 3", "Never")
        container = pod.container(tmp_path, log_bytes=2000)
        await container.run()
        assert container.state.ended["exitCode"] == 3 and (container.folder / LOG).stat().st_size > 4000
        container.rotate_log()
        assert (container.folder / LOG).stat().st_size <= 2000
        assert (await container.logs(1)) == "line 2999"
        (container.folder / LOG).write_text("x\n" * 10_000)
        container._keep_previous_log()
        assert (container.folder / PREVIOUS).stat().st_size <= 2000 and (await container.logs(1, True)) == "x"

    asyncio.run(run())


def test_a_full_disk_at_the_start_is_reported_and_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = os.fdopen

    def full(descriptor: int, *_: Any) -> None:
        os.close(descriptor)
        raise OSError(errno.ENOSPC, "full")

    async def run() -> None:
        pod = OnePod("sleep 3600")
        container = pod.container(tmp_path)
        monkeypatch.setattr(os, "fdopen", full)
        task = asyncio.ensure_future(container.run())
        await eventually_async(
            lambda: container.state.reason == "CreateContainerError" or container.running is not None
        )
        assert "No space left on device; make room on its disk" in container.state.message and container.running is None
        assert any(reason == "Failed" and "make room" in said for reason, said in pod.events)
        assert any(reason == "DiskPressure" for reason, _ in pod.events)
        monkeypatch.setattr(os, "fdopen", opened)
        await eventually_async(lambda: container.running is not None)
        # It fills while something runs: that is told, and it runs on.
        monkeypatch.setattr(os, "fdopen", full)
        pod.events.clear()
        container._update(ready=False, message="another")
        assert pod.events[0][0] == "DiskPressure" and container.running is not None
        monkeypatch.setattr(os, "fdopen", opened)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await container.stop()

    asyncio.run(run())


@pytest.fixture
def small(tmp_path: Path) -> Iterator[LocalSite]:
    """A fleet on a disk of 8 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", disk], check=True)
    site = LocalSite(disk, log_bytes=100_000)
    try:
        site.up()
        site.apply(site.model, runtime())
        yield site
        (site.root / "filler").unlink(missing_ok=True)
        site.close()
    finally:
        subprocess.run(["umount", "-l", disk], check=True)


@pytest.mark.timeout(600)
@pytest.mark.platform  # mounts a disk
def test_on_a_full_disk_running_services_continue(small: LocalSite) -> None:
    small.apply(service("well", minReplicas=2))
    url = small.ready("well", 2)
    filler = small.root / "filler"
    with filler.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
        while True:
            file.write(bytes(4096))
    with pytest.raises(FailedPrecondition, match="make room on its disk"):
        small.apply(service("late"))
    victim = min(small.pids("well"))
    os.kill(victim, signal.SIGKILL)

    def waits() -> list[str]:
        results = [
            container_status
            for pod in small.pods("well")
            for container_status in get_list(pod, "status", "containerStatuses")
        ]
        return [result["state"]["waiting"]["message"] for result in results if "waiting" in result["state"]]

    eventually(lambda: any("No space left on device" in item for item in waits()))
    # Routers cannot be told who is ready either, and that is what the service says first.
    result = small.wait_for_message("well", "No space left on device")
    assert result["status"] == "False" and "make room on its disk" in result["message"]
    assert fetch_text(url).startswith("well ")
    # The daemon may be killed then, too.
    small.kill()
    assert fetch_text(url).startswith("well ")
    filler.unlink()
    small.up()
    assert small.ready("well", 2) == url
    small.apply(service("late"))
    small.ready("late")


@pytest.mark.timeout(600)
@pytest.mark.platform  # mounts a disk
def test_a_replica_that_floods_its_log_fills_no_disk_for_long(small: LocalSite) -> None:
    flood = (
        "import itertools\nfor i in itertools.count():\n  try: print('x' * 1000, flush=True)\n  except OSError: pass"
    )
    loud = {"name": "ome-container", "command": ["python3", "-c", flood], "args": []}
    small.apply(service("well"))
    url = small.ready("well")
    small.apply(service("loud", runner=loud))
    eventually(lambda: any(path.stat().st_size > 400_000 for path in small.root.glob("pods/*/containers/*/log")))
    eventually(lambda: any(path.stat().st_size < 300_000 for path in small.root.glob("pods/*/containers/*/log")))
    assert fetch_text(url).startswith("well ")
    small.delete("loud")
    small.delete("well")
