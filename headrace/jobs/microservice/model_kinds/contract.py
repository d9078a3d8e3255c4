# SPDX-License-Identifier: Apache-2.0
"""The interface of a model kind, and the request parameters that it declares."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

from headrace.core.errors import HeadraceError, InvalidArgument
from headrace.core.requests import InferResponse

MediaType = Literal["image", "video", ""]
"""What a request says a URL is; "" if it does not say."""
OnResponse = Callable[[InferResponse], None]
"""Called on the loop with each response of a model that generates."""
Begin = Callable[[int], OnResponse]
"""Called with the number of choices once a chat is valid; returns the callback for its responses."""

Type = Literal["text", "texts", "integer", "number", "truth", "object", "any"]
MAX_TEXTS = 256
MAX_CHARS = 4_000_000
"""Maximum length of a text that is not a data: URL: more than the context of any model."""
_TYPE_NAMES: Mapping[Type, str] = {
    "text": "a string",
    "texts": "a string or a list of strings",
    "integer": "an integer",
    "number": "a number",
    "truth": "true or false",
    "object": "a JSON object",
    "any": "anything",
}


@dataclass(frozen=True, slots=True)
class MediaItem:
    """An image or video of a request, by its URL."""

    url: str = field(repr=False)
    media_type: MediaType = ""
    field: str = "media"
    """The field of the request, for error messages."""


@dataclass(frozen=True, slots=True)
class Chat:
    """A chat request: the first user and system messages, and all fields besides `messages`."""

    text: str
    system: str
    media: tuple[MediaItem, ...]
    parameters: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ChatChoice:
    """One choice of a chat response."""

    content: str
    finish_reason: str = "stop"


@dataclass(frozen=True, slots=True)
class ChatAnswer:
    """A chat response: its choices, and token counts if known."""

    choices: Sequence[ChatChoice]
    usage: Mapping[str, int] | None = None


class ModelKind(Protocol):
    """A loaded model of one kind."""

    @property
    def model_type(self) -> str:
        """Return the model type in results."""

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """Return the parameters of an inference request."""

    async def infer(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Return the results of an inference request. `InvalidArgument` names the wrong parameter."""

    async def chat(self, chat: Chat) -> ChatAnswer:
        """Return the response to a chat; `InvalidArgument` if the model does not chat."""

    async def close(self) -> None:
        """Release resources outside the engine."""


@runtime_checkable
class StreamingKind(Protocol):
    """A model kind that can stream chat responses."""

    async def stream(self, chat: Chat, begin: Begin) -> None:
        """Stream the response to a chat; return after the last piece. Raises as `ModelKind.chat` does."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of a request."""

    name: str
    type: Type
    default: Any = None
    """The value if it is missing."""
    minimum: float | None = None
    maximum: float | None = None
    aliases: tuple[str, ...] = ()
    """Aliases that clients use."""
    choices: tuple[str, ...] = ()
    ignored: bool = False
    """Accepted because clients send it, without effect; of any type."""

    def describe(self) -> dict[str, Any]:
        """Return the description that /api/v1/status shows."""
        description = {"name": self.name, "type": self.type, "default": self.default}
        optional = {
            "least": self.minimum,
            "most": self.maximum,
            "also": list(self.aliases),
            "choices": list(self.choices),
        }
        return description | {key: value for key, value in optional.items() if value not in (None, [])}


def ignored(*names: str) -> tuple[Parameter, ...]:
    """Return parameters that are accepted without effect."""
    return tuple(Parameter(name, "any", ignored=True) for name in names)


def override(declared: Iterable[Parameter], *others: Parameter) -> tuple[Parameter, ...]:
    """Return the declared parameters, with others replacing those of the same name or added."""
    by_name = {parameter.name: parameter for parameter in declared}
    return tuple((by_name | {parameter.name: parameter for parameter in others}).values())


def read_parameters(declared: Sequence[Parameter], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return every declared parameter by name, with defaults. `InvalidArgument` names the wrong parameter."""
    by_name = {name: parameter for parameter in declared for name in (parameter.name, *parameter.aliases)}
    values: dict[str, Any] = {}
    names: dict[str, str] = {}
    for name, value in given.items():
        parameter = by_name.get(name)
        if parameter is None:
            known = ", ".join(item.name for item in declared if not item.ignored)
            raise InvalidArgument(f"{_display(name)} is not a parameter of this model: use {known}")
        if parameter.ignored or value is None:
            continue
        checked = _check_value(name, parameter, value)
        if parameter.name in values and values[parameter.name] != checked:
            raise InvalidArgument(f"'{names[parameter.name]}' and '{name}' are aliases and differ: give one of them")
        values[parameter.name] = checked
        names[parameter.name] = name
    return {
        parameter.name: values.get(parameter.name, parameter.default) for parameter in declared if not parameter.ignored
    }


def _check_value(name: str, parameter: Parameter, value: Any) -> Any:
    type_name = parameter.type
    if type_name == "any":
        return value
    if type_name == "texts":
        value = [value] if isinstance(value, str) else value
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise _type_error(name, parameter, value)
        if len(value) > MAX_TEXTS:
            raise InvalidArgument(f"'{name}' has {len(value)} entries: at most {MAX_TEXTS} are allowed")
        return value
    if type_name == "truth" and isinstance(value, bool):
        return value
    if type_name == "object" and isinstance(value, Mapping):
        return value
    if type_name == "text" and isinstance(value, str):
        return _check_text(name, parameter, value)
    if type_name in ("integer", "number"):
        return _check_number(name, parameter, value)
    raise _type_error(name, parameter, value)


def _check_text(name: str, parameter: Parameter, value: str) -> str:
    if parameter.choices and value not in parameter.choices:
        raise InvalidArgument(f"'{name}' is {_display(value)}: use one of {', '.join(parameter.choices)}")
    if len(value) > MAX_CHARS:
        raise InvalidArgument(f"'{name}' has {len(value)} characters: at most {MAX_CHARS} are allowed")
    return value


def _check_number(name: str, parameter: Parameter, value: Any) -> Any:
    is_integer = parameter.type == "integer"
    # True is an int in Python but a mistake here; some clients send 5.0 for 5.
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise _type_error(name, parameter, value)
    if is_integer and isinstance(value, float):
        if not value.is_integer():
            raise _type_error(name, parameter, value)
        value = int(value)
    if (parameter.minimum is not None and value < parameter.minimum) or (
        parameter.maximum is not None and value > parameter.maximum
    ):
        raise InvalidArgument(f"'{name}' is {value}: use {_TYPE_NAMES[parameter.type]} {_range(parameter)}")
    return value if is_integer else float(value)


def _range(parameter: Parameter) -> str:
    if parameter.maximum is None:
        return f"of {parameter.minimum:g} or more"
    if parameter.minimum is None:
        return f"of {parameter.maximum:g} or less"
    return f"from {parameter.minimum:g} to {parameter.maximum:g}"


def _type_error(name: str, parameter: Parameter, value: Any) -> InvalidArgument:
    return InvalidArgument(f"'{name}' is {_display(value)}: use {_TYPE_NAMES[parameter.type]}")


def _display(value: object) -> str:
    if isinstance(value, str):
        return ascii(value[:64])
    if isinstance(value, bool) or value is None:
        return "null" if value is None else str(value).lower()
    if isinstance(value, int | float) and abs(value) < 10**15:
        return str(value)
    if isinstance(value, list | dict):
        return "a list" if isinstance(value, list) else "an object"
    return "a very large number"


def require_text(read: Mapping[str, Any], name: str = "prompt") -> str:
    """Return a required text parameter."""
    text = read.get(name)
    if not text:
        raise InvalidArgument(f"'{name}' (or 'text') is required: tell the model what to do")
    return str(text)


def chat_unsupported(what: str) -> HeadraceError:
    """Return the error for a chat with a model that does not chat."""
    return InvalidArgument(f"this model {what} and does not chat: send POST /api/v1/inference")
