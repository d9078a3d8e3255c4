# SPDX-License-Identifier: Apache-2.0
"""The text of a scrape, read back by the parsers of prometheus-client."""

import math
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from headrace.core.clock import ManualClock
from headrace.core.telemetry.exposition import Format, negotiate, render
from headrace.core.telemetry.metrics import Registry

PARSERS = {Format.TEXT: parse_text, Format.OPENMETRICS: parse_openmetrics}
HARD = 'back\\slash "quote" new\nline \\n {,} é \u2028 \r = #'


@pytest.fixture
def registry():
    return Registry(ManualClock())


def samples_of(registry, format):
    """Every sample by name and labels; fails if one is there twice."""
    document = {}
    text = render(registry, format).decode()
    written = {re.split("[{ ]", line)[0] for line in text.split("\n")}
    for family in PARSERS[format](text):
        for sample in family.samples:
            # The parser of the older format adds `_total` to a counter without it; Prometheus itself does not.
            name = sample.name if sample.name in written else sample.name.removesuffix("_total")
            assert name in written
            key = name, tuple(sorted(sample.labels.items()))
            assert key not in document
            document[key] = sample.value
    return document


def full(registry):
    requests = registry.counter("hr_requests_total", "Requests answered.", ["model", "code"])
    requests.labels(model="m", code="200").add(3)
    requests.labels(model=HARD, code="").add(1.5)
    registry.counter("nv_inference_count", "Triton's name.", ["model"]).labels(model="m").add(1 << 60)
    registry.gauge("hr_temperature", HARD).labels().set(-0.5)
    histogram = registry.histogram("hr_seconds", "Durations.", ["model"], buckets=[0.1, 1, 10])
    for value in (0.05, 0.1, 0.5, 100):
        histogram.labels(model="m").observe(value)
    registry.histogram("hr_sizes", "No labels.", buckets=[1]).labels().observe(1)
    summary = registry.summary("hr_wait", "Waiting.", ["model"], quantiles=[0.5, 1])
    summary.labels(model="m").observe(0)
    registry.summary("hr_idle", "Nothing yet.", quantiles=[0.5])
    registry.callback("hr_free_bytes", "Free.", lambda: 7)
    registry.callback("hr_energy_joules_total", "Energy.", lambda: {("0",): 2.5}, ["gpu"], kind="counter")
    registry.gauge("hr_nobody", "No series yet.", ["model"])
    return registry


@pytest.mark.parametrize("format", Format)
def test_everything_is_read_back(registry, format):
    result = samples_of(full(registry), format)
    hard = HARD
    assert math.isnan(result.pop(("hr_idle", (("quantile", "0.5"),))))
    assert result == {
        ("hr_requests_total", (("code", "200"), ("model", "m"))): 3,
        ("hr_requests_total", (("code", ""), ("model", hard))): 1.5,
        ("nv_inference_count", (("model", "m"),)): 1 << 60,
        ("hr_temperature", ()): -0.5,
        ("hr_seconds_bucket", (("le", "0.1"), ("model", "m"))): 2,
        ("hr_seconds_bucket", (("le", "1.0"), ("model", "m"))): 3,
        ("hr_seconds_bucket", (("le", "10.0"), ("model", "m"))): 3,
        ("hr_seconds_bucket", (("le", "+Inf"), ("model", "m"))): 4,
        ("hr_seconds_count", (("model", "m"),)): 4,
        ("hr_seconds_sum", (("model", "m"),)): pytest.approx(100.65),
        ("hr_sizes_bucket", (("le", "1.0"),)): 1,
        ("hr_sizes_bucket", (("le", "+Inf"),)): 1,
        ("hr_sizes_count", ()): 1,
        ("hr_sizes_sum", ()): 1,
        ("hr_wait", (("model", "m"), ("quantile", "0.5"))): 0,
        ("hr_wait", (("model", "m"), ("quantile", "1.0"))): 0,
        ("hr_wait_count", (("model", "m"),)): 1,
        ("hr_wait_sum", (("model", "m"),)): 0,
        ("hr_idle_count", ()): 0,
        ("hr_idle_sum", ()): 0,
        ("hr_free_bytes", ()): 7,
        ("hr_energy_joules_total", (("gpu", "0"),)): 2.5,
    }


def test_both_formats_name_the_same_series(registry):
    full(registry)
    assert samples_of(registry, Format.TEXT).keys() == samples_of(registry, Format.OPENMETRICS).keys()


def test_types_are_written(registry):
    full(registry)
    text = {family.name: family.type for family in parse_text(render(registry).decode())}
    openmetrics = {
        family.name: family.type for family in parse_openmetrics(render(registry, Format.OPENMETRICS).decode())
    }
    common = {
        "hr_requests": "counter",
        "hr_temperature": "gauge",
        "hr_seconds": "histogram",
        "hr_sizes": "histogram",
        "hr_wait": "summary",
        "hr_idle": "summary",
        "hr_free_bytes": "gauge",
        "hr_energy_joules": "counter",
        "hr_nobody": "gauge",
    }
    assert text == common | {"nv_inference_count": "counter"}
    assert openmetrics == common | {"nv_inference_count": "unknown"}


@pytest.mark.parametrize("format", Format)
def test_help_is_written_as_given(registry, format):
    full(registry)
    helps = {family.name: family.documentation for family in PARSERS[format](render(registry, format).decode())}
    assert helps["hr_temperature"] == HARD
    assert helps["hr_requests"] == "Requests answered."


def test_the_text_to_the_letter(registry):
    registry.counter("a_total", 'Say "a"\\\n.', ["x"]).labels(x='"\\\n').add()
    registry.histogram("h", "H.", buckets=[0.5]).labels().observe(2)
    assert render(registry) == (
        b'# HELP a_total Say "a"\\\\\\n.\n'
        b"# TYPE a_total counter\n"
        b'a_total{x="\\"\\\\\\n"} 1\n'
        b"# HELP h H.\n"
        b"# TYPE h histogram\n"
        b'h_bucket{le="0.5"} 0\n'
        b'h_bucket{le="+Inf"} 1\n'
        b"h_count 1\n"
        b"h_sum 2\n"
    )
    assert render(registry, Format.OPENMETRICS) == (
        b"# TYPE a counter\n"
        b'# HELP a Say \\"a\\"\\\\\\n.\n'
        b'a_total{x="\\"\\\\\\n"} 1\n'
        b"# TYPE h histogram\n"
        b"# HELP h H.\n"
        b'h_bucket{le="0.5"} 0\n'
        b'h_bucket{le="+Inf"} 1\n'
        b"h_count 1\n"
        b"h_sum 2\n"
        b"# EOF\n"
    )


def test_an_empty_registry_is_empty(registry):
    assert render(registry, Format.TEXT) == b""
    assert render(registry, Format.OPENMETRICS) == b"# EOF\n"


@given(st.lists(st.text(), unique=True), st.text())
@pytest.mark.parametrize("format", Format)
def test_any_label_value_and_help_survive(format, values, help):
    registry = Registry(ManualClock())
    family = registry.gauge("g", help, ["x", "y"])
    for number, value in enumerate(values):
        family.labels(x=value, y="1").set(number)
    (read,) = PARSERS[format](render(registry, format).decode())
    assert {sample.labels["x"]: sample.value for sample in read.samples} == {v: n for n, v in enumerate(values)}
    # The parser of the older format strips white space around the help.
    assert read.documentation.strip() == help.strip()


@given(st.floats() | st.integers(-(1 << 70), 1 << 70) | st.booleans())
@pytest.mark.parametrize("format", Format)
def test_any_number_survives(format, number):
    registry = Registry(ManualClock())
    registry.gauge("g", "G.").labels().set(number)
    (read,) = samples_of(registry, format).values()
    assert read == number or (math.isnan(read) and math.isnan(number))


@pytest.mark.parametrize(
    ("number", "text"), [(math.nan, b"NaN"), (math.inf, b"+Inf"), (-math.inf, b"-Inf"), (5, b"5"), (1e20, b"1e+20")]
)
def test_numbers_are_spelled_as_specified(registry, number, text):
    registry.gauge("g", "G.").labels().set(number)
    assert render(registry).endswith(b"\ng " + text + b"\n")


@pytest.mark.parametrize("number", [np.float32(0.5), np.float64(0.5), np.int64(3), np.uint8(3)])
def test_numbers_of_numpy_are_written_as_numbers(registry, number):
    registry.callback("g", "G.", lambda: number)
    assert samples_of(registry, Format.TEXT) == {("g", ()): float(number)}


@given(st.lists(st.floats(0, 1e3)))
@pytest.mark.parametrize("format", Format)
def test_buckets_add_up(format, values):
    registry = Registry(ManualClock())
    histogram = registry.histogram("h", "H.", buckets=[0, 1, 100]).labels()
    for value in values:
        histogram.observe(value)
    result = samples_of(registry, format)
    for bound in (0.0, 1.0, 100.0):
        assert result["h_bucket", (("le", str(bound)),)] == sum(value <= bound for value in values)
    assert result["h_bucket", (("le", "+Inf"),)] == result["h_count", ()] == len(values)


def test_half_a_surrogate_pair_does_not_stop_the_scrape(registry):
    registry.gauge("g", "G.", ["x"]).labels(x="\ud800").set(1)
    assert samples_of(registry, Format.TEXT) == {("g", (("x", "?"),)): 1}


@pytest.mark.parametrize("broken", [lambda: 1 / 0, lambda: None, lambda: {("a", "b"): 1}, lambda: {(5,): 1}])
def test_a_callback_that_fails_costs_only_its_own_metric(registry, caplog, broken):
    registry.callback("bad", "Bad.", broken, ["x"])
    registry.gauge("good", "Good.").labels().set(1)
    assert samples_of(registry, Format.OPENMETRICS) == {("good", ()): 1}
    assert b"bad" not in render(registry)
    assert "metric bad cannot be read" in caplog.text


PROMETHEUS_3 = (
    b"application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.5,application/openmetrics-text;version=0.0.1;"
    b"q=0.4,text/plain;version=1.0.0;escaping=allow-utf-8;q=0.3,text/plain;version=0.0.4;q=0.2,*/*;q=0.1"
)
PROMETHEUS_2 = (
    b"application/openmetrics-text;version=1.0.0;q=0.5,application/openmetrics-text;version=0.0.1;q=0.4,"
    b"text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
)


@pytest.mark.parametrize(
    ("accept", "format"),
    [
        (None, Format.TEXT),
        (b"", Format.TEXT),
        (b"*/*", Format.TEXT),
        (b"text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8", Format.TEXT),
        (b"text/plain", Format.TEXT),
        (b"application/json", Format.TEXT),
        (PROMETHEUS_3, Format.OPENMETRICS),
        (PROMETHEUS_2, Format.OPENMETRICS),
        (b"application/openmetrics-text", Format.OPENMETRICS),
        (b"Application/OpenMetrics-Text ; Version=1.0.0 ; Q=0.1", Format.OPENMETRICS),
        (b"application/openmetrics-text;version=0.0.1", Format.TEXT),
        (b"application/openmetrics-text;version=2.0.0,text/plain;q=0.1", Format.TEXT),
        (b"application/openmetrics-text;q=0", Format.TEXT),
        (b"application/openmetrics-text;q=0.2,text/plain;q=0.7", Format.TEXT),
        (b"text/plain;q=0.2,application/openmetrics-text;q=0.7", Format.OPENMETRICS),
        (b"text/plain;q=0.5,application/openmetrics-text;q=0.5", Format.OPENMETRICS),
        (b"application/openmetrics-text;q=high", Format.TEXT),
        (b"application/openmetrics-text;q=nan", Format.TEXT),
        (b"application/openmetrics-text;q=7,text/plain;q=0.1", Format.TEXT),
        (b";;,,;q=,=", Format.TEXT),
        (b"\xff\x00", Format.TEXT),
    ],
)
def test_the_format_is_what_the_scraper_prefers(accept, format):
    assert negotiate(accept) is format


@given(st.binary(max_size=100))
def test_any_accept_field_gets_a_format(accept):
    assert negotiate(accept) in Format


def test_content_types_are_those_of_the_specifications():
    assert Format.TEXT.value == b"text/plain; version=0.0.4; charset=utf-8"
    assert Format.OPENMETRICS.value == b"application/openmetrics-text; version=1.0.0; charset=utf-8"
