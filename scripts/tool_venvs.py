# SPDX-License-Identifier: Apache-2.0
"""Virtual environments below `build/tools` for tools that only releases and audits need.

Used by `lock` and `audit`. They stay out of `.venv`, so that what is locked and audited is not changed by what looks at it.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def tool(requirement: str, program: str) -> Path:
    """The program of a package at a fixed version; installed if it is not there yet."""
    folder = ROOT / "build" / "tools" / requirement
    path = folder / "bin" / program
    if not path.exists():
        subprocess.run(["bash", str(ROOT / "scripts" / "make_venv.sh"), sys.executable, str(folder)], check=True)
        subprocess.run([folder / "bin" / "python", "-m", "pip", "install", "--quiet", requirement], check=True)
    return path
