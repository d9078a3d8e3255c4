# SPDX-License-Identifier: Apache-2.0
"""`headrace operator run` as a process: it leads, tells of itself, and ends cleanly."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.platform, pytest.mark.timeout(900)]


def test_the_program_waits_for_its_kinds_leads_and_ends(tmp_path: Path) -> None:
    from support.kubernetes_server import KubernetesServer

    with KubernetesServer(tmp_path / "server") as server:
        server.kubectl("create", "namespace", "headrace-system")
        asyncio.run(_run(server))


async def _run(server: Any) -> None:
    import httpx2

    from headrace.platforms.kubernetes_client.api import connect
    from headrace.platforms.kubernetes_client.leader_election import LeaseSettings
    from headrace.platforms.kubernetes_client.objects import LEASES
    from headrace.programs.operator import OperatorSettings, operate
    from support.ports import free_port

    port = free_port()
    api, stop = connect(str(server.kubeconfig)), asyncio.Event()
    working = asyncio.create_task(operate(api, OperatorSettings(address=f"127.0.0.1:{port}"), stop))
    async with httpx2.AsyncClient(timeout=60) as client:
        said = ""
        async with asyncio.timeout(90):
            while "headrace_operator_leads 1" not in said:
                await asyncio.sleep(0.1)
                try:
                    said = (await client.get(f"http://127.0.0.1:{port}/metrics")).text
                except httpx2.TransportError:
                    continue
        assert (await client.get(f"http://127.0.0.1:{port}/healthz")).text == "ok\n"
    name = LeaseSettings("", "").name
    held = await api.get(LEASES, "headrace-system", name)
    assert held is not None and held["spec"]["holderIdentity"]
    assert not working.done(), "our kinds are not there, which is no reason to end"
    stop.set()
    assert await asyncio.wait_for(working, 90) == 0
    freed = await api.get(LEASES, "headrace-system", name)
    assert freed is not None and not freed["spec"].get("holderIdentity")
    await api.close()
