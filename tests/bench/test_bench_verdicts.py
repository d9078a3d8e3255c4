# SPDX-License-Identifier: Apache-2.0
"""Targets are judged by the figures, and not where something failed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.sentences import sentences
from bench.summary import Figure, MemoryFigure, OverloadFigure, StartFigure, Summary
from bench.verdicts import verdicts_of

NOTHING = Summary([], [], None, None, None, None)
OVERLOAD = OverloadFigure("headrace-overload", 3, 250, 750, 240, 0.96, 40, 70, 1000, 1.0, 3.0, 0, 0.5, 0.0)
START = StartFigure("headrace-start", 9, 0.7, 1.2, 0.6, 0.8, 1.1, 0.0)
MEMORY = MemoryFigure("headrace-memory", 3, 63.0, 51.0, 1)


def _figure(server: str, workload: str, cpu: float, errors: int = 0) -> Figure:
    return Figure(server, workload, 3, 1000, 1, 2, cpu, cpu, cpu, 10, 50, 60, 1, errors, 0.0)


def _results(summary: Summary) -> dict[str, str]:
    return {one.workload: one.result for one in verdicts_of(summary) if one.result != "not measured"}


def test_nothing_measured_is_judged_as_that() -> None:
    assert _results(NOTHING) == {}
    assert sentences(NOTHING) == []


@pytest.mark.parametrize(
    ("changed", "judged"),
    [
        ({}, ("pass", "pass", "pass")),
        ({"share_of_peak": 0.89}, ("MISSED", "pass", "pass")),
        ({"accepted_p99_ms": 200.0}, ("pass", "MISSED", "pass")),
        ({"rejected_p50_ms": 5.0}, ("pass", "pass", "MISSED")),
        ({"failed": 1}, ("MISSED (errors)",) * 3),
        # Nobody was refused: there was no overload, so nothing was shown.
        ({"rejected": 0}, ("MISSED (errors)",) * 3),
        ({"other_cores": 0.5}, ("pass (disturbed)",) * 3),
    ],
)
def test_overload(changed: dict[str, float], judged: tuple[str, ...]) -> None:
    results = _results(replace(NOTHING, overload=replace(OVERLOAD, **changed)))
    assert tuple(results.values()) == judged


def test_start_and_memory() -> None:
    summary = replace(NOTHING, start=START, memory=MEMORY)
    assert _results(summary) == {"start (s)": "pass", "idle-memory (RSS MB)": "pass"}
    slow = replace(summary, start=replace(START, seconds=1.5), memory=replace(MEMORY, rss_mb=120.0))
    assert set(_results(slow).values()) == {"MISSED"}
    assert len(sentences(summary)) == 2


def test_tritons_c_backend_is_a_peer_of_its_own() -> None:
    ours, theirs = _figure("headrace", "json16", 30.0), _figure("triton-native", "json16", 60.0)
    judged = {(one.workload, one.against): one for one in verdicts_of(replace(NOTHING, figures=[ours, theirs]))}
    assert judged["json16", "triton-native"].result == "pass"
    assert judged["json16", "triton-python"].result == "not measured"
    assert judged["json16 (p99 ms)", "triton-native"].compared == ours.p99_ms / theirs.p99_ms
    dearer = replace(NOTHING, figures=[_figure("headrace", "json16", 30.1), theirs])
    assert next(one for one in verdicts_of(dearer) if one.against == "triton-native").result == "MISSED"


def test_router_and_predict_by_cpu() -> None:
    figures = [
        _figure("headrace-router", "router", 40.0),
        _figure("nginx", "router", 26.0),
        _figure("bare-pump", "router", 19.0),
        _figure("headrace-predict", "predict", 100.0),
        _figure("fastapi-seed", "predict", 400.0),
    ]
    assert _results(replace(NOTHING, figures=figures)) == {
        "predict": "pass",
        "router (CPU us/request)": "pass",
        "router (CPU)": "pass",
    }
    dearer = [_figure("headrace-router", "router", 40.1), *figures[1:4], _figure("fastapi-seed", "predict", 399.0)]
    assert set(_results(replace(NOTHING, figures=dearer)).values()) == {"MISSED"}
