# SPDX-License-Identifier: Apache-2.0
"""A router that an earlier daemon has started: when it dies, this one listens at its port before it does anything else."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from pathlib import Path
from typing import Any

import pytest

from headrace.core.clock import SystemClock
from headrace.core.files import write_json
from headrace.fleet.local import service_proxy
from headrace.fleet.local.service_proxy import Router
from headrace.fleet.local.settings import LocalSettings
from headrace.fleet.local.system import System
from headrace.platforms.node_resources import PortAllocator
from headrace.platforms.processes import Command, Process, spawn
from support.ports import free_port
from support.waiting import eventually_async

pytestmark = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs Linux")


def adopted(folder: Path, port: int) -> Router:
    """A router's folder, whose process is a `sleep`, and what another daemon makes of it."""
    place = folder / "routers" / "default" / "one"
    place.mkdir(parents=True)
    write_json(place / "router.json", {"service": ["default", "one"], "name": "one", "port": port})
    command = Command(("/bin/sleep", "3600"), {}, folder)
    spawn(command, place / "log", lambda record: write_json(place / "process.json", dict(record))).detach()
    settings = LocalSettings(folder, quick_seconds=0.01, port=port)
    ports = PortAllocator(folder / "ports", settings.host, port, 65535)
    return Router(place, ("default", "one"), "one", settings, ports, System(SystemClock()))


def connects(port: int) -> bool:
    with socket.socket() as client:
        client.settimeout(30)
        return client.connect_ex(("127.0.0.1", port)) == 0


def test_its_port_listens_before_its_leftovers_are_searched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    port, found = free_port(), []
    kill = Process.kill

    async def kill_and_connect(process: Process) -> None:
        found.append(connects(port))
        await kill(process)

    async def status(_: int) -> Any:
        return {}

    async def run() -> None:
        router = adopted(tmp_path, port)
        monkeypatch.setattr(service_proxy, "router_status", status)
        monkeypatch.setattr(Process, "kill", kill_and_connect)
        monkeypatch.setattr(service_proxy, "headrace_command", lambda: ("/bin/sleep", "3600"))
        assert not connects(port)
        router.start(lambda _: True, lambda: None)
        assert router.pid is not None
        await eventually_async(lambda: router.is_up)
        os.kill(router.pid, signal.SIGKILL)
        await eventually_async(lambda: found)
        await router.stop()

    asyncio.run(run())
    assert found[0]
    assert not connects(port), "its end frees it"


def test_a_port_taken_by_another_process_is_left_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()

    async def status(_: int) -> Any:
        return {}

    async def run() -> None:
        router = adopted(tmp_path, port)
        monkeypatch.setattr(service_proxy, "router_status", status)
        monkeypatch.setattr(service_proxy, "headrace_command", lambda: ("/bin/sleep", "3600"))
        with socket.create_server(("127.0.0.1", port)):
            before = router.pid
            router.start(lambda _: True, lambda: None)
            assert before is not None
            os.kill(before, signal.SIGKILL)
            await eventually_async(lambda: router.pid not in (None, before))
            assert router.port != port
            await router.stop()

    asyncio.run(run())
