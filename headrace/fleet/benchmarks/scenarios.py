# SPDX-License-Identifier: Apache-2.0
"""Traffic scenarios, as people write them, to the sizes of each request. Pure; chance is passed in.

D(100,200)               prompts of 100 tokens, answers of 200
N(480,240)/(300,150)     normal: mean and deviation of prompts, and of answers
U(50,100)/(200,250)      even: least and most of prompts, and of answers; U(100,250): from 1 up to those
E(128)                   texts of 128 tokens to embed
I(512,256), I(512,256,2) pictures of that width and height, one or so many
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

from headrace.core.errors import InvalidArgument

TASKS = ("text-to-text", "image-to-text", "text-to-embeddings", "image-to-embeddings")

DEFAULTS = {
    "text-to-text": ("N(480,240)/(300,150)", "D(100,100)", "D(100,1000)", "D(2000,200)", "D(7800,200)"),
    "image-to-text": ("I(512,512)", "I(1024,512)", "I(2048,2048)"),
    "text-to-embeddings": ("E(64)", "E(128)", "E(256)", "E(512)", "E(1024)"),
    "image-to-embeddings": ("I(512,512)", "I(1024,512)", "I(2048,2048)"),
}
"""Of each task, where none is told."""

_LETTERS = {"text-to-text": "DNU", "text-to-embeddings": "E", "image-to-text": "I", "image-to-embeddings": "I"}
_FORM = re.compile(r"([DNUEI])\(([0-9, ]+)\)(?:/\(([0-9, ]+)\))?")
_COUNTS = {("D", 2, 0), ("N", 2, 2), ("U", 2, 2), ("U", 2, 0), ("E", 1, 0), ("I", 2, 0), ("I", 3, 0)}
_MOST_TOKENS = 10_000_000
_MOST_PIXELS = 8192
_PICTURE_ANSWER = 100


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of one request."""

    prompt_tokens: int
    answer_tokens: int
    """0: none, for embeddings."""
    width: int = 0
    height: int = 0
    pictures: int = 0


@dataclass(frozen=True, slots=True)
class Scenario:
    """Sizes of requests."""

    said: str
    letter: str
    first: tuple[int, ...]
    second: tuple[int, ...] = ()

    def draw(self, chance: random.Random) -> Sizes:
        """The sizes of the next request."""
        if self.letter == "D":
            return Sizes(*self.first)
        if self.letter == "N":
            prompt, answer = (max(1, round(chance.gauss(*each))) for each in (self.first, self.second))
            return Sizes(prompt, answer)
        if self.letter == "U":
            ranges = (self.first, self.second) if self.second else ((1, self.first[0]), (1, self.first[1]))
            return Sizes(*(chance.randint(*each) for each in ranges))
        if self.letter == "E":
            return Sizes(self.first[0], 0)
        width, height, *more = self.first
        return Sizes(0, _PICTURE_ANSWER, width, height, *(more or (1,)))


def parse_scenario(said: str, task: str) -> Scenario:
    """A scenario for a task. Raises InvalidArgument that says what to write."""
    letters = _LETTERS[task]
    found = _FORM.fullmatch(said.strip())
    forms = " or ".join(_EXAMPLES[each] for each in letters)
    if found is None:
        raise InvalidArgument(f"scenario {said[:60]!a} is none: write {forms}")
    try:
        first, second = (_numbers(each or "") for each in found.group(2, 3))
    except ValueError:
        raise InvalidArgument(f"scenario {said[:60]!a} has numbers that are none: write {forms}") from None
    letter = found[1]
    if letter not in letters:
        raise InvalidArgument(f"scenario {said[:60]!a} is not for {task}: write {forms}")
    if (letter, len(first), len(second)) not in _COUNTS:
        raise InvalidArgument(f"scenario {said[:60]!a} has not the numbers it needs: write {_EXAMPLES[letter]}")
    scenario = Scenario(said.strip(), letter, first, second)
    _check(scenario)
    return scenario


def _check(scenario: Scenario) -> None:
    said, letter = scenario.said[:60], scenario.letter
    given = [*scenario.first, *scenario.second]
    if letter == "I" and not all(1 <= each <= _MOST_PIXELS for each in given):
        raise InvalidArgument(f"scenario {said!a}: sizes of pictures are from 1 to {_MOST_PIXELS}")
    least = given if letter in "DEU" else [scenario.first[0], scenario.second[0]] if letter == "N" else [1]
    if min(least) < 1 or max(given) > _MOST_TOKENS:
        raise InvalidArgument(f"scenario {said!a}: numbers of tokens are from 1 to {_MOST_TOKENS}")
    if scenario.letter == "U" and any(
        pair[0] > pair[1] for pair in (scenario.first, scenario.second) if scenario.second
    ):
        raise InvalidArgument(f"scenario {said!a}: the least is above the most; write {_EXAMPLES['U']}")


def _numbers(said: str) -> tuple[int, ...]:
    return tuple(int(each) for each in said.split(",")) if said else ()


_EXAMPLES = {
    "D": "D(100,100)",
    "N": "N(480,240)/(300,150)",
    "U": "U(50,100)/(200,250)",
    "E": "E(128)",
    "I": "I(512,512)",
}
