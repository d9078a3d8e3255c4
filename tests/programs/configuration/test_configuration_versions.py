# SPDX-License-Identifier: Apache-2.0
"""The order of versions by their names, and the numbers they get."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.models.staging import is_version, number_versions, sort_key


@pytest.mark.parametrize(
    "ordered",
    [
        ["v1.0.0", "v1.2.0", "v1.9.0", "v1.10.0", "v2"],
        ["1.2.0-alpha", "1.2.0-beta.2", "1.2.0-beta.11", "1.2.0-rc1", "1.2.0", "1.2.1"],
        ["1", "2", "10"],
        ["2023-12-31", "2024-05-01", "2024-05-10"],
        ["v1", "v1.0", "v1.0.1"],
    ],
)
def test_from_old_to_new(ordered: list[str]) -> None:
    mixed = [*ordered[1::2], *ordered[::2]]
    assert sorted(mixed, key=sort_key) == ordered


def test_names_that_resemble_versions() -> None:
    assert all(map(is_version, ["1", "v1", "V2.0", "1.2.0-rc1+build", "2024_05"]))
    assert not any(map(is_version, ["", "v", "model", "variables", "assets", "v1/x", "1,2", "1=2", ".1"]))


def test_who_has_a_number_keeps_it() -> None:
    first = number_versions(["v1.2.0", "v1.0.0"], {})
    assert first == {"v1.0.0": 1, "v1.2.0": 2}
    assert number_versions(["v1.3.0", "v1.2.0"], first) == {"v1.2.0": 2, "v1.3.0": 3}
    assert number_versions(["7", "3"], {}) == {"3": 3, "7": 7}


def test_one_in_between_gives_all_new_numbers() -> None:
    before = {"v1": 1, "v3": 2}
    assert number_versions(["v1", "v2", "v3"], before) == {"v1": 3, "v2": 4, "v3": 5}


@given(st.lists(st.sets(st.from_regex(r"v[0-9]{1,2}(\.[0-9])?", fullmatch=True), min_size=1, max_size=6), max_size=5))
def test_numbers_follow_the_order_and_never_change_their_meaning(looks: list[set[str]]) -> None:
    known: dict[str, int] = {}
    meant: dict[int, str] = {}
    for names in looks:
        numbers = number_versions(names, known)
        assert [numbers[name] for name in sorted(names, key=sort_key)] == sorted(numbers.values())
        assert len(set(numbers.values())) == len(numbers)
        for name, number in numbers.items():
            if number in meant and name in known:
                assert meant[number] == name
            meant[number] = name
        known = numbers
