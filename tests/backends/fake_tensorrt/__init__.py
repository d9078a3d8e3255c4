# SPDX-License-Identifier: Apache-2.0
"""A fake of TensorRT 10's Python API and of the CUDA calls beside it, for machines without a GPU.

    trt/tensorrt          stands in for the package `tensorrt`
    driver/cuda/bindings  stands in for `cuda.bindings` of cuda-python
    plans                 writes plans that the fake TensorRT can read

Both follow what NVIDIA documents, the failures too: what is asynchronous happens when it is waited for, memory of the GPU
has addresses that the host cannot read, shapes outside a profile are refused, and a plan for another GPU gives None and a
word in the log. Nothing here proves that a real TensorRT does the same. The fake TensorRT needs no fake CUDA: where there
is a GPU and cuda-python, `install(fake_cuda=False)` has it keep its tensors in real memory of the GPU.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

HERE = Path(__file__).parent
REAL_CUDA = "HEADRACE_TEST_REAL_CUDA"
"""Set in the environment to run these tests with the CUDA of this machine."""


def install(*, fake_cuda: bool = True) -> ModuleType:
    """Have Headrace's backend import the fakes, and nobody else; gives the fake `tensorrt`."""
    known = "headrace.backends.tensorrt.device"
    if known not in sys.modules:
        faked = ("tensorrt", "cuda") if fake_cuda else ("tensorrt",)
        roots = [str(HERE / "trt"), *([str(HERE / "driver")] if fake_cuda else [])]
        before = _taken_out(faked)
        sys.path[:0] = roots
        try:
            importlib.import_module("headrace.backends.tensorrt.backend")
        finally:
            for root in roots:
                sys.path.remove(root)
            # Other frameworks look for these packages, and must not find ours.
            _taken_out(faked)
            sys.modules.update(before)
    fake: ModuleType = sys.modules[known].trt  # type: ignore[attr-defined]
    return fake


def _taken_out(packages: tuple[str, ...]) -> dict[str, ModuleType]:
    names = [name for name in sys.modules if name.split(".")[0] in packages]
    return {name: sys.modules.pop(name) for name in names}
