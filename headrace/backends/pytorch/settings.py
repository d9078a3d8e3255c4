# SPDX-License-Identifier: Apache-2.0
"""What a model's configuration says to PyTorch.

Called by `backends.pytorch`. The names are those of Triton's backend, so that its configurations mean the same here, with
other defaults: an instance computes with one thread, and instances share their weights. Must not know what a model looks
like.

    parameters
      INTRA_OP_THREAD_COUNT        threads inside an operator; 1 unless told, 0 for all cores
      INTER_OP_THREAD_COUNT        threads for what a TorchScript model forks; one number for the whole process, so the
                                   first model to be loaded with it decides
      INFERENCE_MODE               true: no record of operators is kept at all; false: only no gradients
      DISABLE_OPTIMIZED_EXECUTION  true: run TorchScript as it is written, without the slow first calls that optimise it
      ENABLE_WEIGHT_SHARING        true: instances of a device compute with one copy of the weights; false: one each.
                                   Models that write into their own buffers have one each in any case
      ENABLE_CACHE_CLEANING        true: give the GPU's unused memory back after each batch; slow
      DISABLE_CUDNN, ENABLE_JIT_EXECUTOR, ENABLE_JIT_PROFILING   switches of the whole process, set when the model is loaded
      ENABLE_NVFUSER, ENABLE_TENSOR_FUSER   not looked at: PyTorch no longer has them
    parameters of Headrace
      precision                    bf16 or fp16: convert the weights and the FP32 inputs and outputs. fp32: do not
      ALLOW_NATIVE_CODE            true: load a package of AOTInductor, which is a shared library and may do anything

The number of threads: PyTorch (OpenMP) keeps it for each thread that computes, so `torch.set_num_threads` in the
instance's thread changes that thread and those that PyTorch has not seen yet, and no other instance.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from headrace.backends.parameters import number_of
from headrace.core.errors import InvalidArgument
from headrace.models.config.types import ModelConfig

log = logging.getLogger("headrace.backends")

_GONE = ("ENABLE_NVFUSER", "ENABLE_TENSOR_FUSER")
_PRECISIONS = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, slots=True)
class Settings:
    """All of them, read and checked."""

    threads: int = 1
    inter_op_threads: int | None = None
    inference_mode: bool = True
    optimized: bool = True
    share_weights: bool = True
    clean_cache: bool = False
    cudnn: bool = True
    jit_executor: bool | None = None
    jit_profiling: bool | None = None
    precision: Any = None
    """A `torch.dtype`, or None for the model's own."""
    native_code: bool = False


def settings_of(config: ModelConfig) -> Settings:
    """Read the parameters. Changes nothing in PyTorch: that is for `apply_to_process`."""
    given = config.parameters
    for key in _GONE:
        if key in given:
            log.warning("model %s: parameter %s is not looked at, PyTorch no longer has it", config.name, key)
    precision = given.get("precision", "fp32").lower()
    if precision not in _PRECISIONS:
        raise InvalidArgument(f"parameter precision is '{precision[:32]}': use fp32, bf16 or fp16")
    inter_op = number_of(given, "INTER_OP_THREAD_COUNT", 0, 1024)
    return Settings(
        threads=number_of(given, "INTRA_OP_THREAD_COUNT", 1, 1024) or (os.cpu_count() or 1),
        inter_op_threads=inter_op or None,
        inference_mode=_switch(given, "INFERENCE_MODE", True),
        optimized=not _switch(given, "DISABLE_OPTIMIZED_EXECUTION", False),
        share_weights=_switch(given, "ENABLE_WEIGHT_SHARING", True),
        clean_cache=_switch(given, "ENABLE_CACHE_CLEANING", False),
        cudnn=not _switch(given, "DISABLE_CUDNN", False),
        jit_executor=_switch(given, "ENABLE_JIT_EXECUTOR", True) if "ENABLE_JIT_EXECUTOR" in given else None,
        jit_profiling=_switch(given, "ENABLE_JIT_PROFILING", True) if "ENABLE_JIT_PROFILING" in given else None,
        precision=_PRECISIONS[precision],
        native_code=_switch(given, "ALLOW_NATIVE_CODE", False),
    )


def apply_to_process(config: ModelConfig, settings: Settings) -> None:
    """Set what PyTorch has only one of. Other models feel it, so each is told to the log."""
    if settings.inter_op_threads not in (None, torch.get_num_interop_threads()):
        try:
            torch.set_num_interop_threads(settings.inter_op_threads)
        except RuntimeError:
            # PyTorch makes the threads once.
            log.warning(
                "model %s: INTER_OP_THREAD_COUNT is not looked at, this process has %d such threads already",
                config.name,
                torch.get_num_interop_threads(),
            )
    if not settings.cudnn:
        log.warning("model %s: DISABLE_CUDNN turns cuDNN off for all models of this process", config.name)
        torch.backends.cudnn.enabled = False
    if settings.jit_executor is not None:
        log.warning("model %s: ENABLE_JIT_EXECUTOR is set for all models of this process", config.name)
        torch._C._jit_set_profiling_executor(settings.jit_executor)
    if settings.jit_profiling is not None:
        log.warning("model %s: ENABLE_JIT_PROFILING is set for all models of this process", config.name)
        torch._C._jit_set_profiling_mode(settings.jit_profiling)


def _switch(parameters: Mapping[str, str], key: str, default: bool) -> bool:
    text = parameters.get(key)
    if text is None:
        return default
    if text.lower() not in ("true", "false", "1", "0"):
        raise InvalidArgument(f"parameter {key} is '{text[:32]}': use true or false")
    return text.lower() in ("true", "1")
