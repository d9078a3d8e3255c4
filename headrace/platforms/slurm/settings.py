# SPDX-License-Identifier: Apache-2.0
"""Settings of the driver `slurm`, from the environment and from options.

Every value that becomes an argument of `sbatch` or `ssh` is checked here, once.
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
    """A cluster, and the resources of its jobs."""

    partition: str = ""
    """`SLURM_PARTITION`; one or more, separated by commas. Required to start a service."""
    account: str = ""
    """`SLURM_ACCOUNT`; "": the user's default account."""
    hosts: tuple[str, ...] = ()
    """Login nodes: `SLURM_HOSTNAME` or `SLURM_HOST`; the first that answers is used. None: this machine."""
    user: str = ""
    """User on the login nodes: `SLURM_USER`. "": from ssh's configuration."""
    key_file: str = ""
    """Private key for ssh: `SSH_KEY_PATH`. "": from the ssh agent, or ssh's configuration."""
    ssh_port: int = 0
    known_hosts: str = ""
    """File of host keys; "": ssh's own. A host that is not in it is refused."""
    multiplex: bool = True
    """Whether commands share one ssh connection, kept for a minute; otherwise each opens its own."""
    mode: Mode = "pyxis"
    """`SLURM_CONTAINER_MODE`: `pyxis` (with Enroot), `apptainer`, or `bare` for no container at all."""
    folder: str = "~/.headrace/slurm"
    """Folder of scripts and logs on the cluster, shared by login and compute nodes. `SLURM_BASE_RESULTS_DIR`/headrace."""
    state: Path = Path("~/.local/state/headrace/slurm")
    """Folder on this machine with the records of tunnels."""
    time_limit: str = ""
    """Time limit in sbatch's form; `SLURM_TIME_HOURS`. "": the partition's. The service ends with it."""
    memory: str = "32G"
    """Memory per job. Always set: without it a job may take a whole node, and the next job waits."""
    cpus: int = 16
    qos: str = ""
    constraint: str = ""
    reservation: str = ""
    mounts: str = ""
    """Additional mounts of containers, "SRC:DST[:ro],...": `SLURM_CONTAINER_MOUNTS`."""
    tools: str = ""
    """Folder of sbatch and the other tools, if they are not on the PATH of a plain ssh command."""

    def __post_init__(self) -> None:
        """Raise InvalidArgument for values that cannot be arguments of Slurm or ssh."""
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
        """Return the settings; `given` overrides the variables. Raises InvalidArgument."""
        readers: dict[str, tuple[str, Callable[[str], Any]]] = {
            "SLURM_PARTITION": ("partition", str),
            "SLURM_ACCOUNT": ("account", str),
            "SLURM_HOST": ("hosts", _split_list),
            "SLURM_HOSTNAME": ("hosts", _split_list),
            "SLURM_USER": ("user", str),
            "SSH_KEY_PATH": ("key_file", os.path.expanduser),
            "SLURM_CONTAINER_MODE": ("mode", str),
            "SLURM_BASE_RESULTS_DIR": ("folder", lambda text: f"{text.rstrip('/')}/headrace"),
            "SLURM_TIME_HOURS": ("time_limit", _hours),
            "SLURM_CONTAINER_MOUNTS": ("mounts", str),
        }
        read = {field: how(environ[name]) for name, (field, how) in readers.items() if environ.get(name)}
        if isinstance(given.get("hosts"), str):
            given["hosts"] = _split_list(given["hosts"])
        return SlurmSettings(**{**read, **given})


def _check(name: str, text: str, form: re.Pattern[str], hint: str) -> None:
    if text and not form.fullmatch(text):
        raise InvalidArgument(f"slurm: {name}: {text[:64]!a} cannot be used; write {hint}")


def _split_list(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _hours(text: str) -> str:
    try:
        minutes = round(float(text) * 60)
    except (ValueError, OverflowError):
        raise InvalidArgument(f"SLURM_TIME_HOURS: {text[:64]!a} is not a number of hours") from None
    if minutes < 1:
        raise InvalidArgument("SLURM_TIME_HOURS: a service needs at least a minute")
    return f"{minutes // 60}:{minutes % 60:02}:00"
