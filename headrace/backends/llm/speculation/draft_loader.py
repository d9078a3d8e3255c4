# SPDX-License-Identifier: Apache-2.0
"""Load a draft model: its folder is checked before any weights are read, then it is loaded beside the other model."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from headrace.backends.cuda_memory import StableMemory
from headrace.backends.llm.model_runner.attention import PagedAttention
from headrace.backends.llm.model_runner.fused_projections import fuse_projections
from headrace.backends.llm.model_runner.kv_cache import KVCache, page_bytes
from headrace.backends.llm.model_runner.model_loader import (
    ModelFolder,
    check_folder,
    context_length,
    fuses_projections,
    load_model,
    make_runner,
    place_weights,
)
from headrace.backends.llm.settings import EngineSizes, LlmSettings
from headrace.backends.llm.speculation.draft_model import DraftModel
from headrace.backends.llm.tokenizer import Tokenizer
from headrace.core.errors import FailedPrecondition, HeadraceError

log = logging.getLogger("headrace.backends.llm")

_LEAST_TOKEN_COST = 0.05
"""Of a step of the other model: launching the smallest draft model takes that long."""
_LAYER_SECONDS, _SECONDS_PER_BYTE = 35e-6, 1 / 4.3e12
"""A step of one token on a GPU: what the kernels of a layer wait for each other, and the time to read the weights.

Measured on an H200. Only the proportion of two models counts, so other GPUs need no other numbers.
"""


@dataclass(frozen=True, slots=True)
class DraftFolder:
    """A draft model that was checked."""

    folder: ModelFolder
    settings: LlmSettings


def check_draft_model(settings: LlmSettings, tokenizer: Tokenizer) -> DraftFolder | None:
    """Check the folder and the vocabulary of the draft model; None without one."""
    if settings.draft_model is None:
        return None
    path = settings.draft_model
    if not path.is_dir():
        raise FailedPrecondition(
            f"parameter draft_model names '{path.name}', which is not a folder: put the draft model there, or name another"
        )
    own = replace(settings, model_path=path, adapters={}, max_adapters=0, quantization=None, chat_template=None)
    try:
        folder = check_folder(own)
    except HeadraceError as error:
        raise type(error)(f"draft model: {error.message}") from None
    _check_vocabulary(path, settings.model_path, tokenizer, trust_remote_code=settings.trust_remote_code)
    return DraftFolder(folder, own)


def _check_vocabulary(path: Path, target: Path, tokenizer: Tokenizer, *, trust_remote_code: bool) -> None:
    """Refuse a draft model whose tokens are others: its drafts would be nonsense."""
    drafted = Tokenizer.load(path, trust_remote_code=trust_remote_code).hugging_face.get_vocab()
    known = tokenizer.hugging_face.get_vocab()
    if drafted == known:
        return
    differing = [token for token in drafted.keys() | known.keys() if drafted.get(token) != known.get(token)]
    example = min(differing)
    raise FailedPrecondition(
        f"draft model '{path.name}' has another vocabulary than '{target.name}': {len(differing)} tokens differ, such as "
        f"'{example[:32]}'; name a smaller model of the same family in draft_model"
    )


def load_draft(checked: DraftFolder, device: torch.device, log_name: str) -> Any:
    """Load the weights of a draft model onto a device."""
    model = load_model(checked.folder, checked.settings, device, f"{log_name}, draft model")
    if fuses_projections(device, checked.settings):
        fuse_projections(model)
    return model


class LoadedDraft:
    """A draft model with its weights, before the KV caches are allocated."""

    def __init__(self, checked: DraftFolder, device: torch.device, log_name: str) -> None:
        self._settings = checked.settings
        self._device = device
        self._model: Any = load_draft(checked, device, log_name)
        self._attention = PagedAttention(self._model)
        try:
            self._shapes = self._attention.probe(self._model)
        except HeadraceError:
            self._attention.close()
            raise
        except Exception:
            self._attention.close()
            log.exception("The probe of draft model %s failed.", type(self._model).__name__)
            raise FailedPrecondition(
                f"models of class {type(self._model).__name__} cannot be draft models: a trial of two tokens failed, the "
                "server's log has the details; name another in draft_model"
            ) from None
        self._dtype: torch.dtype = next(self._model.parameters()).dtype
        self.page_bytes = page_bytes(self._shapes, checked.settings.page_size, self._dtype)
        """Bytes of a page of its KV cache."""

    def open(self, sizes: EngineSizes, target: Any, memory: StableMemory | None = None) -> DraftModel:
        """Allocate the KV cache and return the drafter of a model. Once, in the engine's thread; it owns this model then."""
        settings, model = self._settings, self._model
        size = settings.page_size
        placed = place_weights(model, memory)
        driver = memory.driver if memory is not None else None
        cache = KVCache(self._shapes, sizes.pages, size, self._dtype, self._device, driver)
        self._attention.attach(cache)
        self._model = None
        # Drafts decide how fast an answer comes, not which.
        runner = make_runner(model, self._attention, cache, settings, replace(sizes, fixed_rows=0), placed)
        return DraftModel(
            runner,
            tokens=settings.speculation_tokens,
            token_cost=max(_LEAST_TOKEN_COST, _step_time(model, self._device) / _step_time(target, self._device)),
            max_running=max(sizes.max_running, sizes.draft_rows),
            max_step_tokens=sizes.max_step_tokens,
            max_length=min(context_length(model, settings), sizes.pages * size),
            vocabulary=target.config.get_text_config().vocab_size,
            prefix_cache=settings.prefix_cache,
        )

    def close(self) -> None:
        """Detach from the model, where loading fails before or after `open`. Idempotent."""
        self._attention.close()
        self._model = None


def weight_bytes(model: Any) -> int:
    """Return the bytes of a model's weights, which a step of few tokens reads once."""
    return sum(tensor.numel() * tensor.element_size() for tensor in (*model.parameters(), *model.buffers()))


def _step_time(model: Any, device: torch.device) -> float:
    """Estimate the time of a step of one token: in seconds on a GPU; on a CPU, in bytes of weights, which decide it."""
    size = weight_bytes(model)
    if device.type == "cpu":
        return size
    layers: int = model.config.get_text_config().num_hidden_layers
    return layers * _LAYER_SECONDS + size * _SECONDS_PER_BYTE
