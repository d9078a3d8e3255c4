# SPDX-License-Identifier: Apache-2.0
"""Run other programs without a shell: docker, sbatch, ssh, brev, lep. The drivers use it.

Output is bounded, and a program is killed when the task that waits for it is cancelled. The driver decides what a nonzero
exit code means.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
from collections.abc import AsyncGenerator, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from headrace.core.errors import FailedPrecondition, InvalidArgument, Unavailable

T = TypeVar("T")
_MAX_BYTES = 16 * 1024 * 1024
_MAX_LINE_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class Completed:
    """The exit code and the output of a program."""

    code: int
    out: str
    err: str

    @property
    def error_line(self) -> str:
        """The last line of its error output, for an error message."""
        lines = [line.strip() for line in (self.err.strip() or self.out.strip()).splitlines()]
        return lines[-1][:500] if lines else f"code {self.code}, without a message"


async def run_command(
    argv: Sequence[str],
    *,
    seconds: float = 60.0,
    input: bytes = b"",
    environment: Mapping[str, str] | None = None,
) -> Completed:
    """Run a program to its end. `environment` is added to the environment of this process; use it for secrets.

    Raises FailedPrecondition if there is no such program, Unavailable if it takes longer than `seconds`.
    """
    if any("\0" in arg for arg in argv):
        raise InvalidArgument("a command's arguments cannot have a zero byte")
    _check_installed(argv[0])
    process = await asyncio.create_subprocess_exec(
        *argv,
        # Without input no pipe: a program that exits at once may close it before it is written to.
        stdin=asyncio.subprocess.PIPE if input else asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, **(environment or {})},
        start_new_session=True,
    )
    try:
        async with asyncio.timeout(seconds):
            out, err = await process.communicate(input or None)
    except TimeoutError:
        raise Unavailable(f"{argv[0]} did not answer within {seconds:g} s") from None
    finally:
        await _kill(process)
    code = process.returncode if process.returncode is not None else -1
    return Completed(code, _decode(out), _decode(err))


async def stream_command(
    argv: Sequence[str], *, seconds: float, environment: Mapping[str, str] | None = None
) -> AsyncGenerator[str, None]:
    """Yield the output of a program, errors included, line by line; the last line is its exit code, `code N`.

    Close it with `contextlib.aclosing`: that kills the program. Raises as `run_command` does.
    """
    _check_installed(argv[0])
    process = await asyncio.create_subprocess_exec(
        *argv,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={**os.environ, **(environment or {})},
        start_new_session=True,
    )
    try:
        async with asyncio.timeout(seconds):
            rest = b""
            while chunk := await process.stdout.read(_MAX_LINE_BYTES) if process.stdout else b"":
                *lines, rest = (rest + chunk).split(b"\n")
                if len(rest) > _MAX_LINE_BYTES:
                    lines, rest = [*lines, rest], b""
                for line in lines:
                    yield _decode_line(line)
            if rest:
                yield _decode_line(rest)
            yield f"code {await process.wait()}"
    except TimeoutError:
        raise Unavailable(f"{' '.join(argv[:2])} was not done within {seconds:g} s") from None
    finally:
        await _kill(process)


async def run_to_end(work: Coroutine[Any, Any, T]) -> T:
    """Await work that must not be cut short, such as a change on a platform: a cancelled caller waits for its end first."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        if not task.cancelled():
            task.exception()  # mark it as retrieved
        raise


def _check_installed(program: str) -> None:
    if shutil.which(program) is None:
        raise FailedPrecondition(f"the program {program!a} is not installed here, or not on the PATH")


async def _kill(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


def _decode(raw: bytes) -> str:
    return raw[-_MAX_BYTES:].decode(errors="replace")


def _decode_line(line: bytes) -> str:
    return line.decode(errors="replace").rstrip("\r").replace("\0", "\ufffd")
