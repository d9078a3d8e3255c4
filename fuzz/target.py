# SPDX-License-Identifier: Apache-2.0
"""A fuzz target, and the check of one input within limits on time and memory.

Used by every module of `targets`, by both ways to fuzz, and by `tests/fuzz`. Knows no target.
"""

from __future__ import annotations

import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

FOLDER = Path(__file__).parent
CORPUS = FOLDER / "corpus"
REGRESSIONS = FOLDER / "regressions"

MOST_SECONDS = 30
"""Time limit of one input: inputs are small, and a busy machine may be ten times slower."""
MOST_GROWTH_BYTES = 256 << 20
"""The growth of the process's peak memory that one input may cause."""

Check = Callable[[bytes], None]


class Broken(Exception):
    """A check of a target failed."""


class TooSlow(BaseException):
    """An input took too long. Not an Exception, so that no handler of the product catches it."""


@dataclass(frozen=True, slots=True)
class Target:
    """One parser under test."""

    about: str
    """The input, and what is checked."""
    open: Callable[[], Check]
    """Create the check; called once. The check raises for an input that reveals a bug, and returns for any other."""
    words: tuple[bytes, ...] = ()
    """Tokens of the format that a fuzzer would not find soon."""
    most_bytes: int = 4096


def require(condition: bool, message: str) -> None:
    """Raise `Broken` unless the condition is true."""
    if not condition:
        raise Broken(message)


def bounded(check: Check, data: bytes) -> None:
    """Run a check on one input; raise if it fails, takes too long or too much memory."""
    before = _most_resident_bytes()
    with _alarm():
        check(data)
    growth = _most_resident_bytes() - before
    require(growth < MOST_GROWTH_BYTES, f"an input of {len(data)} bytes took {growth >> 20} MiB of memory")


def inputs_of(name: str) -> list[Path]:
    """Return the stored inputs of a target: regressions, then seed inputs."""
    return [path for folder in (REGRESSIONS, CORPUS) for path in sorted((folder / name).glob("*")) if path.is_file()]


def _most_resident_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


@contextmanager
def _alarm() -> Iterator[None]:
    before = signal.signal(signal.SIGALRM, _ring)
    others_seconds, _ = signal.setitimer(signal.ITIMER_REAL, MOST_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, others_seconds)  # that of pytest, for one
        signal.signal(signal.SIGALRM, before)


def _ring(number: int, frame: FrameType | None) -> None:
    raise TooSlow(f"no end after {MOST_SECONDS} s")
