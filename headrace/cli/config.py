# SPDX-License-Identifier: Apache-2.0
"""`headrace config`: show the resolved configuration of a server and the source of each value, or check a file.

Options of `headrace serve` may follow those of `show` and have the same effect.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.cli.checks import FAILED, print_warning
from headrace.cli.common_options import Json, print_json

if TYPE_CHECKING:
    from headrace.programs.configuration.resolution import OptionValues

config = typer.Typer(name="config", help="Show and check the configuration of a server.", no_args_is_help=True)

_MORE = {"allow_extra_args": True, "ignore_unknown_options": True}

_KINDS = {"flag": "green", "env": "cyan", "file": "magenta", "default": "dim"}


@config.command(context_settings=_MORE)
def show(
    ctx: typer.Context,
    file: Annotated[str, typer.Option("--config", metavar="FILE", help="YAML file (default: INFERENCE_CONFIG).")] = "",
    origin: Annotated[bool, typer.Option("--origin", help="Also show the source of each value.")] = False,
    everything: Annotated[bool, typer.Option("--all", help="Also show options that are not set.")] = False,
    as_json: Json = False,
) -> None:
    """Show every value that a server would start with. Options of `headrace serve` may follow.

    Examples:

        headrace config show --config config/inference.yaml --origin

        INFERENCE_PORT=9000 headrace config show --origin --http-port 9001
    """
    from headrace.cli.checks import exit_on_error
    from headrace.programs.configuration.resolution import as_json as json_of

    with exit_on_error():
        values = _read_values(ctx.args, file)
    keys = [key for key in values.settings if everything or _is_shown(values, key)]
    if as_json:
        document = json_of(values)
        print_json({key: document[key] for key in keys})
    else:
        _show_table(values, keys, origin=origin)
    for warning in values.warnings:
        print_warning(warning)


@config.command()
def check(
    file: Annotated[str, typer.Argument(metavar="FILE", help="The YAML file.")],
    as_json: Json = False,
) -> None:
    """Check a configuration file and print all mistakes. The environment is ignored.

    Example:

        headrace config check config/inference.yaml
    """
    from headrace.programs.configuration.resolution import SettingsError, configure

    problems: tuple[str, ...] = ()
    try:
        configure({"config": file}, (), {})
    except SettingsError as error:
        problems = tuple(str(problem) for problem in error.problems)
    if as_json:
        print_json({"file": file, "problems": list(problems)})
    elif problems:
        for problem in problems:
            typer.echo(problem)
    else:
        typer.echo(f"{file}: no mistakes")
    if problems:
        raise typer.Exit(FAILED)


def _read_values(arguments: list[str], file: str) -> OptionValues:
    from headrace.cli.serve_arguments import parse_arguments
    from headrace.programs.configuration.resolution import configure

    parsed = parse_arguments(arguments)
    return configure({"config": file, **parsed.texts}, parsed.folders, os.environ)


def _is_shown(values: OptionValues, key: str) -> bool:
    from headrace.programs.configuration.option import OPTIONS

    return values.settings[key].option.section != OPTIONS or values.has(key)


def _show_table(values: OptionValues, keys: list[str], *, origin: bool) -> None:
    from rich.text import Text

    from headrace.cli.tables import open_console, table
    from headrace.programs.configuration.resolution import shown_value, value_text

    rows = []
    for key in keys:
        setting = values.settings[key]
        row: list[object] = [key, value_text(shown_value(setting))]
        if origin:
            row.append(Text(str(setting.origin), _KINDS[setting.origin.kind]))
        rows.append(row)
    open_console().print(table(["key", "value", *(["origin"] if origin else [])], rows))
