# SPDX-License-Identifier: Apache-2.0
"""From a Hugging Face folder to a runner on a device. Called by the backend from a loader thread.

Weights come from safetensors only; nothing is asked of the network; code of the folder runs only where the model's
configuration says so. What transformers raises goes to the log, and our own words to whoever asked.
"""

from __future__ import annotations

import inspect
import json
import logging
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.utils import logging as transformers_logging

from headrace.backends.llm.running.attention import PagedAttention
from headrace.backends.llm.running.kv_cache import KVCache, page_bytes
from headrace.backends.llm.running.runner import Runner
from headrace.backends.llm.settings import LlmSettings
from headrace.backends.one_at_a_time import TRANSFORMERS
from headrace.core.errors import FailedPrecondition, HeadraceError

log = logging.getLogger("headrace.backends.llm")

_MOST_CONFIG_BYTES = 16 << 20


def load_model(settings: LlmSettings, device: torch.device) -> Any:
    """A model of transformers with a language model's head, ready to compute."""
    folder = settings.model_path
    architecture = _checked(folder)
    kind = (
        transformers.AutoModelForImageTextToText
        if architecture.endswith("ForConditionalGeneration")
        else transformers.AutoModelForCausalLM
    )
    transformers_logging.disable_progress_bar()
    dtype: Any = "auto" if settings.dtype == "auto" else getattr(torch, settings.dtype)
    if settings.dtype == "auto" and device.type == "cpu":
        dtype = torch.float32  # of which CPUs compute more, and more exactly, than of 16 bits
    try:
        with TRANSFORMERS:
            model = kind.from_pretrained(
                folder,
                dtype=dtype,
                local_files_only=True,
                use_safetensors=True,
                trust_remote_code=settings.trust_remote_code,
            )
    except HeadraceError:
        raise
    except Exception as error:
        log.exception("transformers cannot load %s", folder)
        raise FailedPrecondition(_why_not(folder, error, trusts=settings.trust_remote_code)) from None
    model.requires_grad_(False)
    model.eval()
    if "logits_to_keep" not in inspect.signature(model.forward).parameters:
        raise FailedPrecondition(
            f"models of class {type(model).__name__} cannot be served by backend 'llm': their forward does not take "
            "logits_to_keep; serve it with another engine through backend 'openai_proxy'"
        )
    return model.to(device)


def open_runner(model: Any, settings: LlmSettings, device: torch.device) -> Runner:
    """Probe the model, make its cache, and put both behind a runner."""
    attention = PagedAttention(model)
    try:
        shapes = attention.probe(model)
        dtype = next(model.parameters()).dtype
        free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None
        size = settings.page_size
        most = settings.running_on(device.type) * -(-context_of(model, settings) // size)
        pages = min(most, settings.cache_bytes(free) // page_bytes(shapes, size, dtype))
        if pages < 2:
            raise FailedPrecondition(
                f"the cache of keys and values has no room: a page takes {page_bytes(shapes, size, dtype)} bytes; set "
                "kv_cache_bytes higher, or free memory of the device"
            )
        cache = KVCache(shapes, pages, size, dtype, device)
        attention.attach(cache)
        return _best_runner(model, attention, cache, settings)
    except HeadraceError:
        attention.close()
        raise
    except Exception:
        attention.close()
        log.exception("a probe of %s failed", type(model).__name__)
        raise FailedPrecondition(
            f"models of class {type(model).__name__} cannot be served by backend 'llm': a trial of two tokens failed, the "
            "server's log has the details; serve it with another engine through backend 'openai_proxy'"
        ) from None


def context_of(model: Any, settings: LlmSettings) -> int:
    """How many tokens a sequence may have, as far as the model and the configuration say."""
    config = model.config.get_text_config()
    own = getattr(config, "max_position_embeddings", None) or 2**20
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        # Beyond this such models turn all positions differently, those of the others in a step too.
        own = min(own, rope.get("original_max_position_embeddings") or own)
    return min(own, settings.max_model_len or own)


def _best_runner(model: Any, attention: PagedAttention, cache: KVCache, settings: LlmSettings) -> Runner:
    """With graphs where there is a GPU that can; else step by step, which is slower and no different."""
    size = settings.page_size
    if cache.device.type == "cuda" and settings.cuda_graphs:
        try:
            from headrace.backends.llm.running.graphs import GraphRunner  # needs triton, which only GPUs have

            return GraphRunner(
                model,
                attention,
                cache,
                page_size=size,
                max_running=settings.running_on("cuda"),
                max_length=min(context_of(model, settings), cache.pages * size),
                max_step_tokens=settings.step_tokens_on("cuda"),
                compiled=settings.compile,
            )
        except Exception:
            log.warning("no CUDA graphs for %s: its steps are launched one by one", type(model).__name__, exc_info=True)
    return Runner(model, attention, cache, page_size=size)


def _checked(folder: Path) -> str:
    """Refuse what is not such a folder; returns the name of its architecture."""
    config = folder / "config.json"
    try:
        if config.stat().st_size > _MOST_CONFIG_BYTES:
            raise FailedPrecondition(f"'{folder.name}/config.json' is larger than any such file: save the model again")
        told = json.loads(config.read_bytes())
    except OSError:
        raise FailedPrecondition(
            f"folder '{folder.name}' has no config.json that can be read: put a Hugging Face model there, or name its "
            "folder in parameter model_path"
        ) from None
    except (ValueError, RecursionError):
        raise FailedPrecondition(f"'{folder.name}/config.json' is not JSON: copy or save the model again") from None
    architectures = told.get("architectures") if isinstance(told, dict) else None
    if not isinstance(architectures, list) or not architectures or not isinstance(architectures[0], str):
        raise FailedPrecondition(f"'{folder.name}/config.json' names no architectures: save the model again")
    if told.get("is_encoder_decoder"):
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
    return architectures[0]


def _why_not(folder: Path, error: Exception, *, trusts: bool) -> str:
    text = str(error)
    if "trust_remote_code" in text and not trusts:
        return (
            f"the model in '{folder.name}' needs Python code of its folder: read that code, and set parameter "
            "trust_remote_code to true if you trust it"
        )
    return (
        f"transformers {transformers.__version__} cannot load the model in '{folder.name}' ({type(error).__name__}): the "
        "server's log has the details"
    )
