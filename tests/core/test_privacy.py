# SPDX-License-Identifier: Apache-2.0
"""Nothing that is served is told to the makers of the libraries that serve it."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

LOOK = """
import sys
class Watch:
    def find_spec(self, name, path=None, target=None):
        if name == "onnxruntime":
            import os
            print(os.environ.get("ORT_DISABLE_TELEMETRY"))
sys.meta_path.insert(0, Watch())
import {module}
"""


@pytest.mark.parametrize("module", ["headrace.backends.onnx.backend", "headrace.backends.netdef.backend"])
@pytest.mark.parametrize(("given", "seen"), [(None, "1"), ("0", "0")])
def test_onnx_runtime_finds_it_refused_when_it_is_loaded(module: str, given: str | None, seen: str) -> None:
    kept = {name: value for name, value in os.environ.items() if name != "ORT_DISABLE_TELEMETRY"}
    environment = kept if given is None else kept | {"ORT_DISABLE_TELEMETRY": given}
    command = [sys.executable, "-c", LOOK.format(module=module)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [seen]


def test_onnx_runtime_reads_the_variable() -> None:
    """If it is renamed, this tells."""
    spec = find_spec("onnxruntime")
    assert spec is not None and spec.origin is not None
    libraries = list((Path(spec.origin).parent / "capi").glob("onnxruntime_pybind11_state*.so"))
    content = libraries[0].read_bytes()
    assert b"events.data.microsoft.com" not in content or b"ORT_DISABLE_TELEMETRY" in content
