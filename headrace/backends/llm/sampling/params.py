# SPDX-License-Identifier: Apache-2.0
"""Sampling params and output formats: parse them from v2 parameters and validate their ranges.

Parsing also converts types: in v2 a list is JSON text, and Triton's clients send numbers as text. `check_sampling` is for
requests of every protocol.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import orjson

from headrace.core.errors import InvalidArgument
from headrace.core.generation import OutputFormat, Sampling

JSON_CHARACTERS = 262_144
MAX_STOPS, MAX_STOP_CHARACTERS, MAX_STOP_TOKENS, MAX_BIASES = 16, 1000, 128, 1024
MAX_BAD_WORDS, MAX_BAD_WORD_CHARACTERS = 128, 256
MAX_ALLOWED_TOKENS = 65_536
MAX_PROMPT_LOGPROBS = 1 << 16
"""Log-probabilities of a prompt: its tokens, each with its alternatives."""
_PRIORITIES = 2**31
_HIGHEST_TOKENS = 2**31 - 1
_INTEGERS: dict[str, tuple[int, int]] = {
    "max_tokens": (1, _HIGHEST_TOKENS),
    "min_tokens": (0, _HIGHEST_TOKENS),
    "top_k": (0, _HIGHEST_TOKENS),
    "seed": (-(2**63), 2**64 - 1),
    "n": (1, 128),
    "logprobs": (0, 20),
    "prompt_logprobs": (0, 20),
    "truncate_prompt_tokens": (-1, _HIGHEST_TOKENS),
    "priority": (-_PRIORITIES, _PRIORITIES - 1),
}
_OPTIONAL = frozenset({"max_tokens", "seed", "logprobs", "prompt_logprobs", "truncate_prompt_tokens"})
_BOOLEANS = ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens")


def parse_sampling(values: Mapping[str, Any]) -> Sampling:
    """Parse values whose names are all in `SAMPLING_FIELDS`."""
    return Sampling(**{name: SAMPLING_FIELDS[name](name, value) for name, value in values.items() if value is not None})


def parse_output_format(value: Any) -> OutputFormat | None:
    """Parse OpenAI's `response_format`, an object or its JSON text."""
    given = _parse_json("response_format", value) if isinstance(value, str) else value
    kind = given.get("type") if isinstance(given, Mapping) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return OutputFormat("json_object")
    if kind == "json_schema":
        outer = given.get("json_schema")
        schema = outer.get("schema") if isinstance(outer, Mapping) else None
        if not isinstance(schema, Mapping):
            raise InvalidArgument("response_format of type 'json_schema' needs {'json_schema': {'schema': {...}}}")
        return OutputFormat("json_schema", schema)
    if kind == "regex" and isinstance(given.get("regex"), str):
        return OutputFormat("regex", regex=given["regex"])
    raise InvalidArgument("response_format must be an object whose 'type' is text, json_object, json_schema or regex")


def parse_object(name: str, value: Any) -> Mapping[str, Any]:
    """Return a JSON object, given as such or as text."""
    given = _parse_json(name, value) if isinstance(value, str) else value
    if not isinstance(given, Mapping):
        raise InvalidArgument(f"{name} must be the text of a JSON object")
    return given


def parse_bool(name: str, value: Any) -> bool:
    """Return a boolean, given as such or as text."""
    if isinstance(value, str):
        value = {"true": True, "false": False}.get(value.lower())
    if type(value) is not bool:
        raise InvalidArgument(f"{name} must be true or false")
    return value


def _parse_json(name: str, text: str) -> Any:
    if len(text) > JSON_CHARACTERS:
        raise InvalidArgument(f"{name} has {len(text)} characters; at most {JSON_CHARACTERS} are allowed")
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        raise InvalidArgument(f"{name} is not JSON") from None


def _parse_float(name: str, value: Any) -> float:
    number = _parse_number(name, value)
    return number if type(number) is float else float(number)


def _parse_int(name: str, value: Any) -> int:
    number = _parse_number(name, value)
    if type(number) is float and not number.is_integer():
        raise InvalidArgument(f"{name} is {number}: use a whole number")
    return int(number)


def _parse_number(name: str, value: Any) -> int | float:
    if type(value) in {int, float}:
        # Refuse infinity and NaN here: converting them to int would raise.
        if value - value != 0:
            raise InvalidArgument(f"{name} must be a finite number")
        if abs(value) < 2**70:
            return value  # type: ignore[no-any-return]
    if isinstance(value, str) and len(value) <= 40:
        try:
            number = orjson.loads(value)
        except orjson.JSONDecodeError:
            number = None
        if type(number) in {int, float}:
            return _parse_number(name, number)
    raise InvalidArgument(f"{name} must be a number")


def _parse_strings(name: str, value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        # One string; or the JSON of several, because v2 parameters cannot be lists.
        value = _parse_list(value) if value.startswith("[") else [value]
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise InvalidArgument(f"{name} must be a string or a list of strings")
    return tuple(value)


def _parse_list(text: str) -> list[Any]:
    try:
        values = orjson.loads(text)
    except orjson.JSONDecodeError:
        return [text]
    return values if isinstance(values, list) else [text]


def _parse_tokens(name: str, value: Any) -> tuple[int, ...]:
    given = _parse_json(name, value) if isinstance(value, str) else value
    if not isinstance(given, list):
        raise InvalidArgument(f"{name} must be a list of whole numbers")
    return tuple(_parse_int(name, item) for item in given)


def _parse_bias(name: str, value: Any) -> dict[int, float]:
    return {_parse_int(name, token): _parse_float(name, bias) for token, bias in parse_object(name, value).items()}


SAMPLING_FIELDS: dict[str, Callable[[str, Any], Any]] = {
    "max_tokens": _parse_int,
    "min_tokens": _parse_int,
    "temperature": _parse_float,
    "top_p": _parse_float,
    "top_k": _parse_int,
    "min_p": _parse_float,
    "repetition_penalty": _parse_float,
    "presence_penalty": _parse_float,
    "frequency_penalty": _parse_float,
    "logit_bias": _parse_bias,
    "seed": _parse_int,
    "stop": _parse_strings,
    "stop_token_ids": _parse_tokens,
    "ignore_eos": parse_bool,
    "n": _parse_int,
    "logprobs": _parse_int,
    "prompt_logprobs": _parse_int,
    "bad_words": _parse_strings,
    "allowed_token_ids": _parse_tokens,
    "truncate_prompt_tokens": _parse_int,
    "include_stop_str_in_output": parse_bool,
    "skip_special_tokens": parse_bool,
    "priority": _parse_int,
}
"""The fields of `Sampling`, each with its parser."""


def _in_range(lowest: float, highest: float, *, above: bool = False) -> Callable[[float], bool]:
    if above:
        return lambda value: lowest < value <= highest
    return lambda value: lowest <= value <= highest


_NUMBERS: dict[str, tuple[Callable[[float], bool], str]] = {
    "temperature": (_in_range(0, 2), "a number from 0 to 2"),
    "top_p": (_in_range(0, 1, above=True), "a number above 0 and at most 1"),
    "min_p": (_in_range(0, 1), "a number from 0 to 1"),
    "repetition_penalty": (_in_range(0, 10, above=True), "a number above 0 and at most 10"),
    "presence_penalty": (_in_range(-2, 2), "a number from -2 to 2"),
    "frequency_penalty": (_in_range(-2, 2), "a number from -2 to 2"),
}


def check_sampling(sampling: Sampling, vocabulary: int) -> None:
    """Validate sampling params; raises InvalidArgument with the name of the first invalid field."""
    for name, (is_valid, range_) in _NUMBERS.items():
        value = getattr(sampling, name)
        if not _is_number(value) or not is_valid(value):
            raise InvalidArgument(f"{name} is {_show(value)}: use {range_}")
    for name, (lowest, highest) in _INTEGERS.items():
        value = getattr(sampling, name)
        if value is None and name in _OPTIONAL:
            continue
        if type(value) is not int or not lowest <= value <= highest:
            raise InvalidArgument(f"{name} is {_show(value)}: use a whole number from {lowest} to {highest}")
    if sampling.max_tokens is not None and sampling.min_tokens > sampling.max_tokens:
        raise InvalidArgument(
            f"min_tokens is {sampling.min_tokens}, more than max_tokens, which is {sampling.max_tokens}: lower it"
        )
    if sampling.truncate_prompt_tokens == 0:
        raise InvalidArgument("truncate_prompt_tokens is 0: keep at least one token, or use -1 for as many as fit")
    for name in _BOOLEANS:
        if type(getattr(sampling, name)) is not bool:
            raise InvalidArgument(f"{name} must be true or false")
    _check_stops(sampling, vocabulary)
    _check_bias(sampling, vocabulary)
    _check_bad_words(sampling.bad_words)
    if sampling.allowed_token_ids is not None:
        _check_allowed_tokens(sampling.allowed_token_ids, vocabulary)


def check_prompt_logprobs(tokens: int, alternatives: int | None) -> None:
    """Refuse a prompt whose log-probabilities would be too many."""
    if alternatives is None or tokens * (1 + alternatives) <= MAX_PROMPT_LOGPROBS:
        return
    most = MAX_PROMPT_LOGPROBS // (1 + alternatives)
    raise InvalidArgument(
        f"prompt_logprobs of {alternatives} is for prompts of at most {most} tokens, and this one has {tokens}: use fewer "
        "alternatives or a shorter prompt"
    )


def _check_stops(sampling: Sampling, vocabulary: int) -> None:
    if len(sampling.stop) > MAX_STOPS:
        raise InvalidArgument(f"stop has {len(sampling.stop)} strings: at most {MAX_STOPS} are allowed")
    for text in sampling.stop:
        if not isinstance(text, str) or not 0 < len(text) <= MAX_STOP_CHARACTERS:
            raise InvalidArgument(f"stop must be strings of 1 to {MAX_STOP_CHARACTERS} characters each")
    if len(sampling.stop_token_ids) > MAX_STOP_TOKENS:
        raise InvalidArgument(
            f"stop_token_ids has {len(sampling.stop_token_ids)}: at most {MAX_STOP_TOKENS} are allowed"
        )
    for token in sampling.stop_token_ids:
        check_token_id("stop_token_ids", token, vocabulary)


def _check_bias(sampling: Sampling, vocabulary: int) -> None:
    if len(sampling.logit_bias) > MAX_BIASES:
        raise InvalidArgument(f"logit_bias has {len(sampling.logit_bias)} tokens: at most {MAX_BIASES} are allowed")
    for token, bias in sampling.logit_bias.items():
        check_token_id("logit_bias", token, vocabulary)
        if not _is_number(bias) or not -100 <= bias <= 100:
            raise InvalidArgument(f"logit_bias of token {token} is {_show(bias)}: use a number from -100 to 100")


def _check_bad_words(words: tuple[str, ...]) -> None:
    if len(words) > MAX_BAD_WORDS:
        raise InvalidArgument(f"bad_words has {len(words)} words: at most {MAX_BAD_WORDS} are allowed")
    for word in words:
        if not isinstance(word, str) or not 0 < len(word.strip()) <= len(word) <= MAX_BAD_WORD_CHARACTERS:
            raise InvalidArgument(
                f"bad_words must be words of 1 to {MAX_BAD_WORD_CHARACTERS} characters each, not only spaces"
            )


def _check_allowed_tokens(tokens: tuple[int, ...], vocabulary: int) -> None:
    if not 0 < len(tokens) <= MAX_ALLOWED_TOKENS:
        raise InvalidArgument(
            f"allowed_token_ids has {len(tokens)} tokens: use 1 to {MAX_ALLOWED_TOKENS}, or leave it out"
        )
    for token in tokens:
        check_token_id("allowed_token_ids", token, vocabulary)


def check_token_id(field: str, token: object, vocabulary: int) -> None:
    """Refuse a value that is not a token id of the model."""
    if type(token) is not int or not 0 <= token < vocabulary:
        raise InvalidArgument(
            f"{field} has {_show(token)}, which is not a token id: use whole numbers below {vocabulary}"
        )


def _is_number(value: object) -> bool:
    return type(value) is int or (type(value) is float and math.isfinite(value))


def _show(value: object) -> str:
    """Return a client's value as short text for an error message."""
    if isinstance(value, int) and abs(value) >= 2**70:
        return "a very large number"
    return ascii(value)[:40] if value is None or isinstance(value, str | int | float) else f"a {type(value).__name__}"
