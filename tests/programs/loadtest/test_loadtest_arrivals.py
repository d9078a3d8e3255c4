# SPDX-License-Identifier: Apache-2.0
"""When requests are due: evenly or as chance has it, never more or fewer than the rate says."""

from __future__ import annotations

import numpy as np
import pytest

from headrace.core.errors import InvalidArgument
from headrace.programs.loadtest.loops import Arrivals


def test_even_distances_do_not_drift() -> None:
    arrivals = Arrivals(1000.0, uniform=True)
    due = list(arrivals.pop_due(10.0))
    assert len(due) == 10_001
    assert due[7777] == 7.777
    assert due[-1] == 10.0


def test_consumed_arrivals_are_not_repeated() -> None:
    arrivals = Arrivals(10.0, uniform=True)
    assert list(arrivals.pop_due(0.25)) == [0.0, 0.1, 0.2]
    assert list(arrivals.pop_due(0.25)) == []
    assert arrivals.next == 0.3
    assert list(arrivals.pop_due(0.45)) == [0.3, 0.4]


def test_chance_has_the_gaps_of_a_poisson_process() -> None:
    due = np.array(list(Arrivals(500.0, seed=1).pop_due(40.0)))
    gaps = np.diff(due)
    # 20,000 arrivals: four standard errors.
    assert len(due) == pytest.approx(20_000, abs=4 * 20_000**0.5)
    assert gaps.mean() == pytest.approx(1 / 500, rel=0.03)
    assert gaps.std() == pytest.approx(1 / 500, rel=0.05)
    assert (gaps >= 0).all()


def test_a_seed_is_a_schedule() -> None:
    first, second, other = (list(Arrivals(50.0, seed=seed).pop_due(1.0)) for seed in (3, 3, 4))
    assert first == second != other


@pytest.mark.parametrize("rate", [0.0, -1.0])
def test_no_rate_is_refused(rate: float) -> None:
    with pytest.raises(InvalidArgument, match="above 0"):
        Arrivals(rate)
