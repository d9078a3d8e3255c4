# SPDX-License-Identifier: Apache-2.0
"""Small models of PyTorch, archives with something wrong inside, and configurations, for the tests of that backend."""

from __future__ import annotations

import io
import os
import warnings
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch

from headrace.backends.contract import EngineServices, ModelFiles, Placement
from headrace.backends.pytorch.backend import PyTorchBackend
from headrace.backends.pytorch.instance import TorchInstance
from headrace.core.dtypes import FP32, DType
from headrace.models.config.messages import new_config
from headrace.models.config.types import Dims, InputSpec, ModelConfig, OutputSpec

CPU = Placement("test_0_cpu")
NO_SERVICES = cast("EngineServices", None)


class Scaled(torch.nn.Module):
    """x [n, 4] -> [n, 3]."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * 2


class Canary:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self._folder),)


def script(module: torch.nn.Module) -> bytes:
    """TorchScript."""
    saved = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.jit.save(torch.jit.script(module.eval()), saved)
    return saved.getvalue()


def traced(module: torch.nn.Module, *given: torch.Tensor) -> bytes:
    """TorchScript by tracing."""
    saved = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.jit.save(torch.jit.trace(module.eval(), given, strict=False), saved)
    return saved.getvalue()


def exported(module: torch.nn.Module, given: Sequence[Any], dynamic: Any = None) -> bytes:
    """An exported program."""
    saved = io.BytesIO()
    torch.export.save(torch.export.export(module.eval(), tuple(given), dynamic_shapes=dynamic), saved)
    return saved.getvalue()


def batched_program(module: torch.nn.Module | None = None) -> bytes:
    """`Scaled` with any number of rows."""
    return exported(module or Scaled(), [torch.ones(2, 4)], {"x": {0: torch.export.Dim("rows")}})


def saved_state(content: Any) -> bytes:
    """What torch.save writes."""
    saved = io.BytesIO()
    torch.save(content, saved)
    return saved.getvalue()


def records_of(archive: bytes) -> dict[str, bytes]:
    """The records by name, the archive's folder in front."""
    with zipfile.ZipFile(io.BytesIO(archive)) as opened:
        return {name: opened.read(name) for name in opened.namelist()}


def archive_of(records: Mapping[str, bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    """The archive of these records."""
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w", compression) as opened:
        for name, content in records.items():
            opened.writestr(name, content)
    return written.getvalue()


def changed(archive: bytes, ending: str, change: Callable[[bytes], bytes]) -> bytes:
    """The archive with the one record of this ending changed."""
    records = records_of(archive)
    (name,) = (name for name in records if name.endswith(ending))
    return archive_of({**records, name: change(records[name])})


def placed(folder: Path, model: bytes | None, filename: str = "model.pt") -> ModelFiles:
    """The model as version 1 of `test`."""
    files = ModelFiles(folder / "test", 1, folder / "test" / "1")
    files.version_folder.mkdir(parents=True, exist_ok=True)
    if model is not None:
        (files.version_folder / filename).write_bytes(model)
    return files


def configured(
    inputs: Mapping[str, tuple[DType, Dims]] | None = None,
    outputs: Mapping[str, tuple[DType, Dims]] | None = None,
    max_batch_size: int = 8,
    **more: Any,
) -> ModelConfig:
    """A configuration for `Scaled`; any part can be replaced."""
    inputs = {"x": (FP32, (4,))} if inputs is None else inputs
    outputs = {"OUTPUT__0": (FP32, (3,))} if outputs is None else outputs
    more.setdefault("proto", new_config(name="test"))
    return ModelConfig(
        "test",
        "pytorch",
        max_batch_size=max_batch_size,
        inputs=tuple(InputSpec(name, dtype, dims) for name, (dtype, dims) in inputs.items()),
        outputs=tuple(OutputSpec(name, dtype, dims) for name, (dtype, dims) in outputs.items()),
        **more,
    )


def open_instance(config: ModelConfig, files: ModelFiles, placement: Placement = CPU) -> TorchInstance:
    """Load and open."""
    return PyTorchBackend().load(config, files, NO_SERVICES).open(placement)
