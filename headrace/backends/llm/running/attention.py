# SPDX-License-Identifier: Apache-2.0
"""Attention over pages, in the place of a model's own.

Registered with transformers' attention interface under a name of its own for each model; a model whose layers go
through that interface computes with it unchanged. `probe` finds out whether they do, and what their keys and values
look like. Rows of one token are computed as one padded batch, longer runs one by one. The kernel is PyTorch's
`scaled_dot_product_attention`; only models with a cap on scores or with sinks are computed in plain steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import functional
from transformers import AttentionInterface

from headrace.backends.llm.running.kv_cache import KVCache, LayerCache, LayerShape
from headrace.backends.llm.running.packing import Layout, Run, Together
from headrace.core.errors import FailedPrecondition

_KINDS = {"full_attention", "sliding_attention"}
_HARMLESS = {"position_ids", "cache_position"}
"""Tensors that models pass on to attention, which has no use for them."""


class PagedAttention:
    """Of one model."""

    def __init__(self, model: Any) -> None:
        self.name = f"headrace_{id(self):x}"
        self._layout: Layout | None = None
        self._seen: list[tuple[Any, LayerShape]] | None = None
        self.modules: list[Any] = []
        """The layers' attention, in their order, once probed."""
        self._config = model.config.get_text_config()
        AttentionInterface.register(self.name, self._attend)
        self._config._attn_implementation = self.name

    def probe(self, model: Any) -> list[LayerShape]:
        """Compute two tokens without a cache and see what comes by. Refuses models that attend in another way."""
        kinds = set(getattr(self._config, "layer_types", None) or ()) - _KINDS
        if kinds or getattr(self._config, "attention_chunk_size", None):
            raise _refused(model, f"it has layers of another kind ({', '.join(sorted(kinds)) or 'chunked attention'})")
        seen: list[tuple[Any, LayerShape]] = []
        self._seen = seen
        try:
            with torch.inference_mode():
                ids = torch.tensor([[0, 1]], device=model.device)
                model(input_ids=ids, use_cache=False, logits_to_keep=torch.tensor([1], device=model.device))
        finally:
            self._seen = None
        layers = self._config.num_hidden_layers
        if len(seen) != layers or len({id(module) for module, _ in seen}) != layers:
            raise _refused(model, f"{len(seen)} of its {layers} layers use transformers' attention interface")
        self.modules = [module for module, _ in seen]
        return [shape for _, shape in seen]

    def attach(self, cache: KVCache) -> None:
        """Give each attention module its part of the cache."""
        for module, layer in zip(self.modules, cache.layers, strict=True):
            module.headrace_cache = layer

    @contextmanager
    def of_step(self, layout: Layout) -> Iterator[None]:
        """While the model computes this step."""
        self._layout = layout
        try:
            yield
        finally:
            self._layout = None

    def close(self) -> None:
        """Forget the model, and let transformers forget us."""
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
        """See transformers' attention interface: `[1, heads, rows, size]` in, `[1, rows, heads, size]` out."""
        if self._seen is not None:
            self._seen.append((module, self._shape_of(module, key, value, attention_mask, more)))
            out = functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
            return out.transpose(1, 2), None
        layout = self._layout
        if layout is None:
            raise RuntimeError("attention outside of a step")
        cache: LayerCache = module.headrace_cache
        cache.keys.index_copy_(0, layout.slots, key[0].transpose(0, 1))
        cache.values.index_copy_(0, layout.slots, value[0].transpose(0, 1))
        kernel = _Kernel(scaling, softcap, s_aux)
        rows = query[0].transpose(0, 1)
        if len(layout.together) == 1 and not layout.runs:
            return kernel.together(rows, cache, layout.together[0])[None], None
        out = query.new_empty(1, rows.shape[0], rows.shape[1], cache.values.shape[-1])
        for group in layout.together:
            out[0, group.rows] = kernel.together(rows[group.rows], cache, group)
        for run in layout.runs:
            here = slice(run.first, run.first + run.count)
            out[0, here] = kernel.run(rows[here], cache, run)
        return out, None

    def _shape_of(
        self, module: Any, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, more: dict[str, Any]
    ) -> LayerShape:
        if mask is not None:
            raise _refused(module, "its attention has a mask of its own")
        more_tensors = [
            name for name, value in more.items() if isinstance(value, torch.Tensor) and name not in _HARMLESS
        ]
        if more_tensors or more.get("is_causal") is False:
            raise _refused(module, f"its attention wants more ({', '.join(more_tensors) or 'it looks ahead'})")
        window = more.get("sliding_window", _UNSAID)
        if window is _UNSAID:
            kinds: Sequence[str] = getattr(self._config, "layer_types", None) or ()
            index = getattr(module, "layer_idx", None)
            slides = isinstance(index, int) and index < len(kinds) and kinds[index] == "sliding_attention"
            window = getattr(self._config, "sliding_window", None) if slides else None
        return LayerShape(key.shape[1], key.shape[3], value.shape[3], window or None)


class _Kernel:
    """Scores to weights to values, as one layer wants them."""

    __slots__ = ("_cap", "_scale", "_sinks")

    def __init__(self, scale: float | None, cap: float | None, sinks: torch.Tensor | None) -> None:
        self._scale = scale
        self._cap = cap
        self._sinks = sinks

    def together(self, rows: torch.Tensor, cache: LayerCache, group: Together) -> torch.Tensor:
        """`[rows, heads, size]` of one token each. Heads that share keys are the queries of one head."""
        count, heads, size = rows.shape
        shared = cache.keys.shape[1]
        keys, values = _paged(cache.keys, group.pages, cache), _paged(cache.values, group.pages, cache)
        mask = group.masks.get(cache.window)
        if mask is None:
            mask = group.masks[cache.window] = _single_mask(group.lengths, keys.shape[1], cache.window)
        queries = rows.reshape(count, shared, heads // shared, size)
        out = self._attend(queries, keys.transpose(1, 2), values.transpose(1, 2), mask)
        return out.reshape(count, heads, -1)

    def run(self, rows: torch.Tensor, cache: LayerCache, run: Run) -> torch.Tensor:
        """`[rows, heads, size]` that follow each other."""
        count, heads, _ = rows.shape
        end = run.start + count
        keys = _paged(cache.keys, run.pages[None], cache)[:, :end]
        values = _paged(cache.values, run.pages[None], cache)[:, :end]
        if cache.window not in run.masks:
            run.masks[cache.window] = _run_mask(run.start, end, cache.window, rows.device)
        mask = run.masks[cache.window]
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

    def _attend(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        if self._cap is None and self._sinks is None:
            return functional.scaled_dot_product_attention(queries, keys, values, mask, scale=self._scale)
        scale = self._scale if self._scale is not None else queries.shape[-1] ** -0.5
        scores = (queries @ keys.transpose(-1, -2)).float() * scale
        if self._cap is not None:
            scores = torch.tanh(scores / self._cap) * self._cap
        scores = scores.masked_fill(~mask, float("-inf"))
        if self._sinks is not None:  # a score that takes weight and brings no value, one for each head
            shared, each = keys.shape[1], queries.shape[2] * keys.shape[1] // self._sinks.numel()
            sinks = self._sinks.float().view(1, shared, -1, 1).repeat_interleave(each, 2)
            scores = torch.cat([scores, sinks.expand(len(scores), -1, -1, 1)], -1)
        weights = torch.softmax(scores, -1)[..., : keys.shape[2]]
        return weights.to(values.dtype) @ values


def _paged(tensor: torch.Tensor, pages: torch.Tensor, cache: LayerCache) -> torch.Tensor:
    """`[rows, slots, heads, size]`: what lies in those pages."""
    size = cache.page_size
    paged = tensor.view(-1, size * tensor.shape[1] * tensor.shape[2])
    taken = paged.index_select(0, pages.reshape(-1))
    return taken.view(pages.shape[0], pages.shape[1] * size, tensor.shape[1], tensor.shape[2])


def _single_mask(lengths: torch.Tensor, slots: int, window: int | None) -> torch.Tensor:
    places = torch.arange(slots, device=lengths.device)
    seen = places < lengths[:, None]
    if window is not None:
        seen &= places >= lengths[:, None] - window
    return seen[:, None, None]


def _run_mask(start: int, end: int, window: int | None, device: torch.device) -> torch.Tensor | None:
    if start == 0 and (window is None or end <= window):
        return None
    rows, places = torch.arange(start, end, device=device)[:, None], torch.arange(end, device=device)
    seen = places <= rows
    if window is not None:
        seen &= places > rows - window
    return seen


def _refused(model: Any, why: str) -> FailedPrecondition:
    return FailedPrecondition(
        f"models of class {type(model).__name__} cannot be served by backend 'llm': {why}; serve it with another engine "
        "through backend 'openai_proxy'"
    )


_UNSAID = object()
