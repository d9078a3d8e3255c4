# SPDX-License-Identifier: Apache-2.0
"""Run a program that is connected to an API server, the operator or the model agent, until a signal."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Awaitable, Callable

from headrace.core.errors import BAD_CONFIGURATION, HeadraceError
from headrace.core.telemetry.logs import log_fatal
from headrace.platforms.kubernetes_client.api import ApiClient, connect

Work = Callable[[ApiClient, asyncio.Event], Awaitable[int]]
"""Runs until the event is set; returns the exit code."""


def run_until_signal(kubeconfig: str, context: str, work: Work, log: logging.Logger) -> int:
    """Run until SIGTERM or SIGINT; return the exit code."""
    # They log every call.
    for name in ("httpx2", "httpx"):
        logging.getLogger(name).setLevel(logging.WARNING)
    try:
        return asyncio.run(_run(kubeconfig, context, work))
    except HeadraceError as error:
        log_fatal(log, error.message)
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
