# SPDX-License-Identifier: Apache-2.0
"""One virtual environment per peer, from its pinned requirements.txt.

The requirement files are complete lists, so pip resolves nothing and every machine gets the same versions.
"""

import hashlib
import importlib.metadata
import shutil
import subprocess
import sys
from pathlib import Path

from bench.errors import BenchError

BENCH = Path(__file__).parent
PEERS = BENCH / "peers"
VENVS = BENCH / ".venvs"
# Triton's Python backend needs numpy 1.26, which has no wheels after Python 3.12.
NEWEST_PYTHON = {"triton-python": (3, 12)}


def venv_of(peer: str) -> Path:
    """Where the peer's environment is, or will be."""
    return VENVS / peer


def is_installed(peer: str) -> bool:
    """Whether the environment was made from the requirements as they are now."""
    stamp = venv_of(peer) / "requirements.sha256"
    return stamp.is_file() and stamp.read_text() == _fingerprint(peer)


def install(peer: str) -> None:
    """Make the environment anew; a half-made one left by an interruption is never taken for a whole one."""
    venv = venv_of(peer)
    shutil.rmtree(venv, ignore_errors=True)
    _run([_python_for(peer), "-m", "venv", str(venv)], peer)
    _run([
        str(venv / "bin/python"), "-m", "pip", "install", "--quiet", "--no-input",
        "--disable-pip-version-check", "--no-deps", "-r", str(PEERS / peer / "requirements.txt"),
    ], peer)  # fmt: skip
    (venv / "requirements.sha256").write_text(_fingerprint(peer))


def site_packages(venv: Path) -> Path:
    """The folder its packages are in."""
    return next(venv.glob("lib/python3*/site-packages"))


def package_versions(venv: Path) -> dict[str, str]:
    """Name and version of everything installed in an environment."""
    distributions = importlib.metadata.distributions(path=[str(site_packages(venv))])
    return {distribution.name: distribution.version for distribution in distributions}


def _python_for(peer: str) -> str:
    newest = NEWEST_PYTHON.get(peer)
    if newest is None or sys.version_info[:2] <= newest:
        return sys.executable
    for minor in range(newest[1], 10, -1):
        if path := shutil.which(f"python3.{minor}"):
            return path
    raise BenchError(f"{peer} needs Python {newest[0]}.{newest[1]} or 3.11: install one and run again")


def _fingerprint(peer: str) -> str:
    # The interpreter itself, not the virtual environment that bench happens to be run from.
    interpreter = Path(_python_for(peer)).resolve()
    requirements = (PEERS / peer / "requirements.txt").read_bytes()
    return hashlib.sha256(requirements + str(interpreter).encode()).hexdigest()


def _run(command: list[str], peer: str) -> None:
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    if finished.returncode != 0:
        raise BenchError(f"installing {peer} failed: {finished.stderr.strip()[-800:]}")
