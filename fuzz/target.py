# SPDX-License-Identifier: Apache-2.0
"""What a target is, and one input held against it within bounds of time and memory.

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
"""For one input: those here are small, and a machine may be ten times as slow as it should be."""
MOST_GROWTH_BYTES = 256 << 20
"""By which one input may raise the most memory that the process ever had."""

Check = Callable[[bytes], None]


class Broken(Exception):
    """Something that must hold did not."""


class TooSlow(BaseException):
    """An input took too long. Not an Exception, so that no handler of the product catches it."""


@dataclass(frozen=True, slots=True)
class Target:
    """One reader of bytes."""

    about: str
    """What is fed, and what must hold."""
    open: Callable[[], Check]
    """Makes what reads; called once. The check raises for an input that broke something, and returns for any other."""
    words: tuple[bytes, ...] = ()
    """What inputs are made of, and no fuzzer would find soon."""
    most_bytes: int = 4096


def must(holds: bool, message: str) -> None:
    """Raise unless it holds."""
    if not holds:
        raise Broken(message)


def bounded(check: Check, data: bytes) -> None:
    """Hold one input against a check. Raises what was found, also where it took too long or too much memory."""
    before = _most_resident_bytes()
    with _alarm():
        check(data)
    growth = _most_resident_bytes() - before
    must(growth < MOST_GROWTH_BYTES, f"an input of {len(data)} bytes took {growth >> 20} MiB of memory")


def inputs_of(name: str) -> list[Path]:
    """The files that are kept for a target: those that broke it once, then those to begin with."""
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
