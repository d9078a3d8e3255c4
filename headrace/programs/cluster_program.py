# SPDX-License-Identifier: Apache-2.0
"""How a program of a cluster runs, the operator as the model agent: connected, until a signal, with an exit code."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Awaitable, Callable

from headrace.core.errors import HeadraceError
from headrace.core.exit_codes import BAD_CONFIGURATION
from headrace.fleet.cluster.api import Api, connect

Work = Callable[[Api, asyncio.Event], Awaitable[int]]
"""Works until the event is set; returns the exit code."""


def run_until_signal(kubeconfig: str, context: str, work: Work, log: logging.Logger) -> int:
    """Run until SIGTERM or SIGINT; returns the exit code."""
    # They tell of every single call.
    for name in ("httpx2", "httpx"):
        logging.getLogger(name).setLevel(logging.WARNING)
    try:
        return asyncio.run(_run(kubeconfig, context, work))
    except HeadraceError as error:
        log.error("%s", error.message)
        return BAD_CONFIGURATION


async def _run(kubeconfig: str, context: str, work: Work) -> int:
    api = connect(kubeconfig, context)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    try:
        return await work(api, stop)
    finally:
        await api.close()
