# SPDX-License-Identifier: Apache-2.0
"""`headrace jobs`: trained models and services of a gateway. Works on its data directory, also while it runs."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from headrace.cli.checks import FAILED, told
from headrace.cli.gateway import DATA_DIR, DatabaseUrl, DataDir
from headrace.cli.results import Json, print_json, print_result

if TYPE_CHECKING:
    from headrace.jobs.records import Job
    from headrace.jobs.service import JobService

jobs = typer.Typer(
    name="jobs", help="Register trained models; look at jobs, end and delete them.", no_args_is_help=True
)

_T = TypeVar("_T")
_STYLES = {"Done": "green", "Running": "green", "Error": "red", "Canceled": "dim"}
OPERATOR = "command-line"
"""Whose the jobs are that are made here."""

JobId = Annotated[str, typer.Argument(metavar="JOB", help="Its id.")]
AnyOrg = Annotated[str, typer.Option("--org", metavar="ORG", help="The organisation; all unless told.")]


@jobs.command()
def register(
    path: Annotated[str, typer.Argument(metavar="PATH", help="The model: a file, a folder, or a URL such as s3://...")],
    org: Annotated[str, typer.Option("--org", metavar="ORG", help="Whose it is.")],
    arch: Annotated[str, typer.Option("--arch", metavar="ARCH", help="The kind of model, such as cosmos-rl.")],
    workspace: Annotated[
        str, typer.Option("--workspace", metavar="ID", help="Whose bucket the model, or its media, lies in.")
    ] = "",
    name: Annotated[
        str, typer.Option("--name", metavar="NAME", help="For people. The path's last part unless told.")
    ] = "",
    data_dir: DataDir = DATA_DIR,
    database_url: DatabaseUrl = "",
    as_json: Json = False,
) -> None:
    """Register a trained model as a completed training job, and print the ids of its experiment and of the job.

    Examples:

        headrace jobs register ./model.onnx --org acme --arch classification --data-dir ./gateway

        headrace jobs register s3://bucket/results/m --org acme --arch cosmos-rl --workspace 6f1c... --json
    """
    called = name or path.rstrip("/").rpartition("/")[2][:255]
    where = path if "://" in path else str(Path(path).expanduser().absolute())

    async def work(service: JobService) -> Job:
        return (await service.register(org, OPERATOR, where, arch, workspace, called))[1]

    job = _with_jobs(data_dir, database_url, work)
    if as_json:
        print_json({"experiment_id": job.experiment_id, "job_id": job.id})
        return
    typer.echo(f"experiment {job.experiment_id}")
    typer.echo(f"job        {job.id}")


@jobs.command("list")
def list_jobs(
    org: AnyOrg = "",
    status: Annotated[str, typer.Option("--status", metavar="STATUS", help="Running, Done, Error, ...")] = "",
    action: Annotated[str, typer.Option("--action", metavar="ACTION", help="train, inference_microservice, ...")] = "",
    size: Annotated[int, typer.Option("--size", min=1, help="At most so many of each organisation.")] = 100,
    data_dir: DataDir = DATA_DIR,
    database_url: DatabaseUrl = "",
    as_json: Json = False,
) -> None:
    """List jobs, the newest first.

    Examples:

        headrace jobs list --org acme

        headrace jobs list --action inference_microservice --status Running --json
    """
    from headrace.cli.tables import open_console, table

    async def work(service: JobService) -> list[Job]:
        found: list[Job] = []
        for each in await _organisations(service, org):
            page = await service.list_jobs(each, size=size, status=status or None, action=action or None)
            found += page.jobs
        return found

    found = _with_jobs(data_dir, database_url, work)
    rows = [_row(job) for job in found]
    if as_json:
        print_json(rows)
        return
    cells = [
        (row["id"], row["org"], row["action"], _coloured(row["status"]), row["network_arch"], row["name"],
         row["created_on"]) for row in rows
    ]  # fmt: skip
    open_console().print(table(("JOB", "ORG", "ACTION", "STATUS", "ARCH", "NAME", "CREATED"), cells))


@jobs.command()
def show(
    job_id: JobId, org: AnyOrg = "", data_dir: DataDir = DATA_DIR, database_url: DatabaseUrl = "", as_json: Json = False
) -> None:
    """Show a job, and every change of it with its reason.

    Example:

        headrace jobs show 8d0a2a3e-4a5b-4f8e-9f57-0f1d6a1b2c3d
    """
    from headrace.cli.tables import heading, open_console, table
    from headrace.jobs.records import iso

    async def work(service: JobService) -> dict[str, Any]:
        job = await _find(service, job_id, org)
        events = await service.job_events(job.org, job.id)
        changes = [
            {"time": iso(each.time), "status": each.status, "reason": each.reason, "by": each.by} for each in events
        ]
        return {**_row(job), "specs": job.specs, "details": job.details, "events": changes}

    found = _with_jobs(data_dir, database_url, work)
    if as_json:
        print_json(found)
        return
    console = open_console()
    plain = [(key, value) for key, value in found.items() if isinstance(value, str | int) and value != ""]
    console.print(table(("FIELD", "VALUE"), plain))
    console.print(heading("changes"))
    changes = [(each["time"], _coloured(each["status"]), each["by"], each["reason"]) for each in found["events"]]
    console.print(table(("TIME", "STATUS", "BY", "REASON"), changes))


@jobs.command()
def logs(
    job_id: JobId,
    tail: Annotated[int, typer.Option("--tail", min=1, max=100_000, help="So many lines.")] = 1000,
    org: AnyOrg = "",
    data_dir: DataDir = DATA_DIR,
    database_url: DatabaseUrl = "",
    as_json: Json = False,
) -> None:
    """Print the last lines of a job's log.

    Example:

        headrace jobs logs 8d0a2a3e-4a5b-4f8e-9f57-0f1d6a1b2c3d --tail 50
    """

    async def work(service: JobService) -> str:
        job = await _find(service, job_id, org)
        return await service.job_logs(job.org, job.id, tail=tail)

    text = _with_jobs(data_dir, database_url, work)
    print_result({"job_id": job_id, "log": text}, text.removesuffix("\n"), as_json)


@jobs.command()
def cancel(
    job_id: JobId, org: AnyOrg = "", data_dir: DataDir = DATA_DIR, database_url: DatabaseUrl = "", as_json: Json = False
) -> None:
    """End a job that is not over; a service is stopped for good.

    Example:

        headrace jobs cancel 8d0a2a3e-4a5b-4f8e-9f57-0f1d6a1b2c3d
    """

    async def work(service: JobService) -> Job:
        job = await _find(service, job_id, org)
        return await service.cancel_job(job.org, OPERATOR, job.id)

    _show_job(_with_jobs(data_dir, database_url, work), as_json)


@jobs.command()
def delete(
    job_id: JobId, org: AnyOrg = "", data_dir: DataDir = DATA_DIR, database_url: DatabaseUrl = "", as_json: Json = False
) -> None:
    """Delete a job that is over. The model's files stay.

    Example:

        headrace jobs delete 8d0a2a3e-4a5b-4f8e-9f57-0f1d6a1b2c3d
    """

    async def work(service: JobService) -> Job:
        job = await _find(service, job_id, org)
        return await service.delete_job(job.org, job.id)

    job = _with_jobs(data_dir, database_url, work)
    print_result(_row(job), f"{job.id}: deleted", as_json)


def _with_jobs(data_dir: Path, database_url: str, work: Callable[[JobService], Awaitable[_T]]) -> _T:
    import asyncio

    from headrace.jobs.settings import JobSettings
    from headrace.programs.gateway.opening import opened

    settings = JobSettings(data_dir.expanduser(), database_url=database_url)

    async def run() -> _T:
        async with opened(settings) as found:
            return await work(found.jobs)

    with told(FAILED):
        return asyncio.run(run())


async def _organisations(service: JobService, org: str) -> list[str]:
    return [org] if org else [each.name for each in await service.store.organisations()]


async def _find(service: JobService, job_id: str, org: str) -> Job:
    from headrace.core.errors import NotFound

    for each in await _organisations(service, org):
        try:
            return await service.get_job(each, job_id)
        except NotFound:
            continue
    raise NotFound(f"there is no job {job_id[:64]!a}: `headrace jobs list` shows those there are")


def _row(job: Job) -> dict[str, Any]:
    from headrace.jobs.records import iso

    return {
        "id": job.id,
        "org": job.org,
        "experiment_id": job.experiment_id,
        "parent_id": job.parent_id,
        "action": job.action,
        "status": job.status,
        "reason": job.reason,
        "name": job.name,
        "network_arch": job.network_arch,
        "checkpoint": job.checkpoint,
        "created_on": iso(job.created_on),
        "last_modified": iso(job.last_modified),
    }


def _show_job(job: Job, as_json: bool) -> None:
    print_result(_row(job), f"{job.id}: {job.status} ({job.reason})", as_json)


def _coloured(status: str) -> Any:
    from rich.text import Text

    return Text(status, _STYLES.get(status, "yellow"))
