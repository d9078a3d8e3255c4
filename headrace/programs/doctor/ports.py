# SPDX-License-Identifier: Apache-2.0
"""Whether ports can be listened on, and who has those that cannot: from a bind that is undone at once, and from /proc."""

from __future__ import annotations

import errno
import os
import pwd
import re
import socket
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from headrace.programs.doctor.finding import Finding, ok, problem, warning

_PROC = Path("/proc")
_LISTEN = "0A"
_INTERPRETER = re.compile(r"python[0-9.]*$")


@dataclass(frozen=True, slots=True)
class Port:
    """A port that a server will want."""

    number: int
    option: str
    """The option of `headrace serve` that names another one."""
    optional: bool = False
    """Whether a server does without it where it is taken."""


@dataclass(frozen=True, slots=True)
class Holder:
    """Who listens on a port."""

    user: str
    pid: int = 0
    """0: not to be seen by this user."""
    words: tuple[str, ...] = ()
    """Its command line."""

    @property
    def is_headrace(self) -> bool:
        """Whether it is a server of ours."""
        return any(Path(word).name == "headrace" or word.startswith("headrace.") for word in self.words[:4])

    def __str__(self) -> str:
        if not self.pid:
            return f"a process of the user {self.user}, which cannot be seen from here"
        return f"{self._program()} (process {self.pid}, user {self.user})"

    def _program(self) -> str:
        """Without its options, which may have secrets among them: findings are shown to others."""
        words = list(self.words)
        if len(words) > 1 and _INTERPRETER.match(Path(words[0]).name):
            words = words[2:] if words[1] == "-m" else words[1:]
        if not words:
            return "?"
        plain = list(takewhile(lambda word: not word.startswith("-"), words[1:3]))
        return " ".join([Path(words[0]).name, *plain])[:80]


def check_ports(host: str, ports: Iterable[Port]) -> Iterator[Finding]:
    """One finding for each."""
    ports = list(ports)
    given = {port.number for port in ports}
    for port in ports:
        yield _check(host, port, given)


def _check(host: str, port: Port, given: set[int]) -> Finding:
    name = f"port {port.number}"
    trouble = bind_error(host, port.number)
    if trouble is None:
        return ok(name, f"free on {host}, for --{port.option}")
    other = f"headrace serve --{port.option} {free_port(host, port.number, given)}"
    if trouble == errno.EADDRINUSE:
        holder = holder_of(port.number)
        who = str(holder) if holder is not None else "a process that cannot be seen from here"
        if holder is not None and holder.is_headrace:
            return ok(name, f"Headrace listens there: {who}; a second server needs another port", other)
        if port.optional:
            return warning(name, f"taken by {who}; a server does without --{port.option}", other)
        return problem(name, f"taken by {who}", other)
    if trouble in (errno.EACCES, errno.EPERM):
        return problem(name, "may not be listened on: ports below 1024 are for root", other)
    if trouble == errno.EADDRNOTAVAIL:
        return problem(name, f"{host} is no address of this machine", "ip -brief address")
    return problem(name, f"cannot be listened on: {os.strerror(trouble)}", other)


def bind_error(host: str, port: int) -> int | None:
    """The error's number; None where the port can be had. Nobody can connect meanwhile: it is bound, not listened on."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        # As a server does: connections that have ended do not count, listeners do.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((host, port))
        except socket.gaierror:
            return errno.EADDRNOTAVAIL
        except OSError as error:
            return error.errno or errno.EIO
    return None


def free_port(host: str, near: int, given: Iterable[int] = ()) -> int:
    """A free port above one, and not one that others are to get; 0, which lets the system choose, where none is near."""
    first = max(near + 10, 1034)
    taken = set(given)
    return next(
        (
            each
            for each in range(first, first + 200)
            if each <= 65535 and each not in taken and not bind_error(host, each)
        ),
        0,
    )


def holder_of(port: int, proc: Path = _PROC) -> Holder | None:
    """Who listens on a port of this machine, on whichever address."""
    inodes: dict[str, int] = {}
    for table in ("tcp", "tcp6"):
        try:
            rows = (proc / "net" / table).read_text().splitlines()[1:]
        except OSError:
            continue
        for row in rows:
            words = row.split()
            if words[3] == _LISTEN and int(words[1].rpartition(":")[2], 16) == port:
                inodes[f"socket:[{words[9]}]"] = int(words[7])
    if not inodes:
        return None
    for pid in sorted(int(each.name) for each in proc.iterdir() if each.name.isdigit()):
        if _holds(proc / str(pid), inodes):
            return Holder(_user(_owner(proc / str(pid))), pid, _words(proc / str(pid)))
    return Holder(_user(next(iter(inodes.values()))))


def _holds(process: Path, inodes: dict[str, int]) -> bool:
    try:
        entries = list(os.scandir(process / "fd"))
    except OSError:
        return False
    for entry in entries:
        try:
            if os.readlink(entry.path) in inodes:
                return True
        except OSError:  # closed meanwhile
            continue
    return False


def _owner(process: Path) -> int:
    try:
        return process.stat().st_uid
    except OSError:
        return -1


def _words(process: Path) -> tuple[str, ...]:
    try:
        told = (process / "cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return ()
    return tuple(word for word in told.split("\0") if word)


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except (KeyError, OverflowError):
        return str(uid)
