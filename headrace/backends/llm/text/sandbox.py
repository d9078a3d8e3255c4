# SPDX-License-Identifier: Apache-2.0
"""A Jinja environment for templates that nobody here wrote: they reach nothing, and their time and memory have an end.

Called by `templates`. Jinja's own sandbox keeps a template from Python's insides, but lets it count for ever and multiply
strings. Here each turn of a loop and each call looks at a budget, and what makes text longer asks before it does.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, cast

from jinja2 import Template, TemplateSyntaxError, nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

_GROWING = frozenset({"replace", "join", "ljust", "rjust", "center", "zfill", "expandtabs"})
_WIDE_PERCENT = re.compile(r"%[^A-Za-z%]*?(\d{6}|\*)")
_WIDE_BRACES = re.compile(r"\{[^{}]*(\d{6}|\{)")
"""In a format: a width of a million characters, or one taken from the arguments."""
_GROWTH = 8
"""How far beyond the budget a text in between may grow, since what we know of it is only the worst case."""
_NUMBER_BITS = 4096


class Refused(TemplateError):
    """The template said no: `raise_exception`. Its text is for whoever sent the messages."""


class OverBudget(Exception):
    """Too long, or took too long."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class Budget:
    """Of one rendering."""

    def __init__(self, seconds: float, characters: int) -> None:
        self._seconds = seconds
        self._deadline = time.monotonic() + seconds
        self.characters = characters

    def turn(self) -> None:
        """A step of the template."""
        if time.monotonic() > self._deadline:
            raise OverBudget(f"took more than {self._seconds:g} s to make")

    def room(self, characters: int) -> None:
        """So much text is about to be made."""
        if characters > self.characters:
            raise OverBudget(f"would have more than {self.characters} characters")


class Sandbox(ImmutableSandboxedEnvironment):
    """The environment. One can be shared between threads; the budget is that of the thread's rendering."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag])
        self._running = threading.local()
        self.filters["tojson"] = _tojson
        self.filters["_each"] = self._each
        self.filters["_joined"] = self._joined
        for name in ("center", "indent", "batch", "slice", "wordwrap", "replace", "join", "truncate"):
            self.filters[name] = self._bounded(self.filters[name])
        self.filters["format"] = self._formatted
        self.filters["_kept"] = self._kept
        for name in ("lipsum", "cycler", "joiner"):
            del self.globals[name]
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now
        self.globals["namespace"] = _Names
        self.globals["dict"] = _new_dict

    def template(self, text: str) -> tuple[Template | None, str]:
        """The template of a text, or None and what is wrong with it."""
        try:
            tree = self.parse(text)
            for node in [*tree.find_all(nodes.For)]:
                node.iter = self._filtered(node.iter, "_each")
            for block in [*tree.find_all(nodes.AssignBlock)]:
                block.filter = self._filtered(block.filter, "_kept", block.lineno)
            for parent in [tree, *tree.find_all(nodes.Node)]:
                self._replace_concats(parent)
            return self.from_string(tree), ""
        except TemplateSyntaxError as error:
            return None, f"line {error.lineno}: {str(error.message)[:200]}"
        except (TemplateError, RecursionError):
            return None, "it cannot be compiled"

    def render(self, template: Template, variables: Mapping[str, Any], budget: Budget) -> str:
        """The text. Raises what the template raises, and `OverBudget`."""
        self._running.budget = budget
        pieces: list[str] = []
        length = 0
        try:
            for piece in template.generate(variables):
                length += len(piece)
                budget.room(length)
                budget.turn()
                pieces.append(piece)
        finally:
            del self._running.budget
        return "".join(pieces)

    @property
    def _budget(self) -> Budget:
        # While a template is compiled, constant expressions are worked out too; nothing large may come of them either.
        return cast("Budget", getattr(self._running, "budget", None) or Budget(1.0, 100_000))

    def _filtered(self, node: nodes.Node | None, name: str, line: int = 1) -> nodes.Filter:
        made = nodes.Filter(cast("nodes.Expr | None", node), name, [], [], None, None)
        made.set_environment(self)
        made.set_lineno(node.lineno if node is not None and node.lineno else line)
        return made

    def _replace_concats(self, parent: nodes.Node) -> None:
        for field, value in parent.iter_fields():
            if isinstance(value, nodes.Concat):
                setattr(parent, field, self._joining(value))
            elif isinstance(value, list):
                value[:] = [self._joining(item) if isinstance(item, nodes.Concat) else item for item in value]

    def _joining(self, concat: nodes.Concat) -> nodes.Filter:
        items = nodes.List(concat.nodes)
        items.set_environment(self)
        items.set_lineno(concat.lineno or 1)
        for item in [concat, *concat.find_all(nodes.Node)]:
            self._replace_concats(item)
        return self._filtered(items, "_joined")

    def _each(self, values: Any) -> Any:
        return _Turns(values, self._budget) if isinstance(values, Iterable) else values

    def _joined(self, values: list[Any]) -> str:
        texts = [str(value) for value in values]
        self._budget.room(sum(map(len, texts)))
        return "".join(texts)

    def _bounded(self, filter: Callable[..., Any]) -> Callable[..., Any]:
        def bounded(*arguments: Any, **named: Any) -> Any:
            self._growth([*arguments, *named.values()])
            return self._kept(filter(*arguments, **named))

        # Jinja marks those that want its context or environment first.
        bounded.__dict__.update(filter.__dict__)
        return bounded

    def _kept(self, value: Any) -> Any:
        """What was made of other texts and may be made longer still."""
        if isinstance(value, str):
            self._budget.room(len(value))
        return value

    def _formatted(self, value: str, *arguments: Any, **named: Any) -> str:
        return cast("str", self.call_binop(None, "%", str(value), named or arguments))

    def _growth(self, values: Iterable[Any]) -> None:
        """Refuse what could come of these values if each stood for every piece of the others."""
        most = 1
        for value in values:
            if type(value) is int:
                most *= max(abs(value), 1)
            elif isinstance(value, str | list | tuple):
                most *= max(len(value), 1)
        if most > self._budget.characters * _GROWTH:
            raise OverBudget(f"would have more than {self._budget.characters} characters")

    def call(self, context: Context, obj: Any, *args: Any, **kwargs: Any) -> Any:
        """A call in a template."""
        self._budget.turn()
        # Jinja wraps `format` in a function of its own.
        method = getattr(obj, "__wrapped__", obj)
        owner = getattr(method, "__self__", None)
        if isinstance(owner, str):
            name = getattr(method, "__name__", "")
            if name in _GROWING:
                self._growth([owner, *args, *kwargs.values()])
            elif name in {"format", "format_map"} and _WIDE_BRACES.search(owner):
                raise OverBudget("is made with a very wide format")
        return self._kept(super().call(context, obj, *args, **kwargs))

    def call_binop(self, context: Context | None, operator: str, left: Any, right: Any) -> Any:
        """An operator in a template."""
        sizes = [len(value) if isinstance(value, str | list | tuple) else None for value in (left, right)]
        if operator == "+" and None not in sizes:
            self._budget.room(sum(size or 0 for size in sizes))
        elif operator == "*" and sizes != [None, None]:
            self._budget.room(
                (sizes[0] if sizes[0] is not None else left) * (sizes[1] if sizes[1] is not None else right)
            )
        elif operator in {"*", "**"} and _bits(left) * (_power(right) if operator == "**" else 1) > _NUMBER_BITS:
            raise OverBudget("is made with very large numbers")
        elif operator == "%" and isinstance(left, str) and _WIDE_PERCENT.search(left):
            raise OverBudget("is made with a very wide format")
        return super().call_binop(cast("Context", context), operator, left, right)


class _Turns:
    """What a loop goes through; each turn is counted."""

    def __init__(self, values: Iterable[Any], budget: Budget) -> None:
        self._values = values
        self._budget = budget

    def __iter__(self) -> Iterator[Any]:
        for value in self._values:
            self._budget.turn()
            yield value

    def __len__(self) -> int:
        return len(self._values)  # type: ignore[arg-type]


class _Names(Namespace):
    """`namespace()` without names that begin with an underscore: those are Python's."""

    def __init__(*arguments: Any, **named: Any) -> None:
        self, values = arguments[0], dict(*arguments[1:], **named)
        for name in values:
            _check_name(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


class _GenerationTag(Extension):
    """`{% generation %}`, by which templates mark what the model says in training; here it is its contents."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The statements inside."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def iterates_content(sandbox: Sandbox, text: str) -> bool:
    """Whether a template goes through a message's content, hence knows that it may be a list."""
    for loop in sandbox.parse(text).find_all(nodes.For):
        for node in [loop.iter, *loop.iter.find_all(nodes.Node)]:
            if _member(node) == "content" or (isinstance(node, nodes.Name) and node.name == "content"):
                return True
        # Whatever the list is called there, its items are those of a content when they have a text.
        items = loop.target.name if isinstance(loop.target, nodes.Name) else None
        for node in loop.find_all(nodes.Expr):
            owner = node.node if isinstance(node, nodes.Getattr | nodes.Getitem) else None
            if isinstance(owner, nodes.Name) and owner.name == items and _member(node) == "text":
                return True
    return False


def _member(node: nodes.Node) -> object:
    """The name by which a member of something is taken, or None."""
    if isinstance(node, nodes.Getattr):
        return node.attr
    return node.arg.value if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const) else None


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError("a namespace has no names that begin with an underscore")


def _raise_exception(message: object = "") -> None:
    raise Refused(str(message))


def _strftime_now(format: str) -> str:
    if len(format) > 256 or re.search(r"\d{3}", format):
        raise OverBudget("is made with a very long date")
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
    """JSON as models were trained on it: Jinja's own escapes for HTML."""
    if indent is not None and not (type(indent) is int and 0 <= indent <= 16):
        raise OverBudget("is made with a very wide indent")
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _bits(value: object) -> int:
    return value.bit_length() if isinstance(value, int) else 1


def _power(value: object) -> int:
    return abs(value) if isinstance(value, int) else 1
