# SPDX-License-Identifier: Apache-2.0
"""Parse the PyTorch parameters of a model's configuration.

The names are those of Triton's PyTorch backend, so that its configurations keep their meaning, with other defaults: an
instance uses one thread, and instances share their weights.

    parameters
      INTRA_OP_THREAD_COUNT        threads inside an operator (default 1; 0: all cores)
      INTER_OP_THREAD_COUNT        threads for what a TorchScript model forks; one setting for the whole process, made by
                                   the first model that has it
      INFERENCE_MODE               true: use torch.inference_mode; false: torch.no_grad
      DISABLE_OPTIMIZED_EXECUTION  true: run TorchScript as it is written, without the slow first calls that optimise it
      ENABLE_WEIGHT_SHARING        true: instances on a device share one copy of the weights; false: one copy each.
                                   Models that write into their own buffers always have one each
      ENABLE_CACHE_CLEANING        true: give the GPU's unused memory back after each batch; slow
      DISABLE_CUDNN, ENABLE_JIT_EXECUTOR, ENABLE_JIT_PROFILING   process-wide switches, set when the model is loaded
      ENABLE_NVFUSER, ENABLE_TENSOR_FUSER   ignored: PyTorch no longer has them
    parameters of Headrace
      precision                    bf16 or fp16: convert the weights and the FP32 inputs and outputs. fp32: do not
      ALLOW_NATIVE_CODE            true: load an AOTInductor package, which is a shared library and may do anything

PyTorch (OpenMP) keeps the thread count per calling thread, so `torch.set_num_threads` in the instance's thread affects
that thread and threads new to PyTorch, but no other instance.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from typing import Any

import torch

from headrace.backends.model_config import parse_bool, parse_choice, parse_int
from headrace.models.config.types import ModelConfig

log = logging.getLogger("headrace.backends")

_REMOVED = ("ENABLE_NVFUSER", "ENABLE_TENSOR_FUSER")
_PRECISIONS = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, slots=True)
class Settings:
    """The parsed and checked parameters of a configuration."""

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
    """Parse the parameters. This changes nothing in PyTorch; `apply_to_process` does."""
    given = config.parameters
    for key in _REMOVED:
        if key in given:
            log.warning("model %s: ignoring parameter %s, which PyTorch no longer has", config.name, key)
    inter_op = parse_int(given, "INTER_OP_THREAD_COUNT", 0, 1024)
    return Settings(
        threads=parse_int(given, "INTRA_OP_THREAD_COUNT", 1, 1024) or (os.cpu_count() or 1),
        inter_op_threads=inter_op or None,
        inference_mode=parse_bool(given, "INFERENCE_MODE", True),
        optimized=not parse_bool(given, "DISABLE_OPTIMIZED_EXECUTION", False),
        share_weights=parse_bool(given, "ENABLE_WEIGHT_SHARING", True),
        clean_cache=parse_bool(given, "ENABLE_CACHE_CLEANING", False),
        cudnn=not parse_bool(given, "DISABLE_CUDNN", False),
        jit_executor=parse_bool(given, "ENABLE_JIT_EXECUTOR", None),
        jit_profiling=parse_bool(given, "ENABLE_JIT_PROFILING", None),
        precision=_PRECISIONS[parse_choice(given, "precision", "fp32", _PRECISIONS)],
        native_code=parse_bool(given, "ALLOW_NATIVE_CODE", False),
    )


def apply_to_process(config: ModelConfig, settings: Settings) -> None:
    """Apply the process-wide settings. They affect other models, so each is logged."""
    if settings.inter_op_threads not in (None, torch.get_num_interop_threads()):
        try:
            torch.set_num_interop_threads(settings.inter_op_threads)
        except RuntimeError:
            # PyTorch creates these threads once.
            log.warning(
                "model %s: ignoring INTER_OP_THREAD_COUNT, this process already has %d such threads",
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
