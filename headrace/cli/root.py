# SPDX-License-Identifier: Apache-2.0
"""The command above all verbs: shows the table of `verbs`, and brings a verb when it is needed.

Used by `main` as the class of its Typer. The help of the whole is plain text: rich alone would take twice as long to import
as all else that it needs.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, Final

import typer
from typer.core import TyperCommand, TyperGroup

from headrace.cli.checks import BAD_USE
from headrace.cli.verbs import SECTIONS, Verb

MARKUP: Final = "markdown"


class Root(TyperGroup):
    """Has all verbs, and none of their modules."""

    def __init__(self, **told: Any) -> None:
        verbs = {verb.name: Unopened(verb) for section in SECTIONS.values() for verb in section}
        super().__init__(**told | {"commands": verbs})

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """The help for who says nothing: not as Typer shows an error, which takes rich."""
        if not args and not ctx.resilient_parsing:
            typer.echo(ctx.get_help(), err=True)
            raise typer.Exit(BAD_USE)
        return super().parse_args(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """As plain text, in the order that is usual."""
        self.format_usage(ctx, formatter)
        self.format_help_text(ctx, formatter)
        self.format_options(ctx, formatter)
        self.format_epilog(ctx, formatter)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """The verbs under their headings."""
        width = max(map(len, self.commands))
        for heading, verbs in SECTIONS.items():
            with formatter.section(heading):
                formatter.write_dl([(f"{verb.name:{width}}", verb.help) for verb in verbs])


class Unopened(TyperCommand):
    """Stands for a verb until its command line is read."""

    def __init__(self, verb: Verb) -> None:
        super().__init__(verb.name, help=verb.help)
        self._verb = verb

    def make_context(self, info_name: Any, args: list[str], parent: Any = None, **extra: Any) -> Any:
        """Called with what stands behind the verb. The context is that of the command itself, which goes on from here."""
        command = opened(self._verb, completing=extra.get("resilient_parsing", False))
        return command.make_context(info_name, args, parent=parent, **extra)


def opened(verb: Verb, *, completing: bool = False) -> Any:
    """The command of a verb, whose module is imported. When a shell completes a line, its values can be completed too."""
    target = _named(verb.target)
    holder = typer.Typer(add_completion=False, rich_markup_mode=MARKUP)
    holder.callback()(_nothing)  # else a single command would become the whole program
    if isinstance(target, typer.Typer):
        holder.add_typer(target, name=verb.name)
    else:
        holder.command(verb.name, cls=_named(verb.command_class) if verb.command_class else None)(target)
    if completing:
        from headrace.cli.completion import add_values

        add_values(holder)
    group: Any = typer.main.get_command(holder)
    return group.commands[verb.name]


def _named(target: str) -> Any:
    module, _, attribute = target.partition(":")
    return getattr(import_module(module), attribute)


def _nothing() -> None: ...
