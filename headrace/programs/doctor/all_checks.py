# SPDX-License-Identifier: Apache-2.0
"""Which checks there are for what a user said. Called by the verb."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from headrace.programs.doctor import gpus, machine, packages, places, platforms, ports, servers
from headrace.programs.doctor.finding import Finding
from headrace.programs.doctor.running import Check

QUICK_SECONDS = 5.0
"""Most machines take a fifth of it: only what hangs is waited for."""
SERVER_SECONDS = 15.0
"""With servers that were named: they may be far away."""
PLATFORM_SECONDS = 25.0


@dataclass(frozen=True)
class Wanted:
    """What is to be looked at beside the machine itself."""

    environ: Mapping[str, str] = field(repr=False)
    host: str = "127.0.0.1"
    ports: tuple[ports.Port, ...] = ()
    repository: Path | None = None
    servers: tuple[str, ...] = ()
    gateways: tuple[str, ...] = ()
    platforms: tuple[str, ...] = ()

    @property
    def seconds(self) -> float:
        """The most that all of it may take."""
        if self.platforms:
            return PLATFORM_SECONDS
        return SERVER_SECONDS if self.servers or self.gateways else QUICK_SECONDS


def checks_of(wanted: Wanted) -> dict[str, Check]:
    """By name, in the order in which their findings are told."""
    environ, repository = wanted.environ, wanted.repository
    count = len(gpus.devices())
    checks: dict[str, Check] = {
        "Python": packages.check_python,
        "ports": lambda: ports.check_ports(wanted.host, wanted.ports),
        "server": lambda: _servers(wanted),
    }
    for each in wanted.gateways:
        checks[f"gateway {each}"] = lambda url=each: servers.check_gateway(url, environ)  # type: ignore[misc]
    if repository is not None:
        checks["repository"] = lambda: places.check_repository(repository)
    checks |= {
        "folders": lambda: places.check_kept(environ),
        "disks": lambda: places.check_room(environ, repository),
        "memory": machine.check_memory,
        "cores": lambda: machine.check_cores(environ),
        "limits": lambda: machine.check_limits(count),
        "GPUs": lambda: gpus.check_gpus(environ),
        "packages": packages.check_packages,
        "platforms": lambda: platforms.check_unasked(environ),
    }
    if wanted.platforms:
        del checks["platforms"]
    for each in wanted.platforms:
        checks[each] = lambda name=each: platforms.check_platform(name, environ, asked=True)  # type: ignore[misc]
    return checks


def _servers(wanted: Wanted) -> Iterator[Finding]:
    """Those that were named; without, our own of this machine that has the first port."""
    for url in wanted.servers:
        yield from servers.check_server(url, wanted.environ)
    if wanted.servers or not wanted.ports:
        return
    port = wanted.ports[0].number
    holder = ports.holder_of(port) if ports.bind_error(wanted.host, port) else None
    if holder is not None and holder.is_headrace:
        yield from servers.check_server(f"http://{wanted.host}:{port}", wanted.environ)
