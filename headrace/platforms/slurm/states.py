# SPDX-License-Identifier: Apache-2.0
"""What Slurm says of a job, in the words of the contract. Called by `driver` and `looking`; no I/O."""

from __future__ import annotations

import signal
from collections.abc import Mapping

from headrace.platforms.contract import Observed
from headrace.platforms.slurm.script import PORT_TAKEN

WAITING = frozenset(
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
WORKING = frozenset({"RUNNING", "RESIZING", "SIGNALING", "SUSPENDED", "STOPPED"})
LEAVING = frozenset({"COMPLETING", "STAGE_OUT"})
ACTIVE = WAITING | WORKING | LEAVING
ENDED: Mapping[str, str] = {
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
    "PREEMPTED": "the job had to make room for one of a higher priority",
    "REVOKED": "the job was taken over by another cluster",
}
_REASONS: Mapping[str, str] = {
    "None": "Slurm has not looked at it yet",
    "Resources": "no node has enough free GPUs, processors or memory",
    "Priority": "jobs of a higher priority are before it",
    "Dependency": "it waits for another job",
    "Licenses": "a licence is not free",
    "BeginTime": "its time has not come",
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


def state_of(text: str) -> str:
    """The state itself, of "CANCELLED+", "CANCELLED by 0" and "RUNNING"; "" of nothing."""
    words = text.split()
    return words[0].rstrip("+").upper() if words else ""


def observed_of(state: str, number: str, reason: str, code: int | None) -> Observed:
    """`code`: as the script has left it. An unknown state is one of a job that is there."""
    if state in WAITING:
        return Observed("starting", number, "Pending", reason=waiting_reason(reason))
    if state in ENDED:
        if state == "COMPLETED":
            return Observed("ended", number, "Succeeded", 0 if code is None else code)
        return Observed("ended", number, "Failed", code, ENDED[state] or end_reason(code))
    if state in LEAVING:
        return Observed("running", number, "Terminating", reason="the job is ending")
    if state in ("SUSPENDED", "STOPPED"):
        return Observed("running", number, "Running", reason=f"the job is {state.lower()} by Slurm")
    return Observed("running", number, "Running" if state in WORKING else "Unknown")


def waiting_reason(reason: str) -> str:
    """Why it does not run yet, in a sentence with Slurm's own word."""
    # "ReqNodeNotAvail, UnavailableNodes:n[1-4]" and "(Resources)" are what squeue may print.
    first = reason.strip().strip("()").partition(",")[0].split(" ")[0]
    told = _REASONS.get(first)
    if told is None and first.startswith(("QOS", "Assoc", "Max")):
        told = "a limit of the account or the quality of service is reached"
    return f"in the queue: {told} ({first})" if told else f"in the queue: {first or 'no reason is told'}"


def end_reason(code: int | None) -> str:
    """What an exit code of the script means."""
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
