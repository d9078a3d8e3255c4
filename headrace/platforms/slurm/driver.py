# SPDX-License-Identifier: Apache-2.0
"""The driver `slurm`: a service is a batch job, named by its job id, with a folder of that name on the cluster.

The folder (`script`, `env`, `log`, `meta`, `number`, `end`) is created first and removed last: a service exists as long as
its folder does. Slurm forgets jobs minutes after their end; the exit code that the script writes to the folder stays. This
machine reaches a service on its node through an ssh tunnel, which `endpoint` opens, and opens again if it died.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from headrace.core.errors import (
    AlreadyExists,
    FailedPrecondition,
    HeadraceError,
    ResourceExhausted,
    Unavailable,
)
from headrace.core.nodes import first_host
from headrace.platforms.commands import Completed
from headrace.platforms.contract import Check, Handle, LaunchSpec, PlatformStatus, check_job_id
from headrace.platforms.node_resources import LOOPBACK
from headrace.platforms.slurm import login_node
from headrace.platforms.slurm.batch_script import BatchJob, build_batch_job
from headrace.platforms.slurm.login_node import LoginNodes, cluster_location
from headrace.platforms.slurm.settings import SlurmSettings
from headrace.platforms.slurm.status import JobRecord, parse_checks, parse_listing, parse_node_address, service_status
from headrace.platforms.slurm.tunnels import Tunnels

_POLL_SECONDS = 0.2
_KILL_SECONDS = 60.0
_FULL = ("temporarily unable", "QOSMaxSubmit", "AssocMaxSubmit", "AssocGrpSubmit", "QOSGrpSubmit", "MaxJobCount")


class SlurmDriver:
    """Implements `contract.Driver`."""

    name = "slurm"

    def __init__(self, settings: SlurmSettings, *, environ: Mapping[str, str] | None = None) -> None:
        self._settings = settings
        self.place = cluster_location(settings)
        state = settings.state.expanduser().absolute()
        self._login = LoginNodes(settings, state, os.environ if environ is None else environ)
        self._tunnels = Tunnels(state / "tunnels")
        self._folder = "" if settings.folder.startswith("~") else settings.folder.rstrip("/")
        self._node_addresses: dict[str, str] = {}

    # The contract

    async def preflight(self) -> list[Check]:
        """Check ssh, the Slurm tools, the partition and the folder."""
        ssh = Check("ssh", True, "Slurm is used from this machine")
        try:
            folder = await self._jobs_folder()
            result = await self._login.run(login_node.CHECK, folder)
            if self._login.is_remote:
                ssh = Check("ssh", True, f"{await self._login.host()} accepts the login")
        except (FailedPrecondition, Unavailable) as error:
            return [Check("ssh", False, error.message)]
        return [ssh, *parse_checks(result.out, self._settings, folder)]

    async def start(self, spec: LaunchSpec) -> Handle:
        """Submit the batch job."""
        check_job_id(spec.job_id)
        if not self._settings.partition:
            raise FailedPrecondition("slurm: no partition is set: set SLURM_PARTITION (`sinfo` lists them)")
        base = await self._jobs_folder()
        batch_job = build_batch_job(spec, self._settings, f"{base}/{spec.job_id}", time.time())
        # A script that is cut off here may continue there: wait for its end, then undo what it did.
        task = asyncio.create_task(self._submit(base, spec, batch_job))
        try:
            number = await asyncio.shield(task)
        except asyncio.CancelledError:
            with contextlib.suppress(HeadraceError):
                await task
                await self.stop(Handle(spec.job_id, self.name), 0.0)
            raise
        return Handle(spec.job_id, self.name, self._handle_data(number, spec.host_port, _port(spec)))

    async def status(self, handle: Handle) -> PlatformStatus:
        """Return the status by the queue, the folder, or the accounting."""
        record = await self._job_record(handle.job_id)
        status = await self._job_status(record)
        if status.phase == "ended" and record.has_variables:
            await self._login.run(login_node.REMOVE_VARIABLES, await self._jobs_folder(), handle.job_id)
        return status

    async def logs(self, handle: Handle, tail: int) -> str:
        """Return the last lines of the job's output file."""
        check_job_id(handle.job_id)
        if tail <= 0:
            return ""
        result = await self._login.run(login_node.LOG, await self._jobs_folder(), handle.job_id, str(tail))
        return "\n".join(result.out.replace("\0", "\ufffd").splitlines()[-tail:])

    async def endpoint(self, handle: Handle) -> str | None:
        """Return the URL of a running job; opens a tunnel if Slurm is remote."""
        record = await self._job_record(handle.job_id)
        port = record.meta.get("port")
        if not record.is_running or record.row is None or not record.row.node or not isinstance(port, int):
            return None
        address = await self._node_address(first_host(record.row.node))
        bracketed = f"[{address}]" if ":" in address else address
        if not self._login.is_remote:
            return f"http://{bracketed}:{port}"
        args = self._login.ssh_args(await self._login.host())
        local_port = record.meta.get("host_port")
        tunnel = await self._tunnels.ensure(
            handle.job_id, args, f"{bracketed}:{port}", local_port, self._login.environment
        )
        return f"http://{LOOPBACK}:{tunnel.port}"

    async def stop(self, handle: Handle, grace_seconds: float) -> None:
        """Cancel the job, stop its tunnel and remove its folder."""
        record = await self._job_record(handle.job_id)
        if record.is_active:
            await self._stop_job(handle.job_id, record.row.number if record.row else "", grace_seconds)
        await self._tunnels.stop(handle.job_id)
        if record.folder:
            base = await self._jobs_folder()
            if (await self._login.run(login_node.REMOVE, base, handle.job_id)).code != 0:
                raise Unavailable(f"{base}/{handle.job_id} cannot be removed; check its permissions and remove it")

    async def list_services(self) -> dict[str, PlatformStatus]:
        """Return the status of every job that has a folder or is in the queue."""
        records = {job_id: job for job_id, job in (await self._list_jobs("")).items() if job.folder or job.is_active}
        statuses = {job_id: await self._job_status(job) for job_id, job in records.items()}
        return {job_id: status for job_id, status in statuses.items() if status.phase != "gone"}

    async def close(self) -> None:
        """Close the ssh connection; tunnels stay open."""
        self._tunnels.close()
        await self._login.close()

    # In addition to the contract

    async def describe(self, handle: Handle) -> Handle:
        """Return the handle with its node and the process of its tunnel."""
        record = await self._job_record(handle.job_id)
        number = record.row.number if record.row else record.number
        data = {**handle.data, **self._handle_data(number, record.meta.get("host_port"), record.meta.get("port"))}
        if record.is_running and record.row is not None:
            data["slurm_node"] = first_host(record.row.node)
        tunnel = self._tunnels.find(handle.job_id)
        if tunnel is not None:
            data |= {"host_port": tunnel.port, "tunnel_pid": tunnel.pid, "tunnel_started": tunnel.started}
        return replace(handle, data=data)

    # Helpers

    async def _submit(self, base: str, spec: LaunchSpec, batch_job: BatchJob) -> str:
        args = (base, spec.job_id, batch_job.meta, batch_job.variables, batch_job.script, *batch_job.sbatch)
        try:
            result = await self._login.run(login_node.START, *args, seconds=90.0)
        except Unavailable:
            return await self._recover_submission(spec.job_id, batch_job)
        if result.code == 0:
            return result.out.strip().partition(";")[0]
        raise _start_error(result, spec.job_id, base)

    async def _recover_submission(self, job_id: str, batch_job: BatchJob) -> str:
        """Return the job's number if it was submitted although the answer was lost; otherwise remove what is left of it."""
        record = await self._job_record(job_id)
        if json.loads(batch_job.meta) != record.meta:
            raise Unavailable(f"the connection was lost while {job_id} was being started; it was not started")
        if record.row is not None and record.is_active:
            return record.row.number
        await self.stop(Handle(job_id, self.name), 0.0)
        raise Unavailable(f"the connection was lost while {job_id} was being started; the start was undone")

    async def _stop_job(self, job_id: str, number: str, grace_seconds: float) -> None:
        if grace_seconds > 0:
            await self._login.run(login_node.TERMINATE, job_id)
            if await self._wait_ended(job_id, grace_seconds):
                return
        limit = time.monotonic() + _KILL_SECONDS
        await self._login.run(login_node.KILL, job_id, number)
        while not await self._wait_ended(job_id, 3.0):
            if time.monotonic() > limit:
                break
            await self._login.run(login_node.CANCEL, job_id)
        else:
            return
        raise Unavailable(
            f"job {job_id} does not end although it was cancelled: `squeue --name={job_id}`; try again later"
        )

    async def _wait_ended(self, job_id: str, seconds: float) -> bool:
        limit = time.monotonic() + seconds
        while (await self._job_record(job_id)).is_active:
            if time.monotonic() > limit:
                return False
            await asyncio.sleep(_POLL_SECONDS)
        return True

    async def _job_record(self, job_id: str) -> JobRecord:
        check_job_id(job_id)
        return (await self._list_jobs(job_id)).get(job_id) or JobRecord()

    async def _list_jobs(self, job_id: str) -> dict[str, JobRecord]:
        result = await self._login.run(login_node.LIST, await self._jobs_folder(), job_id)
        if result.code != 0:
            raise _tool_error("squeue", result)
        return parse_listing(result.out)

    async def _job_status(self, record: JobRecord) -> PlatformStatus:
        now = time.time()
        status = service_status(record, "", now)
        if status is None:
            result = await self._login.run(login_node.ACCOUNTED, record.number)
            status = service_status(record, result.out.strip() or "-", now)
        return status or PlatformStatus("gone")

    async def _node_address(self, node: str) -> str:
        if node not in self._node_addresses:
            result = await self._login.run(login_node.NODE, node)
            if result.code != 0:
                raise _tool_error("scontrol", result)
            self._node_addresses[node] = parse_node_address(result.out, node)
        return self._node_addresses[node]

    async def _jobs_folder(self) -> str:
        """Return the folder of all jobs, as the cluster's machines see it."""
        if not self._folder:
            result = await self._login.run(login_node.FOLDER, self._settings.folder)
            path = result.out.strip()
            if result.code != 0 or not path.startswith("/") or "%" in path or "\\" in path or "\n" in path:
                raise FailedPrecondition("slurm: the home folder on the cluster cannot be used: set `folder`")
            self._folder = path.rstrip("/")
        return self._folder

    def _handle_data(self, number: str, host_port: int | None, port: int | None) -> dict[str, Any]:
        """Return the data of a handle, for the registry."""
        return {"platform_job_id": number, "host_port": host_port if self._login.is_remote else port, "node_port": port}


def _port(spec: LaunchSpec) -> int | None:
    return spec.container.port if spec.container else None


def _start_error(result: Completed, job_id: str, base: str) -> HeadraceError:
    if result.code == login_node.EXISTS:
        return AlreadyExists(f"a service of job {job_id} was started here before")
    if result.code == login_node.NO_FOLDER:
        return FailedPrecondition(
            f"{base} cannot be written on the cluster; change its permissions or set another `folder`"
        )
    if result.code == login_node.NO_ROOM:
        return ResourceExhausted(f"{base} is on a full disk of the cluster; make room")
    if result.code == login_node.REFUSED:
        if any(word in result.err for word in _FULL):
            return ResourceExhausted(f"Slurm takes no more jobs for now: {result.error_line}")
        return FailedPrecondition(f"Slurm refuses the job: {result.error_line}")
    return _tool_error("sbatch", result)


def _tool_error(tool: str, result: Completed) -> HeadraceError:
    if "not found" in result.err:
        return FailedPrecondition(
            f"{tool} is not on the PATH of the cluster's machine: install Slurm's tools or set `tools`"
        )
    return Unavailable(f"Slurm does not answer {tool}: {result.error_line}")
