# SPDX-License-Identifier: Apache-2.0
"""Computes the vectors of a batch of texts.

Made by `embedding.model`, called by the engine, which joins the requests (`contract.ComputeInstance`). Texts are computed
in groups of like length, so that a short one does not pay for a long one beside it.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from headrace.backends.contract import Array
from headrace.backends.llm.embedding.pooling import pool
from headrace.core.errors import FailedPrecondition, HeadraceError, Internal, InvalidArgument, ResourceExhausted
from headrace.core.generation import EMBEDDING, TEXT_INPUT

log = logging.getLogger("headrace.backends")

TOKEN_COUNT = "token_count"  # noqa: S105  # the name of an output
_GROUP_TOKENS = 16384
"""In one forward, fillings included. More does not make a machine faster, and takes memory."""
_ALIKE_TOKENS = 64
"""Texts up to this length go together whatever their lengths: a forward has a price of its own."""
_CHARACTERS_PER_TOKEN = 64
"""No tokenizer averages more over a text; what is longer than this is not worth the time to count."""

_ACTIVATIONS = {
    "tanh": torch.tanh,
    "gelu": torch.nn.functional.gelu,
    "relu": torch.relu,
}


@dataclass(frozen=True, slots=True)
class Steps:
    """From a text to its vector."""

    tokenizer: Any
    model: Any
    poolings: tuple[str, ...]
    dense: tuple[tuple[Any, Any, str], ...]
    """Weight, bias or None, activation."""
    normalize: bool
    max_tokens: int
    truncate: bool
    lower_case: bool
    prompt: str
    threads: int
    device: Any
    size: int
    """Of a vector."""


class EmbeddingInstance:
    """One execution context."""

    def __init__(self, name: str, steps: Steps) -> None:
        self._name = name
        self._steps: Steps | None = steps
        self._types = "token_type_ids" in getattr(steps.tokenizer, "model_input_names", ())
        self._filling = steps.tokenizer.pad_token_id or 0

    def compute(self, inputs: Mapping[str, Array], wanted: Collection[str]) -> Mapping[str, Array]:
        """Compute a batch of texts, [rows, 1]."""
        steps = self._steps
        if steps is None:
            raise FailedPrecondition(f"an instance of model '{self._name}' is closed")
        if steps.threads and torch.get_num_threads() != steps.threads:
            torch.set_num_threads(steps.threads)
        rows = self._tokens(steps, inputs[TEXT_INPUT].ravel())
        counts = np.array([len(row) for row in rows], np.int32).reshape(-1, 1)
        if EMBEDDING not in wanted:
            return {TOKEN_COUNT: counts}
        try:
            with torch.inference_mode():
                vectors = self._vectors(steps, rows)
        except HeadraceError:
            raise
        except Exception as error:
            log.exception("model %s could not compute a batch", self._name)
            raise self._explained(error) from None
        return {EMBEDDING: vectors, TOKEN_COUNT: counts}

    def close(self) -> None:
        """Let the model go."""
        self._steps = None

    def _tokens(self, steps: Steps, texts: Iterable[bytes]) -> list[list[int]]:
        shown: list[str] = []
        most = steps.max_tokens * _CHARACTERS_PER_TOKEN
        for raw in texts:
            try:
                text = raw.decode()
            except UnicodeDecodeError:
                raise InvalidArgument(f"input '{TEXT_INPUT}' has a text that is not UTF-8: encode it so") from None
            if len(text) > most:
                if not steps.truncate:
                    raise InvalidArgument(
                        f"input '{TEXT_INPUT}' has a text of {len(text)} characters, and model '{self._name}' reads at most "
                        f"{steps.max_tokens} tokens: send less text at a time"
                    )
                text = text[:most]
            text = steps.prompt + text
            shown.append(text.lower() if steps.lower_case else text)
        if not shown:
            return []
        rows: list[list[int]] = steps.tokenizer(
            shown,
            truncation=steps.truncate,
            max_length=steps.max_tokens if steps.truncate else None,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )["input_ids"]
        for row in rows:
            if len(row) > steps.max_tokens:
                raise InvalidArgument(
                    f"input '{TEXT_INPUT}' has a text of {len(row)} tokens, and model '{self._name}' reads at most "
                    f"{steps.max_tokens}: send less text at a time, or set parameter truncate: true for the model"
                )
            if not row:
                raise InvalidArgument(f"input '{TEXT_INPUT}' has a text without a single token: send some text")
        return rows

    def _vectors(self, steps: Steps, rows: list[list[int]]) -> Array:
        order = sorted(range(len(rows)), key=lambda place: -len(rows[place]))
        parts = [self._group(steps, [rows[place] for place in group]) for group in _groups(order, rows)]
        if not parts:
            return np.zeros((0, steps.size), np.float32)
        joined = torch.cat(parts)
        back = torch.empty(len(order), dtype=torch.long)
        back[torch.tensor(order)] = torch.arange(len(order))
        array: Array = joined[back.to(joined.device)].cpu().numpy()
        return array

    def _group(self, steps: Steps, rows: list[list[int]]) -> Any:
        width = len(rows[0])
        ids = torch.tensor([row + [self._filling] * (width - len(row)) for row in rows]).to(steps.device)
        lengths = torch.tensor([len(row) for row in rows]).to(steps.device)
        mask = (torch.arange(width, device=steps.device) < lengths.unsqueeze(1)).long()
        more = {"token_type_ids": torch.zeros_like(ids)} if self._types else {}
        hidden = steps.model(input_ids=ids, attention_mask=mask, **more).last_hidden_state
        vector = torch.cat([pool(hidden, mask, mode) for mode in steps.poolings], 1).float()
        for weight, bias, activation in steps.dense:
            vector = torch.nn.functional.linear(vector, weight, bias)
            vector = _ACTIVATIONS[activation](vector) if activation in _ACTIVATIONS else vector
        return torch.nn.functional.normalize(vector, dim=1) if steps.normalize else vector

    def _explained(self, error: Exception) -> HeadraceError:
        if isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error):
            return ResourceExhausted(
                f"model '{self._name}' has not enough memory for this batch: send fewer or shorter texts at a time, or "
                "lower max_batch_size"
            )
        return Internal(f"model '{self._name}' failed to compute this request; the server's log has the details")


def _groups(order: list[int], rows: list[list[int]]) -> list[list[int]]:
    """Places in groups, the longest first: none much shorter than the longest of its group."""
    groups: list[list[int]] = []
    longest = 0
    for place in order:
        length = len(rows[place])
        alike = longest <= _ALIKE_TOKENS or 2 * length >= longest
        if not groups or not alike or (len(groups[-1]) + 1) * longest > _GROUP_TOKENS:
            groups.append([])
            longest = length
        groups[-1].append(place)
    return groups
