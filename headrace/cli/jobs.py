# SPDX-License-Identifier: Apache-2.0
"""`headrace jobs`: manage trained models and services of a gateway in its data directory, while it runs or not."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from headrace.cli.common_options import Json, print_json, print_result
from headrace.cli.gateway import DATA_DIR, DatabaseUrl, DataDir, with_gateway

if TYPE_CHECKING:
    from headrace.jobs.records import Job
    from headrace.jobs.service import JobService

jobs = typer.Typer(name="jobs", help="Register trained models; list, cancel and delete jobs.", no_args_is_help=True)

_T = TypeVar("_T")
_STYLES = {"Done": "green", "Running": "green", "Error": "red", "Canceled": "dim"}
OPERATOR = "command-line"
"""User name of jobs that are created here."""

JobId = Annotated[str, typer.Argument(metavar="JOB", help="Job id.")]
AnyOrg = Annotated[str, typer.Option("--org", metavar="ORG", help="Organisation (default: all).")]


@jobs.command()
def register(
    path: Annotated[str, typer.Argument(metavar="PATH", help="Model file or folder, or a URL such as s3://...")],
    org: Annotated[str, typer.Option("--org", metavar="ORG", help="Organisation that owns the model.")],
    arch: Annotated[str, typer.Option("--arch", metavar="ARCH", help="Architecture, such as cosmos-rl.")],
    workspace: Annotated[
        str, typer.Option("--workspace", metavar="ID", help="Workspace with the bucket of the model or its media.")
    ] = "",
    name: Annotated[
        str, typer.Option("--name", metavar="NAME", help="Display name (default: last part of the path).")
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
    display_name = name or path.rstrip("/").rpartition("/")[2][:255]
    location = path if "://" in path else str(Path(path).expanduser().absolute())

    async def work(service: JobService) -> Job:
        return (await service.register(org, OPERATOR, location, arch, workspace, display_name))[1]

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
    size: Annotated[int, typer.Option("--size", min=1, help="Maximum jobs per organisation.")] = 100,
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
        jobs_: list[Job] = []
        for organisation in await _organisations(service, org):
            page = await service.list_jobs(organisation, size=size, status=status or None, action=action or None)
            jobs_ += page.jobs
        return jobs_

    jobs_ = _with_jobs(data_dir, database_url, work)
    rows = [_row(job) for job in jobs_]
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
    """Show a job and the history of its status.

    Example:

        headrace jobs show 8d0a2a3e-4a5b-4f8e-9f57-0f1d6a1b2c3d
    """
    from headrace.cli.tables import heading, open_console, table
    from headrace.jobs.records import iso

    async def work(service: JobService, job: Job) -> dict[str, Any]:
        events = await service.job_events(job.org, job.id)
        changes = [
            {"time": iso(event.time), "status": event.status, "reason": event.reason, "by": event.by}
            for event in events
        ]
        return {**_row(job), "specs": job.specs, "details": job.details, "events": changes}

    job = _with_job(data_dir, database_url, org, job_id, work)
    if as_json:
        print_json(job)
        return
    console = open_console()
    plain = [(key, value) for key, value in job.items() if isinstance(value, str | int) and value != ""]
    console.print(table(("FIELD", "VALUE"), plain))
    console.print(heading("changes"))
    changes = [(event["time"], _coloured(event["status"]), event["by"], event["reason"]) for event in job["events"]]
    console.print(table(("TIME", "STATUS", "BY", "REASON"), changes))


@jobs.command()
def logs(
    job_id: JobId,
    tail: Annotated[int, typer.Option("--tail", min=1, max=100_000, help="Number of lines.")] = 1000,
    org: AnyOrg = "",
    data_dir: DataDir = DATA_DIR,
    database_url: DatabaseUrl = "",
    as_json: Json = False,
) -> None:
    """Print the last lines of a job's log.

    Example:

        headrace jobs logs 8d0a2a3e-4a5b-4f8e-9f57-0f1d6a1b2c3d --tail 50
    """
    text = _with_job(
        data_dir, database_url, org, job_id, lambda service, job: service.job_logs(job.org, job.id, tail=tail)
    )
    print_result({"job_id": job_id, "log": text}, text.removesuffix("\n"), as_json)


@jobs.command()
def cancel(
    job_id: JobId, org: AnyOrg = "", data_dir: DataDir = DATA_DIR, database_url: DatabaseUrl = "", as_json: Json = False
) -> None:
    """Cancel a job that has not finished; a service is stopped permanently.

    Example:

        headrace jobs cancel 8d0a2a3e-4a5b-4f8e-9f57-0f1d6a1b2c3d
    """
    job = _with_job(
        data_dir, database_url, org, job_id, lambda service, job: service.cancel_job(job.org, OPERATOR, job.id)
    )
    print_result(_row(job), f"{job.id}: {job.status} ({job.reason})", as_json)


@jobs.command()
def delete(
    job_id: JobId, org: AnyOrg = "", data_dir: DataDir = DATA_DIR, database_url: DatabaseUrl = "", as_json: Json = False
) -> None:
    """Delete a finished job. The model's files stay.

    Example:

        headrace jobs delete 8d0a2a3e-4a5b-4f8e-9f57-0f1d6a1b2c3d
    """
    job = _with_job(data_dir, database_url, org, job_id, lambda service, job: service.delete_job(job.org, job.id))
    print_result(_row(job), f"{job.id}: deleted", as_json)


def _with_jobs(data_dir: Path, database_url: str, work: Callable[[JobService], Awaitable[_T]]) -> _T:
    return with_gateway(data_dir, database_url, lambda gateway: work(gateway.jobs))


def _with_job(
    data_dir: Path, database_url: str, org: str, job_id: str, work: Callable[[JobService, Job], Awaitable[_T]]
) -> _T:
    async def find_and_work(service: JobService) -> _T:
        return await work(service, await _find(service, job_id, org))

    return _with_jobs(data_dir, database_url, find_and_work)


async def _organisations(service: JobService, org: str) -> list[str]:
    return [org] if org else [organisation.name for organisation in await service.store.organisations()]


async def _find(service: JobService, job_id: str, org: str) -> Job:
    from headrace.core.errors import NotFound

    for organisation in await _organisations(service, org):
        try:
            return await service.get_job(organisation, job_id)
        except NotFound:
            continue
    raise NotFound(f"there is no job {job_id[:64]!a}: `headrace jobs list` lists all")


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


def _coloured(status: str) -> Any:
    from rich.text import Text

    return Text(status, _STYLES.get(status, "yellow"))
