# SPDX-License-Identifier: Apache-2.0
"""Chat templates: render messages to a prompt with the Jinja template of a model, in a sandbox with limits.

A template is code of the model's author: it reaches nothing outside, and its time and memory are limited. What clients send
is data to it; their extra arguments cannot replace those of the server.
"""

from __future__ import annotations

import json
import logging
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

from jinja2 import Template, TemplateSyntaxError, nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from headrace.core.errors import InvalidArgument, TooLarge

log = logging.getLogger("headrace.llm")

PROMPT_CHARACTERS = 8_000_000
RENDER_SECONDS = 5.0
_MAX_ARGUMENTS = 64
_MAX_DEPTH = 64
_REFUSAL_CHARACTERS = 300

_RESERVED = frozenset(
    {"messages", "tools", "chat_template", "tokenize", "conversation", "tokenizer_kwargs", "processor_kwargs"}
    | {"return_tensors", "return_dict", "return_assistant_tokens_mask", "continue_final_message"}
    | {"padding", "truncation", "max_length"}
    | {"self", "environment", "loop", "caller", "varargs", "kwargs"}
)
"""Arguments that the server sets, those of transformers' `apply_chat_template`, and Jinja's own names."""
_GROWING_METHODS = frozenset({"replace", "join", "ljust", "rjust", "center", "zfill", "expandtabs"})
_WIDE_PERCENT = re.compile(r"%[^A-Za-z%]*?(\d{6}|\*)")
_WIDE_BRACES = re.compile(r"\{[^{}]*(\d{6}|\{)")
"""In a format string: a width of a million characters, or one from the arguments."""
_GROWTH = 8
"""How far beyond the budget an intermediate text may grow: only its worst case is known."""
_NUMBER_BITS = 4096


class ChatTemplate:
    """The chat template of a model, and its template for requests with tools, if it has one. Thread-safe."""

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
        self._default, self._takes_lists = self._compile(text)
        self._tools = self._compile(with_tools)[0] if with_tools else self._default
        self._special_tokens = dict(special_tokens)
        self._seconds = seconds
        self._characters = characters

    def _compile(self, text: str) -> tuple[Any, bool]:
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
        """Return the prompt of chat messages."""
        self._check_arguments(arguments)
        variables: dict[str, Any] = {"add_generation_prompt": True, "documents": None}
        variables |= _copy_json(arguments)
        variables |= self._special_tokens
        variables["messages"] = [self._message(_copy_json(message)) for message in messages]
        variables["tools"] = _copy_json(list(tools)) or None
        budget = Budget(self._seconds, self._characters)
        try:
            return self._sandbox.render(self._tools if tools else self._default, variables, budget)
        except TemplateRefused as error:
            raise InvalidArgument(f"messages: {str(error.message or '')[:_REFUSAL_CHARACTERS]}") from None
        except OverBudget as error:
            raise TooLarge(f"messages: the prompt {error.message}: send fewer or shorter messages") from None
        except (Exception, RecursionError) as error:
            log.warning("A chat template failed.", exc_info=error)
            raise InvalidArgument(
                "messages: the model's chat template cannot render them: check each 'role' and 'content'; "
                "the server's log says more"
            ) from None

    def _check_arguments(self, arguments: Mapping[str, Any]) -> None:
        if len(arguments) > _MAX_ARGUMENTS:
            raise InvalidArgument(
                f"chat_template_kwargs has {len(arguments)} members: at most {_MAX_ARGUMENTS} are allowed"
            )
        for name in arguments:
            reserved = name in _RESERVED or name in self._special_tokens or name in self._sandbox.globals
            if reserved or not name.isidentifier() or name.startswith("_"):
                raise InvalidArgument(f"chat_template_kwargs: {name[:64]!a} cannot be given: leave it out")

    def _message(self, message: Any) -> dict[str, Any]:
        """Convert a message to what templates expect: text for those without lists, tool-call arguments as an object."""
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
                function["arguments"] = _parse_arguments(function["arguments"])
        return message


def _parse_arguments(text: str) -> Any:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text


def _copy_json(value: Any, depth: int = 0) -> Any:
    """Return a copy of JSON types only, so that a template can neither change a client's data nor call its methods."""
    if depth > _MAX_DEPTH:
        raise InvalidArgument(f"messages, tools and chat_template_kwargs may be nested {_MAX_DEPTH} deep at most")
    if value is None or type(value) in {str, int, float, bool}:
        return value
    if isinstance(value, Mapping):
        return {str(key): _copy_json(item, depth + 1) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [_copy_json(item, depth + 1) for item in value]
    return str(value) if isinstance(value, str) else f"<{type(value).__name__}>"


class TemplateRefused(TemplateError):
    """The template called `raise_exception`. The message is for the client."""


class OverBudget(Exception):
    """Rendering took too long, or the text is too long."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class Budget:
    """The limits of one rendering: time and characters."""

    def __init__(self, seconds: float, characters: int) -> None:
        self._seconds = seconds
        self._deadline = time.monotonic() + seconds
        self.characters = characters

    def check_time(self) -> None:
        """Check the time limit; called for each step of the template."""
        if time.monotonic() > self._deadline:
            raise OverBudget(f"took more than {self._seconds:g} s to render")

    def check_size(self, characters: int) -> None:
        """Check the size of a text before it is created."""
        if characters > self.characters:
            raise OverBudget(f"would have more than {self.characters} characters")


class Sandbox(ImmutableSandboxedEnvironment):
    """The Jinja environment of chat templates. Thread-safe; each thread has the budget of its rendering.

    A template is code of the model's author. Jinja's own sandbox keeps it from Python's internals, but lets it loop forever
    and multiply strings. Here each iteration and each call checks a budget, and so does everything that makes text longer.
    """

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag])
        self._running = threading.local()
        self.filters["tojson"] = _tojson
        self.filters["_counted"] = self._counted
        self.filters["_concatenate"] = self._concatenate
        for name in ("center", "indent", "batch", "slice", "wordwrap", "replace", "join", "truncate"):
            self.filters[name] = self._with_limits(self.filters[name])
        self.filters["format"] = self._format
        self.filters["_check_text"] = self._check_text
        for name in ("lipsum", "cycler", "joiner"):
            del self.globals[name]
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now
        self.globals["namespace"] = _SafeNamespace
        self.globals["dict"] = _new_dict

    def template(self, text: str) -> tuple[Template | None, str]:
        """Compile a template; return None and the problem if it is invalid."""
        try:
            tree = self.parse(text)
            for node in [*tree.find_all(nodes.For)]:
                node.iter = self._apply_filter(node.iter, "_counted")
            for block in [*tree.find_all(nodes.AssignBlock)]:
                block.filter = self._apply_filter(block.filter, "_check_text", block.lineno)
            for parent in [tree, *tree.find_all(nodes.Node)]:
                self._replace_concats(parent)
            return self.from_string(tree), ""
        except TemplateSyntaxError as error:
            return None, f"line {error.lineno}: {str(error.message)[:200]}"
        except (TemplateError, RecursionError):
            return None, "it cannot be compiled"

    def render(self, template: Template, variables: Mapping[str, Any], budget: Budget) -> str:
        """Render a template. Raises what the template raises, and `OverBudget`."""
        self._running.budget = budget
        pieces: list[str] = []
        length = 0
        try:
            for piece in template.generate(variables):
                length += len(piece)
                budget.check_size(length)
                budget.check_time()
                pieces.append(piece)
        finally:
            del self._running.budget
        return "".join(pieces)

    @property
    def _budget(self) -> Budget:
        # Jinja evaluates constant expressions while it compiles; they have a small budget.
        return cast("Budget", getattr(self._running, "budget", None) or Budget(1.0, 100_000))

    def _apply_filter(self, node: nodes.Node | None, name: str, line: int = 1) -> nodes.Filter:
        node_filter = nodes.Filter(cast("nodes.Expr | None", node), name, [], [], None, None)
        node_filter.set_environment(self)
        node_filter.set_lineno(node.lineno if node is not None and node.lineno else line)
        return node_filter

    def _replace_concats(self, parent: nodes.Node) -> None:
        for field, value in parent.iter_fields():
            if isinstance(value, nodes.Concat):
                setattr(parent, field, self._concat_filter(value))
            elif isinstance(value, list):
                value[:] = [self._concat_filter(item) if isinstance(item, nodes.Concat) else item for item in value]

    def _concat_filter(self, concat: nodes.Concat) -> nodes.Filter:
        items = nodes.List(concat.nodes)
        items.set_environment(self)
        items.set_lineno(concat.lineno or 1)
        for item in [concat, *concat.find_all(nodes.Node)]:
            self._replace_concats(item)
        return self._apply_filter(items, "_concatenate")

    def _counted(self, values: Any) -> Any:
        return _CountedLoop(values, self._budget) if isinstance(values, Iterable) else values

    def _concatenate(self, values: list[Any]) -> str:
        texts = [str(value) for value in values]
        self._budget.check_size(sum(map(len, texts)))
        return "".join(texts)

    def _with_limits(self, filter: Callable[..., Any]) -> Callable[..., Any]:
        def bounded(*arguments: Any, **named: Any) -> Any:
            self._check_growth([*arguments, *named.values()])
            return self._check_text(filter(*arguments, **named))

        # Keep Jinja's marks of filters that take the context or environment.
        bounded.__dict__.update(filter.__dict__)
        return bounded

    def _check_text(self, value: Any) -> Any:
        """Check the size of a text that was created from others."""
        if isinstance(value, str):
            self._budget.check_size(len(value))
        return value

    def _format(self, value: str, *arguments: Any, **named: Any) -> str:
        return cast("str", self.call_binop(None, "%", str(value), named or arguments))

    def _check_growth(self, values: Iterable[Any]) -> None:
        """Refuse values whose worst-case result, the product of their sizes, is too large."""
        most = 1
        for value in values:
            if type(value) is int:
                most *= max(abs(value), 1)
            elif isinstance(value, str | list | tuple):
                most *= max(len(value), 1)
        if most > self._budget.characters * _GROWTH:
            raise OverBudget(f"would have more than {self._budget.characters} characters")

    def call(self, context: Context, obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Check a call in a template."""
        self._budget.check_time()
        # Jinja wraps `format` in its own function.
        method = getattr(obj, "__wrapped__", obj)
        owner = getattr(method, "__self__", None)
        if isinstance(owner, str):
            name = getattr(method, "__name__", "")
            if name in _GROWING_METHODS:
                self._check_growth([owner, *args, *kwargs.values()])
            elif name in {"format", "format_map"} and _WIDE_BRACES.search(owner):
                raise OverBudget("uses a very wide format")
        return self._check_text(super().call(context, obj, *args, **kwargs))

    def call_binop(self, context: Context | None, operator: str, left: Any, right: Any) -> Any:
        """Check an operator in a template."""
        sizes = [len(value) if isinstance(value, str | list | tuple) else None for value in (left, right)]
        if operator == "+" and None not in sizes:
            self._budget.check_size(sum(size or 0 for size in sizes))
        elif operator == "*" and sizes != [None, None]:
            self._budget.check_size(
                (sizes[0] if sizes[0] is not None else left) * (sizes[1] if sizes[1] is not None else right)
            )
        elif operator in {"*", "**"} and _bits(left) * (_power(right) if operator == "**" else 1) > _NUMBER_BITS:
            raise OverBudget("uses very large numbers")
        elif operator == "%" and isinstance(left, str) and _WIDE_PERCENT.search(left):
            raise OverBudget("uses a very wide format")
        return super().call_binop(cast("Context", context), operator, left, right)


class _CountedLoop:
    """The iterable of a loop; each iteration checks the time limit."""

    def __init__(self, values: Iterable[Any], budget: Budget) -> None:
        self._values = values
        self._budget = budget

    def __iter__(self) -> Iterator[Any]:
        for value in self._values:
            self._budget.check_time()
            yield value

    def __len__(self) -> int:
        return len(self._values)  # type: ignore[arg-type]


class _SafeNamespace(Namespace):
    """`namespace()` that refuses names with a leading underscore, which are Python's."""

    def __init__(*arguments: Any, **named: Any) -> None:
        self, values = arguments[0], dict(*arguments[1:], **named)
        for name in values:
            _check_name(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


class _GenerationTag(Extension):
    """`{% generation %}`, which marks the model's text for training; here its contents are rendered."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Return the statements inside the tag."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def iterates_content(sandbox: Sandbox, text: str) -> bool:
    """Return whether a template iterates over a message's content, and so supports lists."""
    for loop in sandbox.parse(text).find_all(nodes.For):
        for node in [loop.iter, *loop.iter.find_all(nodes.Node)]:
            if _member_name(node) == "content" or (isinstance(node, nodes.Name) and node.name == "content"):
                return True
        # A loop whose items have a `text` iterates over a content, whatever its variable is called.
        items = loop.target.name if isinstance(loop.target, nodes.Name) else None
        for node in loop.find_all(nodes.Expr):
            owner = node.node if isinstance(node, nodes.Getattr | nodes.Getitem) else None
            if isinstance(owner, nodes.Name) and owner.name == items and _member_name(node) == "text":
                return True
    return False


def _member_name(node: nodes.Node) -> object:
    """Return the name of an attribute or item access, or None."""
    if isinstance(node, nodes.Getattr):
        return node.attr
    return node.arg.value if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const) else None


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError("a namespace has no names that begin with an underscore")


def _raise_exception(message: object = "") -> None:
    raise TemplateRefused(str(message))


def _strftime_now(format: str) -> str:
    if len(format) > 256 or re.search(r"\d{3}", format):
        raise OverBudget("uses a very long date")
    return time.strftime(format)


def _new_dict(*arguments: Any, **named: Any) -> dict[Any, Any]:
    return dict(*arguments, **named)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON as models were trained on it; Jinja's own filter escapes HTML."""
    if indent is not None and not (type(indent) is int and 0 <= indent <= 16):
        raise OverBudget("uses a very wide indent")
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _bits(value: object) -> int:
    return value.bit_length() if isinstance(value, int) else 1


def _power(value: object) -> int:
    return abs(value) if isinstance(value, int) else 1
