# SPDX-License-Identifier: Apache-2.0
"""Describe the machine and the software, so that results can be compared later."""

import os
import platform
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

from bench.tools import load_generator_versions

REPOSITORY = Path(__file__).parent.parent


def describe_machine() -> dict[str, object]:
    """What the figures depend on, with nothing that identifies the machine's owner."""
    return {
        "cpu_model": _cpu_model(),
        "cpu_count": len(os.sched_getaffinity(0)),
        "architecture": platform.machine(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "kernel": platform.release(),
        "system": platform.freedesktop_os_release().get("PRETTY_NAME", "unknown"),
        "python": _python_version(),
        "load_generators": load_generator_versions(),
        "git_commit": _git_commit(),
        "load_average_before": os.getloadavg()[0],
    }


def short_name(machine: dict[str, object]) -> str:
    """A name for files, such as aarch64-neoverse-n1-2cpu."""
    text = f"{machine['architecture']}-{machine['cpu_model']}-{machine['cpu_count']}cpu".lower()
    return re.sub(r"[^a-z0-9]+", "-", text).strip("-")


def _cpu_model() -> str:
    # /proc/cpuinfo has no model name on ARM; lscpu knows the names.
    listing = _output(["lscpu"])
    match = re.search(r"^Model name:\s+(\S.*)$", listing, re.MULTILINE)
    return match[1].strip() if match and match[1].strip("- ") else "unknown CPU"


def _python_version() -> str:
    # A self-built Python (pyenv) without profile-guided optimisation was 1.6 times slower than Debian's.
    # Debian optimises without saying so in CONFIG_ARGS, hence the second question.
    asked_for = "--enable-optimizations" in (sysconfig.get_config_var("CONFIG_ARGS") or "")
    optimised = asked_for or sys.base_prefix == "/usr"
    return platform.python_version() + ("" if optimised else " (built without optimisation)")


def _git_commit() -> str:
    commit = _output(["git", "-C", str(REPOSITORY), "rev-parse", "--short=12", "HEAD"]).strip()
    if not commit:
        return "none"
    changed = _output(["git", "-C", str(REPOSITORY), "status", "--porcelain", "--untracked-files=no"]).strip()
    return f"{commit} with uncommitted changes" if changed else commit


def _output(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout
    except OSError:
        return ""
