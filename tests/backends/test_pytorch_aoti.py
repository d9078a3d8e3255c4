# SPDX-License-Identifier: Apache-2.0
"""A package that AOTInductor compiled: loaded when the configuration allows it, and found by position."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from pytorch_models import CPU, NO_SERVICES, configured, open_instance, placed

from headrace.backends.pytorch.backend import PyTorchBackend
from headrace.core.dtypes import FP32
from headrace.core.errors import FailedPrecondition, InvalidArgument
from support.model_cache import made_once

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # the compiler takes as long as it takes

ALLOWED = {"ALLOW_NATIVE_CODE": "true"}
INPUTS = {"first": (FP32, (-1, 4)), "second": (FP32, (4, 4))}
OUTPUTS = {"square": (FP32, (4, 4)), "product": (FP32, (-1, 4))}
ROWS = np.arange(12, dtype=np.float32).reshape(3, 4)
TWICE = np.eye(4, dtype=np.float32) * 2


class Keyed(torch.nn.Module):
    """Products only: they call PyTorch, so that there is no kernel to compile, which takes as long again."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"product": x @ y, "square": y @ y}


def compile_package(folder: Path) -> None:
    """Compiling takes ten seconds, most of them the compiler's."""
    given = (torch.ones(2, 4), torch.ones(4, 4))
    quick: dict[str, Any] = {"aot_inductor.compile_wrapper_opt_level": "O0", "aot_inductor.precompile_headers": False}
    with (
        TemporaryDirectory() as scratch,
        pytest.MonkeyPatch.context() as patch,
        warnings.catch_warnings(action="ignore"),
    ):
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", scratch)
        program = torch.export.export(Keyed(), given, dynamic_shapes={"x": {0: torch.export.Dim("rows")}, "y": None})
        torch._inductor.aoti_compile_and_package(
            program, package_path=str(folder / "model.pt2"), inductor_configs={**quick, "compile_threads": 1}
        )


@pytest.fixture(scope="module")
def package() -> bytes:
    if shutil.which("g++") is None:
        pytest.skip("AOTInductor needs g++ to compile")
    return (made_once(compile_package) / "model.pt2").read_bytes()


def test_a_package_computes_when_it_is_allowed_to(tmp_path: Path, package: bytes) -> None:
    files = placed(tmp_path, package, "model.pt2")
    with pytest.raises(FailedPrecondition, match="set the parameter ALLOW_NATIVE_CODE to true"):
        PyTorchBackend().load(configured(INPUTS, OUTPUTS, 0), files, NO_SERVICES)
    version = PyTorchBackend().load(configured(INPUTS, OUTPUTS, 0, parameters=ALLOWED), files, NO_SERVICES)
    first, second = version.open(CPU), version.open(CPU)
    for instance in (first, second):
        answer = instance.compute({"first": ROWS, "second": TWICE}, ["product", "square"])
        assert answer["product"].tolist() == (ROWS * 2).tolist()
        assert answer["square"].tolist() == (TWICE * 2).tolist()
    first.close()
    given = {"first": ROWS[:1], "second": TWICE}
    assert second.compute(given, ["product"])["product"].tolist() == (ROWS[:1] * 2).tolist()
    with pytest.raises(InvalidArgument, match="has 2 inputs, and its configuration names"):
        open_instance(configured({**INPUTS, "third": (FP32, (4,))}, OUTPUTS, parameters=ALLOWED), files)
    with pytest.raises(InvalidArgument, match="take the parameter precision away"):
        open_instance(configured(INPUTS, OUTPUTS, parameters={**ALLOWED, "precision": "bf16"}), files)
    with pytest.raises(InvalidArgument, match="a compiled package, which does not declare types and shapes"):
        PyTorchBackend().complete(configured({}, {}, parameters=ALLOWED), files)
