# SPDX-License-Identifier: Apache-2.0
"""Check the platforms for services by their preflights.

A platform that was not named is only detected. The preflight of Slurm creates the folder for its scripts on the cluster,
so it runs only if Slurm is named.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

from headrace.core.errors import HeadraceError
from headrace.core.extras import MissingExtra
from headrace.programs.doctor.finding import Finding, ok, problem, warning

_SECONDS = 1.8
_NAMED_SECONDS = 20.0
PROCESS, DOCKER, SLURM, KUBERNETES = "process", "local-docker", "slurm", "kubernetes"
_COMMANDS = {
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


def check_platform(platform: str, environ: Mapping[str, str], *, is_named: bool) -> Iterator[Finding]:
    """Run a platform's preflight. A failure is a problem if the user named the platform, else a warning."""
    from headrace.platforms.contract import Check

    wrong = problem if is_named else warning
    if platform == PROCESS:
        # Its driver creates its folder, and needs nothing that other checks do not cover.
        yield ok(PROCESS, "needs this machine alone")
        return

    async def run_preflight() -> list[Check]:
        from headrace.platforms.drivers import DriverOptions, create_driver, default_state_dir
        from headrace.platforms.registry import DEFAULT_PATH

        driver = create_driver(platform, DriverOptions(default_state_dir(DEFAULT_PATH, environ), environ))
        try:
            return await asyncio.wait_for(driver.preflight(), _NAMED_SECONDS if is_named else _SECONDS)
        finally:
            await driver.close()

    try:
        checks = asyncio.run(run_preflight())
    except TimeoutError:
        yield wrong(platform, "did not answer in time", _COMMANDS.get(platform, ""))
        return
    except HeadraceError as error:
        pip = f"pip install 'headrace[{error.extra}]'" if isinstance(error, MissingExtra) else ""
        yield wrong(platform, error.message, pip or _COMMANDS.get(platform, ""))
        return
    for check in checks:
        name = f"{platform}: {check.name}"
        yield ok(name, check.message) if check.passed else wrong(name, check.message, _fix(platform, check.name))


def _fix(platform: str, name: str) -> str:
    if name.isupper() and name.replace("_", "").isalnum():
        return f"export {name}=VALUE"
    return _FIXES.get(name) or _COMMANDS.get(platform, "")


def detect_platforms(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Check Docker on this machine, and detect whether other platforms are configured."""
    from headrace.platforms.docker.cli import remote_host

    if shutil.which("docker") is None:
        yield ok(DOCKER, "no docker program: services run as processes", "sudo apt install docker.io")
    elif remote_host(environ.get("DOCKER_HOST", "")):
        yield ok(DOCKER, "on another machine, not checked", f"headrace doctor --platform {DOCKER}")
    else:
        yield from check_platform(DOCKER, environ, is_named=False)
    if shutil.which("sbatch") or environ.get("SLURM_HOST") or environ.get("SLURM_HOSTNAME"):
        yield ok(SLURM, "a cluster is configured, not checked", f"headrace doctor --platform {SLURM}")
    kubeconfigs = environ.get("KUBECONFIG") or str(Path(environ.get("HOME") or Path.home()) / ".kube/config")
    if "KUBERNETES_SERVICE_HOST" in environ or any(Path(path).is_file() for path in kubeconfigs.split(os.pathsep)):
        yield ok(KUBERNETES, "a cluster is configured, not checked", "headrace doctor --kube")
