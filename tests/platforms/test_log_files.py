# SPDX-License-Identifier: Apache-2.0
"""A log that grows, seen through looks at its end."""

from __future__ import annotations

import asyncio

import pytest

from headrace.platforms.log_files import SKIPPED, WINDOW_LINES, follow_log, new_lines


@pytest.mark.parametrize(
    ("before", "now", "fresh"),
    [
        ([], [], []),
        ([], ["a"], ["a"]),
        (["a"], ["a"], []),
        (["a", "b"], ["a", "b", "c"], ["c"]),
        (["a", "b", "c"], ["b", "c", "d", "e"], ["d", "e"]),
        (["x", "x"], ["x", "x", "x"], ["x"]),
        (["a", "b"], ["y", "z"], [SKIPPED, "y", "z"]),
        (["a", "b"], [], []),
    ],
)
def test_only_new_lines_are_sent(before: list[str], now: list[str], fresh: list[str]) -> None:
    assert new_lines(before, now) == fresh


def followed(looks: list[str], tail: int) -> list[str]:
    left = list(looks)

    async def read(lines: int) -> str:
        assert lines == WINDOW_LINES
        return left.pop(0)

    async def lives() -> bool:
        return len(left) > 1

    async def pause(seconds: float) -> None:
        pass

    async def main() -> list[str]:
        return [line async for line in follow_log(read, lives, tail, pause=pause)]

    return asyncio.run(main())


def test_it_starts_with_the_tail_and_ends_with_the_last_lines_of_the_service() -> None:
    assert followed(["1\n2\n3", "1\n2\n3\n4", "1\n2\n3\n4", "1\n2\n3\n4\nbye"], 2) == ["2", "3", "4", "bye"]
    assert followed(["1\n2", "1\n2"], 0) == []
    assert followed(["", "", "a"], 10) == ["a"]
