# SPDX-License-Identifier: Apache-2.0
"""Traffic scenarios: parse their text form, and draw the sizes of each request.

D(100,200)               prompts of 100 tokens, answers of 200
N(480,240)/(300,150)     normal distribution: mean and deviation of prompts, and of answers
U(50,100)/(200,250)      uniform: minimum and maximum of prompts, and of answers; U(100,250): from 1 to these
E(128)                   texts of 128 tokens to embed
I(512,256), I(512,256,2) images of that width and height, one or the given number
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
"""Default scenarios of each task."""

_LETTERS = {"text-to-text": "DNU", "text-to-embeddings": "E", "image-to-text": "I", "image-to-embeddings": "I"}
_FORM = re.compile(r"([DNUEI])\(([0-9, ]+)\)(?:/\(([0-9, ]+)\))?")
_COUNTS = {("D", 2, 0), ("N", 2, 2), ("U", 2, 2), ("U", 2, 0), ("E", 1, 0), ("I", 2, 0), ("I", 3, 0)}
_MAX_TOKENS = 10_000_000
_MAX_PIXELS = 8192
_IMAGE_ANSWER_TOKENS = 100


@dataclass(frozen=True, slots=True)
class RequestSizes:
    """Sizes of one request."""

    prompt_tokens: int
    answer_tokens: int
    """0 for embeddings."""
    width: int = 0
    height: int = 0
    pictures: int = 0


@dataclass(frozen=True, slots=True)
class Scenario:
    """A distribution of request sizes."""

    text: str
    """As the user wrote it."""
    letter: str
    first: tuple[int, ...]
    second: tuple[int, ...] = ()

    def draw(self, chance: random.Random) -> RequestSizes:
        """Draw the sizes of the next request."""
        if self.letter == "D":
            return RequestSizes(*self.first)
        if self.letter == "N":
            prompt, answer = (max(1, round(chance.gauss(*pair))) for pair in (self.first, self.second))
            return RequestSizes(prompt, answer)
        if self.letter == "U":
            ranges = (self.first, self.second) if self.second else ((1, self.first[0]), (1, self.first[1]))
            return RequestSizes(*(chance.randint(*bounds) for bounds in ranges))
        if self.letter == "E":
            return RequestSizes(self.first[0], 0)
        width, height, *more = self.first
        return RequestSizes(0, _IMAGE_ANSWER_TOKENS, width, height, *(more or (1,)))


def parse_scenario(value: str, task: str) -> Scenario:
    """Parse a scenario for a task. Raises InvalidArgument."""
    letters = _LETTERS[task]
    match = _FORM.fullmatch(value.strip())
    forms = " or ".join(_EXAMPLES[letter] for letter in letters)
    if match is None:
        raise InvalidArgument(f"scenario {value[:60]!a} is invalid: write {forms}")
    try:
        first, second = (_numbers(group or "") for group in match.group(2, 3))
    except ValueError:
        raise InvalidArgument(f"scenario {value[:60]!a} has invalid numbers: write {forms}") from None
    letter = match[1]
    if letter not in letters:
        raise InvalidArgument(f"scenario {value[:60]!a} is not for {task}: write {forms}")
    if (letter, len(first), len(second)) not in _COUNTS:
        raise InvalidArgument(f"scenario {value[:60]!a} has the wrong number of values: write {_EXAMPLES[letter]}")
    scenario = Scenario(value.strip(), letter, first, second)
    _check(scenario)
    return scenario


def _check(scenario: Scenario) -> None:
    value, letter = scenario.text[:60], scenario.letter
    given = [*scenario.first, *scenario.second]
    if letter == "I" and not all(1 <= number <= _MAX_PIXELS for number in given):
        raise InvalidArgument(f"scenario {value!a}: image sizes must be from 1 to {_MAX_PIXELS}")
    minimums = given if letter in "DEU" else [scenario.first[0], scenario.second[0]] if letter == "N" else [1]
    if min(minimums) < 1 or max(given) > _MAX_TOKENS:
        raise InvalidArgument(f"scenario {value!a}: numbers of tokens must be from 1 to {_MAX_TOKENS}")
    if scenario.letter == "U" and any(
        pair[0] > pair[1] for pair in (scenario.first, scenario.second) if scenario.second
    ):
        raise InvalidArgument(f"scenario {value!a}: the minimum is above the maximum; write {_EXAMPLES['U']}")


def _numbers(value: str) -> tuple[int, ...]:
    return tuple(int(number) for number in value.split(",")) if value else ()


_EXAMPLES = {
    "D": "D(100,100)",
    "N": "N(480,240)/(300,150)",
    "U": "U(50,100)/(200,250)",
    "E": "E(128)",
    "I": "I(512,512)",
}
