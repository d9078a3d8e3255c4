# SPDX-License-Identifier: Apache-2.0
"""The docker program: its words are run, its JSON is read, its lines are followed. Called by `driver` and its helpers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from headrace.core.errors import FailedPrecondition, Unavailable
from headrace.platforms.commands import Completed, run_command
from headrace.platforms.docker.settings import DockerSettings
from headrace.platforms.docker.troubles import engine_error, is_missing

_LONGEST_LINE = 64 * 1024


class Engine:
    """One Docker engine."""

    def __init__(self, settings: DockerSettings, program: str = "docker") -> None:
        self._settings = settings
        self._program = program
        self._environment = {"DOCKER_HOST": settings.host} if settings.host else {}

    async def run(
        self,
        *words: str,
        input: bytes = b"",
        seconds: float | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> Completed:
        """Whatever comes of it; only that there is no such program is an error."""
        return await run_command(
            (self._program, *words),
            seconds=self._settings.command_seconds if seconds is None else seconds,
            input=input,
            environment={**self._environment, **(environment or {})},
        )

    async def must(self, what: str, *words: str, input: bytes = b"", seconds: float | None = None) -> str:
        """What it prints. Raises an error that begins with `what` where it fails."""
        done = await self.run(*words, input=input, seconds=seconds)
        if done.code != 0:
            raise engine_error(done, what)
        return done.out.strip()

    async def inspect(self, kind: str, *names: str) -> list[dict[str, Any]]:
        """Those that are there, of containers, images or networks."""
        done = await self.run(kind, "inspect", *names)
        if done.code != 0 and not is_missing(done):
            raise engine_error(done, f"the {kind} cannot be looked at")
        try:
            found = json.loads(done.out or "[]")
        except ValueError:
            raise Unavailable(f"docker {kind} inspect answered something that is not JSON; is it Docker's?") from None
        return found if isinstance(found, list) else []

    async def info(self) -> dict[str, Any]:
        """The engine's machine."""
        told = await self.must("the engine cannot be asked", "info", "--format", "{{json .}}")
        try:
            found = json.loads(told)
        except ValueError:
            found = {}
        return found if isinstance(found, dict) else {}

    async def lines(
        self, *words: str, seconds: float, environment: Mapping[str, str] | None = None
    ) -> AsyncGenerator[str, None]:
        """What it prints, errors and all, line by line; the last one is how it ended, `code N`.

        To be closed with `contextlib.aclosing`, so that the program ends too.
        """
        if shutil.which(self._program) is None:
            raise FailedPrecondition(f"the program {self._program!a} is not installed here, or not on the PATH")
        process = await asyncio.create_subprocess_exec(
            self._program,
            *words,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env={**os.environ, **self._environment, **(environment or {})},
            start_new_session=True,
        )
        try:
            async with asyncio.timeout(seconds):
                rest = b""
                while chunk := await process.stdout.read(_LONGEST_LINE) if process.stdout else b"":
                    *whole, rest = (rest + chunk).split(b"\n")
                    if len(rest) > _LONGEST_LINE:
                        whole, rest = [*whole, rest], b""
                    for line in whole:
                        yield _text(line)
                if rest:
                    yield _text(rest)
                yield f"code {await process.wait()}"
        except TimeoutError:
            raise Unavailable(f"docker {words[0]} was not done within {seconds:g} s") from None
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                await process.wait()


def _text(line: bytes) -> str:
    return line.decode(errors="replace").rstrip("\r").replace("\0", "�")
