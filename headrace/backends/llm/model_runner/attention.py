# SPDX-License-Identifier: Apache-2.0
"""Paged attention with PyTorch kernels, in place of a model's own attention.

Registered with transformers' attention interface under a name per model; a model whose layers use that interface runs
unchanged. `probe` checks that they do, and records the shapes of their keys and values. Decode rows are computed as padded
batches, prefill chunks one by one, with `scaled_dot_product_attention`; models with a score cap or attention sinks are
computed in separate operations. With `each_token`, every token is computed by itself: its result depends on the tokens
before it alone, not on its chunk or on other sequences.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import functional
from transformers import AttentionInterface

from headrace.backends.llm.model_runner.kv_cache import KVCache, LayerCache, LayerShape, write_slots
from headrace.core.errors import FailedPrecondition

_SUPPORTED_LAYERS = {"full_attention", "sliding_attention"}
_IGNORED_ARGUMENTS = {"position_ids", "cache_position"}
"""Tensors that models pass to attention, which it does not need."""


@dataclass(slots=True)
class DecodeBatch:
    """Rows of one token each, whose contexts are gathered as one padded batch."""

    rows: torch.Tensor | slice
    """Indices into the rows of the step."""
    pages: torch.Tensor
    """`[rows, max pages]`, padded with page 0."""
    lengths: torch.Tensor
    """`[rows]`: context lengths, the row's own token included."""
    masks: dict[int | None, torch.Tensor] = field(default_factory=dict)
    """By sliding window, `[rows, 1, 1, slots]`: computed for the first layer that needs it."""


@dataclass(slots=True)
class PrefillChunk:
    """Consecutive rows of one sequence."""

    first: int
    count: int
    start: int
    """Position of the first row in its sequence."""
    pages: torch.Tensor
    masks: dict[int | None, torch.Tensor | None] = field(default_factory=dict)


@dataclass(slots=True)
class AttentionMetadata:
    """What attention needs for a step."""

    slots: torch.Tensor
    """`[rows]`: the KV-cache slot of each row."""
    decode_batches: Sequence[DecodeBatch]
    prefill_chunks: Sequence[PrefillChunk]
    each_token: bool = False
    """Whether the tokens of `prefill_chunks`, which are then all there are, are computed one by one."""


class PagedAttention:
    """The paged attention of one model."""

    def __init__(self, model: Any) -> None:
        self.name = f"headrace_{id(self):x}"
        self._metadata: AttentionMetadata | None = None
        self._probed: list[tuple[Any, LayerShape]] | None = None
        self.modules: list[Any] = []
        """The attention modules of the layers, in order, once probed."""
        self._config = model.config.get_text_config()
        AttentionInterface.register(self.name, self._attend)
        self._config._attn_implementation = self.name

    def probe(self, model: Any) -> list[LayerShape]:
        """Compute two tokens without a cache and record each layer's shape. Refuses models with unsupported attention."""
        kinds = set(getattr(self._config, "layer_types", None) or ()) - _SUPPORTED_LAYERS
        if kinds or getattr(self._config, "attention_chunk_size", None):
            raise _unsupported(model, f"it has unsupported layers ({', '.join(sorted(kinds)) or 'chunked attention'})")
        probed: list[tuple[Any, LayerShape]] = []
        self._probed = probed
        try:
            with torch.inference_mode():
                ids = torch.tensor([[0, 1]], device=model.device)
                model(input_ids=ids, use_cache=False, logits_to_keep=torch.tensor([1], device=model.device))
        finally:
            self._probed = None
        layers = self._config.num_hidden_layers
        if len(probed) != layers or len({id(module) for module, _ in probed}) != layers:
            raise _unsupported(model, f"{len(probed)} of its {layers} layers use transformers' attention interface")
        self.modules = [module for module, _ in probed]
        return [shape for _, shape in probed]

    def attach(self, cache: KVCache) -> None:
        """Give each attention module its layer of the KV cache."""
        for module, layer in zip(self.modules, cache.layers, strict=True):
            module.headrace_cache = layer

    @contextmanager
    def using(self, metadata: AttentionMetadata) -> Iterator[None]:
        """Set the metadata while the model computes a step."""
        self._metadata = metadata
        try:
            yield
        finally:
            self._metadata = None

    def close(self) -> None:
        """Detach from the model and unregister from transformers."""
        for module in self.modules:
            if hasattr(module, "headrace_cache"):
                del module.headrace_cache
        self.modules = []
        AttentionInterface._global_mapping.pop(self.name, None)

    def _attend(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float | None = None,
        softcap: float | None = None,
        s_aux: torch.Tensor | None = None,
        **more: Any,
    ) -> tuple[torch.Tensor, None]:
        """Implement transformers' attention interface: `[1, heads, rows, size]` in, `[1, rows, heads, size]` out."""
        if self._probed is not None:
            self._probed.append((module, self._shape_of(module, key, value, attention_mask, more)))
            out = functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
            return out.transpose(1, 2), None
        metadata = self._metadata
        if metadata is None:
            raise RuntimeError("attention was called outside of a step")
        cache: LayerCache = module.headrace_cache
        write_slots(cache.keys, metadata.slots, key[0].transpose(0, 1))
        write_slots(cache.values, metadata.slots, value[0].transpose(0, 1))
        kernel = _Kernel(scaling, softcap, s_aux)
        rows = query[0].transpose(0, 1)
        if len(metadata.decode_batches) == 1 and not metadata.prefill_chunks:
            return kernel.decode(rows, cache, metadata.decode_batches[0])[None], None
        shape = (1, rows.shape[0], rows.shape[1], cache.values.shape[-1])
        if metadata.each_token:
            out = query.new_zeros(shape)  # also of padding
            for chunk in metadata.prefill_chunks:
                kernel.each_token(rows, cache, chunk, out[0])
            return out, None
        out = query.new_empty(shape)
        for batch in metadata.decode_batches:
            out[0, batch.rows] = kernel.decode(rows[batch.rows], cache, batch)
        for chunk in metadata.prefill_chunks:
            chunk_rows = slice(chunk.first, chunk.first + chunk.count)
            out[0, chunk_rows] = kernel.prefill(rows[chunk_rows], cache, chunk)
        return out, None

    def _shape_of(
        self, module: Any, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, more: dict[str, Any]
    ) -> LayerShape:
        if mask is not None:
            raise _unsupported(module, "its attention has a mask of its own")
        more_tensors = [
            name for name, value in more.items() if isinstance(value, torch.Tensor) and name not in _IGNORED_ARGUMENTS
        ]
        if more_tensors or more.get("is_causal") is False:
            reason = f"gets unsupported arguments ({', '.join(more_tensors)})" if more_tensors else "is not causal"
            raise _unsupported(module, f"its attention {reason}")
        window = more.get("sliding_window", _MISSING)
        if window is _MISSING:
            kinds: Sequence[str] = getattr(self._config, "layer_types", None) or ()
            index = getattr(module, "layer_idx", None)
            slides = isinstance(index, int) and index < len(kinds) and kinds[index] == "sliding_attention"
            window = getattr(self._config, "sliding_window", None) if slides else None
        return LayerShape(key.shape[1], key.shape[3], value.shape[3], window or None)


class _Kernel:
    """Attention of one layer: scaled dot product, with an optional score cap and attention sinks."""

    __slots__ = ("_cap", "_scale", "_sinks")

    def __init__(self, scale: float | None, cap: float | None, sinks: torch.Tensor | None) -> None:
        self._scale = scale
        self._cap = cap
        self._sinks = sinks

    def decode(self, rows: torch.Tensor, cache: LayerCache, batch: DecodeBatch) -> torch.Tensor:
        """Attend for `[rows, heads, size]` of one token each. Heads that share keys become queries of one head."""
        count, heads, size = rows.shape
        shared = cache.keys.shape[1]
        keys, values = (_gather_pages(part, batch.pages, cache, rows.dtype) for part in (cache.keys, cache.values))
        mask = batch.masks.get(cache.window)
        if mask is None:
            mask = batch.masks[cache.window] = _decode_mask(batch.lengths, keys.shape[1], cache.window)
        queries = rows.reshape(count, shared, heads // shared, size)
        out = self._attend(queries, keys.transpose(1, 2), values.transpose(1, 2), mask)
        return out.reshape(count, heads, -1)

    def prefill(self, rows: torch.Tensor, cache: LayerCache, chunk: PrefillChunk) -> torch.Tensor:
        """Attend for `[rows, heads, size]` of consecutive tokens."""
        count, heads, _ = rows.shape
        end = chunk.start + count
        keys = _gather_pages(cache.keys, chunk.pages[None], cache, rows.dtype)[:, :end]
        values = _gather_pages(cache.values, chunk.pages[None], cache, rows.dtype)[:, :end]
        if cache.window not in chunk.masks:
            chunk.masks[cache.window] = _prefill_mask(chunk.start, end, cache.window, rows.device)
        mask = chunk.masks[cache.window]
        queries = rows.transpose(0, 1)[None]
        keys, values = keys.transpose(1, 2), values.transpose(1, 2)
        if self._cap is None and self._sinks is None:
            out = functional.scaled_dot_product_attention(
                queries, keys, values, mask, is_causal=mask is None, scale=self._scale, enable_gqa=True
            )
            return out[0].transpose(0, 1)
        shared = keys.shape[1]
        if mask is None:
            mask = torch.ones(count, end, dtype=torch.bool, device=rows.device).tril(end - count)
        grouped = queries.reshape(1, shared, heads // shared * count, -1)
        out = self._attend(grouped, keys, values, mask.repeat(heads // shared, 1))
        return out.reshape(heads, count, -1).transpose(0, 1)

    def each_token(self, rows: torch.Tensor, cache: LayerCache, chunk: PrefillChunk, out: torch.Tensor) -> None:
        """Attend for consecutive tokens one by one: the shapes of an operation depend on the token's position alone."""
        pages = chunk.pages[None]
        keys, values = (
            _gather_pages(part, pages, cache, rows.dtype).transpose(1, 2) for part in (cache.keys, cache.values)
        )
        for number in range(chunk.count):
            end = chunk.start + number + 1
            seen = slice(0 if cache.window is None else max(0, end - cache.window), end)
            query = rows[chunk.first + number].reshape(1, cache.keys.shape[1], -1, rows.shape[-1])
            result = self._attend(query, keys[:, :, seen], values[:, :, seen], None)
            out[chunk.first + number] = result.reshape(rows.shape[1], -1)

    def _attend(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        if self._cap is None and self._sinks is None:
            return functional.scaled_dot_product_attention(queries, keys, values, mask, scale=self._scale)
        scale = self._scale if self._scale is not None else queries.shape[-1] ** -0.5
        scores = (queries @ keys.transpose(-1, -2)).float() * scale
        if self._cap is not None:
            scores = torch.tanh(scores / self._cap) * self._cap
        if mask is not None:
            scores = scores.masked_fill(~mask, float("-inf"))
        if self._sinks is not None:  # a score per head that takes weight and adds no value
            shared, repeats = keys.shape[1], queries.shape[2] * keys.shape[1] // self._sinks.numel()
            sinks = self._sinks.float().view(1, shared, -1, 1).repeat_interleave(repeats, 2)
            scores = torch.cat([scores, sinks.expand(len(scores), -1, -1, 1)], -1)
        weights = torch.softmax(scores, -1)[..., : keys.shape[2]]
        return weights.to(values.dtype) @ values


def _gather_pages(tensor: torch.Tensor, pages: torch.Tensor, cache: LayerCache, dtype: torch.dtype) -> torch.Tensor:
    """Return the contents of pages as `[rows, slots, heads, size]` in a dtype that PyTorch computes with."""
    size = cache.page_size
    paged = tensor.view(-1, size * tensor.shape[1] * tensor.shape[2])
    gathered = paged.index_select(0, pages.reshape(-1)).to(dtype)
    return gathered.view(pages.shape[0], pages.shape[1] * size, tensor.shape[1], tensor.shape[2])


def _decode_mask(lengths: torch.Tensor, slots: int, window: int | None) -> torch.Tensor:
    positions = torch.arange(slots, device=lengths.device)
    visible = positions < lengths[:, None]
    if window is not None:
        visible &= positions >= lengths[:, None] - window
    return visible[:, None, None]


def _prefill_mask(start: int, end: int, window: int | None, device: torch.device) -> torch.Tensor | None:
    if start == 0 and (window is None or end <= window):
        return None
    rows, positions = torch.arange(start, end, device=device)[:, None], torch.arange(end, device=device)
    visible = positions <= rows
    if window is not None:
        visible &= positions > rows - window
    return visible


def _unsupported(model: Any, reason: str) -> FailedPrecondition:
    return FailedPrecondition(
        f"models of class {type(model).__name__} cannot be served by backend 'llm': {reason}; serve it with another engine "
        "through backend 'openai_proxy'"
    )


_MISSING = object()
