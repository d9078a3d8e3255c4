# SPDX-License-Identifier: Apache-2.0
"""What is left of something that ended while nobody looked, or that comes back by the same name: nothing that harms."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from headrace.core.clock import ManualClock, SystemClock
from headrace.fleet.local.cgroups import Cgroups
from headrace.fleet.local.container import Container
from headrace.fleet.local.object_store import ServiceObjects
from headrace.fleet.local.pod import PodRecord, create_pod
from headrace.fleet.local.process_runtime import ProcessRuntime
from headrace.fleet.local.scheduler import Placement
from headrace.fleet.local.service_proxy import Routers
from headrace.fleet.local.settings import LocalSettings
from headrace.fleet.local.system import System
from headrace.fleet.local.workload_controller import WorkloadController
from headrace.platforms.kubernetes_client.objects import Document
from headrace.platforms.processes import Command, Process, read_stat, session_members, spawn
from support.ports import service_ports
from support.waiting import eventually, eventually_async

pytestmark = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs Linux")

SERVICE = ("default", "s")
_PARENT = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', sys.argv[1]]); time.sleep(600)"
_CHILD = "import time; time.sleep(600)"


def test_the_children_of_a_process_that_died_unseen_end_with_it(tmp_path: Path) -> None:
    kept: dict[str, Any] = {}
    command = Command((sys.executable, "-c", _PARENT, _CHILD), dict(os.environ), tmp_path)
    process = spawn(command, tmp_path / "log", kept.update)
    eventually(lambda: len(session_members(process.pid)) == 2)
    os.kill(process.pid, signal.SIGKILL)
    asyncio.run(process.wait())
    assert len(session_members(process.pid)) == 1, "the child outlives its parent"
    # To a stranger's record, whose number is the same by chance, they mean nothing.
    assert Process.from_record({**kept, "run": "another"}) is None
    assert len(session_members(process.pid)) == 1
    assert Process.from_record(kept) is None
    eventually(lambda: not session_members(process.pid))


def test_a_process_has_not_ended_before_its_last_thread_has(tmp_path: Path) -> None:
    """Its first thread is gone, so that it looks like a zombie. How it ended is not known yet."""
    waits = "while not pathlib.Path('go').exists(): time.sleep(0.01)"
    other = f"def other():\n    {waits}\n    os._exit(7)"
    ends = "threading.Thread(target=other).start(); ctypes.CDLL(None).pthread_exit(None)"
    line = f"import ctypes, os, pathlib, threading, time\n{other}\n{ends}"

    async def play() -> None:
        process = spawn(Command((sys.executable, "-c", line), dict(os.environ), tmp_path), tmp_path / "log", print)
        try:
            await eventually_async(lambda: (stat := read_stat(process.pid)) is None or not stat.is_alive)
            ended = asyncio.ensure_future(process.wait())
            await asyncio.sleep(0)
            assert not ended.done()
            (tmp_path / "go").touch()
            async with asyncio.timeout(60):
                assert await ended == 7
        finally:
            await process.kill()

    asyncio.run(play())


@pytest.mark.slow  # without processes: test_simulated_restarts.py
def test_who_connects_while_a_router_is_killed_waits_for_the_next(tmp_path: Path) -> None:
    async def play() -> None:
        routers = Routers(LocalSettings(tmp_path, service_ports()[0]), System(SystemClock()))
        try:
            routers.ensure(SERVICE, ["a"])
            router = routers.get("default", "a")
            assert router is not None
            await eventually_async(lambda: router.is_up)
            was = router.pid
            assert was is not None
            os.kill(was, signal.SIGKILL)
            await eventually_async(lambda: (stat := read_stat(was)) is None or not stat.is_alive)
            async with asyncio.timeout(60):
                # Nobody accepts; a refusal would be an error here. The next router finds the request.
                reader, writer = await asyncio.open_connection("127.0.0.1", router.port)
                writer.write(b"GET /router/status HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n")
                assert (await reader.read()).startswith(b"HTTP/1.1 200 ")
                writer.close()
            assert router.pid not in (None, was)
        finally:
            await routers.stop_all()
            await routers.close()
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", router.port)

    asyncio.run(play())


class FakeKubelet:
    """No pods."""

    def pods_of(self, service: tuple[str, str]) -> list[Any]:
        return []


def test_a_restored_workload_has_its_full_deadline(tmp_path: Path) -> None:
    """What did not get further long ago says nothing of one by the same name."""
    template: Document = {"metadata": {}, "spec": {"containers": []}}
    workload: Document = {
        "kind": "Deployment",
        "metadata": {"name": "w"},
        "spec": {"replicas": 1, "template": template},
    }
    clock = ManualClock()
    objects = ServiceObjects(tmp_path)
    units = WorkloadController(FakeKubelet(), objects, clock)  # type: ignore[arg-type]

    def progressing() -> str:
        units.update_status(SERVICE)
        (live,) = objects.workloads(SERVICE)
        (found,) = (condition for condition in live["status"]["conditions"] if condition["type"] == "Progressing")
        return str(found["status"])

    objects.apply(SERVICE, [workload])
    assert progressing() == "True"
    clock.advance(601)
    assert progressing() == "False"
    objects.remove(SERVICE)
    units.forget(SERVICE)
    objects.apply(SERVICE, [workload])
    assert progressing() == "True"


class FakeAround:
    """Room for every pod, and nobody who listens."""

    system = System(SystemClock())

    def models(self, pod: Any) -> dict[str, str]:
        return {}

    def place(self, pod: Any) -> Placement:
        return Placement()

    def pod_changed(self, pod: Any) -> None:
        """Nothing follows."""


def test_a_failure_in_one_container_leaves_the_others_supervised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pod is followed anew: two who follow one container would both start it."""
    left: list[str] = []

    async def run(container: Container) -> None:
        if container.name == "first":
            raise RuntimeError("a mistake of ours")
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            left.append(container.name)

    monkeypatch.setattr(Container, "run", run)
    containers = [{"name": "second"}, {"name": "first"}]
    pod = {"metadata": {"name": "p", "namespace": "default"}, "spec": {"containers": containers}}
    record = PodRecord("uid", pod, SERVICE, ("Deployment", "w"), "p", "hash")

    async def play() -> None:
        driver = ProcessRuntime(Cgroups({}))
        replica = create_pod(tmp_path / "pod", record, LocalSettings(tmp_path), FakeAround(), driver)  # type: ignore[arg-type]
        with pytest.raises(ExceptionGroup):
            await replica.run()
        assert left == ["second"]

    asyncio.run(play())
