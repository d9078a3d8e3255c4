# SPDX-License-Identifier: Apache-2.0
"""The model loader: from a Hugging Face folder to a model runner on a device. Runs in a loader thread.

Weights are read from safetensors only; nothing is downloaded; code of the folder runs only with `trust_remote_code`. Errors
of transformers go to the log, and clients get our own message.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.utils import logging as transformers_logging

from headrace.backends.cuda_memory import StableMemory
from headrace.backends.llm.model_runner.attention import PagedAttention
from headrace.backends.llm.model_runner.fused_projections import fuse_projections
from headrace.backends.llm.model_runner.kv_cache import FP8, KVCache, page_bytes
from headrace.backends.llm.model_runner.runner import ModelRunner, model_weights
from headrace.backends.llm.quantization.checkpoint import (
    MADE_FP8,
    QuantizedCheckpoint,
    bytes_after_fp8,
    check_quantization,
)
from headrace.backends.llm.settings import EngineSizes, LlmSettings
from headrace.backends.model_config import read_json_object
from headrace.backends.sleeping_weights import PlacedWeights, free_unused, place_of
from headrace.backends.torch_import import TRANSFORMERS
from headrace.backends.weight_files import WeightFiles, check_bytes, check_memory, check_sizes
from headrace.core.errors import FailedPrecondition, HeadraceError, ResourceExhausted
from headrace.core.telemetry.load_stages import READ_WEIGHTS, TO_DEVICE, stage

log = logging.getLogger("headrace.backends.llm")


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A folder that was checked."""

    path: Path
    architecture: str
    weights: WeightFiles
    quantized: QuantizedCheckpoint | None = None


def check_folder(settings: LlmSettings) -> ModelFolder:
    """Check the model's folder before transformers reads it."""
    folder = settings.model_path
    config = _read_config(folder)
    if "auto_map" in config and str(config.get("model_type")) not in CONFIG_MAPPING and not settings.trust_remote_code:
        raise FailedPrecondition(_needs_code(folder))
    weights = check_sizes(folder, config)
    quantized = check_quantization(folder, config)
    if quantized is not None and settings.quantization:
        raise FailedPrecondition(
            f"the weights in '{folder.name}' are quantised already ({quantized.quantization}): leave out parameter "
            "quantization"
        )
    return ModelFolder(folder, config["architectures"][0], weights, quantized)


def load_model(checked: ModelFolder, settings: LlmSettings, device: torch.device, version: str = "") -> Any:
    """Load the weights of a transformers model with a language-model head onto a device. `version`: for the log."""
    folder, architecture = checked.path, checked.architecture
    model_class = (
        transformers.AutoModelForImageTextToText
        if architecture.endswith("ForConditionalGeneration")
        else transformers.AutoModelForCausalLM
    )
    transformers_logging.disable_progress_bar()
    dtype: Any = "auto" if settings.dtype == "auto" else getattr(torch, settings.dtype)
    if settings.dtype == "auto" and device.type == "cpu":
        dtype = torch.float32  # faster and more exact than 16 bits on CPUs
    if device.type == "cpu":
        _check_memory(checked, settings, dtype.itemsize)
    quantizes = checked.quantized is not None or bool(settings.quantization)
    try:
        with TRANSFORMERS, ExitStack() as stack:
            arguments: Mapping[str, Any] = {}
            if quantizes:
                # Needs more of transformers than models without quantised weights.
                from headrace.backends.llm.quantization.loading import quantized_loading

                arguments = stack.enter_context(
                    quantized_loading(folder, checked.quantized, trust_remote_code=settings.trust_remote_code)
                )
                if dtype == "auto" and arguments["config"].dtype is None:
                    dtype = torch.bfloat16  # transformers would take the first type of the weights, perhaps FP8
            with stage(READ_WEIGHTS):
                model, report = model_class.from_pretrained(
                    folder,
                    dtype=dtype,
                    local_files_only=True,
                    use_safetensors=True,
                    trust_remote_code=settings.trust_remote_code,
                    output_loading_info=True,
                    **arguments,
                )
    except HeadraceError:
        raise
    except Exception as error:
        log.exception("transformers cannot load %s.", folder)
        raise FailedPrecondition(_load_error(folder, error, trusts=settings.trust_remote_code)) from None
    if report["missing_keys"]:
        # transformers has filled them with random numbers.
        raise FailedPrecondition(
            f"the weights in '{folder.name}' lack {len(report['missing_keys'])} tensors of {architecture}, such as "
            f"'{min(report['missing_keys'])}': copy the whole model folder"
        )
    if quantizes:
        from headrace.backends.llm.quantization.loading import finish_layers

        count = finish_layers(model, device)
        scheme = checked.quantized.quantization if checked.quantized else MADE_FP8
        log.info("%s: %d layers have quantised weights (%s).", version or f"'{folder}'", count, scheme)
    model.requires_grad_(False)
    model.eval()
    if "logits_to_keep" not in inspect.signature(model.forward).parameters:
        raise FailedPrecondition(
            f"models of class {type(model).__name__} cannot be served by backend 'llm': their forward does not take "
            "logits_to_keep; serve it with another engine through backend 'openai_proxy'"
        )
    with stage(TO_DEVICE):
        return model.to(device)


def _check_memory(checked: ModelFolder, settings: LlmSettings, bytes_per_element: int) -> None:
    """Raise ResourceExhausted if the weights would not fit into the memory of the machine."""
    limit = settings.max_weight_bytes
    if checked.quantized is not None:
        check_bytes(checked.path, checked.quantized.needed_bytes(bytes_per_element), limit)
    elif settings.quantization:
        check_bytes(checked.path, bytes_after_fp8(checked.path, bytes_per_element), limit)
    else:
        check_memory(checked.path, checked.weights, bytes_per_element, limit)


def open_runner(
    model: Any,
    settings: LlmSettings,
    device: torch.device,
    version: str = "",
    *,
    draft_page_bytes: int = 0,
    agree: Callable[[EngineSizes], EngineSizes] | None = None,
    memory: StableMemory | None = None,
) -> tuple[ModelRunner, EngineSizes]:
    """Probe a model, choose the sizes of its engine, allocate its KV cache and return its runner.

    `version`: for the log. `draft_page_bytes`: of a page of the draft model, which has as many pages. `agree` returns the
    sizes to use, where other processes compute with this one. `memory`: for weights and a KV cache that keep their addresses
    while the model sleeps.
    """
    if fuses_projections(device, settings):
        fuse_projections(model)
    placed = place_weights(model, memory)
    attention = PagedAttention(model)
    try:
        shapes = attention.probe(model)
        dtype = next(model.parameters()).dtype
        free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None
        size = settings.page_size
        cache_dtype = FP8 if settings.kv_cache_dtype == "fp8" else dtype
        bytes_per_page = page_bytes(shapes, size, cache_dtype) + draft_page_bytes
        sizes = settings.engine_sizes(context_length(model, settings), bytes_per_page, _token_bytes(model, dtype), free)
        if sizes.pages < 2:
            raise FailedPrecondition(
                f"the KV cache has no space: a page takes {bytes_per_page} bytes; set "
                "kv_cache_bytes higher, or free memory of the device"
            )
        if agree is not None:
            sizes = agree(sizes)
        cache = KVCache(shapes, sizes.pages, size, cache_dtype, device, memory.driver if placed and memory else None)
        attention.attach(cache)
        log.info(
            "%s: at most %d running sequences and %d tokens per step, KV cache of %d tokens (%.1f GiB); the parameters "
            "max_running, max_step_tokens and kv_cache_bytes change this.",
            version or f"'{settings.model_path}'",
            sizes.max_running,
            sizes.max_step_tokens,
            sizes.pages * size,
            sizes.pages * bytes_per_page / 2**30,
        )
        runner = make_runner(model, attention, cache, settings, sizes, placed)
        if runner.fixed_rows:
            log.info(
                "%s: answers do not depend on other requests; steps are computed in blocks of %d rows.",
                version or f"'{settings.model_path}'",
                runner.block_rows,
            )
        return runner, sizes
    except HeadraceError:
        attention.close()
        raise
    except Exception:
        attention.close()
        log.exception("The probe of %s failed.", type(model).__name__)
        raise FailedPrecondition(
            f"models of class {type(model).__name__} cannot be served by backend 'llm': a trial of two tokens failed, the "
            "server's log has the details; serve it with another engine through backend 'openai_proxy'"
        ) from None


def place_weights(model: Any, memory: StableMemory | None) -> PlacedWeights | None:
    """Move the weights of a model to addresses that stay while it sleeps."""
    if memory is None:
        return None
    with stage(TO_DEVICE):
        try:
            placed = PlacedWeights(model_weights(model), memory)
        except torch.OutOfMemoryError:
            raise ResourceExhausted(
                f"the weights do not fit into the free memory of {place_of(memory.driver.device)}: unload another model, or "
                "serve this one elsewhere"
            ) from None
        free_unused()  # what is free decides the size of the KV cache
    return placed


def fuses_projections(device: torch.device, settings: LlmSettings) -> bool:
    """Return whether projections with the same input are computed together. An adapter wraps each of them."""
    return device.type == "cuda" and not settings.takes_adapters


def context_length(model: Any, settings: LlmSettings) -> int:
    """Return the maximum sequence length of a model and its configuration, in tokens."""
    config = model.config.get_text_config()
    own = getattr(config, "max_position_embeddings", None) or 2**20
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        # Beyond this length such models rotate all positions of a step differently, those of other sequences too.
        own = min(own, rope.get("original_max_position_embeddings") or own)
    return min(own, settings.max_model_len or own)


def _token_bytes(model: Any, dtype: torch.dtype) -> int:
    """Return roughly how many bytes of intermediate results a token of a step needs."""
    config = model.config.get_text_config()
    hidden = getattr(config, "hidden_size", 0)
    inner = getattr(config, "intermediate_size", 0)
    experts = getattr(config, "num_experts_per_tok", None) or 1
    return int(dtype.itemsize) * (8 * hidden + 3 * experts * (inner if isinstance(inner, int) else max(inner)))


def make_runner(
    model: Any,
    attention: PagedAttention,
    cache: KVCache,
    settings: LlmSettings,
    sizes: EngineSizes,
    placed: PlacedWeights | None = None,
) -> ModelRunner:
    """Return a CUDA graph runner if possible, else a plain one, which is slower and computes the same."""
    size = settings.page_size
    if cache.device.type == "cuda" and settings.cuda_graphs:
        try:
            from headrace.backends.llm.model_runner.cuda_graphs import (
                CudaGraphRunner,  # needs Triton, which only PyTorch for CUDA has
            )

            return CudaGraphRunner(
                model,
                attention,
                cache,
                page_size=size,
                max_running=max(sizes.max_running, sizes.draft_rows),
                max_length=min(context_length(model, settings), cache.pages * size),
                max_step_tokens=sizes.max_step_tokens,
                compiled=settings.compile,
                placed=placed,
                fixed_rows=sizes.fixed_rows,
            )
        except Exception:
            log.warning("No CUDA graphs for %s: steps take longer.", type(model).__name__, exc_info=True)
    return ModelRunner(model, attention, cache, page_size=size, placed=placed, fixed_rows=sizes.fixed_rows)


def _needs_code(folder: Path) -> str:
    return (
        f"the model in '{folder.name}' needs Python code of its folder: read that code, and set parameter "
        "trust_remote_code to true if you trust it"
    )


def _read_config(folder: Path) -> Mapping[str, Any]:
    """Check a model folder; return its config.json."""
    config = read_json_object(
        folder / "config.json",
        f"'{folder.name}/config.json'",
        f"folder '{folder.name}' has no config.json that can be read: put a Hugging Face model there, or name its folder in "
        "parameter model_path",
    )
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or not architectures or not isinstance(architectures[0], str):
        raise FailedPrecondition(f"'{folder.name}/config.json' names no architectures: save the model again")
    if config.get("is_encoder_decoder"):
        raise FailedPrecondition(
            f"the model in '{folder.name}' has an encoder and a decoder, which backend 'llm' does not serve: serve it with "
            "another engine through backend 'openai_proxy'"
        )
    if not any(folder.glob("*.safetensors")):
        pickles = sorted(path.name for path in folder.iterdir() if path.suffix in (".bin", ".pt", ".pth"))
        text = (
            f"has its weights in '{pickles[0]}', a pickle, which could run code: convert them to safetensors "
            "(model.save_pretrained in transformers does)"
            if pickles
            else "has no *.safetensors: copy the whole model"
        )
        raise FailedPrecondition(f"folder '{folder.name}' {text}")
    return config


def _load_error(folder: Path, error: Exception, *, trusts: bool) -> str:
    text = str(error)
    if "trust_remote_code" in text and not trusts:
        return _needs_code(folder)
    return (
        f"transformers {transformers.__version__} cannot load the model in '{folder.name}' ({type(error).__name__}): the "
        "server's log has the details"
    )
