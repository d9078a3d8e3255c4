# SPDX-License-Identifier: Apache-2.0
"""The driver `slurm`: a service is a batch job, named by its job id, with a folder of that name on the cluster.

The folder (`script`, `env`, `log`, `meta`, `number`, `end`) is made first and removed last: a service is known as long as
it has one. Slurm forgets jobs minutes after their end; the exit code that the script leaves in its folder stays. From this
machine a service is reached at its node, over ssh through a tunnel, which `endpoint` makes and makes again.
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
    InvalidArgument,
    ResourceExhausted,
    Unavailable,
)
from headrace.platforms.commands import Completed
from headrace.platforms.contract import Check, Handle, LaunchSpec, Observed
from headrace.platforms.folders import is_id
from headrace.platforms.slurm import programs
from headrace.platforms.slurm.hosts import Hosts, place_of
from headrace.platforms.slurm.looking import Seen, node_address, observe, read_checks, read_look
from headrace.platforms.slurm.script import Submission, build
from headrace.platforms.slurm.settings import SlurmSettings
from headrace.platforms.slurm.tunnels import LOOPBACK, Tunnels

_POLL_SECONDS = 0.2
_KILL_SECONDS = 60.0
_FULL = ("temporarily unable", "QOSMaxSubmit", "AssocMaxSubmit", "AssocGrpSubmit", "QOSGrpSubmit", "MaxJobCount")


class SlurmDriver:
    """See `contract.Driver`."""

    name = "slurm"

    def __init__(self, settings: SlurmSettings, *, environ: Mapping[str, str] | None = None) -> None:
        self._settings = settings
        self.place = place_of(settings)
        state = settings.state.expanduser().absolute()
        self._hosts = Hosts(settings, state, os.environ if environ is None else environ)
        self._tunnels = Tunnels(state / "tunnels")
        self._folder = "" if settings.folder.startswith("~") else settings.folder.rstrip("/")
        self._addresses: dict[str, str] = {}

    # The contract

    async def preflight(self) -> list[Check]:
        """See `contract.Driver.preflight`."""
        reached = Check("ssh", True, "Slurm is used from this machine")
        try:
            folder = await self._base()
            told = await self._hosts.run(programs.CHECK, folder)
            if self._hosts.is_remote:
                reached = Check("ssh", True, f"{await self._hosts.host()} lets us in")
        except (FailedPrecondition, Unavailable) as error:
            return [Check("ssh", False, error.message)]
        return [reached, *read_checks(told.out, self._settings, folder)]

    async def start(self, spec: LaunchSpec) -> Handle:
        """See `contract.Driver.start`."""
        _check_id(spec.job_id)
        if not self._settings.partition:
            raise FailedPrecondition("slurm: no partition is given: set SLURM_PARTITION (`sinfo` lists them)")
        base = await self._base()
        made = build(spec, self._settings, f"{base}/{spec.job_id}", time.time())
        # A program that is cut off here may go on there: it is seen to its end, and what it made is taken back.
        task = asyncio.create_task(self._submit(base, spec, made))
        try:
            number = await asyncio.shield(task)
        except asyncio.CancelledError:
            with contextlib.suppress(HeadraceError):
                await task
                await self.stop(Handle(spec.job_id, self.name), 0.0)
            raise
        return Handle(spec.job_id, self.name, self._data(number, spec.host_port, _port(spec)))

    async def status(self, handle: Handle) -> Observed:
        """See `contract.Driver.status`."""
        seen = await self._look_at(handle.job_id)
        observed = await self._observe(seen)
        if observed.phase == "ended" and seen.has_variables:
            await self._hosts.run(programs.FORGET_VARIABLES, await self._base(), handle.job_id)
        return observed

    async def logs(self, handle: Handle, tail: int) -> str:
        """See `contract.Driver.logs`."""
        _check_id(handle.job_id)
        if tail <= 0:
            return ""
        told = await self._hosts.run(programs.LOG, await self._base(), handle.job_id, str(tail))
        return "\n".join(told.out.replace("\0", "\ufffd").splitlines()[-tail:])

    async def endpoint(self, handle: Handle) -> str | None:
        """See `contract.Driver.endpoint`."""
        seen = await self._look_at(handle.job_id)
        port = seen.meta.get("port")
        if not seen.runs or seen.row is None or not seen.row.node or not isinstance(port, int):
            return None
        address = await self._address(seen.row.node)
        bracketed = f"[{address}]" if ":" in address else address
        if not self._hosts.is_remote:
            return f"http://{bracketed}:{port}"
        words = self._hosts.ssh_words(await self._hosts.host())
        wanted = seen.meta.get("host_port")
        tunnel = await self._tunnels.ensure(
            handle.job_id, words, f"{bracketed}:{port}", wanted, self._hosts.environment
        )
        return f"http://{LOOPBACK}:{tunnel.port}"

    async def stop(self, handle: Handle, grace_seconds: float) -> None:
        """See `contract.Driver.stop`."""
        seen = await self._look_at(handle.job_id)
        if seen.is_active:
            await self._end(handle.job_id, seen.row.number if seen.row else "", grace_seconds)
        await self._tunnels.end(handle.job_id)
        if seen.folder:
            base = await self._base()
            if (await self._hosts.run(programs.REMOVE, base, handle.job_id)).code != 0:
                raise Unavailable(f"{base}/{handle.job_id} cannot be removed; look at its rights and remove it")

    async def found(self) -> dict[str, Observed]:
        """See `contract.Driver.found`."""
        seen = await self._look("")
        observed = {job_id: await self._observe(each) for job_id, each in seen.items() if each.folder or each.is_active}
        return {job_id: each for job_id, each in observed.items() if each.phase != "gone"}

    async def close(self) -> None:
        """See `contract.Driver.close`."""
        self._tunnels.close()
        await self._hosts.close()

    # Beside the contract

    async def described(self, handle: Handle) -> Handle:
        """The handle with what is known by now: its node, and which process its tunnel is."""
        seen = await self._look_at(handle.job_id)
        number = seen.row.number if seen.row else seen.number
        data = {**handle.data, **self._data(number, seen.meta.get("host_port"), seen.meta.get("port"))}
        if seen.runs and seen.row is not None:
            data["slurm_node"] = seen.row.node
        tunnel = self._tunnels.living(handle.job_id)
        if tunnel is not None:
            data |= {"host_port": tunnel.port, "tunnel_pid": tunnel.pid, "tunnel_started": tunnel.started}
        return replace(handle, data=data)

    # Means

    async def _submit(self, base: str, spec: LaunchSpec, made: Submission) -> str:
        words = (base, spec.job_id, made.meta, made.variables, made.script, *made.sbatch)
        try:
            told = await self._hosts.run(programs.START, *words, seconds=90.0)
        except Unavailable:
            return await self._was_submitted(spec.job_id, made)
        if told.code == 0:
            return told.out.strip().partition(";")[0]
        raise _refusal(told, spec.job_id, base)

    async def _was_submitted(self, job_id: str, made: Submission) -> str:
        """The job's number, if it was handed over although nobody could say so; else nothing is left of it."""
        seen = await self._look_at(job_id)
        if json.loads(made.meta) != seen.meta:
            raise Unavailable(f"the cluster was lost while {job_id} was being started; it was not")
        if seen.row is not None and seen.is_active:
            return seen.row.number
        await self.stop(Handle(job_id, self.name), 0.0)
        raise Unavailable(f"the cluster was lost while {job_id} was being started; it was taken back")

    async def _end(self, job_id: str, number: str, grace_seconds: float) -> None:
        if grace_seconds > 0:
            await self._hosts.run(programs.TERMINATE, job_id)
            if await self._until_ended(job_id, grace_seconds):
                return
        limit = time.monotonic() + _KILL_SECONDS
        await self._hosts.run(programs.KILL, job_id, number)
        while not await self._until_ended(job_id, 3.0):
            if time.monotonic() > limit:
                break
            await self._hosts.run(programs.CANCEL, job_id)
        else:
            return
        raise Unavailable(
            f"job {job_id} does not end although it was cancelled: `squeue --name={job_id}`; try again later"
        )

    async def _until_ended(self, job_id: str, seconds: float) -> bool:
        limit = time.monotonic() + seconds
        while (await self._look_at(job_id)).is_active:
            if time.monotonic() > limit:
                return False
            await asyncio.sleep(_POLL_SECONDS)
        return True

    async def _look_at(self, job_id: str) -> Seen:
        _check_id(job_id)
        return (await self._look(job_id)).get(job_id) or Seen()

    async def _look(self, job_id: str) -> dict[str, Seen]:
        told = await self._hosts.run(programs.LOOK, await self._base(), job_id)
        if told.code != 0:
            raise _unanswered("squeue", told)
        return read_look(told.out)

    async def _observe(self, seen: Seen) -> Observed:
        now = time.time()
        observed = observe(seen, "", now)
        if observed is None:
            told = await self._hosts.run(programs.ACCOUNTED, seen.number)
            observed = observe(seen, told.out.strip() or "-", now)
        return observed or Observed("gone")

    async def _address(self, node: str) -> str:
        if node not in self._addresses:
            told = await self._hosts.run(programs.NODE, node)
            if told.code != 0:
                raise _unanswered("scontrol", told)
            self._addresses[node] = node_address(told.out, node)
        return self._addresses[node]

    async def _base(self) -> str:
        """The folder of all jobs, as the cluster's machines see it."""
        if not self._folder:
            told = await self._hosts.run(programs.FOLDER, self._settings.folder)
            found = told.out.strip()
            if told.code != 0 or not found.startswith("/") or "%" in found or "\\" in found or "\n" in found:
                raise FailedPrecondition("slurm: the home folder on the cluster cannot be used: give `folder`")
            self._folder = found.rstrip("/")
        return self._folder

    def _data(self, number: str, host_port: int | None, port: int | None) -> dict[str, Any]:
        """What the registry shows."""
        return {"platform_job_id": number, "host_port": host_port if self._hosts.is_remote else port, "node_port": port}


def _port(spec: LaunchSpec) -> int | None:
    return spec.container.port if spec.container else None


def _check_id(job_id: str) -> None:
    if not is_id(job_id):
        raise InvalidArgument("a service's job id is a UUID, written in lower case")


def _refusal(told: Completed, job_id: str, base: str) -> HeadraceError:
    if told.code == programs.EXISTS:
        return AlreadyExists(f"a service of job {job_id} was started here before")
    if told.code == programs.NO_FOLDER:
        return FailedPrecondition(
            f"{base} cannot be written on the cluster; change its rights or give another `folder`"
        )
    if told.code == programs.NO_ROOM:
        return ResourceExhausted(f"{base} has no room on the cluster; make some")
    if told.code == programs.REFUSED:
        if any(word in told.err for word in _FULL):
            return ResourceExhausted(f"Slurm takes no more jobs for now: {told.told}")
        return FailedPrecondition(f"Slurm refuses the job: {told.told}")
    return _unanswered("sbatch", told)


def _unanswered(tool: str, told: Completed) -> HeadraceError:
    if "not found" in told.err:
        return FailedPrecondition(
            f"{tool} is not on the PATH of the cluster's machine: install Slurm's tools or give `tools`"
        )
    return Unavailable(f"Slurm does not answer {tool}: {told.told}")
