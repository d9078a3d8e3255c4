# SPDX-License-Identifier: Apache-2.0
"""`headrace service`: inference microservices on this machine, in containers, on clusters and clouds."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.cli.checks import FAILED
from headrace.cli.results import Json, print_json, print_json_line, print_result
from headrace.cli.service_options import (
    REGISTRY,
    OptionalJob,
    RegistryFile,
    Settings,
    StateDir,
    pairs,
    refuse,
    told_only,
    with_launcher,
)
from headrace.cli.service_request import request
from headrace.cli.service_start import start

if TYPE_CHECKING:
    from headrace.platforms.launcher import Launcher, Preflight, Service

service = typer.Typer(
    name="service",
    help="Start inference microservices anywhere, and look at, ask and stop them.",
    no_args_is_help=True,
)
service.command()(start)
service.command()(request)


@service.command("list")
def list_services(registry: RegistryFile = REGISTRY, state_dir: StateDir = None, as_json: Json = False) -> None:
    """List the services that are recorded, as they really are.

    Their state is running, starting, ended, stale (its platform does not know it any more) or unknown (its platform could
    not be asked).

    Examples:

        headrace service list

        headrace service list --json --registry ./services.json
    """
    from headrace.cli.service_view import show_services

    async def work(launcher: Launcher) -> tuple[list[Service], str | None]:
        return await launcher.list(), launcher.registry.latest

    found, latest = with_launcher(registry, state_dir, work)
    show_services(found, latest, as_json)


@service.command()
def status(
    job: OptionalJob = "", registry: RegistryFile = REGISTRY, state_dir: StateDir = None, as_json: Json = False
) -> None:
    """Show one service: what is recorded, what its platform says, and what it says itself.

    Example:

        headrace service status 8d0a2a3e-4a5b-4f8e-9f57-0f1d6a1b2c3d
    """
    from headrace.cli.service_view import show_service

    async def work(launcher: Launcher) -> tuple[Service, Any]:
        job_id = _resolved(launcher, job)
        return await launcher.status(job_id), await launcher.told(job_id)

    found, told = with_launcher(registry, state_dir, work)
    show_service(found, told, as_json)


@service.command()
def logs(
    job: OptionalJob = "",
    tail: Annotated[int, typer.Option("--tail", min=0, max=100_000, help="So many of the last lines.")] = 1000,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on with new lines until the service ends.")
    ] = False,
    registry: RegistryFile = REGISTRY,
    state_dir: StateDir = None,
    as_json: Json = False,
) -> None:
    """Print the last lines of a service's log.

    Examples:

        headrace service logs 8d0a2a3e-4a5b-4f8e-9f57-0f1d6a1b2c3d --tail 50

        headrace service logs -f
    """

    async def work(launcher: Launcher) -> None:
        job_id = _resolved(launcher, job)
        if not follow:
            text = await launcher.logs(job_id, tail)
            if as_json or text:
                print_result({"job_id": job_id, "log": text}, text, as_json)
            return
        async for line in launcher.follow(job_id, tail):
            if as_json:
                print_json_line({"job_id": job_id, "line": line})
            else:
                typer.echo(line)

    with_launcher(registry, state_dir, work)


@service.command()
def stop(
    job: Annotated[
        str, typer.Argument(metavar="[JOB]", help="Its job id; the latest unless told, which is confirmed.")
    ] = "",
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Stop the latest without asking.")] = False,
    grace_seconds: Annotated[
        float, typer.Option("--grace-seconds", min=0, metavar="SECONDS", help="For the requests that it is answering.")
    ] = 30.0,
    forget: Annotated[
        bool, typer.Option("--forget", help="Remove the record even if the platform cannot be reached any more.")
    ] = False,
    registry: RegistryFile = REGISTRY,
    state_dir: StateDir = None,
    as_json: Json = False,
) -> None:
    """Stop a service, and remove what it left on its platform and its record.

    Examples:

        headrace service stop 8d0a2a3e-4a5b-4f8e-9f57-0f1d6a1b2c3d

        headrace service stop --yes
    """
    job_id = _to_stop(registry, state_dir, job, yes)

    async def work(launcher: Launcher) -> None:
        await launcher.stop(job_id, grace_seconds, forget=forget)

    with_launcher(registry, state_dir, work)
    print_result({"job_id": job_id, "status": "stopped"}, f"{job_id}: stopped", as_json)


@service.command()
def prune(registry: RegistryFile = REGISTRY, state_dir: StateDir = None, as_json: Json = False) -> None:
    """Remove the services that have ended, and those that are recorded and not there any more.

    Example:

        headrace service prune
    """

    async def work(launcher: Launcher) -> list[Service]:
        return await launcher.prune()

    removed = with_launcher(registry, state_dir, work)
    if as_json:
        print_json([each.as_json() for each in removed])
        return
    for each in removed:
        typer.echo(f"{each.entry.job_id}: removed ({each.state})")
    if not removed:
        typer.echo("nothing to remove")


@service.command()
def preflight(
    platform: Annotated[
        str,
        typer.Option("--platform", metavar="NAME", help="process, local-docker, slurm, kubernetes, lepton or brev."),
    ] = "process",
    setting: Settings = None,
    partition: Annotated[str, typer.Option("--partition", metavar="NAME", help="slurm")] = "",
    namespace: Annotated[str, typer.Option("--namespace", metavar="NAME", help="kubernetes")] = "",
    instance_id: Annotated[str, typer.Option("--instance-id", metavar="NAME", help="brev")] = "",
    registry: RegistryFile = REGISTRY,
    state_dir: StateDir = None,
    as_json: Json = False,
) -> None:
    """Look whether all is there that a platform needs. Variables are SET or UNSET; what they hold is not shown.

    Examples:

        headrace service preflight --platform local-docker

        headrace service preflight --platform slurm --partition gpu --json
    """
    from headrace.cli.service_view import show_preflight

    settings = pairs(setting, "--setting") | told_only(
        {"partition": partition, "namespace": namespace, "instance_id": instance_id}
    )

    async def work(launcher: Launcher) -> Preflight:
        return await launcher.preflight(platform, settings)

    found = with_launcher(registry, state_dir, work)
    show_preflight(found, as_json)
    if not found.passed:
        raise typer.Exit(FAILED)


def _resolved(launcher: Launcher, job: str) -> str:
    """The job that is meant: the one that is named, or the only one."""
    from headrace.core.errors import InvalidArgument, NotFound

    if job:
        return job
    entries = launcher.registry.entries()
    if not entries:
        raise NotFound("no service is recorded: start one first, or name another --registry")
    if len(entries) > 1:
        raise InvalidArgument(f"{len(entries)} services are recorded: say which. {', '.join(entries)}")
    return next(iter(entries))


def _to_stop(registry: Path, state_dir: Path | None, job: str, yes: bool) -> str:
    from headrace.cli.service_view import is_interactive
    from headrace.core.errors import NotFound
    from headrace.platforms.targets import Refusal, Target, stop_target

    async def work(launcher: Launcher) -> Target:
        found = stop_target(*launcher.registry.read(), job)
        if isinstance(found, Refusal):
            raise NotFound(found.text)
        return found

    target = with_launcher(registry, state_dir, work)
    if target.confirm and not yes:
        if not is_interactive():
            raise refuse(f"{target.confirm} This is no terminal to ask on: name the job, or give --yes")
        typer.confirm(target.confirm, abort=True)
    return target.entry.job_id
