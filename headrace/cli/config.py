# SPDX-License-Identifier: Apache-2.0
"""`headrace config`: show the resolved configuration of a server and the source of each value, or check a file.

Options of `headrace serve` may follow those of `show` and have the same effect.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.cli.checks import FAILED
from headrace.cli.common_options import Json, print_json

if TYPE_CHECKING:
    from headrace.cli.serve_configuration import Configured

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
        configured = _configured(ctx.args, file)
    settings = configured.configuration.settings
    wanted = [path for path in settings if everything or _is_shown(configured, path)]
    if as_json:
        document = json_of(configured.configuration)
        print_json({path: document[path] for path in wanted})
    else:
        _show_table(configured, wanted, origin=origin)
    for warning in configured.configuration.warnings:
        typer.secho(f"headrace: {warning}", fg="yellow", err=True)


@config.command()
def check(
    file: Annotated[str, typer.Argument(metavar="FILE", help="The YAML file.")],
    as_json: Json = False,
) -> None:
    """Check a configuration file and print all mistakes. The environment is ignored.

    Example:

        headrace config check config/inference.yaml
    """
    from headrace.cli.serve_configuration import configure
    from headrace.programs.configuration.keys import SettingsError

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


def _configured(arguments: list[str], file: str) -> Configured:
    from headrace.cli.options import BY_NAME
    from headrace.cli.serve_arguments import normalise
    from headrace.cli.serve_configuration import configure

    given, _ = normalise(arguments)
    texts: dict[str, str | list[str] | None] = {"config": file or None}
    folders: list[str] = []
    while given and given[0] != "--":
        name, _, text = given.pop(0).removeprefix("--").partition("=")
        if name in BY_NAME and BY_NAME[name].many:
            before = texts.get(name)
            texts[name] = [*(before if isinstance(before, list) else []), text]
        elif name in BY_NAME:
            texts[name] = text
    folders += given[1:]
    return configure(texts, folders, os.environ)


def _is_shown(configured: Configured, path: str) -> bool:
    from headrace.programs.configuration.keys import OPTIONS

    return not path.startswith(f"{OPTIONS}.") or configured.configuration.given(path)


def _show_table(configured: Configured, paths: list[str], *, origin: bool) -> None:
    from rich.text import Text

    from headrace.cli.tables import open_console, table
    from headrace.programs.configuration.resolution import shown_value, value_text

    rows = []
    for path in paths:
        setting = configured.configuration.settings[path]
        row: list[object] = [path, value_text(shown_value(setting))]
        if origin:
            row.append(Text(str(setting.origin), _KINDS[setting.origin.kind]))
        rows.append(row)
    open_console().print(table(["key", "value", *(["origin"] if origin else [])], rows))
