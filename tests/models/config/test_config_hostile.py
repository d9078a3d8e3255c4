# SPDX-License-Identifier: Apache-2.0
"""Files made to hurt: a ConfigError, soon, and nothing else."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.models.config.completion import complete
from headrace.models.config.drafts import draft_from_json, read_draft
from headrace.models.config.problems import ConfigError
from headrace.models.config.syntax import MAX_BYTES

FILES = ["config.pbtxt", "config.json", "config.yaml"]
NEARLY = MAX_BYTES - 64
SOME = MAX_BYTES // 16
"""Bytes: enough for every limit but that of the size itself."""


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[",
        '{"a":',
        "input{",
        "input: [",
        '{"input":[',
        "- ",
        '"',
        "x",
        "x: 1\n",
        "input{} ",
    ],
    ids=repr,
)
@pytest.mark.parametrize("size", [SOME, pytest.param(NEARLY, marks=pytest.mark.slow)], ids=["some", "nearly all"])
def test_many_of_the_same_are_refused(folder, file, text, size):
    with pytest.raises(ConfigError) as caught:
        complete(read_draft(folder(text * (size // len(text)), file=file)), None)
    assert len(caught.value.message) < 4000


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize(
    "text",
    [
        "max_batch_size: " + "9" * (NEARLY - 100),
        '{"max_batch_size": ' + "9" * (NEARLY - 100) + "}",
        "a: &a [*a, *a]\n" * 100,
        b"\x00" * 1000,
        b"\xff\xfe" * 1000,
        b"\x89PNG\r\n\x1a\n" * 100,
        "x" * (MAX_BYTES + 1),
    ],
    ids=lambda text: repr(text[:10]),
)
def test_refused(folder, file, text):
    with pytest.raises(ConfigError) as caught:
        complete(read_draft(folder(text, file=file)), None)
    assert len(caught.value.message) < 4000


def test_the_size_is_limited_exactly(folder):
    read_draft(folder("#" * MAX_BYTES))
    with pytest.raises(ConfigError, match="has more than 1048576 bytes"):
        read_draft(folder("#" * (MAX_BYTES + 1)))


def test_too_many_tokens(folder):
    with pytest.raises(ConfigError, match="names, values and brackets"):
        read_draft(folder("input{}" * 140_000))


def test_dims_whose_product_is_too_large_to_print(folder, problems):
    result = problems("input { dims: [" + "9223372036854775807," * 20_000 + "1] reshape { shape: [ 2 ] } }")
    assert any("20001 dimensions; at most 32" in item for item in result)


def test_a_surrogate_in_a_request(tmp_path):
    with pytest.raises(ConfigError, match="UTF-8"):
        draft_from_json(tmp_path, '{"name": "\ud800"}')


SYMBOLS = [*":{}[]<>,;'\"-#\\%?|\n\t é", '"x"', "*a", "&a", "!!python", "0x", ".5", "1"]
NAMES = ["name", "input", "dims", "auto", "tags", "key", "value", "dynamic_batching", "max_queue_delay_microseconds"]
WORDS = st.sampled_from(SYMBOLS + NAMES)


def refusal(folder, text, file):
    try:
        complete(read_draft(folder(text, file=file)), None)
    except ConfigError as error:
        return error.message
    return "none"


@pytest.mark.parametrize("file", FILES)
@given(pieces=st.lists(WORDS, max_size=30))
@settings(
    max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
def test_salad_is_read_or_refused_in_one_line(folder, file, pieces):
    assert refusal(folder, "".join(pieces), file).isprintable()


@pytest.mark.parametrize("file", FILES)
@given(junk=st.binary(max_size=60))
@settings(
    max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
def test_junk_is_read_or_refused_in_one_line(folder, file, junk):
    assert refusal(folder, junk, file).isprintable()
