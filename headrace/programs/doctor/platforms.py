# SPDX-License-Identifier: Apache-2.0
"""Check the platforms for services by their preflights.

A platform that was not named is only detected. The preflight of Slurm makes the folder for its scripts on the cluster,
so it runs only if Slurm is named.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

from headrace.core.errors import HeadraceError
from headrace.programs.doctor.finding import Finding, ok, problem, warning

_SECONDS = 1.8
_NAMED_SECONDS = 20.0
PROCESS, DOCKER, SLURM, KUBERNETES = "process", "local-docker", "slurm", "kubernetes"
_LOOK = {
    DOCKER: "sudo systemctl start docker",
    SLURM: "sinfo",
    KUBERNETES: "kubectl cluster-info",
    "lepton": "headrace service preflight --platform lepton",
    "brev": "brev login",
}
_FIXES = {
    "partition": "export SLURM_PARTITION=NAME",
    "pyxis": "export SLURM_CONTAINER_MODE=bare",
    "kubeconfig": "export KUBECONFIG=FILE",
    "rights": "kubectl auth can-i --list",
}
"""Fixes by name of the check."""


def check_platform(platform: str, environ: Mapping[str, str], *, asked: bool) -> Iterator[Finding]:
    """Run a platform's preflight. A failure is a problem if the user named the platform, else a warning."""
    from headrace.platforms.contract import Check

    wrong = problem if asked else warning
    if platform == PROCESS:
        # Its driver makes its folder, and needs nothing that is not checked anyway.
        yield ok(PROCESS, "needs this machine alone")
        return

    async def look() -> list[Check]:
        from headrace.platforms.drivers import DriverOptions, create_driver, default_state_dir
        from headrace.platforms.registry import DEFAULT_PATH

        driver = create_driver(platform, DriverOptions(default_state_dir(DEFAULT_PATH, environ), environ))
        try:
            return await asyncio.wait_for(driver.preflight(), _NAMED_SECONDS if asked else _SECONDS)
        finally:
            await driver.close()

    try:
        checks = asyncio.run(look())
    except TimeoutError:
        yield wrong(platform, "did not answer in time", _LOOK.get(platform, ""))
        return
    except HeadraceError as error:
        yield wrong(platform, error.message, _LOOK.get(platform, ""))
        return
    for each in checks:
        name = f"{platform}: {each.name}"
        yield ok(name, each.message) if each.passed else wrong(name, each.message, _fix(platform, each.name))


def _fix(platform: str, name: str) -> str:
    if name.isupper() and name.replace("_", "").isalnum():
        return f"export {name}=VALUE"
    return _FIXES.get(name) or _LOOK.get(platform, "")


def check_unasked(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Check what needs no other machine: Docker here, and whether other platforms are configured."""
    from headrace.platforms.docker.cli import remote_host

    if shutil.which("docker") is None:
        yield ok(DOCKER, "no docker program: services run as processes", "sudo apt install docker.io")
    elif remote_host(environ.get("DOCKER_HOST", "")):
        yield ok(DOCKER, "on another machine, which was not asked", f"headrace doctor --platform {DOCKER}")
    else:
        yield from check_platform(DOCKER, environ, asked=False)
    if shutil.which("sbatch") or environ.get("SLURM_HOST") or environ.get("SLURM_HOSTNAME"):
        yield ok(SLURM, "there is a cluster to ask, which was not asked", f"headrace doctor --platform {SLURM}")
    named = environ.get("KUBECONFIG") or str(Path(environ.get("HOME") or Path.home()) / ".kube/config")
    if "KUBERNETES_SERVICE_HOST" in environ or any(Path(each).is_file() for each in named.split(os.pathsep)):
        yield ok(KUBERNETES, "there is a cluster to ask, which was not asked", "headrace doctor --kube")
