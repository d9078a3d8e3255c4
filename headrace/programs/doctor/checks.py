# SPDX-License-Identifier: Apache-2.0
"""The list of checks for the options of `headrace doctor`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from headrace.programs.doctor import folders, machine, packages, platforms, servers
from headrace.programs.doctor.finding import Check, Finding

QUICK_SECONDS = 5.0
"""Most machines need a fifth of it; only a hanging check takes it all."""
SERVER_SECONDS = 15.0
"""With named servers, which may be far away."""
PLATFORM_SECONDS = 25.0


@dataclass(frozen=True)
class DoctorOptions:
    """What to check besides the machine itself."""

    environ: Mapping[str, str] = field(repr=False)
    host: str = "127.0.0.1"
    ports: tuple[servers.Port, ...] = ()
    repository: Path | None = None
    servers: tuple[str, ...] = ()
    gateways: tuple[str, ...] = ()
    platforms: tuple[str, ...] = ()

    @property
    def seconds(self) -> float:
        """Time limit for all checks."""
        if self.platforms:
            return PLATFORM_SECONDS
        return SERVER_SECONDS if self.servers or self.gateways else QUICK_SECONDS


def list_checks(options: DoctorOptions) -> dict[str, Check]:
    """Return the checks by name, in the order of the output."""
    environ, repository = options.environ, options.repository
    count = len(machine.devices())
    checks: dict[str, Check] = {
        "ports": lambda: servers.check_ports(options.host, options.ports),
        "server": lambda: _servers(options),
    }
    for gateway in options.gateways:
        checks[f"gateway {gateway}"] = lambda url=gateway: servers.check_gateway(url, environ)  # type: ignore[misc]
    if repository is not None:
        checks["repository"] = lambda: folders.check_repository(repository)
    checks |= {
        "folders": lambda: folders.check_writable(environ),
        "disks": lambda: folders.check_disk_space(environ, repository),
        "memory": machine.check_memory,
        "cores": lambda: machine.check_cores(environ),
        "limits": lambda: machine.check_limits(count),
        "GPUs": lambda: machine.check_gpus(environ),
        "Python": packages.check_python,
        "packages": packages.check_packages,
        "platforms": lambda: platforms.detect_platforms(environ),
    }
    if options.platforms:
        del checks["platforms"]
    for platform in options.platforms:
        checks[platform] = lambda name=platform: platforms.check_platform(name, environ, is_named=True)  # type: ignore[misc]
    return checks


HEADINGS = {
    "Ports and servers": ("ports", "server"),
    "Folders and disks": ("repository", "folders", "disks"),
    "Machine": ("memory", "cores", "limits", "GPUs"),
    "Packages": ("Python", "packages"),
}
"""The checks under each heading of the output; the others are platforms and gateways."""


def heading_of(check: str) -> str:
    """Return the heading of a check."""
    if check.startswith("gateway "):
        return "Ports and servers"
    return next((heading for heading, checks in HEADINGS.items() if check in checks), "Platforms")


def _servers(options: DoctorOptions) -> Iterator[Finding]:
    """Check the named servers; without any, a Headrace server on the first port of this machine."""
    for url in options.servers:
        yield from servers.check_server(url, options.environ)
    if options.servers or not options.ports:
        return
    port = options.ports[0].number
    holder = servers.holder_of(port) if servers.bind_error(options.host, port) else None
    if holder is not None and holder.is_headrace:
        yield from servers.check_server(f"http://{options.host}:{port}", options.environ)
