# SPDX-License-Identifier: Apache-2.0
"""`headrace completion`: print a shell completion script, and complete values.

The script runs `headrace` with an environment variable, and Typer prints the candidates. `root` calls `add_values` only
then, and only for the command on the line. Model names come from a server, with a short timeout and no errors.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from enum import StrEnum
from typing import Annotated, Any, get_args, get_type_hints

import typer

from headrace.cli.common_options import SERVER_URL

VARIABLE = "_HEADRACE_COMPLETE"
_SECONDS = 1.0
_BASH = """
_headrace_completion() {
    local line="${COMP_LINE:0:COMP_POINT}" words at
    read -ra words <<< "$line"
    at=$((${#words[@]} - 1))
    [[ $line == *[[:space:]] ]] && at=$((at + 1))
    mapfile -t COMPREPLY < <(env COMP_WORDS="$line" COMP_CWORD=$at _HEADRACE_COMPLETE=complete_bash "$1" 2>/dev/null)
}
complete -o default -F _headrace_completion headrace
"""
"""Typer's script does not work: bash splits words at = and :, so --policy=p2c and URLs are read from the line."""

Values = Callable[..., list[str]]
"""A callback that returns candidates; Typer inspects the names of its parameters."""


class Shell(StrEnum):
    """The supported shells."""

    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


def completion(
    shell: Annotated[Shell, typer.Argument(metavar="SHELL", help="bash, zsh or fish.", show_default=False)],
) -> None:
    """Print a shell completion script for commands, options, policies, platforms and model names.

    Examples:

        source <(headrace completion bash)

        headrace completion bash > ~/.local/share/bash-completion/completions/headrace

        headrace completion zsh > ~/.zfunc/_headrace

        headrace completion fish > ~/.config/fish/completions/headrace.fish
    """
    from typer.completion import get_completion_script  # type: ignore[attr-defined]  # only imported there

    if shell is Shell.BASH:
        typer.echo(_BASH.strip())
    else:
        options = {"prog_name": "headrace", "complete_var": VARIABLE, "shell": shell.value}
        typer.echo(get_completion_script(**options))


def add_values(app: typer.Typer) -> None:
    """Add completion of values to arguments and options, by their names. Call this before the app runs."""
    from headrace.cli.serve import serve

    for callback in _callbacks(app):
        find = _flag_values if callback is serve else _values
        for name, parameter in _parameters(callback):
            if parameter.autocompletion is None and parameter.shell_complete is None:
                parameter.autocompletion = find(name)


def _values(name: str) -> Values | None:
    if name == "model":
        return model_names
    if name in ("policy", "platform"):
        return _starting(_policies if name == "policy" else _platforms)
    return None


def _flag_values(name: str) -> Values | None:
    """Return the completion of an option of `serve`, from its table."""
    from headrace.programs.configuration.option_table import FLAGS

    option = FLAGS.get(name.replace("_", "-"))
    choices = () if option is None else option.choices or (("true", "false") if option.type == "bool" else ())
    return _starting(lambda: choices) if choices else None


def model_names(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the model names of the server on the line or of the default one; none if it does not answer."""
    from headrace.cli.client import credentials
    from headrace.core.errors import InvalidArgument
    from headrace.net.http_client import request

    url = str(ctx.params.get("url") or SERVER_URL)
    try:
        index = request("POST", url, "/v2/repository/index", b"{}", credentials(), seconds=_SECONDS).json()
        names = {str(entry["name"]) for entry in index}
    except (OSError, InvalidArgument, TypeError, KeyError):
        return []
    return sorted(name for name in names if name.startswith(incomplete))


def _policies() -> Iterable[str]:
    from headrace.fleet.router.settings import POLICIES

    return POLICIES


def _platforms() -> Iterable[str]:
    from headrace.platforms.drivers import PLATFORMS

    return PLATFORMS


def _starting(candidates: Callable[[], Iterable[str]]) -> Values:
    def values(incomplete: str) -> list[str]:
        return [value for value in candidates() if value.startswith(incomplete)]

    return values


def _callbacks(app: typer.Typer) -> Iterator[Callable[..., Any]]:
    for command in app.registered_commands:
        if command.callback is not None:
            yield command.callback
    if app.registered_callback is not None and app.registered_callback.callback is not None:
        yield app.registered_callback.callback
    for group in app.registered_groups:
        if group.typer_instance is not None:
            yield from _callbacks(group.typer_instance)


def _parameters(callback: Callable[..., Any]) -> Iterator[tuple[str, Any]]:
    """Return Typer's metadata of each parameter.

    Annotations are strings that are evaluated at each use: evaluate them once here, so that Typer finds the same objects.
    """
    from typer.models import ParameterInfo

    if any(isinstance(annotation, str) for annotation in callback.__annotations__.values()):
        try:
            callback.__annotations__ = get_type_hints(callback, include_extras=True)
        except NameError:  # a type imported for type checkers only: no completion for this command
            return
    for name, parameter in inspect.signature(callback).parameters.items():
        for metadata in get_args(parameter.annotation)[1:]:
            if isinstance(metadata, ParameterInfo):
                yield name, metadata
