# SPDX-License-Identifier: Apache-2.0
"""The root command: lists the commands of `commands` and imports a command's module when it is needed.

The root help is plain text: importing rich would take twice as long as everything else that it needs.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, Final

import typer
from typer.core import TyperCommand, TyperGroup

from headrace.cli.checks import BAD_USE, print_error
from headrace.cli.commands import SECTIONS, CommandSpec
from headrace.core.extras import MissingExtra, extra_of

UsageError: type[Exception] = typer.BadParameter.__mro__[1]
"""What Typer raises for words of a command line that it cannot parse; it has no public name there."""
MARKUP: Final = "markdown"
_CONTEXT: Final = "headrace.command"
"""Key of the running command's context in the metadata of the root's."""


class Root(TyperGroup):
    """The group of all commands, without importing their modules."""

    def __init__(self, **options: Any) -> None:
        specs = {spec.name: LazyCommand(spec) for section in SECTIONS.values() for spec in section}
        super().__init__(**options | {"commands": specs})

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Print the help if there are no arguments: Typer's error output would import rich."""
        if not args and not ctx.resilient_parsing:
            typer.echo(ctx.get_help(), err=True)
            raise typer.Exit(BAD_USE)
        try:
            return super().parse_args(ctx, args)
        except UsageError as error:
            raise _report_usage(error) from None

    def invoke(self, ctx: Any) -> Any:
        """Run the command. If a package of an extra is missing, say in one line which extra to install."""
        try:
            return super().invoke(ctx)
        except UsageError as error:
            raise _report_usage(error) from None
        except ModuleNotFoundError as error:
            extra = extra_of(error)
            if extra is None:
                raise
            print_error(str(MissingExtra(_command_words(ctx), extra)))
            raise typer.Exit(BAD_USE) from None
        except MissingExtra as error:
            print_error(error.message)
            raise typer.Exit(BAD_USE) from None

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help as plain text."""
        self.format_usage(ctx, formatter)
        self.format_help_text(ctx, formatter)
        self.format_options(ctx, formatter)
        self.format_epilog(ctx, formatter)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the commands under their headings."""
        width = max(map(len, self.commands))
        for heading, specs in SECTIONS.items():
            with formatter.section(heading):
                formatter.write_dl([(f"{spec.name:{width}}", spec.help) for spec in specs])


class LazyCommand(TyperCommand):
    """A placeholder for a command until its module is needed."""

    def __init__(self, spec: CommandSpec) -> None:
        super().__init__(spec.name, help=spec.help)
        self._spec = spec

    def make_context(self, info_name: Any, args: list[str], parent: Any = None, **extra: Any) -> Any:
        """Import the command and return its own context, which Typer continues with."""
        command = load_command(self._spec, completing=extra.get("resilient_parsing", False))
        context = command.make_context(info_name, args, parent=parent, **extra)
        if parent is not None:
            parent.meta[_CONTEXT] = context
        return context


def load_command(spec: CommandSpec, *, completing: bool = False) -> Any:
    """Import the module of a command and return the command. `completing` adds shell completion of its values."""
    target = _named(spec.target)
    holder = typer.Typer(add_completion=False, rich_markup_mode=MARKUP)
    holder.callback()(_nothing)  # a Typer with one command and no callback becomes that command
    if isinstance(target, typer.Typer):
        holder.add_typer(target, name=spec.name)
    else:
        holder.command(spec.name, cls=_named(spec.command_class) if spec.command_class else None)(target)
    if completing:
        from headrace.cli.completion import add_values

        add_values(holder)
    group: Any = typer.main.get_command(holder)
    return group.commands[spec.name]


def _named(target: str) -> Any:
    module, _, attribute = target.partition(":")
    return getattr(import_module(module), attribute)


def _report_usage(error: Any) -> typer.Exit:
    """Report wrong words of a command line as any other error; return the exception that ends the program."""
    if type(error).__name__ == "NoArgsIsHelpError":
        typer.echo(error.ctx.get_help(), err=True)
        return typer.Exit(BAD_USE)
    path = "headrace" if error.ctx is None else error.ctx.command_path
    print_error(error.format_message(), f"{path} --help")
    return typer.Exit(BAD_USE)


def _command_words(ctx: Any) -> str:
    """Return the command that runs, with its subcommand: `headrace operator run`."""
    context = ctx.meta.get(_CONTEXT)
    subcommand = None if context is None else context.invoked_subcommand
    return " ".join(filter(None, ("headrace", ctx.invoked_subcommand, subcommand)))


def _nothing() -> None: ...
