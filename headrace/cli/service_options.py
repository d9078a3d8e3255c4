# SPDX-License-Identifier: Apache-2.0
"""Shared by the commands of `headrace service`: options, how to open a launcher, and exit codes of errors."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from headrace.cli.checks import BAD_USE, FAILED, print_error

if TYPE_CHECKING:
    from headrace.core.errors import HeadraceError
    from headrace.platforms.launcher import Launcher

NOT_READY, BROKEN = 3, 4
"""Exit codes of `headrace service`: not ready yet; the service has failed permanently."""
REGISTRY = Path("/tmp/tao-inf-ms-state.json")  # noqa: S108  # TAO's; readers check the owner
T = TypeVar("T")

RegistryFile = Annotated[
    Path,
    typer.Option("--registry", metavar="FILE", help="File that records services (default: the one of TAO's tools)."),
]
StateDir = Annotated[
    Path | None,
    typer.Option(
        "--state-dir",
        metavar="FOLDER",
        help="State directory of local services (default: ~/.local/state/headrace/services, or beside --registry).",
    ),
]
Architectures = Annotated[
    Path | None,
    typer.Option(
        "--architectures", metavar="FOLDER", help="Folder with more architectures, one YAML or JSON file each."
    ),
]
OptionalJob = Annotated[str, typer.Argument(metavar="[JOB]", help="Job id; optional if there is only one service.")]
Platform = Annotated[
    str, typer.Option("--platform", metavar="NAME", help="process, local-docker, slurm, kubernetes, lepton or brev.")
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
    """Run a function with a launcher; show progress on a terminal, and report errors with their exit code."""
    import asyncio

    from headrace.cli.progress import logging_beside_bars
    from headrace.platforms.launcher import Launcher

    async def run(progress: Any) -> T:
        async with Launcher(registry, state_dir=state_dir, progress=progress, **more) as launcher:
            return await work(launcher)

    with report_service_errors(platform), logging_beside_bars("warning", "auto", bars=True) as progress:
        return asyncio.run(run(progress))


@contextmanager
def report_service_errors(platform: str = "") -> Iterator[None]:
    """Report an error, with the last log lines if there are any, and exit with its code."""
    from headrace.core.errors import FailedPrecondition, HeadraceError
    from headrace.core.extras import MissingExtra
    from headrace.core.telemetry.logs import one_line
    from headrace.platforms.launcher import StartFailed

    try:
        yield
    except HeadraceError as error:
        is_of_platform = platform and isinstance(error, FailedPrecondition) and not isinstance(error, MissingExtra)
        has_log = isinstance(error, StartFailed) and error.last_lines
        hint = f"headrace service preflight --platform {platform}" if is_of_platform and not has_log else ""
        print_error(error.message, hint)
        if isinstance(error, StartFailed) and error.last_lines:
            typer.echo("last log lines:", err=True)
            for line in error.last_lines.splitlines():
                typer.echo(f"  {one_line(line)}", err=True)
        raise typer.Exit(exit_code(error)) from None


def exit_code(error: HeadraceError) -> int:
    """Return the exit code of an error."""
    from headrace.core.errors import DeadlineExceeded, InvalidArgument
    from headrace.core.extras import MissingExtra
    from headrace.platforms.launcher import StartFailed
    from headrace.platforms.service_client import NotReadyYet, ServiceBroken

    if isinstance(error, InvalidArgument | MissingExtra):
        return BAD_USE
    if isinstance(error, NotReadyYet | DeadlineExceeded):
        return NOT_READY
    return BROKEN if isinstance(error, ServiceBroken | StartFailed) else FAILED


def refuse(text: str) -> typer.Exit:
    """Print an error in the options and return the exception to raise."""
    from headrace.core.telemetry.logs import one_line

    print_error(one_line(text))
    return typer.Exit(BAD_USE)


def pairs(texts: list[str] | None, flag: str) -> dict[str, str]:
    """Parse repeated NAME=VALUE options."""
    result: dict[str, str] = {}
    for text in texts or []:
        name, equals, value = text.partition("=")
        if not name or not equals:
            raise refuse(f"{flag} {text[:64]!a}: write {flag} NAME=VALUE")
        result[name.replace("-", "_")] = value
    return result


def non_empty(options: Mapping[str, str]) -> dict[str, str]:
    """Return the options that are not empty."""
    return {name: value for name, value in options.items() if value}
