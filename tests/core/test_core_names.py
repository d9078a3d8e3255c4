# SPDX-License-Identifier: Apache-2.0
"""Names and versions: nothing that could leave a folder gets through."""

import posixpath
import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from headrace.core.errors import InvalidArgument
from headrace.core.names import NAME_PATTERN, check_name, is_name, nearest, parse_version

GOOD = ["a", "_", "0", "resnet50", "ResNet-50_v1.5", "a.b.c", "a-", "a.", "_hidden", "1", "x" * 255]

BAD = [
    "",
    ".",
    "..",
    "...",
    "../a",
    "a/..",
    "a/../b",
    "a..b",
    "a..",
    "/etc/passwd",
    "//a",
    "a/b",
    "a\\b",
    "..\\a",
    "C:\\a",
    "C:a",
    "%2e%2e",
    "%2e%2e%2fa",
    "..%2f",
    "..%c0%af",
    "a%00b",
    "a\0b",
    "a\0",
    "\0",
    ".hidden",
    "-rf",
    "--option",
    "a b",
    " a",
    "a ",
    "a\n",
    "\na",
    "a\r\nb",
    "a\tb",
    "~",
    "~root",
    "$HOME",
    "`id`",
    "$(id)",
    "a;b",
    "a|b",
    "a&b",
    "a*",
    "a?",
    "a#b",
    "a:b",
    "a'b",
    'a"b',
    "<a>",
    "a{b}",
    "file://a",
    "é",
    "a\u0301",
    "\uff0e\uff0e",  # full-width dots
    "a\u2215b",  # division slash
    "a\u202eb",
    "\u0661",  # an Arabic digit
    "\ud800",
    "x" * 256,
    "x" * 4096,
]


@pytest.mark.parametrize("text", GOOD)
def test_good_names_pass(text):
    assert check_name(text) is text


@pytest.mark.parametrize("text", BAD, ids=ascii)
def test_bad_names_are_refused_with_printable_text(text):
    assert not is_name(text)
    with pytest.raises(InvalidArgument, match="^workspace name .* is not allowed: use 1 to 255") as caught:
        check_name(text, "workspace")
    assert caught.value.message.isascii()
    assert caught.value.message.isprintable()
    assert len(caught.value.message) < 1024


@given(st.text(alphabet="./\\-_aA0%~\0\n \u2024") | st.text())
@example("a/../../b")
def test_a_name_stays_one_step_below_its_folder(text):
    if is_name(text):
        assert posixpath.normpath(posixpath.join("/root", text)) == f"/root/{text}"
        assert posixpath.dirname(posixpath.join("/root", text)) == "/root"
        assert not text.startswith(("-", "."))
        assert text.isascii()


@given(st.from_regex(re.compile(NAME_PATTERN), fullmatch=True))
def test_the_pattern_and_the_check_agree(text):
    assert is_name(text) == (".." not in text)


@pytest.mark.parametrize(("text", "number"), [("0", 0), ("1", 1), ("10", 10), ("9" * 18, 10**18 - 1)])
def test_versions_are_whole_numbers(text, number):
    assert parse_version(text) == number


@pytest.mark.parametrize(
    "text",
    [
        "",
        "-1",
        "+1",
        "01",
        "00",
        "1.0",
        "1 ",
        " 1",
        "1\n",
        "1_000",
        "0x1",
        "1e3",
        "٣",
        "²",
        "latest",
        "../1",
        "1/..",
        "9" * 19,
    ],
    ids=ascii,
)
def test_other_versions_are_refused(text):
    with pytest.raises(InvalidArgument, match="use a whole number such as 1") as caught:
        parse_version(text)
    assert caught.value.message.isascii()


@pytest.mark.parametrize(
    ("name", "known", "expected"),
    [
        ("inptus", ["inputs", "outputs"], "inputs"),
        ("MAX_BATCH", ["max_batch", "other"], "max_batch"),
        ("minreplicas", ["minReplicas"], "minReplicas"),
        ("zzz", ["inputs"], ""),
        ("a", [], ""),
        ("", ["a"], ""),
    ],
)
def test_nearest_is_the_closest_known_name(name: str, known: list[str], expected: str) -> None:
    assert nearest(name, known) == expected
