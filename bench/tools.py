# SPDX-License-Identifier: Apache-2.0
"""Install the two load generators, and report their versions."""

import os
import shutil
import subprocess

from bench.errors import BenchError

DEBIAN_PACKAGES = {"wrk": "wrk", "h2load": "nghttp2-client"}


def ensure_load_generators() -> None:
    """Install wrk and h2load with apt where that is possible; say what to do where it is not."""
    missing = [package for tool, package in DEBIAN_PACKAGES.items() if shutil.which(tool) is None]
    if not missing:
        return
    advice = f"install them (Debian, Ubuntu: apt-get install {' '.join(missing)}) and run again"
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise BenchError(f"wrk or h2load is missing: {advice}")
    print(f"Installing {' '.join(missing)} with apt-get ...", flush=True)
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    install = ["apt-get", "install", "-y", "--no-install-recommends", *missing]
    if not _quietly(install, environment):
        _quietly(["apt-get", "update"], environment)
        if not _quietly(install, environment):
            raise BenchError(f"apt-get could not install them: {advice}")


def load_generator_versions() -> dict[str, str]:
    """The first line each of them prints about itself."""
    # wrk prints its usage, and exits with 1, for -v; its version is on the first line all the same.
    return {tool: _first_line([tool, flag]) for tool, flag in (("wrk", "-v"), ("h2load", "--version"))}


def _first_line(command: list[str]) -> str:
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = (finished.stdout + finished.stderr).strip().splitlines()
    return lines[0] if lines else "unknown"


def _quietly(command: list[str], environment: dict[str, str]) -> bool:
    return subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=False).returncode == 0
