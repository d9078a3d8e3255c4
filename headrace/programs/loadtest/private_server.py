# SPDX-License-Identifier: Apache-2.0
"""A server process over a folder of models on a free port, for `headrace tune`.

It loads only the model that is tuned, so that other models of the folder do not disturb the measurement.
"""

from __future__ import annotations

import asyncio
import os
import re
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from headrace.core.errors import InvalidArgument, Unavailable

_PROGRAM = "from headrace.cli.main import main; main()"
_LISTENING = re.compile(r"listening on 127\.0\.0\.1:(\d+)")
_READY = "ready: "
_START_SECONDS = 60.0
_STOP_SECONDS = 15.0
_LOG_LINES = 5


@asynccontextmanager
async def private_server(repository: Path) -> AsyncIterator[str]:
    """Start the server and yield its address; stop it in any case."""
    if not os.path.isdir(repository):  # noqa: ASYNC240 - once, before anything runs
        raise InvalidArgument(
            f"{repository} is not a folder: give --repository the folder that holds the model's folder"
        )
    with tempfile.TemporaryFile("w+b") as log:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", _PROGRAM, "serve", str(repository),
            "--model-control-mode", "explicit", "--http-address", "127.0.0.1", "--http-port", "0", "--allow-grpc=false",
            stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log,
        )  # fmt: skip
        try:
            yield await _wait_for_address(process, log.fileno())
        finally:
            await _stop(process)


async def _wait_for_address(process: asyncio.subprocess.Process, log: int) -> str:
    try:
        async with asyncio.timeout(_START_SECONDS):
            while True:
                text = _read(log)
                if _READY in text and (match := _LISTENING.search(text)) is not None:
                    return f"http://127.0.0.1:{match[1]}"
                if process.returncode is not None:
                    last = " | ".join(text.splitlines()[-_LOG_LINES:])
                    raise Unavailable(f"the server for the measurement did not start: {last}")
                await asyncio.sleep(0.02)
    except TimeoutError:
        raise Unavailable(f"the server for the measurement did not start in {_START_SECONDS:g} s") from None


def _read(log: int) -> str:
    # With pread: the server writes at the file's shared position.
    return os.pread(log, 1 << 20, 0).decode(errors="replace")


async def _stop(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.terminate()
        try:
            async with asyncio.timeout(_STOP_SECONDS):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()
