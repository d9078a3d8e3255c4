# SPDX-License-Identifier: Apache-2.0
"""Other programs, run by their words and never by a shell: docker, sbatch, ssh, brev, lep. Called by the drivers.

What a program prints is bounded, and whoever waits for it is cancelled together with it. What a nonzero end means is the
driver's business.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from headrace.core.errors import FailedPrecondition, InvalidArgument, Unavailable

_MOST_BYTES = 16 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Completed:
    """How a program ended and what it said."""

    code: int
    out: str
    err: str

    @property
    def told(self) -> str:
        """The last line that it complained with, for an error's text."""
        lines = [line.strip() for line in (self.err.strip() or self.out.strip()).splitlines()]
        return lines[-1][:500] if lines else f"code {self.code}, without a word"


async def run_command(
    argv: Sequence[str],
    *,
    seconds: float = 60.0,
    input: bytes = b"",
    environment: Mapping[str, str] | None = None,
) -> Completed:
    """Run it to its end. `environment`: added to this process's own, and the way for secrets.

    Raises FailedPrecondition where there is no such program, Unavailable where it takes longer than `seconds`.
    """
    if any("\0" in word for word in argv):
        raise InvalidArgument("a command's words cannot have a zero byte")
    if shutil.which(argv[0]) is None:
        raise FailedPrecondition(f"the program {argv[0]!a} is not installed here, or not on the PATH")
    process = await asyncio.create_subprocess_exec(
        *argv,
        # A pipe that nobody needs may be closed, by a program that ends at once, before nothing is written to it.
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
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
    code = process.returncode if process.returncode is not None else -1
    return Completed(code, _text(out), _text(err))


def _text(raw: bytes) -> str:
    return raw[-_MOST_BYTES:].decode(errors="replace")
