# SPDX-License-Identifier: Apache-2.0
"""`headrace service`: manage inference microservices on this machine, in containers, on clusters and clouds."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.cli.checks import FAILED
from headrace.cli.common_options import Json, print_json, print_json_line, print_result
from headrace.cli.service_options import (
    REGISTRY,
    OptionalJob,
    Platform,
    RegistryFile,
    Settings,
    StateDir,
    non_empty,
    pairs,
    refuse,
    with_launcher,
)
from headrace.cli.service_request import request
from headrace.cli.service_start import start

if TYPE_CHECKING:
    from headrace.platforms.launcher import Launcher, Preflight, Service

service = typer.Typer(
    name="service",
    help="Start inference microservices on any platform; inspect, query and stop them.",
    no_args_is_help=True,
)
service.command()(start)
service.command()(request)


@service.command("list")
def list_services(registry: RegistryFile = REGISTRY, state_dir: StateDir = None, as_json: Json = False) -> None:
    """List the recorded services with their current state.

    The state is running, starting, ended, stale (unknown to its platform) or unknown (the platform did not answer).

    Examples:

        headrace service list

        headrace service list --json --registry ./services.json
    """
    from headrace.cli.service_view import show_services

    async def work(launcher: Launcher) -> tuple[list[Service], str | None]:
        return await launcher.list(), launcher.registry.latest

    services, latest = with_launcher(registry, state_dir, work)
    show_services(services, latest, as_json)


@service.command()
def status(
    job: OptionalJob = "", registry: RegistryFile = REGISTRY, state_dir: StateDir = None, as_json: Json = False
) -> None:
    """Show one service: its record, its state on the platform, and its own status.

    Example:

        headrace service status 8d0a2a3e-4a5b-4f8e-9f57-0f1d6a1b2c3d
    """
    from headrace.cli.service_view import show_service

    async def work(launcher: Launcher) -> tuple[Service, Any]:
        job_id = _resolve_job(launcher, job)
        return await launcher.status(job_id), await launcher.fetch_status(job_id)

    recorded, own_status = with_launcher(registry, state_dir, work)
    show_service(recorded, own_status, as_json)


@service.command()
def logs(
    job: OptionalJob = "",
    tail: Annotated[int, typer.Option("--tail", min=0, max=100_000, help="Number of lines.")] = 1000,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Print new lines until the service ends.")] = False,
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
        job_id = _resolve_job(launcher, job)
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
    job: Annotated[str, typer.Argument(metavar="[JOB]", help="Job id (default: the latest, after confirmation).")] = "",
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Stop the latest without asking.")] = False,
    grace_seconds: Annotated[
        float, typer.Option("--grace-seconds", min=0, metavar="SECONDS", help="Time for open requests.")
    ] = 30.0,
    forget: Annotated[
        bool, typer.Option("--forget", help="Remove the record even if the platform cannot be reached.")
    ] = False,
    registry: RegistryFile = REGISTRY,
    state_dir: StateDir = None,
    as_json: Json = False,
) -> None:
    """Stop a service; remove its resources on the platform and its record.

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
    """Remove services that have ended, and records of services that no longer exist.

    Example:

        headrace service prune
    """

    async def work(launcher: Launcher) -> list[Service]:
        return await launcher.prune()

    removed = with_launcher(registry, state_dir, work)
    if as_json:
        print_json([removed_service.as_json() for removed_service in removed])
        return
    for removed_service in removed:
        typer.echo(f"{removed_service.entry.job_id}: removed ({removed_service.state})")
    if not removed:
        typer.echo("nothing to remove")


@service.command()
def preflight(
    platform: Platform = "process",
    setting: Settings = None,
    partition: Annotated[str, typer.Option("--partition", metavar="NAME", help="slurm")] = "",
    namespace: Annotated[str, typer.Option("--namespace", metavar="NAME", help="kubernetes")] = "",
    instance_id: Annotated[str, typer.Option("--instance-id", metavar="NAME", help="brev")] = "",
    registry: RegistryFile = REGISTRY,
    state_dir: StateDir = None,
    as_json: Json = False,
) -> None:
    """Check what a platform needs. Variables are shown as SET or UNSET, never with their values.

    Examples:

        headrace service preflight --platform local-docker

        headrace service preflight --platform slurm --partition gpu --json
    """
    from headrace.cli.service_view import show_preflight

    settings = pairs(setting, "--setting") | non_empty(
        {"partition": partition, "namespace": namespace, "instance_id": instance_id}
    )

    async def work(launcher: Launcher) -> Preflight:
        return await launcher.preflight(platform, settings)

    result = with_launcher(registry, state_dir, work)
    show_preflight(result, as_json)
    if not result.passed:
        raise typer.Exit(FAILED)


def _resolve_job(launcher: Launcher, job: str) -> str:
    """Return the given job, or the only one."""
    from headrace.core.errors import InvalidArgument, NotFound

    if job:
        return job
    entries = launcher.registry.entries()
    if not entries:
        raise NotFound("no service is recorded: start one first, or set --registry")
    if len(entries) > 1:
        raise InvalidArgument(f"{len(entries)} services are recorded: give one of {', '.join(entries)}")
    return next(iter(entries))


def _to_stop(registry: Path, state_dir: Path | None, job: str, yes: bool) -> str:
    from headrace.cli.service_view import is_interactive
    from headrace.core.errors import NotFound
    from headrace.platforms.services import NoTarget, Target, stop_target

    async def work(launcher: Launcher) -> Target:
        target = stop_target(*launcher.registry.read(), job)
        if isinstance(target, NoTarget):
            raise NotFound(target.text)
        return target

    target = with_launcher(registry, state_dir, work)
    if target.confirm and not yes:
        if not is_interactive():
            raise refuse(f"{target.confirm} There is no terminal to ask on: give the job, or --yes")
        typer.confirm(target.confirm, abort=True)
    return target.entry.job_id
