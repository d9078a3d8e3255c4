# SPDX-License-Identifier: Apache-2.0
"""Reads `Sampling` and `OutputFormat` from names and values, as v2's parameters and `sampling_parameters` give them.

Called by `requests`. Types are put right here (in v2 a list is JSON text, and Triton's clients write numbers as text); that
numbers are within their ranges is `checking`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import orjson

from headrace.core.errors import InvalidArgument
from headrace.core.generation import OutputFormat, Sampling

JSON_CHARACTERS = 262_144


def sampling_of(values: Mapping[str, Any]) -> Sampling:
    """From values whose names are all in `SAMPLING_FIELDS`."""
    return Sampling(**{name: SAMPLING_FIELDS[name](name, value) for name, value in values.items() if value is not None})


def format_of(value: Any) -> OutputFormat | None:
    """From OpenAI's `response_format`, or its JSON text."""
    given = _json("response_format", value) if isinstance(value, str) else value
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


def object_of(name: str, value: Any) -> Mapping[str, Any]:
    """A JSON object from its text."""
    given = _json(name, value) if isinstance(value, str) else value
    if not isinstance(given, Mapping):
        raise InvalidArgument(f"{name} must be the text of a JSON object")
    return given


def flag_of(name: str, value: Any) -> bool:
    """True or false, also as text."""
    if isinstance(value, str):
        value = {"true": True, "false": False}.get(value.lower())
    if type(value) is not bool:
        raise InvalidArgument(f"{name} must be true or false")
    return value


def _json(name: str, text: str) -> Any:
    if len(text) > JSON_CHARACTERS:
        raise InvalidArgument(f"{name} has {len(text)} characters; at most {JSON_CHARACTERS} are allowed")
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        raise InvalidArgument(f"{name} is not JSON") from None


def _real(name: str, value: Any) -> float:
    number = _number(name, value)
    return number if type(number) is float else float(number)


def _whole(name: str, value: Any) -> int:
    number = _number(name, value)
    if type(number) is float and not number.is_integer():
        raise InvalidArgument(f"{name} is {number}: use a whole number")
    return int(number)


def _number(name: str, value: Any) -> int | float:
    if type(value) in {int, float}:
        # Infinities and what is no number fail here and not where they become whole.
        if value - value != 0:
            raise InvalidArgument(f"{name} must be a number with an end")
        if abs(value) < 2**70:
            return value  # type: ignore[no-any-return]
    if isinstance(value, str) and len(value) <= 40:
        try:
            number = orjson.loads(value)
        except orjson.JSONDecodeError:
            number = None
        if type(number) in {int, float}:
            return _number(name, number)
    raise InvalidArgument(f"{name} must be a number")


def _texts(name: str, value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        # One text; or, since parameters of v2 cannot be lists, the JSON of several.
        value = _list_within(value) if value.startswith("[") else [value]
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise InvalidArgument(f"{name} must be a text or a list of texts")
    return tuple(value)


def _list_within(text: str) -> list[Any]:
    try:
        found = orjson.loads(text)
    except orjson.JSONDecodeError:
        return [text]
    return found if isinstance(found, list) else [text]


def _tokens(name: str, value: Any) -> tuple[int, ...]:
    given = _json(name, value) if isinstance(value, str) else value
    if not isinstance(given, list):
        raise InvalidArgument(f"{name} must be a list of whole numbers")
    return tuple(_whole(name, item) for item in given)


def _bias(name: str, value: Any) -> dict[int, float]:
    return {_whole(name, token): _real(name, bias) for token, bias in object_of(name, value).items()}


SAMPLING_FIELDS: dict[str, Callable[[str, Any], Any]] = {
    "max_tokens": _whole,
    "min_tokens": _whole,
    "temperature": _real,
    "top_p": _real,
    "top_k": _whole,
    "min_p": _real,
    "repetition_penalty": _real,
    "presence_penalty": _real,
    "frequency_penalty": _real,
    "logit_bias": _bias,
    "seed": _whole,
    "stop": _texts,
    "stop_token_ids": _tokens,
    "ignore_eos": flag_of,
    "n": _whole,
    "logprobs": _whole,
}
"""The fields of `Sampling`, each with what reads it."""
