# SPDX-License-Identifier: Apache-2.0
"""Folders and configurations for the tests of the tabular backends and OpenVINO's."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from headrace.backends.contract import EngineServices, ModelFiles, Placement
from headrace.backends.table import backend_named
from headrace.core.dtypes import DType
from headrace.models.config.messages import new_config
from headrace.models.config.types import Dims, InputSpec, ModelConfig, OutputSpec

Tensors = Mapping[str, tuple[DType, Dims]]
NO_SERVICES = cast("EngineServices", None)


def placed(folder: Path, content: bytes | None, filename: str) -> ModelFiles:
    """The model as version 1 of `test`."""
    files = ModelFiles(folder / "test", 1, folder / "test" / "1")
    files.version_folder.mkdir(parents=True, exist_ok=True)
    if content is not None:
        (files.version_folder / filename).write_bytes(content)
    return files


def configured(
    backend: str, inputs: Tensors | None = None, outputs: Tensors | None = None, batch: int = 8, **more: Any
) -> ModelConfig:
    more.setdefault("proto", new_config(name="test"))
    return ModelConfig(
        "test",
        backend,
        max_batch_size=batch,
        inputs=tuple(InputSpec(name, dtype, dims) for name, (dtype, dims) in (inputs or {}).items()),
        outputs=tuple(OutputSpec(name, dtype, dims) for name, (dtype, dims) in (outputs or {}).items()),
        **more,
    )


def open_instance(config: ModelConfig, files: ModelFiles) -> Any:
    """Load and open."""
    return backend_named(config.backend).load(config, files, NO_SERVICES).open(Placement("test_0_cpu"))


def completed_tensors(backend: str, files: ModelFiles, config: ModelConfig | None = None) -> dict[str, dict[str, Any]]:
    """What `complete` tells: inputs and outputs as name -> (type's number, dims), and the batch size."""
    message = backend_named(backend).complete(config or configured(backend, batch=0), files)
    assert message is not None
    return {
        "input": {tensor.name: (tensor.data_type, list(tensor.dims)) for tensor in message.input},
        "output": {tensor.name: (tensor.data_type, list(tensor.dims)) for tensor in message.output},
        "max_batch_size": message.max_batch_size,
    }


def in_a_process(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a script that may die of a signal, beside the tests' modules."""
    here = str(Path(__file__).parent)
    return subprocess.run(
        [sys.executable, "-c", script, *arguments],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env={**os.environ, "PYTHONPATH": here, "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"},
    )


def damaged(whole: bytes, count: int, seed: int) -> list[bytes]:
    """Copies that were cut short, or have bytes changed, taken out or doubled."""
    import random

    choose = random.Random(seed)
    copies = []
    for number in range(count):
        copy = bytearray(whole)
        place = choose.randrange(len(copy))
        match number % 5:
            case 0:
                copy = copy[:place]
            case 1:
                copy[place] = choose.randrange(256)
            case 2:
                copy[place : place + 4] = choose.choice([b"\x7f\xff\xff\xff", b"9999", b"-999", b"\0\0\0\0"])
            case 3:
                del copy[place : place + choose.randrange(1, 40)]
            case 4:
                copy[place:place] = copy[: choose.randrange(1, 40)]
        copies.append(bytes(copy))
    return copies
