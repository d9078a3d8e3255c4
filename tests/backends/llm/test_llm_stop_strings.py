# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.backends.llm.detokenizer import StopStrings


def _expected(text: str, stops: list[str]) -> tuple[str, bool]:
    """The same, slowly: the stop that ends first, of those the longest."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end - max(map(len, found))], True
    return text, False


@given(
    st.text("ab ", max_size=40),
    st.lists(st.text("ab", min_size=1, max_size=6), max_size=4),
    st.lists(st.integers(0, 40), max_size=12),
)
def test_cut_anywhere_it_shows_the_same(text: str, stops: list[str], cuts: list[int]) -> None:
    places = [0, *sorted(cut for cut in cuts if cut <= len(text)), len(text)]
    search = StopStrings(tuple(stops))
    shown, stopped = "", False
    for start, end in zip(places, places[1:], strict=False):
        new, stopped = search.push(text[start:end])
        shown += new
        if stopped:
            break
        whole = text[:end]
        # Nothing is held back that could not begin a stop.
        held = whole[len(shown) :]
        assert not held or any(stop.startswith(held) for stop in stops)
    if not stopped:
        shown += search.finish()
    assert (shown, stopped) == _expected(text, stops)


def test_the_found_stop_string_is_reported() -> None:
    search = StopStrings(("ab", "cab", "x"))
    assert search.push("a c") == ("a ", False) and search.matched == ""
    assert search.push("ab x") == ("", True) and search.matched == "cab"


def test_without_stops_text_passes() -> None:
    assert StopStrings(()).push("anything") == ("anything", False)
    assert StopStrings(()).finish() == ""


@pytest.mark.parametrize("size", [1, 3, 50])
def test_a_stop_over_many_pieces_is_found(size: int) -> None:
    search, shown = StopStrings(("\n\nUser:",)), ""
    text = "Hello.\n\nUs\n\nUser: no"
    for start in range(0, len(text), size):
        new, stopped = search.push(text[start : start + size])
        shown += new
        if stopped:
            break
    assert shown == "Hello.\n\nUs" and stopped


def test_after_the_stop_nothing_is_shown() -> None:
    search = StopStrings(("x",))
    assert search.push("axb") == ("a", True)
    assert search.push("more") == ("", True)
    assert search.finish() == ""


def test_a_stop_can_be_part_of_the_text() -> None:
    search = StopStrings(("stop", "p!"), included=True)
    assert search.push("a st") == ("a ", False)
    assert search.push("op! more") == ("stop", True)
    assert search.push("more") == ("", True)
    assert search.matched == "stop"


def test_held_back_text_is_sent_at_the_end() -> None:
    search = StopStrings(("END",))
    assert search.push("the EN") == ("the ", False)
    assert search.finish() == "EN"


def test_an_unkind_stop_costs_no_more_than_its_text() -> None:
    # Quadratic work would take minutes here.
    search = StopStrings(("a" * 999 + "b",) * 16)
    shown = sum(len(search.push("aaaa")[0]) for _ in range(20_000))
    assert shown + len(search.finish()) == 80_000
