# SPDX-License-Identifier: Apache-2.0
"""The guide finds what chance alone would not, keeps one input of each kind, and holds inputs to time and memory."""

from __future__ import annotations

import itertools
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from fuzz import target as targets
from fuzz.findings import Findings, failure_kind
from fuzz.guided import fuzz, minimal_corpus
from fuzz.target import Broken, Target, TooSlow, bounded, require

HERE = str(Path(__file__).parent)


def gated(data: bytes) -> None:
    """Four bytes, one after the other: chance alone needs 2 ** 32 tries, and each step shows as a new line here."""
    if data[:1] != b"F":
        return
    if data[1:2] != b"U":
        return
    if data[2:3] != b"Z":
        return
    if data[3:4] == b"!":
        raise ZeroDivisionError


def rounds(count: int) -> Callable[[], float]:
    """A clock that moves by one each time it is asked: so many inputs, on any machine."""
    ticks = itertools.count()
    return lambda: next(ticks) / count


def test_what_is_behind_four_gates_is_found_once(tmp_path: Path) -> None:
    findings = Findings(tmp_path)
    target = Target("", lambda: gated, (b"F", b"U", b"Z", b"!"))
    figures = fuzz(target, [b"begin"], 1.0, findings, clock=rounds(30_000), folder=HERE)
    (kind,) = findings.kinds
    assert kind.startswith("ZeroDivisionError at ")
    assert findings.kinds[kind].read_bytes().startswith(b"FUZ!")
    assert "gated" in findings.kinds[kind].with_suffix(".txt").read_text()
    assert sorted(path.suffix for path in tmp_path.iterdir()) == ["", ".txt"]
    assert len(figures.corpus) >= 4
    assert figures.runs > 20_000


def test_the_same_seed_does_the_same(tmp_path: Path) -> None:
    target = Target("", lambda: lambda data: None)
    seen: list[list[bytes]] = []
    for _ in range(2):
        fed: list[bytes] = []
        noting = Target("", lambda fed=fed: fed.append, target.words)  # type: ignore[misc]
        fuzz(noting, [b"abc"], 1.0, Findings(tmp_path), seed=3, clock=rounds(200))
        seen.append(fed)
    assert seen[0] == seen[1]
    assert len(set(seen[0])) > 100


def test_two_places_are_two_findings_and_one_place_is_one() -> None:
    def error_of(value: bytes) -> BaseException:
        try:
            require(value == b"a", "text") if value == b"b" else gated(value)
        except Exception as error:
            return error
        raise AssertionError

    assert failure_kind(error_of(b"FUZ!a")) == failure_kind(error_of(b"FUZ!b")) != failure_kind(error_of(b"b"))


def test_few_inputs_that_reach_as_much() -> None:
    few = minimal_corpus(Target("", lambda: gated), [b"x", b"F", b"FU", b"FU-long", b"FUZ", b"FUZ?"], 10, HERE)
    assert sorted(few) == [b"F", b"FU", b"FUZ", b"x"]


def test_an_input_that_does_not_end_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "MOST_SECONDS", 0.05)

    def forever(data: bytes) -> None:
        while True:
            pass

    left = signal.getitimer(signal.ITIMER_REAL)[0]
    with pytest.raises(TooSlow):
        bounded(forever, b"")
    assert (left > 0) == (signal.getitimer(signal.ITIMER_REAL)[0] > 0), "the alarm of others is set again"


def test_an_input_that_takes_memory_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = iter([100 << 20, 900 << 20])
    monkeypatch.setattr(targets, "_most_resident_bytes", lambda: next(sizes))
    with pytest.raises(Broken, match="800 MiB"):
        bounded(lambda data: None, b"x")
