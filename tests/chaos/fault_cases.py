# SPDX-License-Identifier: Apache-2.0
"""Tools of the tests of fault injection: which fault is tried at which point, and programs that meet it.

CASES = Cases()

@CASES.of("batch.ledger.append:die@3", "batch.ledger.append:disk_full@2")
def test_something(fault: str) -> None:
    done = run_script(SCRIPT, fault=fault)
    check_met(fault, done.returncode, done.stderr)
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from headrace.core.fault_points import VARIABLE, parse_faults

_TESTS = Path(__file__).parent.parent


class Cases:
    """The faults that tests try, collected from their parametrisation."""

    def __init__(self) -> None:
        self.points: set[str] = set()
        """Every point at which some test has a fault."""

    def of(self, *faults: str) -> pytest.MarkDecorator:
        """Parametrise a test with `fault`."""
        self.points |= {fault.point for text in faults for fault in parse_faults(text)}
        return pytest.mark.parametrize("fault", faults)


def environment(fault: str = "") -> dict[str, str]:
    """The environment of a program that meets a fault; "" for none."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(_TESTS), *sys.path]), VARIABLE: fault}


def run_script(script: str, *args: str | Path, fault: str = "") -> subprocess.CompletedProcess[str]:
    """Run some lines of Python in a process of its own, to its end."""
    arguments = [sys.executable, "-c", script, *map(str, args)]
    return subprocess.run(arguments, env=environment(fault), capture_output=True, text=True, timeout=240, check=False)


def is_deadly(fault: str) -> bool:
    return parse_faults(fault)[0].kind == "die"


def check_met(fault: str, code: int | None, error_output: str) -> None:
    """The process said that it met the fault, and a deadly one killed it. Any other left no traceback."""
    (parsed,) = parse_faults(fault)
    assert f"injecting {parsed.kind} at {parsed.point}, time {parsed.time}\n" in error_output, error_output
    if is_deadly(fault):
        assert code == -signal.SIGKILL, (code, error_output)
    else:
        assert "Traceback" not in error_output, error_output


def temporary_files(*folders: Path) -> list[str]:
    """What `write_atomically`, downloads and deliveries write before they rename it."""
    prefixes, suffixes = (".bringing-", ".delivering-", ".fetch-", ".incoming", ".going"), (".new", ".headrace-new")
    paths: Iterable[Path] = (path for folder in folders for path in folder.rglob(".*"))
    return sorted(str(path) for path in paths if path.name.startswith(prefixes) or path.name.endswith(suffixes))


def processes_in(folder: Path) -> list[int]:
    """Processes that run in a folder or below it."""
    results = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and (entry / "cwd").readlink().is_relative_to(folder):
                results.append(int(entry.name))
    return results


def unreadable_files(folder: Path) -> list[Path]:
    """JSON documents that are not whole."""
    results = []
    for path in folder.rglob("[!.]*.json"):
        try:
            json.loads(path.read_bytes())
        except ValueError:
            results.append(path)
    return results
