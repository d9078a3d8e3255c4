# SPDX-License-Identifier: Apache-2.0
"""A coverage-guided fuzzer in plain Python: keeps inputs that reach new lines of the product, and mutates them further.

Called by `__main__`. Follows the steps from line to line (`sys.settrace`) in this thread, which costs half of the time or
more; libFuzzer (`libfuzzer`) also sees what values are compared with, where it can be had.
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
from fuzz.mutator import Mutator
from fuzz.target import Check, Target, bounded

PRODUCT = str(Path(__file__).parents[1] / "headrace") + "/"
Step = tuple[CodeType, int, int]
"""A function, and two of its lines that ran one after the other."""


class CoverageTracer:
    """Traces which steps of the product's code a call takes."""

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
    """The result of fuzzing one target."""

    runs: int = 0
    seconds: float = 0.0
    covered: int = 0
    """Steps from line to line of the product that some input took (libFuzzer: its own count)."""
    corpus: list[bytes] = field(default_factory=list)
    """Inputs that each took a step that no earlier input took."""

    @property
    def rate(self) -> float:
        """Inputs per second."""
        return self.runs / self.seconds if self.seconds else 0.0


def fuzz(
    target: Target,
    seed_inputs: list[bytes],
    seconds: float,
    findings: Findings,
    *,
    seed: int = 0,
    clock: Callable[[], float] = time.monotonic,
    folder: str = PRODUCT,
) -> Figures:
    """Fuzz a target for some seconds, starting from the seed inputs, guided by the coverage of a folder's code."""
    check, tracer, figures, known = target.open(), CoverageTracer(folder), Figures(), set[Step]()
    rng = random.Random(seed)  # to do the same again, not to be unforeseeable
    mutator = Mutator(rng, target.words, target.most_bytes)
    start = clock()

    def feed(data: bytes) -> None:
        figures.runs += 1
        try:
            steps = tracer.call(check, data)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            findings.add(data, error)
            return
        if not steps <= known:
            known.update(steps)
            figures.corpus.append(data)

    for data in (*seed_inputs, b""):
        feed(data)
    while (now := clock() - start) < seconds:
        # The newest inputs reach furthest; the oldest are still chosen now and then.
        corpus = figures.corpus or seed_inputs or [b""]
        chosen = corpus[-1 - min(int(rng.expovariate(4 / len(corpus))), len(corpus) - 1)]
        feed(mutator.mutated(chosen, rng.choice(corpus)))
    figures.seconds, figures.covered = now, len(known)
    return figures


def minimal_corpus(target: Target, inputs: list[bytes], most: int, folder: str = PRODUCT) -> list[bytes]:
    """Return a few short inputs that together cover nearly as much as all: greedily, the one that adds most first."""
    check, tracer = target.open(), CoverageTracer(folder)
    corpus: list[tuple[bytes, set[Step]]] = []
    for data in sorted(set(inputs), key=len):
        try:
            corpus.append((data, tracer.call(check, data)))
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
