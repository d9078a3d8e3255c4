# SPDX-License-Identifier: Apache-2.0
"""Called by servers.py: builds the C backend of the peer `triton-native`, which needs gcc and nothing else."""

import subprocess
from pathlib import Path

from bench.errors import BenchError
from bench.models import FIRST_NUMBERS, WORK
from bench.venvs import PEERS

SOURCE = PEERS / "triton-native/copy_backend.c"
# Backends as Triton finds them, by the `backend` of a model: the same source, told how many numbers of each row to
# keep (0: all).
BACKENDS = {"identity": 0, "first1000": FIRST_NUMBERS}
FLAGS = ("-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared", "-fvisibility=hidden")


def native_backends() -> Path:
    """Build both backends, and return the folder to start Triton with."""
    folder = WORK / "triton-native-backends"
    for name, numbers in BACKENDS.items():
        library = folder / name / f"libtriton_{name}.so"
        library.parent.mkdir(parents=True, exist_ok=True)
        command = ["gcc", *FLAGS, f"-DROW_NUMBERS={numbers}", "-o", str(library), str(SOURCE)]
        finished = subprocess.run(command, capture_output=True, text=True, check=False)
        if finished.returncode != 0:
            raise BenchError(f"the C backend cannot be built: {finished.stderr.strip()[-800:]}")
    return folder
