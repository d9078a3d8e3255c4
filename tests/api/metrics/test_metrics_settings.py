# SPDX-License-Identifier: Apache-2.0
"""`--metrics-config` and its neighbours."""

from __future__ import annotations

import pytest

from headrace.api.metrics.settings import MetricsSettings, metrics_settings
from headrace.core.errors import InvalidArgument


def test_nothing_given_is_the_default() -> None:
    assert metrics_settings() == MetricsSettings()
    assert MetricsSettings().histogram_latencies
    assert MetricsSettings().engine_quantiles == ()


def test_every_key_is_read() -> None:
    settings = metrics_settings(
        [
            "counter_latencies=false",
            "histogram_latencies=FALSE",
            " summary_latencies = true",
            "summary_quantiles=0.5:0.05,0.999:0.001,0.25",
        ],
        interval_ms=50,
        gpu=False,
        cpu=False,
    )
    assert settings == MetricsSettings(False, False, False, True, (0.5, 0.999, 0.25), 50, False, False)
    assert settings.engine_quantiles == (0.5, 0.999, 0.25)


def test_quantiles_are_read_as_leniently_as_in_triton() -> None:
    settings = metrics_settings(["summary_quantiles= 0.5:0.05, 0.9 : 2,,0.5:0.1,"])
    assert settings.summary_quantiles == (0.5, 0.9)


@pytest.mark.parametrize(("entries", "there"), [([], False), (["histogram_latencies=true"], True)])
def test_triton_s_histogram_is_there_when_enabled(entries: list[str], there: bool) -> None:
    settings = metrics_settings(entries)
    assert settings.histogram_latencies
    assert settings.first_response_histogram == there


def test_the_last_of_a_key_counts() -> None:
    assert metrics_settings(["counter_latencies=false", "counter_latencies=1"]).counter_latencies


@pytest.mark.parametrize(
    ("entry", "text"),
    [
        ("counter_latencies", "key=value"),
        ("latencies=true", "one of counter_latencies"),
        ("=true", "key=value"),
        ("", "key=value"),
        ("counter_latencies=maybe", "true or false"),
        ("summary_quantiles=", "quantiles from 0 to 1"),
        ("summary_quantiles=0.5:x", "quantiles from 0 to 1"),
        ("summary_quantiles=1.5", "quantiles from 0 to 1"),
        ("summary_quantiles=0.5:0:0", "quantiles from 0 to 1"),
        ("summary_quantiles=nan", "quantiles from 0 to 1"),
    ],
)
def test_mistakes_are_named(entry: str, text: str) -> None:
    with pytest.raises(InvalidArgument, match=text) as caught:
        metrics_settings([entry])
    assert repr(entry) in caught.value.message


def test_the_interval_is_positive() -> None:
    with pytest.raises(InvalidArgument, match="at least 1 millisecond"):
        metrics_settings(interval_ms=0)
