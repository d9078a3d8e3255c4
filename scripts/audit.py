# SPDX-License-Identifier: Apache-2.0
"""Check the locked dependencies for known vulnerabilities: `make audit` runs pip-audit, which asks PyPI.

Exit code 0: none is known. 1: some are; they are printed, with the versions that fix them. 3: PyPI could not be reached.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from lock import FOLDER, LOCKS
from tool_venvs import tool

PIP_AUDIT = "pip-audit==2.10.1"
CLEAN, HOLES, UNKNOWN = 0, 1, 3


def main() -> int:
    """Ask about each lock."""
    program = tool(PIP_AUDIT, "pip-audit")
    codes = {audited([str(program)], FOLDER / f"{name}.lock") for name in LOCKS}
    return HOLES if HOLES in codes else max(codes)


def audited(program: list[str], lock: Path) -> int:
    """Ask about one lock, tell what there is to tell, and return the exit code that says it."""
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        how = ["--require-hashes", "--disable-pip", "--progress-spinner", "off", "--format", "json"]
        command = [*program, *how, "--output", str(answer), "--requirement", str(lock)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        try:
            document = json.loads(answer.read_text())
        except (OSError, ValueError):
            # pip-audit ends with 1 both for a hole and for a service that does not answer: only its answer tells.
            last = (done.stderr.strip().splitlines() or ["no word"])[-1]
            print(
                f"{lock.name}: PyPI's list of holes cannot be asked here, so nothing is known: {last[:300]}",
                file=sys.stderr,
            )
            return UNKNOWN
    holes, skipped = (
        holes_in(document),
        [dependency for dependency in document["dependencies"] if "skip_reason" in dependency],
    )
    for hole in holes:
        print(f"{lock.name}: {hole}")
    if skipped:
        # An index without the list answers 404, which pip-audit takes for a package that is not there: no good news either.
        message = (
            f"{len(skipped)} packages are unknown to it, so of them nothing is known: {skipped[0]['skip_reason'][:200]}"
        )
        print(f"{lock.name}: {message}", file=sys.stderr)
    print(f"{lock.name}: {len(document['dependencies']) - len(skipped)} packages asked about, {len(holes)} known holes")
    return HOLES if holes else UNKNOWN if skipped else CLEAN


def holes_in(document: Any) -> list[str]:
    """`name version: id, mended in ...` of each."""
    holes = []
    for package in document["dependencies"]:
        for hole in package.get("vulns", []):
            mended = ", ".join(hole["fix_versions"]) or "no version yet"
            holes.append(f"{package['name']} {package['version']}: {hole['id']}, mended in {mended}")
    return holes


if __name__ == "__main__":
    sys.exit(main())
