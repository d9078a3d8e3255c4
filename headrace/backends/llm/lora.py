# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters: load them in PEFT's format, and apply those of each request; one step may use several.

The layers of the model stay in place and only their `forward` is replaced, so that names, weights and tied weights do not
change. The rows of one adapter are gathered, multiplied with its two small matrices, and added to the layer's output. Rows
without an adapter, and steps without any, are computed as in the base model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from headrace.backends.llm.adapter_files import AdapterWeights, LoraWeights, read_adapter
from headrace.backends.llm.model_runner.quantized_linear import QuantizedLinear
from headrace.backends.llm.scheduler import Chunk
from headrace.core.errors import FailedPrecondition, NotFound, Unimplemented

_RENAMED_PREFIXES = (
    # Old and new names of the parts of vision-language models: many adapters were trained with the old ones.
    ("model.layers.", "model.language_model.layers."),
    ("language_model.model.", "model.language_model."),
    ("language_model.lm_head", "lm_head"),
    ("visual.", "model.visual."),
    ("vision_tower.", "model.vision_tower."),
    ("multi_modal_projector.", "model.multi_modal_projector."),
)
Rows = Any
"""A slice, or a tensor of row indices."""
Group = tuple[str, Rows]
"""An adapter and its rows."""
_LINEAR = (torch.nn.Linear, QuantizedLinear)


class SlotWeights(NamedTuple):
    """The matrices of one layer as they are copied into a slot, with the scaling in `lora_b`."""

    lora_a: Any
    """[rank, inputs]."""
    lora_b: Any
    """[rank, outputs]."""


def load_adapters(model: Any, folders: Mapping[str, Path]) -> LoraAdapters:
    """Load adapters and wrap the layers of a model, so that it can compute with each of them."""
    adapters = LoraAdapters(tuple(folders), model.device)
    layers = dict(model.named_modules())
    wrapped: dict[str, LoraLayer] = {}
    try:
        for name, folder in folders.items():
            _attach(adapters, model, layers, wrapped, name, read_adapter(name, folder))
    except Exception:
        adapters.close()
        raise
    adapters.layers = wrapped
    return adapters


def open_slots(model: Any, folders: Mapping[str, Path], slots: int, max_rank: int) -> LoraAdapters:
    """Load adapters as `load_adapters` does, and take the memory for as many more as there are slots.

    Every linear layer is wrapped, since it is not known which of them an adapter will change.
    """
    adapters = load_adapters(model, folders)
    head = model.get_output_embeddings()
    try:
        adapters.slots = slots
        for path, layer in model.named_modules():
            if not takes_adapters(layer):
                continue
            if path not in adapters.layers:
                adapters.layers[path] = adapters.wrap(layer, is_head=layer is head)
            adapters.layers[path].open_slots(slots, max_rank, own_tensor(model, layer))
    except Exception:
        adapters.close()
        raise
    # Found by the runner that captures steps.
    model.headrace_adapters = adapters
    return adapters


def takes_adapters(layer: Any) -> bool:
    """Return whether a layer of a model can be changed by an adapter."""
    is_linear = isinstance(layer, _LINEAR) or type(layer).__name__ == "Conv1D"
    return is_linear and not hasattr(layer, "headrace_lora_refusal")


def _attach(
    adapters: LoraAdapters,
    model: Any,
    layers: Mapping[str, Any],
    wrapped: dict[str, LoraLayer],
    name: str,
    adapter: AdapterWeights,
) -> None:
    head = model.get_output_embeddings()

    def wrap(layer_name: str) -> tuple[Any, LoraLayer]:
        path = linear_layer(layers, name, layer_name)
        layer = layers[path]
        if path not in wrapped:
            wrapped[path] = adapters.wrap(layer, is_head=layer is head)
        return layer, wrapped[path]

    for layer_name, weights in adapter.lora.items():
        layer, target = wrap(layer_name)
        sharding = getattr(layer, "headrace_sharding", None)
        check_sizes(name, layer_name, weights, layer_sizes(layer) if sharding is None else sharding.full_sizes())
        lora_a, lora_b = weights.lora_a, weights.lora_b
        if sharding is not None:
            lora_a, lora_b = sharding.shard(lora_a, lora_b)
        lora_a, lora_b = (_like(model, layer, tensor) for tensor in (lora_a, lora_b))
        target.add(name, LoraWeights(lora_a, lora_b, weights.scaling))
    for layer_name, copy in adapter.copies.items():
        path = find_layer(layers, layer_name)
        check_copy(name, layer_name, None if path is None else getattr(layers[path], "weight", None), copy)
    for layer_name, tensors in adapter.replaced.items():
        layer, target = wrap(layer_name)
        if hasattr(layer, "headrace_sharding"):
            raise Unimplemented(
                f"adapter '{name}' has a whole layer '{layer_name[:128]}', which is sharded here (tensor_parallel): merge "
                "the adapter into the model"
            )
        shape = layer_sizes(layer)
        if "weight" not in tensors or tuple(tensors["weight"].shape) != shape or not isinstance(layer, _LINEAR):
            raise FailedPrecondition(
                f"adapter '{name}' has a whole layer '{layer_name[:128]}' that does not fit the model's, of {list(shape)}: "
                "it was trained on another model, or with more tokens"
            )
        target.replace(name, {key: _like(model, layer, tensor) for key, tensor in tensors.items()})


def linear_layer(layers: Mapping[str, Any], name: str, layer_name: str) -> str:
    """Return the path of a layer that an adapter changes; raise if the model has none that can be changed."""
    path = find_layer(layers, layer_name)
    if path is None:
        raise FailedPrecondition(
            f"adapter '{name}' changes a layer '{layer_name[:128]}' that the model does not have: it was trained on "
            "another model"
        )
    layer = layers[path]
    if hasattr(layer, "headrace_lora_refusal"):
        raise Unimplemented(f"adapter '{name}' changes '{layer_name[:128]}', {layer.headrace_lora_refusal}")
    if not takes_adapters(layer):
        raise Unimplemented(
            f"adapter '{name}' changes '{layer_name[:128]}', a layer of kind {type(layer).__name__}: this server "
            "supports linear layers"
        )
    return path


def check_sizes(name: str, layer_name: str, weights: LoraWeights, sizes: tuple[int, int]) -> None:
    """Refuse matrices for a layer of other sizes."""
    outputs, inputs = sizes
    if (weights.lora_b.shape[0], weights.lora_a.shape[1]) != (outputs, inputs):
        raise FailedPrecondition(
            f"adapter '{name}' has matrices for {weights.lora_a.shape[1]} inputs and {weights.lora_b.shape[0]} "
            f"outputs, and layer '{layer_name}' of the model has {inputs} and {outputs}: it was trained on another model"
        )


def check_copy(name: str, layer_name: str, own: Any, copy: Any) -> None:
    """Refuse weights of the base model that an adapter brings along, unless they are the model's own."""
    if own is None or own.shape != copy.shape or not torch.equal(own, copy.to(device=own.device, dtype=own.dtype)):
        raise Unimplemented(
            f"adapter '{name}' has its own '{layer_name[:128]}', as after a training with new tokens, which this server "
            "does not support: merge the adapter into the model"
        )


def find_layer(layers: Mapping[str, Any], name: str) -> str | None:
    """Return the path of the layer that an adapter calls by this name; None if the model has none."""
    if name in layers:
        return name
    for old, new in _RENAMED_PREFIXES:
        if name.startswith(old) and (path := new + name.removeprefix(old)) in layers:
            return path
    return None


def layer_sizes(layer: Any) -> tuple[int, int]:
    """Return outputs and inputs; the weight of GPT-2's Conv1D is transposed."""
    if isinstance(layer, _LINEAR):
        return layer.out_features, layer.in_features
    first, second = layer.weight.shape
    return second, first


def _like(model: Any, layer: Any, tensor: Any) -> Any:
    """Return a tensor of an adapter in the dtype and on the device that a layer computes with."""
    own = own_tensor(model, layer)
    return tensor.to(device=own.device, dtype=own.dtype)


def own_tensor(model: Any, layer: Any) -> Any:
    """Return a tensor that has the dtype and the device that a layer computes with."""
    return next(model.parameters()) if isinstance(layer, QuantizedLinear) else layer.weight


class LoraAdapters:
    """All adapters of a model, and the rows of the current step that use each."""

    def __init__(self, names: Sequence[str], device: Any) -> None:
        self.names = tuple(names)
        self.body: Sequence[Group] = ()
        """For layers that compute every row of the step."""
        self.head: Sequence[Group] = ()
        """For the head, which computes only rows after which a token is sampled."""
        self.body_slots: Any = None
        """While a step is captured, for `body`: `[rows, slots]`, whether the row uses the slot. Then groups are not read."""
        self.head_slots: Any = None
        """The same for the head."""
        self.layers: dict[str, LoraLayer] = {}
        """By path."""
        self.slots = 0
        """How many adapters can be placed beside those of `names`."""
        self._slot_of: dict[str, int] = {}
        self._device = device
        self._layers: list[LoraLayer] = []

    @property
    def active(self) -> bool:
        """Whether the current step has rows of an adapter."""
        return bool(self.body)

    def check(self, name: str) -> None:
        """Refuse the name of an unknown adapter; "" is the base model."""
        if name and name not in self.names:
            known = ", ".join(self.names) or "none"
            raise NotFound(f"adapter '{name[:64]}' is not loaded: this model has {known}")

    def place(self, slot: int, name: str, weights: Mapping[str, SlotWeights], replaced: str) -> None:
        """Copy an adapter into a slot. `weights`: by path. `replaced`: the adapter that has the slot; "" for none.

        Steps that were launched before are not changed: the device copies after them.
        """
        if replaced:
            self._slot_of.pop(replaced, None)
        for path, layer in self.layers.items():
            layer.place(slot, name, weights.get(path), replaced)
        self._slot_of[name] = slot

    def slot_of(self, name: str) -> int:
        """Return the slot of an adapter; -1 for none, and for an adapter that has no slot."""
        return self._slot_of.get(name, -1)

    @contextmanager
    def captured(self, body: Any = None, head: Any = None) -> Iterator[None]:
        """Compute rows by their slots, numbers of which -1 is none; or (None) all rows without adapters."""
        before = self.body, self.head
        self.body = self.head = ()
        if body is not None and head is not None:
            numbers = torch.arange(self.slots, dtype=body.dtype, device=body.device)
            self.body_slots, self.head_slots = (slots[:, None] == numbers for slots in (body, head))
        try:
            yield
        finally:
            self.body, self.head = before
            self.body_slots = self.head_slots = None

    def select_rows(self, chunks: Sequence[Chunk]) -> None:
        """Set which rows of the next step use which adapter. For `ModelRunner.before_forward`."""
        if not any(chunk.sequence.adapter for chunk in chunks):
            self.body = self.head = ()
            return
        body: dict[str, list[tuple[int, int]]] = {}
        head: dict[str, list[tuple[int, int]]] = {}
        row = sampled = 0
        for chunk in chunks:
            name = chunk.sequence.adapter
            if name:
                _extend(body.setdefault(name, []), row, row + chunk.count)
                if chunk.samples:
                    _extend(head.setdefault(name, []), sampled, sampled + 1)
            row += chunk.count
            sampled += chunk.samples
        self.body = [(name, self._rows(spans)) for name, spans in body.items()]
        self.head = [(name, self._rows(spans)) for name, spans in head.items()]

    @contextmanager
    def applied_to_all(self, name: str) -> Iterator[None]:
        """Use one adapter, or none, for all rows: for a forward pass outside of a step, such as the image encoder's."""
        before = self.body, self.head
        self.body = self.head = [(name, slice(None))] if name else ()
        try:
            yield
        finally:
            self.body, self.head = before

    def wrap(self, layer: Any, *, is_head: bool) -> LoraLayer:
        """Wrap the forward method of a layer."""
        wrapped = LoraLayer(self, layer, is_head=is_head)
        self._layers.append(wrapped)
        return wrapped

    def close(self) -> None:
        """Unwrap all layers."""
        for layer in self._layers:
            layer.unwrap()
        self._layers.clear()
        self.layers.clear()
        self._slot_of.clear()

    def _rows(self, spans: Sequence[tuple[int, int]]) -> Rows:
        if len(spans) == 1:
            return slice(*spans[0])
        numbers = [number for first, end in spans for number in range(first, end)]
        return torch.tensor(numbers).to(self._device, non_blocking=True)


class LoraLayer:
    """Replaces the `forward` of a linear layer."""

    def __init__(self, adapters: LoraAdapters, layer: Any, *, is_head: bool) -> None:
        self._adapters = adapters
        self._layer = layer
        self._base_forward = layer.forward
        self._is_head = is_head
        self._sharding = getattr(layer, "headrace_sharding", None)
        """How a tensor-parallel model shards the layer: `tensor_parallel.parallel_layers.LoraSharding`."""
        self._lora: dict[str, LoraWeights] = {}
        self._replaced: dict[str, tuple[Any, Any]] = {}
        self._stacked_a: Any = None
        """[slots, rank, inputs]: the memory of the slots, which stays where it is, so that captured steps find it."""
        self._stacked_b: Any = None
        """[slots, rank, outputs]."""
        self._slot_ranks: list[int] = []
        """Per slot: rows of it that may be other than zero."""
        layer.forward = self

    def add(self, name: str, weights: LoraWeights) -> None:
        """Set the LoRA weights of an adapter."""
        self._lora[name] = weights

    def replace(self, name: str, tensors: Mapping[str, Any]) -> None:
        """Set the full weights of an adapter that replaces the layer."""
        self._replaced[name] = tensors["weight"], tensors.get("bias", self._layer.bias)

    def open_slots(self, count: int, rank: int, like: Any) -> None:
        """Take the memory of the slots, in the dtype and on the device of `like`."""
        outputs, inputs = layer_sizes(self._layer)
        self._stacked_a = torch.zeros((count, rank, inputs), dtype=like.dtype, device=like.device)
        self._stacked_b = torch.zeros((count, rank, outputs), dtype=like.dtype, device=like.device)
        self._slot_ranks = [0] * count

    def place(self, slot: int, name: str, weights: SlotWeights | None, replaced: str) -> None:
        """Copy the matrices of an adapter into a slot, or zeros for one that does not change this layer."""
        if self._stacked_a is None:
            return
        self._lora.pop(replaced, None)
        rank, before = 0 if weights is None else len(weights.lora_a), self._slot_ranks[slot]
        lora_a, lora_b = self._stacked_a[slot], self._stacked_b[slot]
        self._slot_ranks[slot] = max(rank, before)  # if a copy fails, the rest is not zero
        with torch.inference_mode():
            if before > rank:
                lora_a[rank:].zero_()
                lora_b[rank:].zero_()
            if weights is not None:
                lora_a[:rank].copy_(weights.lora_a, non_blocking=True)
                lora_b[:rank].copy_(weights.lora_b, non_blocking=True)
                self._lora[name] = LoraWeights(lora_a[:rank], lora_b[:rank].T, 1.0)
        self._slot_ranks[slot] = rank

    def unwrap(self) -> None:
        """Restore the layer's own `forward`."""
        del self._layer.forward

    def __call__(self, rows: Any) -> Any:
        """Compute the layer."""
        output = self._base_forward(rows)
        slots = self._adapters.head_slots if self._is_head else self._adapters.body_slots
        if slots is not None:
            return self._with_slots(rows, output, slots)
        groups = self._adapters.head if self._is_head else self._adapters.body
        if not groups:
            return output
        inputs, outputs = rows.reshape(-1, rows.shape[-1]), output.view(-1, output.shape[-1])
        for name, chosen in groups:
            if name in self._replaced:
                outputs[chosen] = torch.nn.functional.linear(inputs[chosen], *self._replaced[name])
            weights = self._lora.get(name)
            if weights is None:
                continue
            down = torch.nn.functional.linear(inputs[chosen], weights.lora_a)
            if self._sharding is not None:
                down = self._sharding.reduce(down)
            delta = torch.nn.functional.linear(down, weights.lora_b)
            if isinstance(chosen, slice):
                outputs[chosen].add_(delta, alpha=weights.scaling)
            else:
                outputs.index_add_(0, chosen, delta, alpha=weights.scaling)
        return output

    def _with_slots(self, rows: Any, output: Any, slots: Any) -> Any:
        """Add the product of every row with its slot's matrices: two products with those of all slots, for any rows."""
        if self._stacked_a is None:
            return output
        count, rank, inputs = self._stacked_a.shape
        down = torch.nn.functional.linear(rows.reshape(-1, inputs), self._stacked_a.view(count * rank, inputs))
        # Not multiplied by 0: what overflows with another adapter must not reach this row.
        down = torch.where(slots[:, :, None], down.view(-1, count, rank), 0.0).to(down.dtype)
        delta = down.view(-1, count * rank) @ self._stacked_b.view(count * rank, -1)
        return output + delta.view(output.shape)


def _extend(spans: list[tuple[int, int]], first: int, end: int) -> None:
    """Add a span, merged with the last one if they are adjacent."""
    if spans and spans[-1][1] == first:
        spans[-1] = (spans[-1][0], end)
    else:
        spans.append((first, end))
