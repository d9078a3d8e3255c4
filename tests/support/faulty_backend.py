# SPDX-License-Identifier: Apache-2.0
"""A backend `faulty`, as another package would add it: the file of a model, `model.faulty`, names how its load fails.

It is found by this process and by those that it starts. `good` loads, and returns its input.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

CONFIG = """
backend: "faulty"
input { name: "INPUT0" data_type: TYPE_FP32 dims: [ 4 ] }
output { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ 4 ] }
"""

_CODE = '''
import os
import signal

from headrace.backends.identity import IdentityBackend


class FaultyBackend(IdentityBackend):
    def load(self, config, files, services):
        """As a library would: no exception of Python ends a crash or a loop."""
        how = (files.version_folder / "model.faulty").read_text()
        if how == "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        if how == "allocate":
            taken = []
            while True:
                taken.append(bytearray(b"x") * 10_000_000)
        if how == "loop":
            while True:
                pass
        if how == "error":
            raise KeyError("a secret of the backend")
        return super().load(config, files, services)
'''


def install_faulty_backend(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write the package into a folder, and put that on the path."""
    info = site / "headrace_faulty-1.0.dist-info"
    info.mkdir(parents=True)
    (site / "headrace_faulty.py").write_text(_CODE)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: headrace-faulty\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[headrace.backends]\nfaulty = headrace_faulty:FaultyBackend\n")
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(site), os.environ.get("PYTHONPATH")))))


def add_faulty_model(repository: Path, name: str, how: str) -> None:
    """A model whose load goes as `how` says."""
    folder = repository / name / "1"
    folder.mkdir(parents=True)
    (folder / "model.faulty").write_text(how)
    (folder.parent / "config.pbtxt").write_text(CONFIG)
