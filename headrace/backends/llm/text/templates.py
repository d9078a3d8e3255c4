# SPDX-License-Identifier: Apache-2.0
"""Chat templates: messages into a prompt, by the Jinja text that comes with a model. Called by `tokenizer`.

A template is code of whoever made the model, so it runs in `sandbox`: it reaches nothing, and ends in time. What clients
send is data to it. They may add arguments, but none that takes the place of what the server gives.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from headrace.backends.llm.text.sandbox import Budget, OverBudget, Refused, Sandbox, iterates_content
from headrace.core.errors import InvalidArgument, TooLarge

log = logging.getLogger("headrace.llm")

PROMPT_CHARACTERS = 8_000_000
RENDER_SECONDS = 5.0
_ARGUMENTS = 64
_DEPTH = 64
_REFUSAL_CHARACTERS = 300

_RESERVED = frozenset(
    {"messages", "tools", "chat_template", "tokenize", "conversation", "tokenizer_kwargs", "processor_kwargs"}
    | {"return_tensors", "return_dict", "return_assistant_tokens_mask", "continue_final_message"}
    | {"padding", "truncation", "max_length"}
    | {"self", "environment", "loop", "caller", "varargs", "kwargs"}
)
"""Arguments that are the server's, those that mean something to transformers, and Jinja's own names."""


class ChatTemplate:
    """One model's template, and another one for requests with tools where it has one. Safe to share between threads."""

    def __init__(
        self,
        text: str,
        with_tools: str | None = None,
        *,
        special_tokens: Mapping[str, str],
        seconds: float = RENDER_SECONDS,
        characters: int = PROMPT_CHARACTERS,
    ) -> None:
        self._sandbox = Sandbox()
        self._plain, self._takes_lists = self._read(text)
        self._tools = self._read(with_tools)[0] if with_tools else self._plain
        self._special_tokens = dict(special_tokens)
        self._seconds = seconds
        self._characters = characters

    def _read(self, text: str) -> tuple[Any, bool]:
        template, problem = self._sandbox.template(text)
        if template is None:
            raise InvalidArgument(f"chat_template is not a Jinja template: {problem}")
        return template, iterates_content(self._sandbox, text)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        arguments: Mapping[str, Any],
    ) -> str:
        """The prompt."""
        self._check(arguments)
        variables: dict[str, Any] = {"add_generation_prompt": True, "documents": None}
        variables |= _plain(arguments)
        variables |= self._special_tokens
        variables["messages"] = [self._message(_plain(message)) for message in messages]
        variables["tools"] = _plain(list(tools)) or None
        budget = Budget(self._seconds, self._characters)
        try:
            return self._sandbox.render(self._tools if tools else self._plain, variables, budget)
        except Refused as error:
            raise InvalidArgument(f"messages: {str(error.message or '')[:_REFUSAL_CHARACTERS]}") from None
        except OverBudget as error:
            raise TooLarge(f"messages: the prompt {error.message}: send fewer or shorter messages") from None
        except (Exception, RecursionError) as error:
            log.warning("a chat template failed", exc_info=error)
            raise InvalidArgument(
                "messages: the model's chat template cannot render them: check each 'role' and 'content'; "
                "the server's log says more"
            ) from None

    def _check(self, arguments: Mapping[str, Any]) -> None:
        if len(arguments) > _ARGUMENTS:
            raise InvalidArgument(
                f"chat_template_kwargs has {len(arguments)} members: at most {_ARGUMENTS} are allowed"
            )
        for name in arguments:
            taken = name in _RESERVED or name in self._special_tokens or name in self._sandbox.globals
            if taken or not name.isidentifier() or name.startswith("_"):
                raise InvalidArgument(f"chat_template_kwargs: {name[:64]!a} cannot be given: leave it out")

    def _message(self, message: Any) -> dict[str, Any]:
        """As templates expect it: text in one piece where they know no lists, arguments of tool calls as an object."""
        if not isinstance(message, dict):
            raise InvalidArgument("messages: each must be an object with 'role' and 'content'")
        content = message.get("content")
        if isinstance(content, list) and not self._takes_lists:
            given = [item.get("text") for item in content if isinstance(item, dict)]
            texts = [text for text in given if isinstance(text, str)]
            if len(texts) != len(content):
                raise InvalidArgument("messages: this model's chat template takes text only: leave other content out")
            message["content"] = "\n".join(texts)
        calls = message.get("tool_calls")
        for call in calls if isinstance(calls, list) else ():
            function = call.get("function") if isinstance(call, dict) else None
            if isinstance(function, dict) and isinstance(function.get("arguments"), str):
                function["arguments"] = _parsed(function["arguments"])
        return message


def _parsed(text: str) -> Any:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text


def _plain(value: Any, depth: int = 0) -> Any:
    """A copy of JSON types only, so that a template can neither change a caller's data nor call methods of it."""
    if depth > _DEPTH:
        raise InvalidArgument(f"messages, tools and chat_template_kwargs may be nested {_DEPTH} deep at most")
    if value is None or type(value) in {str, int, float, bool}:
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item, depth + 1) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [_plain(item, depth + 1) for item in value]
    return str(value) if isinstance(value, str) else f"<{type(value).__name__}>"
