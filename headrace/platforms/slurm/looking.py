# SPDX-License-Identifier: Apache-2.0
"""What the programs on the cluster print, read; and how each service is by it. Called by `driver`; no I/O."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from headrace.platforms.contract import Check, Observed
from headrace.platforms.folders import is_id
from headrace.platforms.slurm.settings import SlurmSettings
from headrace.platforms.slurm.states import ACTIVE, ENDED, WORKING, end_reason, observed_of, state_of

_SUBMITTING_SECONDS = 120.0
_ADDRESS = re.compile(r"(?:^| )NodeAddr=(\S+)")
_TOOLS = ("sbatch", "squeue", "scancel", "scontrol", "srun")


@dataclass(frozen=True, slots=True)
class Row:
    """A job of Slurm's own list."""

    number: str
    state: str
    node: str
    reason: str


@dataclass(slots=True)
class Seen:
    """All that is known of one service."""

    folder: bool = False
    number: str = ""
    has_variables: bool = False
    meta: Mapping[str, Any] = field(default_factory=dict)
    end: int | None = None
    row: Row | None = None

    @property
    def is_active(self) -> bool:
        """Whether Slurm will run it, runs it, or is not done with it."""
        return self.row is not None and self.row.state not in ENDED

    @property
    def runs(self) -> bool:
        """Whether its processes are there."""
        return self.row is not None and self.row.state in WORKING


def read_look(told: str) -> dict[str, Seen]:
    """By job id, from what `programs.LOOK` printed. Jobs of the user that are none of ours are left out."""
    found: dict[str, Seen] = {}
    for line in told.splitlines():
        kind, _, rest = line.partition(" ")
        if kind == "folder":
            job_id, number, variables, meta = (*rest.split(" ", 3), "", "", "")[:4]
            if is_id(job_id):
                seen = found.setdefault(job_id, Seen())
                seen.folder, seen.has_variables = True, variables == "env"
                seen.number, seen.meta = _number(number), _meta(meta)
        elif kind == "job":
            parts = rest.split("|", 4)
            if len(parts) == 5 and is_id(parts[3]):
                seen = found.setdefault(parts[3], Seen())
                row = Row(parts[0], state_of(parts[1]), parts[2], parts[4])
                # One that is still there counts before one that was.
                if seen.row is None or seen.row.state not in ACTIVE:
                    seen.row = row
        elif kind == "end":
            job_id, _, code = rest.partition(" ")
            if job_id in found and code.strip().isdecimal():
                found[job_id].end = int(code)
    return found


def observe(seen: Seen, accounted: str, now: float) -> Observed | None:
    """How it is; None if Slurm has forgotten it and left no trace, so that its accounting has to be asked.

    `accounted`: what `programs.ACCOUNTED` printed, "-" where it was asked in vain.
    """
    if seen.row is not None and (seen.folder or seen.is_active):
        return observed_of(seen.row.state, seen.row.number, seen.row.reason, seen.end)
    if not seen.folder:
        return Observed("gone")
    if seen.end is not None:
        return observed_of("COMPLETED" if seen.end == 0 else "FAILED", seen.number, "", seen.end)
    if not seen.number:
        if now - float(seen.meta.get("began", 0)) < _SUBMITTING_SECONDS:
            return Observed("starting", word="Pending", reason="it is being handed to Slurm")
        return Observed("ended", word="Failed", reason="it was never handed to Slurm")
    if not accounted:
        return None
    state, _, code = accounted.splitlines()[0].partition("|")
    if state_of(state) in ENDED:
        number = code.partition(":")[0]
        return observed_of(state_of(state), seen.number, "", int(number) if number.isdecimal() else None)
    return Observed("ended", seen.number, "Failed", reason=f"Slurm knows job {seen.number} no more; {end_reason(None)}")


def node_address(told: str, node: str) -> str:
    """Where Slurm reaches a node, from `scontrol show node`."""
    found = _ADDRESS.search(told)
    return found[1] if found else node


def read_checks(told: str, settings: SlurmSettings, folder: str) -> list[Check]:
    """From what `programs.CHECK` printed."""
    lines = told.splitlines()
    tools = {line[5:] for line in lines if line.startswith("tool ")}
    missing = [name for name in _TOOLS if name not in tools]
    where = "on the login node" if settings.hosts else "on this machine"
    checks = [
        Check(
            "slurm",
            not missing,
            f"{', '.join(missing)} is not on the PATH {where}: install Slurm's client tools or give `tools`"
            if missing
            else f"sbatch and the others are {where}",
        ),
        Check("controller", "sinfo" in lines, "answers" if "sinfo" in lines else "sinfo fails: look at the cluster"),
        _partition(lines, settings),
        Check("account", True, settings.account or "SLURM_ACCOUNT is not set: your default account is used"),
        Check(
            "folder",
            "folder" in lines,
            folder + (" is writable" if "folder" in lines else f" cannot be made {where}: give another `folder`"),
        ),
    ]
    if settings.mode == "pyxis":
        there = "pyxis" in tools
        told_of = (
            "srun knows --container-image" if there else "srun knows no --container-image: install Pyxis and Enroot"
        )
        checks.append(Check("pyxis", there, told_of + ("" if there else ", or use mode apptainer or bare")))
        has = "credentials" in tools
        text = (
            "~/.config/enroot/.credentials is there" if has else "no ~/.config/enroot/.credentials: public images only"
        )
        checks.append(Check("enroot", True, text))
    elif settings.mode == "apptainer":
        there = "apptainer" in tools
        checks.append(Check("apptainer", there, "is installed" if there else f"is not on the PATH {where}: install it"))
    return checks


def _partition(lines: list[str], settings: SlurmSettings) -> Check:
    known = {
        name: rest for name, _, rest in (line[10:].partition("|") for line in lines if line.startswith("partition "))
    }
    offer = f"the cluster has {', '.join(sorted(known))}" if known else "`sinfo` lists them"
    if not settings.partition:
        return Check("partition", False, f"SLURM_PARTITION is not set: {offer}")
    for name in settings.partition.split(","):
        if name not in known:
            return Check("partition", False, f"SLURM_PARTITION: there is no {name}; {offer}")
        if not known[name].startswith("up|"):
            return Check("partition", False, f"SLURM_PARTITION: {name} is down")
    limits = ", ".join(f"{name} (at most {known[name].partition('|')[2]})" for name in settings.partition.split(","))
    return Check("partition", True, limits)


def _number(text: str) -> str:
    # "12;cluster" where there are several clusters.
    number = text.partition(";")[0]
    return number if number.isdecimal() else ""


def _meta(text: str) -> Mapping[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
