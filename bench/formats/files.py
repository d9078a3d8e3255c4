# SPDX-License-Identifier: Apache-2.0
"""The model files of a format: created once and kept under .work/."""

import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

from bench.errors import BenchError
from bench.formats import FORESTS, Format

HERE = Path(__file__).parent
BENCH = HERE.parent
MADE = BENCH / ".work/formats"
ANSWER = "answer.json"


def model_file(kind: Format, plan: str) -> Path:
    """The file (or folder) of this plan, made now unless it is there."""
    folder = MADE / kind.name
    stamp = folder / "sources.sha256"
    if not stamp.is_file() or stamp.read_text() != _fingerprint(kind):
        shutil.rmtree(folder, ignore_errors=True)
        _make(kind, folder)
        # Last, so that a folder left half made by an interruption is never taken for a whole one.
        stamp.write_text(_fingerprint(kind))
    return folder / plan / kind.file


def forest_answer(kind: Format) -> float:
    """What the library itself says of the row that is asked for."""
    return float(json.loads((model_file(kind, kind.large).parent / ANSWER).read_text()))


def _make(kind: Format, folder: Path) -> None:
    command = [sys.executable, "-m", "bench.formats.make", kind.name, str(folder)]
    finished = subprocess.run(command, cwd=BENCH.parent, capture_output=True, text=True, check=False)
    if finished.returncode != 0:
        raise BenchError(
            f"the {kind.name} model cannot be made (pip install 'headrace[formats]' brings the frameworks): "
            f"{finished.stderr.strip()[-800:]}"
        )


def _fingerprint(kind: Format) -> str:
    plan = HERE / "forest.py" if kind.name in FORESTS else BENCH / "resnet50.py"
    sources = (plan, HERE / "__init__.py", HERE / "make.py", HERE / f"{kind.name}_file.py")
    return hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()
