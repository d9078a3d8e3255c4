# SPDX-License-Identifier: Apache-2.0
"""The model agent program: run the agent of one node until a signal."""

from __future__ import annotations

import asyncio
import logging

from headrace.core.errors import HeadraceError
from headrace.fleet.agent.agent import Agent, AgentSettings
from headrace.fleet.metrics import AgentMetrics, metrics_server
from headrace.net.sockets import Address
from headrace.platforms.kubernetes_client.api import ApiClient
from headrace.programs.cluster_program import run_until_signal

log = logging.getLogger("headrace.agent")


def run_agent(settings: AgentSettings) -> int:
    """Run until SIGTERM or SIGINT; return the exit code."""
    return run_until_signal(settings.kubeconfig, settings.context, lambda api, stop: work(api, settings, stop), log)


async def work(api: ApiClient, settings: AgentSettings, stop: asyncio.Event) -> int:
    """Run until `stop` is set. Return the exit code. Raises HeadraceError."""
    metrics = AgentMetrics(api)
    server = metrics_server(metrics, Address.parse(settings.address)) if settings.address else None
    agent = Agent(api, settings, metrics)
    try:
        if server is not None:
            await server.start()
        stopped, working = asyncio.create_task(stop.wait()), asyncio.create_task(agent.run())
        await asyncio.wait([stopped, working], return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        working.cancel()
        (ended,) = await asyncio.gather(working, return_exceptions=True)
        if isinstance(ended, HeadraceError):
            raise ended
        if isinstance(ended, Exception):
            log.error("the agent failed", exc_info=ended)
            return 1
        return 0
    finally:
        if server is not None:
            await server.drain(0)
