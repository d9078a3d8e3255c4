# SPDX-License-Identifier: Apache-2.0
"""Many small ONNX models with memory for a few, under Zipf traffic from many clients: no request fails."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.scenarios.models_on_demand import run, zipf_order


def test_the_first_models_are_the_most_popular() -> None:
    order = zipf_order(["a", "b", "c", "d"], 4000, 1)
    counts = [order.count(name) for name in ("a", "b", "c", "d")]
    assert sum(counts) == 4000
    assert counts == sorted(counts, reverse=True)
    assert counts[0] == pytest.approx(4000 / (1 + 1 / 2 + 1 / 3 + 1 / 4), rel=0.1)


@pytest.mark.slow
def test_two_hundred_models_with_memory_for_twenty(tmp_path: Path) -> None:
    """The ratio of the p99s is for `bench/scenarios/models_on_demand.py`: a timing decides no test."""
    figures = run(tmp_path, models=200, room=20, clients=32, requests=800)
    assert figures["failures"] == []
    assert figures["failed_loads"] == 0
    assert figures["evictions"] > 100
    assert figures["waited_share"] < 1
    assert 0 < figures["counted_bytes"] <= figures["limit_bytes"]
