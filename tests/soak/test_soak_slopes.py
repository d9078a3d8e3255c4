# SPDX-License-Identifier: Apache-2.0
"""A leak is found, and noise, steps, sawteeth and what climbs to a level are not taken for one."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from soak.report import ALLOWED, verdicts_of, write
from soak.sampling import MEASURES, Samples
from soak.slopes import Allowance, Floats, judge, theil_sen

HOUR = np.arange(0.0, 3600.0, 5.0)
TEN_MINUTES = np.arange(0.0, 600.0, 5.0)


def noise(times: Floats, size: float, seed: int) -> Floats:
    """Neighbours are alike, as those of a real process are: each is half of the last one and half anew; some lie far off."""
    rng = np.random.default_rng(seed)
    values = np.zeros(len(times))
    for place in range(1, len(times)):
        values[place] = values[place - 1] / 2 + rng.normal(0, size)
    return values + np.where(rng.random(len(times)) < 0.02, 20 * size, 0.0)


def grows(times: Floats, values: Floats, measure: str = "RSS") -> bool:
    return judge(measure, "", times, values, ALLOWED[measure]).grows


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("times", [HOUR, TEN_MINUTES])
def test_noise_is_not_growth(times: Floats, seed: int) -> None:
    assert not grows(times, 300 + noise(times, 2.0, seed))
    assert not grows(times, 60 + np.round(noise(times, 1.0, seed)), "descriptors")


@pytest.mark.parametrize("seed", range(8))
def test_a_leak_is_found_below_the_noise(seed: int) -> None:
    """20 MiB in an hour, of 300; with noise of a few MiB and jumps of 40."""
    assert grows(HOUR, 300 + 20 * HOUR / 3600 + noise(HOUR, 2.0, seed))


@pytest.mark.parametrize("seed", range(5))
def test_a_quick_leak_is_found_in_ten_minutes(seed: int) -> None:
    assert grows(TEN_MINUTES, 300 + 60 * TEN_MINUTES / 600 + noise(TEN_MINUTES, 2.0, seed))


@pytest.mark.parametrize("measure", ["descriptors", "threads"])
def test_one_descriptor_or_thread_in_five_minutes_is_found(measure: str) -> None:
    values = 60 + np.floor(HOUR / 300) + np.round(noise(HOUR, 0.5, 1))
    assert grows(HOUR, values, measure)
    assert not grows(HOUR, values - np.floor(HOUR / 300), measure)


def test_a_climb_to_a_plateau_is_not_growth() -> None:
    assert not grows(HOUR, 300 + 80 * (1 - np.exp(-HOUR / 300)) + noise(HOUR, 1.0, 1))


def test_the_warm_up_does_not_count() -> None:
    assert not grows(HOUR, 300 + np.minimum(HOUR, 600.0) / 5 + noise(HOUR, 1.0, 1))


def test_a_step_and_a_sawtooth_are_not_growth() -> None:
    assert not grows(HOUR, 300 + np.where(HOUR > 1500, 30.0, 0.0) + noise(HOUR, 1.0, 1))
    assert not grows(HOUR, 300 + (HOUR % 120) / 4 + noise(HOUR, 1.0, 1))


def test_a_slope_that_outliers_do_not_move() -> None:
    x = np.arange(100.0)
    y = 2 * x / 3600
    y[::10] = 1e6
    result = theil_sen(x, y)
    assert result.an_hour == pytest.approx(2.0)
    assert result.low <= 2.0 <= result.high


def test_too_few_samples_are_reported() -> None:
    verdict = judge("RSS", "MiB", [0.0, 1.0], [1.0, math.nan], Allowance(1.0, 1.0))
    assert not verdict.grows
    assert "too few" in verdict.why


def test_a_report_has_the_picture_and_the_numbers(tmp_path: Path) -> None:
    leak = 300 + 0.02 * HOUR
    flat = np.full(len(HOUR), 9.0)
    values = dict(zip(MEASURES, (leak, flat, flat, flat), strict=True))
    samples = Samples(list(HOUR), {name: list(map(float, item)) for name, item in values.items()})
    verdicts = verdicts_of(samples)
    assert {verdict.name: verdict.grows for verdict in verdicts} == {name: name == "RSS" for name in MEASURES}
    page, numbers = write(tmp_path, samples, verdicts, Counter({"v2 http": 3}), Counter())
    assert page.read_text().count("<svg") == len(MEASURES)
    assert "RSS: GROWS" in page.read_text()
    assert json.loads(numbers.read_text())["verdicts"][0]["slope"]["an_hour"] == pytest.approx(72.0)
