# SPDX-License-Identifier: Apache-2.0
"""Parse what the scripts of `login_node` print, and derive the status of each service. No I/O."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from headrace.platforms.contract import Check, PlatformStatus, is_job_id
from headrace.platforms.slurm.batch_script import PORT_TAKEN
from headrace.platforms.slurm.settings import SlurmSettings

_SUBMITTING_SECONDS = 120.0
_ADDRESS = re.compile(r"(?:^| )NodeAddr=(\S+)")
_TOOLS = ("sbatch", "squeue", "scancel", "scontrol", "srun")


@dataclass(frozen=True, slots=True)
class QueueRow:
    """A job in the output of squeue."""

    number: str
    state: str
    node: str
    reason: str


@dataclass(slots=True)
class JobRecord:
    """What the cluster reports of one service: its folder, its row in the queue, its exit code."""

    folder: bool = False
    number: str = ""
    has_variables: bool = False
    meta: Mapping[str, Any] = field(default_factory=dict)
    end: int | None = None
    row: QueueRow | None = None

    @property
    def is_active(self) -> bool:
        """Whether it is pending, running or being cleaned up."""
        return self.row is not None and self.row.state not in ENDED_STATES

    @property
    def is_running(self) -> bool:
        """Whether its processes run."""
        return self.row is not None and self.row.state in RUNNING_STATES


def parse_listing(output: str) -> dict[str, JobRecord]:
    """Return the records by job id, from the output of `login_node.LIST`. Other jobs of the user are left out."""
    records: dict[str, JobRecord] = {}
    for line in output.splitlines():
        kind, _, rest = line.partition(" ")
        if kind == "folder":
            job_id, number, variables, meta = (*rest.split(" ", 3), "", "", "")[:4]
            if is_job_id(job_id):
                record = records.setdefault(job_id, JobRecord())
                record.folder, record.has_variables = True, variables == "env"
                record.number, record.meta = _number(number), _meta(meta)
        elif kind == "job":
            parts = rest.split("|", 4)
            if len(parts) == 5 and is_job_id(parts[3]):
                record = records.setdefault(parts[3], JobRecord())
                row = QueueRow(parts[0], parse_state(parts[1]), parts[2], parts[4])
                # A job that is active takes precedence over one that has ended.
                if record.row is None or record.row.state not in ACTIVE_STATES:
                    record.row = row
        elif kind == "end":
            job_id, _, code = rest.partition(" ")
            if job_id in records and code.strip().isdecimal():
                records[job_id].end = int(code)
    return records


def service_status(record: JobRecord, accounted: str, now: float) -> PlatformStatus | None:
    """Return the status; None if only Slurm's accounting knows it, because Slurm has forgotten the job.

    `accounted`: the output of `login_node.ACCOUNTED`, "-" if it has no answer.
    """
    if record.row is not None and (record.folder or record.is_active):
        return job_status(record.row.state, record.row.number, record.row.reason, record.end)
    if not record.folder:
        return PlatformStatus("gone")
    if record.end is not None:
        return job_status("COMPLETED" if record.end == 0 else "FAILED", record.number, "", record.end)
    if not record.number:
        if now - float(record.meta.get("began", 0)) < _SUBMITTING_SECONDS:
            return PlatformStatus("starting", pod_phase="Pending", reason="it is being submitted to Slurm")
        return PlatformStatus("ended", pod_phase="Failed", reason="it was never submitted to Slurm")
    if not accounted:
        return None
    state, _, code = accounted.splitlines()[0].partition("|")
    if parse_state(state) in ENDED_STATES:
        number = code.partition(":")[0]
        return job_status(parse_state(state), record.number, "", int(number) if number.isdecimal() else None)
    return PlatformStatus(
        "ended", record.number, "Failed", reason=f"Slurm has forgotten job {record.number}; {exit_reason(None)}"
    )


def parse_node_address(output: str, node: str) -> str:
    """Return the address of a node, from the output of `scontrol show node`."""
    match = _ADDRESS.search(output)
    return match[1] if match else node


def parse_checks(output: str, settings: SlurmSettings, folder: str) -> list[Check]:
    """Return the preflight checks, from the output of `login_node.CHECK`."""
    lines = output.splitlines()
    tools = {line[5:] for line in lines if line.startswith("tool ")}
    missing = [name for name in _TOOLS if name not in tools]
    location = "on the login node" if settings.hosts else "on this machine"
    checks = [
        Check(
            "slurm",
            not missing,
            f"{', '.join(missing)} is not on the PATH {location}: install Slurm's client tools or set `tools`"
            if missing
            else f"sbatch and the other tools are {location}",
        ),
        Check("controller", "sinfo" in lines, "answers" if "sinfo" in lines else "sinfo fails: check the cluster"),
        _partition(lines, settings),
        Check("account", True, settings.account or "SLURM_ACCOUNT is not set: your default account is used"),
        Check(
            "folder",
            "folder" in lines,
            folder + (" is writable" if "folder" in lines else f" cannot be created {location}: set another `folder`"),
        ),
    ]
    if settings.mode == "pyxis":
        has_pyxis = "pyxis" in tools
        message = (
            "srun has --container-image" if has_pyxis else "srun has no --container-image: install Pyxis and Enroot"
        )
        checks.append(Check("pyxis", has_pyxis, message + ("" if has_pyxis else ", or use mode apptainer or bare")))
        has = "credentials" in tools
        text = (
            "~/.config/enroot/.credentials is there" if has else "no ~/.config/enroot/.credentials: public images only"
        )
        checks.append(Check("enroot", True, text))
    elif settings.mode == "apptainer":
        has_pyxis = "apptainer" in tools
        checks.append(
            Check("apptainer", has_pyxis, "is installed" if has_pyxis else f"is not on the PATH {location}: install it")
        )
    return checks


def _partition(lines: list[str], settings: SlurmSettings) -> Check:
    partitions = {
        name: rest for name, _, rest in (line[10:].partition("|") for line in lines if line.startswith("partition "))
    }
    partitions_text = f"the cluster has {', '.join(sorted(partitions))}" if partitions else "`sinfo` lists them"
    if not settings.partition:
        return Check("partition", False, f"SLURM_PARTITION is not set: {partitions_text}")
    for name in settings.partition.split(","):
        if name not in partitions:
            return Check("partition", False, f"SLURM_PARTITION: there is no {name}; {partitions_text}")
        if not partitions[name].startswith("up|"):
            return Check("partition", False, f"SLURM_PARTITION: {name} is down")
    limits = ", ".join(
        f"{name} (at most {partitions[name].partition('|')[2]})" for name in settings.partition.split(",")
    )
    return Check("partition", True, limits)


def _number(text: str) -> str:
    # "12;cluster" where there are several clusters.
    number = text.partition(";")[0]
    return number if number.isdecimal() else ""


def _meta(text: str) -> Mapping[str, Any]:
    try:
        meta = json.loads(text)
    except ValueError:
        return {}
    return meta if isinstance(meta, dict) else {}


PENDING_STATES = frozenset(
    {
        "PENDING",
        "CONFIGURING",
        "REQUEUED",
        "REQUEUE_FED",
        "REQUEUE_HOLD",
        "RESV_DEL_HOLD",
        "SPECIAL_EXIT",
        "POWER_UP_NODE",
    }
)
RUNNING_STATES = frozenset({"RUNNING", "RESIZING", "SIGNALING", "SUSPENDED", "STOPPED"})
COMPLETING_STATES = frozenset({"COMPLETING", "STAGE_OUT"})
ACTIVE_STATES = PENDING_STATES | RUNNING_STATES | COMPLETING_STATES
ENDED_STATES: Mapping[str, str] = {
    "COMPLETED": "",
    "FAILED": "",
    "CANCELLED": "the job was cancelled",
    "TIMEOUT": "the job reached its time limit: give a longer one (SLURM_TIME_HOURS)",
    "DEADLINE": "the job reached its deadline",
    "OUT_OF_MEMORY": "the job used more memory than it had asked for: give it more",
    "NODE_FAIL": "the job's node failed",
    "BOOT_FAIL": "the job's node did not boot",
    "LAUNCH_FAILED": "the job could not be launched on its node",
    "RECONFIG_FAIL": "the job's node could not be configured",
    "PREEMPTED": "the job was preempted by one of a higher priority",
    "REVOKED": "the job was taken over by another cluster",
}
_REASONS: Mapping[str, str] = {
    "None": "Slurm has not scheduled it yet",
    "Resources": "no node has enough free GPUs, processors or memory",
    "Priority": "jobs of a higher priority come first",
    "Dependency": "it waits for another job",
    "Licenses": "a licence is not free",
    "BeginTime": "its begin time has not come",
    "JobHeldUser": "it is held by its user: scontrol release",
    "JobHeldAdmin": "it is held by an administrator",
    "ReqNodeNotAvail": "the nodes it needs are down, drained or reserved",
    "PartitionDown": "its partition is down",
    "PartitionInactive": "its partition takes no jobs",
    "PartitionNodeLimit": "it needs more than its partition gives",
    "PartitionTimeLimit": "its time limit is longer than its partition gives",
    "BadConstraints": "no node of the cluster can ever run it",
    "Reservation": "its reservation has not begun",
    "InvalidAccount": "its account is not valid: SLURM_ACCOUNT",
    "InvalidQOS": "its quality of service is not valid",
    "NodeDown": "a node it needs is down",
}


def parse_state(text: str) -> str:
    """Return the state of "CANCELLED+", "CANCELLED by 0" or "RUNNING"; "" if there is none."""
    words = text.split()
    return words[0].rstrip("+").upper() if words else ""


def job_status(state: str, number: str, reason: str, code: int | None) -> PlatformStatus:
    """Return the status of a job in the queue. `code`: the exit code that its script wrote. An unknown state is active."""
    if state in PENDING_STATES:
        return PlatformStatus("starting", number, "Pending", reason=pending_reason(reason))
    if state in ENDED_STATES:
        if state == "COMPLETED":
            return PlatformStatus("ended", number, "Succeeded", 0 if code is None else code)
        return PlatformStatus("ended", number, "Failed", code, ENDED_STATES[state] or exit_reason(code))
    if state in COMPLETING_STATES:
        return PlatformStatus("running", number, "Terminating", reason="the job is ending")
    if state in ("SUSPENDED", "STOPPED"):
        return PlatformStatus("running", number, "Running", reason=f"the job is {state.lower()} by Slurm")
    return PlatformStatus("running", number, "Running" if state in RUNNING_STATES else "Unknown")


def pending_reason(reason: str) -> str:
    """Return why a job is pending: a sentence with Slurm's own reason."""
    # squeue prints "ReqNodeNotAvail, UnavailableNodes:n[1-4]" and "(Resources)", for example.
    first = reason.strip().strip("()").partition(",")[0].split(" ")[0]
    sentence = _REASONS.get(first)
    if sentence is None and first.startswith(("QOS", "Assoc", "Max")):
        sentence = "a limit of the account or the quality of service is reached"
    return f"in the queue: {sentence} ({first})" if sentence else f"in the queue: {first or 'squeue gives no reason'}"


def exit_reason(code: int | None) -> str:
    """Return what an exit code of the batch script means."""
    if code is None:
        return "the job has ended without leaving an exit code"
    if code == PORT_TAKEN:
        return "the service's port is taken on its node: start it again"
    if 128 < code < 192:
        try:
            return f"the service was ended by {signal.Signals(code - 128).name}"
        except ValueError:
            pass
    return f"the service has ended with code {code}"
