# SPDX-License-Identifier: Apache-2.0
"""Coverage-guided fuzzing in plain Python: inputs that reach new lines of the product are kept and mutated further.

Called by `__main__`. Follows the steps from line to line (`sys.settrace`) in this thread, which costs half of the time or
more; libFuzzer (`with_atheris`) also sees what values are compared with, where it can be had.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from fuzz.findings import Findings
from fuzz.mutating import Mutator
from fuzz.target import Check, Target, bounded

PRODUCT = str(Path(__file__).parents[1] / "headrace") + "/"
Step = tuple[CodeType, int, int]
"""From one line of a function to another."""


class Followed:
    """Which steps of the product's code a call takes."""

    def __init__(self, folder: str = PRODUCT) -> None:
        self._folder = folder
        self.steps: set[Step] = set()

    def call(self, check: Check, data: bytes) -> set[Step]:
        """Check an input, and return the lines that it reached."""
        self.steps = set()
        before = sys.gettrace()
        sys.settrace(self._entered)
        try:
            bounded(check, data)
        finally:
            sys.settrace(before)
        return self.steps

    def _entered(self, frame: FrameType, event: str, argument: Any) -> Any:
        code = frame.f_code
        if not code.co_filename.startswith(self._folder):
            return None
        steps, last = self.steps, 0

        def line(frame: FrameType, event: str, argument: Any) -> Any:
            nonlocal last
            if event == "line":
                steps.add((code, last, frame.f_lineno))
                last = frame.f_lineno
            return line

        return line


@dataclass(slots=True)
class Figures:
    """How far it came."""

    runs: int = 0
    seconds: float = 0.0
    covered: int = 0
    """Steps from line to line of the product that some input took (libFuzzer: its own count)."""
    corpus: list[bytes] = field(default_factory=list)
    """Inputs that each took a step which none before it took."""

    @property
    def rate(self) -> float:
        """Inputs in a second."""
        return self.runs / self.seconds if self.seconds else 0.0


def fuzz(
    target: Target,
    beginnings: list[bytes],
    seconds: float,
    findings: Findings,
    *,
    seed: int = 0,
    clock: Callable[[], float] = time.monotonic,
    folder: str = PRODUCT,
) -> Figures:
    """Feed a target for some seconds, beginning with some inputs, and follow the code of a folder."""
    check, followed, figures, known = target.open(), Followed(folder), Figures(), set[Step]()
    rng = random.Random(seed)  # to do the same again, not to be unforeseeable
    mutator = Mutator(rng, target.words, target.most_bytes)
    start = clock()

    def feed(data: bytes) -> None:
        figures.runs += 1
        try:
            steps = followed.call(check, data)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            findings.add(data, error)
            return
        if not steps <= known:
            known.update(steps)
            figures.corpus.append(data)

    for data in (*beginnings, b""):
        feed(data)
    while (now := clock() - start) < seconds:
        # The newest lead furthest; the oldest are never given up.
        corpus = figures.corpus or beginnings or [b""]
        chosen = corpus[-1 - min(int(rng.expovariate(4 / len(corpus))), len(corpus) - 1)]
        feed(mutator.mutated(chosen, rng.choice(corpus)))
    figures.seconds, figures.covered = now, len(known)
    return figures


def least_covering(target: Target, inputs: list[bytes], most: int, folder: str = PRODUCT) -> list[bytes]:
    """A few inputs that together take nearly all the steps of many: the shortest of those that add most, one by one."""
    check, followed = target.open(), Followed(folder)
    corpus: list[tuple[bytes, set[Step]]] = []
    for data in sorted(set(inputs), key=len):
        try:
            corpus.append((data, followed.call(check, data)))
        except Exception:  # a finding: it is kept elsewhere
            continue
    chosen: list[bytes] = []
    known: set[Step] = set()
    while corpus and len(chosen) < most:
        data, steps = max(corpus, key=lambda entry: len(entry[1] - known))
        if steps <= known:
            break
        chosen.append(data)
        known |= steps
    return chosen
