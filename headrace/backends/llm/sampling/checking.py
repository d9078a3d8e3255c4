# SPDX-License-Identifier: Apache-2.0
"""Whether the numbers of a `Sampling` are such as can be meant. Called by `requests` for requests of any protocol."""

from __future__ import annotations

import math
from collections.abc import Callable

from headrace.core.errors import InvalidArgument
from headrace.core.generation import Sampling

STOPS, STOP_CHARACTERS, STOP_TOKENS, BIASES = 16, 1000, 128, 1024
_HIGHEST_TOKENS = 2**31 - 1


def _within(lowest: float, highest: float, *, above: bool = False) -> Callable[[float], bool]:
    if above:
        return lambda value: lowest < value <= highest
    return lambda value: lowest <= value <= highest


_NUMBERS: dict[str, tuple[Callable[[float], bool], str]] = {
    "temperature": (_within(0, 2), "a number from 0 to 2"),
    "top_p": (_within(0, 1, above=True), "a number above 0 and at most 1"),
    "min_p": (_within(0, 1), "a number from 0 to 1"),
    "repetition_penalty": (_within(0, 10, above=True), "a number above 0 and at most 10"),
    "presence_penalty": (_within(-2, 2), "a number from -2 to 2"),
    "frequency_penalty": (_within(-2, 2), "a number from -2 to 2"),
}
_WHOLE_NUMBERS: dict[str, tuple[int, int]] = {
    "max_tokens": (1, _HIGHEST_TOKENS),
    "min_tokens": (0, _HIGHEST_TOKENS),
    "top_k": (0, _HIGHEST_TOKENS),
    "seed": (-(2**63), 2**64 - 1),
    "n": (1, 128),
    "logprobs": (0, 20),
}
_MAY_BE_NONE = frozenset({"max_tokens", "seed", "logprobs"})


def check(sampling: Sampling, vocabulary: int) -> None:
    """Raise for the first thing that is wrong, by its name."""
    for name, (holds, range_) in _NUMBERS.items():
        value = getattr(sampling, name)
        if not _is_number(value) or not holds(value):
            raise InvalidArgument(f"{name} is {_shown(value)}: use {range_}")
    for name, (lowest, highest) in _WHOLE_NUMBERS.items():
        value = getattr(sampling, name)
        if value is None and name in _MAY_BE_NONE:
            continue
        if type(value) is not int or not lowest <= value <= highest:
            raise InvalidArgument(f"{name} is {_shown(value)}: use a whole number from {lowest} to {highest}")
    if sampling.max_tokens is not None and sampling.min_tokens > sampling.max_tokens:
        raise InvalidArgument(
            f"min_tokens is {sampling.min_tokens}, more than max_tokens, which is {sampling.max_tokens}: lower it"
        )
    if type(sampling.ignore_eos) is not bool:
        raise InvalidArgument("ignore_eos must be true or false")
    _check_stops(sampling, vocabulary)
    _check_bias(sampling, vocabulary)


def _check_stops(sampling: Sampling, vocabulary: int) -> None:
    if len(sampling.stop) > STOPS:
        raise InvalidArgument(f"stop has {len(sampling.stop)} texts: at most {STOPS} are allowed")
    for text in sampling.stop:
        if not isinstance(text, str) or not 0 < len(text) <= STOP_CHARACTERS:
            raise InvalidArgument(f"stop must be texts of 1 to {STOP_CHARACTERS} characters each")
    if len(sampling.stop_token_ids) > STOP_TOKENS:
        raise InvalidArgument(f"stop_token_ids has {len(sampling.stop_token_ids)}: at most {STOP_TOKENS} are allowed")
    for token in sampling.stop_token_ids:
        check_token("stop_token_ids", token, vocabulary)


def _check_bias(sampling: Sampling, vocabulary: int) -> None:
    if len(sampling.logit_bias) > BIASES:
        raise InvalidArgument(f"logit_bias has {len(sampling.logit_bias)} tokens: at most {BIASES} are allowed")
    for token, bias in sampling.logit_bias.items():
        check_token("logit_bias", token, vocabulary)
        if not _is_number(bias) or not -100 <= bias <= 100:
            raise InvalidArgument(f"logit_bias of token {token} is {_shown(bias)}: use a number from -100 to 100")


def check_token(field: str, token: object, vocabulary: int) -> None:
    """Refuse what is no token of the model."""
    if type(token) is not int or not 0 <= token < vocabulary:
        raise InvalidArgument(f"{field} has {_shown(token)}, which is no token: use whole numbers below {vocabulary}")


def _is_number(value: object) -> bool:
    return type(value) is int or (type(value) is float and math.isfinite(value))


def _shown(value: object) -> str:
    """A caller's value for an error: short, whatever it is."""
    if isinstance(value, int) and abs(value) >= 2**70:
        return "a very large number"
    return ascii(value)[:40] if value is None or isinstance(value, str | int | float) else f"a {type(value).__name__}"
