# SPDX-License-Identifier: Apache-2.0
"""Check whether ports are free, and servers or gateways that already run."""

from __future__ import annotations

import errno
import os
import pwd
import re
import socket
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

from headrace.net.http_client import error_text, request
from headrace.programs.doctor.finding import Finding, ok, problem, warning
from headrace.version import __version__

_PROC = Path("/proc")
_LISTEN = "0A"
_INTERPRETER = re.compile(r"python[0-9.]*$")


@dataclass(frozen=True, slots=True)
class Port:
    """A port that a server needs."""

    number: int
    option: str
    """The option of `headrace serve` for another port."""
    optional: bool = False
    """Whether a server can run without it."""


@dataclass(frozen=True, slots=True)
class Holder:
    """The process that listens on a port."""

    user: str
    pid: int = 0
    """0: not visible to this user."""
    words: tuple[str, ...] = ()
    """Its command line."""

    @property
    def is_headrace(self) -> bool:
        """Whether it is a Headrace server."""
        return any(Path(word).name == "headrace" or word.startswith("headrace.") for word in self.words[:4])

    def __str__(self) -> str:
        if not self.pid:
            return f"a process of the user {self.user}, which cannot be seen from here"
        return f"{self._program()} (process {self.pid}, user {self.user})"

    def _program(self) -> str:
        """Return the program without its options, which may have secrets: findings are shown to others."""
        words = list(self.words)
        if len(words) > 1 and _INTERPRETER.match(Path(words[0]).name):
            words = words[2:] if words[1] == "-m" else words[1:]
        if not words:
            return "?"
        plain = list(takewhile(lambda word: not word.startswith("-"), words[1:3]))
        return " ".join([Path(words[0]).name, *plain])[:80]


def check_ports(host: str, ports: Iterable[Port]) -> Iterator[Finding]:
    """Check each port."""
    ports = list(ports)
    taken = {port.number for port in ports}
    for port in ports:
        yield _check(host, port, taken)


def _check(host: str, port: Port, taken: set[int]) -> Finding:
    name = f"port {port.number}"
    trouble = bind_error(host, port.number)
    if trouble is None:
        return ok(name, f"free on {host}, for --{port.option}")
    fix = f"headrace serve --{port.option} {free_port(host, port.number, taken)}"
    if trouble == errno.EADDRINUSE:
        holder = holder_of(port.number)
        holder_text = str(holder) if holder is not None else "a process that cannot be seen from here"
        if holder is not None and holder.is_headrace:
            return ok(name, f"Headrace listens there: {holder_text}; a second server needs another port", fix)
        if port.optional:
            return warning(name, f"taken by {holder_text}; a server does without --{port.option}", fix)
        return problem(name, f"taken by {holder_text}", fix)
    if trouble in (errno.EACCES, errno.EPERM):
        return problem(name, "may not be listened on: ports below 1024 are for root", fix)
    if trouble == errno.EADDRNOTAVAIL:
        return problem(name, f"{host} is not an address of this machine", "ip -brief address")
    return problem(name, f"cannot be listened on: {os.strerror(trouble)}", fix)


def bind_error(host: str, port: int) -> int | None:
    """Return the errno of binding a port; None if it is free. It is only bound, so that no client can connect."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        # As a server does: ended connections do not count, listeners do.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((host, port))
        except socket.gaierror:
            return errno.EADDRNOTAVAIL
        except OSError as error:
            return error.errno or errno.EIO
    return None


def free_port(host: str, start: int, others: Iterable[int] = ()) -> int:
    """Return a free port above one that no other option uses; 0 if there is none nearby."""
    first = max(start + 10, 1034)
    taken = set(others)
    return next(
        (
            port
            for port in range(first, first + 200)
            if port <= 65535 and port not in taken and not bind_error(host, port)
        ),
        0,
    )


def holder_of(port: int, proc: Path = _PROC) -> Holder | None:
    """Find the process that listens on a port of this machine, on any address."""
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
    for pid in sorted(int(folder.name) for folder in proc.iterdir() if folder.name.isdigit()):
        if _holds(proc / str(pid), inodes):
            return Holder(_user(_owner(proc / str(pid))), pid, _command_line(proc / str(pid)))
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
        except OSError:  # Closed meanwhile.
            continue
    return False


def _owner(process: Path) -> int:
    try:
        return process.stat().st_uid
    except OSError:
        return -1


def _command_line(process: Path) -> tuple[str, ...]:
    try:
        command_line = (process / "cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return ()
    return tuple(word for word in command_line.split("\0") if word)


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except (KeyError, OverflowError):
        return str(uid)


_SECONDS = 4.0
"""Time limit for an answer: the machine may be busy."""
_SKEW_LOW, _SKEW_MOST = 5.0, 60.0
"""A Date has whole seconds; tokens are refused if clocks differ by a minute."""


class Answer(NamedTuple):
    """The answer of a server."""

    status: int
    document: Any
    """None if it is not JSON."""
    skew: float | None
    """Seconds that their clock is ahead of this one."""


def check_server(url: str, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Check a `headrace serve`, or another server of the v2 protocol."""
    name = f"server {url}"
    try:
        live = ask(url, "/v2/health/live", environ)
    except OSError as error:
        yield problem(name, f"does not answer: {_error_text(error)}", "headrace serve models")
        return
    if live.status in (401, 403):
        yield warning(name, "answers, and requires an API key", "export HEADRACE_API_KEY=KEY")
        return
    if live.status != 200:
        yield problem(name, f"answers {live.status} to /v2/health/live: is it a model server?", f"curl -i {url}/v2")
        return
    if ask(url, "/v2/health/ready", environ).status == 200:
        yield ok(name, "answers and is ready", f"headrace top {url}")
    else:
        reasons = "; ".join(_not_ready(url, environ)) or "it does not say why"
        yield problem(name, f"answers, but is not ready: {reasons}", f"headrace models list --url {url}")
    about = ask(url, "/v2", environ).document
    if isinstance(about, dict) and about.get("name") == "headrace" and about.get("version") != __version__:
        reasons = f"it is Headrace {about.get('version')}, and this is {__version__}"
        yield warning(f"version of {url}", reasons, f"pip install headrace=={about.get('version')}")
    yield from check_clock(url, live)


def check_gateway(url: str, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Check a `headrace gateway`."""
    name = f"gateway {url}"
    try:
        ready = ask(url, "/health/readiness", environ)
    except OSError as error:
        yield problem(name, f"does not answer: {_error_text(error)}", "headrace gateway")
        return
    if ready.status == 200:
        yield ok(name, "answers and takes work")
    else:
        yield problem(name, f"answers {ready.status} to /health/readiness", f"curl -i {url}/health/readiness")
    yield from check_clock(url, ready)


def check_clock(url: str, answer: Answer) -> Iterator[Finding]:
    """Compare their clock with this machine's."""
    if answer.skew is None:
        return
    name = f"clock of {url}"
    if abs(answer.skew) < _SKEW_LOW:
        yield ok(name, "agrees with this one")
        return
    difference = (
        f"{abs(answer.skew):.0f} s {'ahead of' if answer.skew > 0 else 'behind'} this one: tokens may be refused"
    )
    yield (problem if abs(answer.skew) >= _SKEW_MOST else warning)(name, difference, "timedatectl set-ntp true")


def ask(url: str, path: str, environ: Mapping[str, str], method: str = "GET", body: bytes | None = None) -> Answer:
    """Send one request, without redirects or proxies. Raises OSError without an answer, InvalidArgument for a bad URL."""
    key = environ.get("HEADRACE_API_KEY", "")
    headers = {"authorization": f"Bearer {key}"} if key else {}
    sent = time.time()
    response = request(method, url, path, body, headers, seconds=_SECONDS)
    return Answer(response.status, response.json(), _skew(response.headers.get("date", ""), sent, time.time()))


def _skew(date: str, sent: float, received: float) -> float | None:
    try:
        server_time = parsedate_to_datetime(date).timestamp()
    except (TypeError, ValueError):
        return None
    # A Date is cut to whole seconds: it was true at some moment of the following second.
    return server_time - received if server_time > received else min(0.0, server_time + 1 - sent)


def _not_ready(url: str, environ: Mapping[str, str]) -> Iterator[str]:
    index = ask(url, "/v2/repository/index", environ, "POST", b"{}").document
    for entry in index if isinstance(index, list) else ():
        if isinstance(entry, dict) and entry.get("state") != "READY":
            reason = entry.get("reason") or "no reason is given"
            yield f"{entry.get('name')} is {entry.get('state') or 'not loaded'}: {reason}"


def _error_text(error: OSError) -> str:
    if isinstance(error, TimeoutError):
        return f"nothing came in {_SECONDS:g} s"
    return error_text(error)
