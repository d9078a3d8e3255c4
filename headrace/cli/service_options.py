# SPDX-License-Identifier: Apache-2.0
"""What the verbs of `headrace service` share: options, how a launcher is opened, and which error is which exit code."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from headrace.cli.checks import BAD_USE, FAILED, complain

if TYPE_CHECKING:
    from headrace.core.errors import HeadraceError
    from headrace.platforms.launcher import Launcher

NOT_READY, BROKEN = 3, 4
"""Exit codes beside those of every verb: not ready yet; the service has failed for good."""
REGISTRY = Path("/tmp/tao-inf-ms-state.json")  # noqa: S108  # TAO's; whoever reads it checks its owner
T = TypeVar("T")

RegistryFile = Annotated[
    Path,
    typer.Option("--registry", metavar="FILE", help="Where services are recorded; by default where TAO's tools do."),
]
StateDir = Annotated[
    Path | None,
    typer.Option(
        "--state-dir",
        metavar="FOLDER",
        help="Files of services of this machine. Default: ~/.local/state/headrace/services, or beside your --registry.",
    ),
]
Architectures = Annotated[
    Path | None,
    typer.Option("--architectures", metavar="FOLDER", help="More architectures: a YAML or JSON file for each."),
]
OptionalJob = Annotated[
    str, typer.Argument(metavar="[JOB]", help="Its job id; may be left out where there is only one.")
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--setting",
        metavar="NAME=VALUE",
        help="Any setting of the platform; see its guide. Repeatable.",
        show_default=False,
    ),
]


def with_launcher(
    registry: Path,
    state_dir: Path | None,
    work: Callable[[Launcher], Awaitable[T]],
    *,
    platform: str = "",
    **more: Any,
) -> T:
    """Do something with a launcher; progress is shown on a terminal, and an error becomes a sentence and an exit code."""
    import asyncio

    from headrace.cli.progress import logging_beside_bars
    from headrace.platforms.launcher import Launcher

    async def run(progress: Any) -> T:
        async with Launcher(registry, state_dir=state_dir, progress=progress, **more) as launcher:
            return await work(launcher)

    with or_sentence(platform), logging_beside_bars("warning", "auto", bars=True) as progress:
        return asyncio.run(run(progress))


@contextmanager
def or_sentence(platform: str = "") -> Iterator[None]:
    """Turn an error into its text, with the last lines of a log where there are some, and its exit code."""
    from headrace.core.errors import FailedPrecondition, HeadraceError
    from headrace.core.telemetry.logs import one_line
    from headrace.platforms.starting import StartFailed

    try:
        yield
    except HeadraceError as error:
        complain(one_line(error.message))
        if isinstance(error, StartFailed) and error.last_lines:
            typer.echo("the last lines of its log:", err=True)
            for line in error.last_lines.splitlines():
                typer.echo(f"  {one_line(line)}", err=True)
        elif platform and isinstance(error, FailedPrecondition):
            typer.echo(f"     try: headrace service preflight --platform {platform}", err=True)
        raise typer.Exit(exit_code(error)) from None


def exit_code(error: HeadraceError) -> int:
    """Which of the four."""
    from headrace.core.errors import DeadlineExceeded, InvalidArgument
    from headrace.platforms.asking import NotReadyYet, ServiceBroken
    from headrace.platforms.starting import StartFailed

    if isinstance(error, InvalidArgument):
        return BAD_USE
    if isinstance(error, NotReadyYet | DeadlineExceeded):
        return NOT_READY
    return BROKEN if isinstance(error, ServiceBroken | StartFailed) else FAILED


def refuse(text: str) -> typer.Exit:
    """Say what to do instead; raise what this returns."""
    from headrace.core.telemetry.logs import one_line

    complain(one_line(text))
    return typer.Exit(BAD_USE)


def pairs(given: list[str] | None, flag: str) -> dict[str, str]:
    """NAME=VALUE, several times."""
    made: dict[str, str] = {}
    for text in given or []:
        name, equals, value = text.partition("=")
        if not name or not equals:
            raise refuse(f"{flag} {text[:64]!a}: write {flag} NAME=VALUE")
        made[name.replace("-", "_")] = value
    return made


def told_only(named: Mapping[str, str]) -> dict[str, str]:
    """The options that were given."""
    return {name: value for name, value in named.items() if value}
