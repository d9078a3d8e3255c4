# SPDX-License-Identifier: Apache-2.0
"""What the driver `slurm` has to know of a cluster, from the environment and from whoever makes it.

Called by `launch.drivers`. Everything that ends up among the words of `sbatch` or `ssh` is checked here, once.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from headrace.core.errors import InvalidArgument

Mode = Literal["pyxis", "apptainer", "bare"]

_WORD = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.,@:+-]*")
_HOST = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9])?|[0-9A-Fa-f:]+")
_TIME = re.compile(r"[0-9]+(-[0-9]+)?(:[0-9]{1,2}){0,2}|UNLIMITED")
_MEMORY = re.compile(r"[0-9]+[KMGT]?")
_FOLDER = re.compile(r"(/|~/)[A-Za-z0-9_./@+=, ~-]+")
_FILE = re.compile(r"/[A-Za-z0-9_./@+=,:-]+")


@dataclass(frozen=True, slots=True)
class SlurmSettings:
    """A cluster, and how its jobs are to be."""

    partition: str = ""
    """`SLURM_PARTITION`; one or more, with commas. Jobs are not sent anywhere without it."""
    account: str = ""
    """`SLURM_ACCOUNT`; "": the user's default account."""
    hosts: tuple[str, ...] = ()
    """Login nodes, the first that answers is used: `SLURM_HOSTNAME` or `SLURM_HOST`. None: Slurm's tools are here."""
    user: str = ""
    """At the login nodes: `SLURM_USER`. "": as ssh's own configuration says."""
    key_file: str = ""
    """A private key for ssh: `SSH_KEY_PATH`. "": those of the agent, or as ssh's own configuration says."""
    ssh_port: int = 0
    known_hosts: str = ""
    """A file of host keys; "": ssh's own. A host that is in none is refused."""
    multiplex: bool = True
    """Whether commands share one connection for a minute; without, each makes its own."""
    mode: Mode = "pyxis"
    """`SLURM_CONTAINER_MODE`: `pyxis` (with Enroot), `apptainer`, or `bare` for no container at all."""
    folder: str = "~/.headrace/slurm"
    """On the cluster, where login and compute nodes see it: scripts and logs. `SLURM_BASE_RESULTS_DIR`/headrace."""
    state: Path = Path("~/.local/state/headrace/slurm")
    """On this machine: which process a tunnel is."""
    time_limit: str = ""
    """As sbatch takes it; `SLURM_TIME_HOURS`. "": the partition's own. The service ends with it."""
    memory: str = "32G"
    """For each job. Never left out: without it a job may take all of a node, and the next one waits."""
    cpus: int = 16
    qos: str = ""
    constraint: str = ""
    reservation: str = ""
    mounts: str = ""
    """More folders for containers, "SRC:DST[:ro],...": `SLURM_CONTAINER_MOUNTS`."""
    tools: str = ""
    """A folder with sbatch and the others, where they are not on the PATH of a plain ssh command."""

    def __post_init__(self) -> None:
        """Raises InvalidArgument for what could not be a word of Slurm's or ssh's."""
        for name in ("partition", "account", "qos", "constraint", "reservation", "user"):
            _check(name, getattr(self, name), _WORD, "letters, digits and _.,@:+-")
        for host in self.hosts:
            _check("hosts", host or " ", _HOST, "a name or an address")
        _check("time_limit", self.time_limit, _TIME, 'such as 4:00:00 or "2-0" for two days')
        _check("memory", self.memory or " ", _MEMORY, "such as 32G")
        _check("folder", self.folder or " ", _FOLDER, "an absolute path of plain letters, or one under ~/")
        for name in ("key_file", "known_hosts", "tools"):
            _check(name, getattr(self, name), _FILE, "an absolute path of plain letters")
        if ".." in self.folder.split("/"):
            raise InvalidArgument("slurm: folder: write the path without ..")
        if self.mode not in get_args(Mode):
            raise InvalidArgument(f"slurm: mode is one of {', '.join(get_args(Mode))}, not {self.mode[:64]!a}")
        if self.cpus < 1 or not 0 <= self.ssh_port <= 65535:
            raise InvalidArgument("slurm: cpus is 1 or more, and ssh_port a port")

    @staticmethod
    def from_environment(environ: Mapping[str, str], **given: Any) -> SlurmSettings:
        """What was given counts before the variables. Raises InvalidArgument."""
        readers: dict[str, tuple[str, Callable[[str], Any]]] = {
            "SLURM_PARTITION": ("partition", str),
            "SLURM_ACCOUNT": ("account", str),
            "SLURM_HOST": ("hosts", _listed),
            "SLURM_HOSTNAME": ("hosts", _listed),
            "SLURM_USER": ("user", str),
            "SSH_KEY_PATH": ("key_file", os.path.expanduser),
            "SLURM_CONTAINER_MODE": ("mode", str),
            "SLURM_BASE_RESULTS_DIR": ("folder", lambda text: f"{text.rstrip('/')}/headrace"),
            "SLURM_TIME_HOURS": ("time_limit", _hours),
            "SLURM_CONTAINER_MOUNTS": ("mounts", str),
        }
        read = {field: how(environ[name]) for name, (field, how) in readers.items() if environ.get(name)}
        if isinstance(given.get("hosts"), str):
            given["hosts"] = _listed(given["hosts"])
        return SlurmSettings(**{**read, **given})


def _check(name: str, text: str, form: re.Pattern[str], told: str) -> None:
    if text and not form.fullmatch(text):
        raise InvalidArgument(f"slurm: {name}: {text[:64]!a} cannot be used; write {told}")


def _listed(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _hours(text: str) -> str:
    try:
        minutes = round(float(text) * 60)
    except (ValueError, OverflowError):
        raise InvalidArgument(f"SLURM_TIME_HOURS: {text[:64]!a} is no number of hours") from None
    if minutes < 1:
        raise InvalidArgument("SLURM_TIME_HOURS: a service needs at least a minute")
    return f"{minutes // 60}:{minutes % 60:02}:00"
