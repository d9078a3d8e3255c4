# SPDX-License-Identifier: Apache-2.0
"""The model runner: computes a step, from scheduled chunks of sequences to logits or the likeliest tokens.

Only the engine's thread calls it. The tokens of all chunks are packed into one row (`prepare_input`), the transformers model
computes it with `attention.PagedAttention` in place of its own attention, and the head is applied only to rows after
which a token is sampled.

    step = runner.launch(chunks, greedy=True)     # returns when the work is queued on the device; or sample=...
    ...                                           # with `runner.async_scheduling`: launch the next step
    tokens = step.tokens()                        # waits; one per chunk that samples, in their order
    logits = step.logits                          # or these [rows, vocabulary], if the step is neither greedy nor sampled

A sequence may bring `PromptInputs`, created by `vision`. LoRA: `before_forward` is called with the chunks, in the order of
their rows, before each forward pass. With `fixed_rows`, a step is several forward passes of so many rows.
`cuda_graphs.CudaGraphRunner` is the same with CUDA graphs and async scheduling.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from headrace.backends.contract import SleepLevel
from headrace.backends.llm.model_runner.attention import AttentionMetadata, DecodeBatch, PagedAttention, PrefillChunk
from headrace.backends.llm.model_runner.fixed_rows import are_alike, blocks_of, most_rows, trial_tokens
from headrace.backends.llm.model_runner.fused_experts import using_fused_experts
from headrace.backends.llm.model_runner.kv_cache import KVCache
from headrace.backends.llm.model_runner.quantized_linear import QuantizedLinear
from headrace.backends.llm.scheduler import Chunk
from headrace.backends.sleeping_weights import PlacedWeights, SleepingWeights, add_bytes, difference, place_of


@dataclass(slots=True)
class PromptInputs:
    """Precomputed model inputs of a prompt, such as image embeddings, on the runner's device and in its dtype."""

    embeddings: torch.Tensor | None = None
    """`[prompt_length, hidden]`: used in place of the token embeddings."""
    positions: torch.Tensor | None = None
    """Position ids, `[3, prompt_length]`."""
    position_delta: int = 0
    """The position of token i behind the prompt is i + position_delta, in all three rows."""
    arguments: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """More per-token tensors, `[prompt_length, ...]`: chunked and packed like the tokens, with zeros for other sequences.
    `ModelRunner.extra_arguments` turns the packed tensors into keyword arguments of the model."""


Sample = Callable[[Sequence[Chunk], torch.Tensor], torch.Tensor]
"""Samples the next tokens of chunks from their logits, `[chunks, vocabulary]`, without waiting for the device."""


class RunnerLost(Exception):
    """The runner computes nothing until it is restored: a process that it needs has ended. The text is for clients."""


class Step:
    """A step that was queued on the device."""

    __slots__ = ("_logits", "_tokens", "chunks")

    def __init__(self, chunks: Sequence[Chunk], logits: torch.Tensor, tokens: torch.Tensor | None = None) -> None:
        self.chunks = chunks
        self._logits = logits
        self._tokens = tokens

    @property
    def logits(self) -> torch.Tensor:
        """`[rows, vocabulary]` in float32, a row per chunk that samples, in their order."""
        return self._logits.float()

    def tokens(self) -> list[int]:
        """Return the sampled token of each row, or the likeliest if nothing was sampled. Waits for the device."""
        if not len(self._logits):
            return []
        chosen = self._logits.argmax(dim=-1) if self._tokens is None else self._tokens
        tokens: list[int] = chosen.tolist()
        return tokens


class ModelRunner:
    """A model and its KV cache on one device."""

    async_scheduling = False
    """Whether `launch` takes chunks whose token is not known: then a step can be launched before the last is read."""

    def __init__(
        self,
        model: Any,
        attention: PagedAttention,
        cache: KVCache,
        *,
        page_size: int,
        placed: PlacedWeights | None = None,
        fixed_rows: int = 0,
    ) -> None:
        """`fixed_rows`: as many rows as are computed together, or fewer where equal rows would differ; 0: any number."""
        self.model = model
        """A transformers model with a head; called with `inputs_embeds` or `input_ids`, `position_ids`, `logits_to_keep`."""
        self.attention = attention
        self.cache = cache
        self.page_size = page_size
        self.device: torch.device = cache.device
        self.dtype: torch.dtype = next(model.parameters()).dtype
        """Of logits, and of keys and values before they are cached."""
        self.position_rows = position_rows(model.config)
        """1, or 3 for models whose positions are time, height and width."""
        self.before_forward: Callable[[Sequence[Chunk]], None] | None = None
        """Called before each forward pass with the chunks in the order of their rows. Set for LoRA."""
        self.extra_arguments: Callable[[Mapping[str, torch.Tensor]], Mapping[str, Any]] | None = None
        """Turns packed `PromptInputs.arguments` into keyword arguments of the model. Set by the image encoder."""
        self._embed = model.get_input_embeddings()
        self.placed = placed
        """The weights, if they and the KV cache keep their addresses while the model sleeps."""
        self.direct_weights: Mapping[str, torch.Tensor] | None = None
        """The weights by the names in their files, if they can be read without a conversion. Set by `model_loader`."""
        self.graph_bytes = 0
        """What captured graphs take on the device, about, also while the model sleeps."""
        self._sleeping: SleepingWeights | PlacedWeights | None = None
        self.fixed_rows = most_rows(model, fixed_rows, self.device) if fixed_rows else 0
        """Rows of each forward pass, for answers that do not depend on other requests; 0: as many as there are tokens."""
        while self.fixed_rows > 1 and not self._are_rows_alike():
            self.fixed_rows //= 2

    @property
    def block_rows(self) -> int:
        """Rows that are computed together; 0: any number."""
        return self.fixed_rows

    def launch(self, chunks: Sequence[Chunk], *, greedy: bool, sample: Sample | None = None) -> Step:
        """Queue a step on the device. Chunks of one token come first.

        With `greedy` or `sample` the caller does not read `Step.logits`.
        """
        with torch.inference_mode():
            logits = self.compute(chunks)
            sampling = [chunk for chunk in chunks if chunk.samples]
            return Step(chunks, logits, sample(sampling, logits) if sample is not None and sampling else None)

    def compute(self, chunks: Sequence[Chunk]) -> torch.Tensor:
        """Return the logits of the chunks that sample, without waiting for the device. In inference mode."""
        rows = self.fixed_rows
        if not rows:
            return self.forward(prepare_input(chunks, self))
        by_index: dict[int, torch.Tensor] = {}
        none = torch.empty(0, 0, device=self.device)
        for block in blocks_of(chunks, range(len(chunks)), rows, most_singles=rows, most_others=rows):
            logits = self.forward(prepare_input(block.parts, self))
            none = logits[:0]
            by_index.update(zip([index for index in block.ended if chunks[index].samples], logits, strict=True))
        return torch.stack([by_index[index] for index in sorted(by_index)]) if by_index else none

    def forward(self, model_input: ModelInput) -> torch.Tensor:
        """Return the logits of the rows that sample, without waiting for the device."""
        if self.before_forward is not None:
            self.before_forward(model_input.chunks)
        arguments: dict[str, Any] = {}
        if model_input.arguments and self.extra_arguments is not None:
            arguments.update(self.extra_arguments(model_input.arguments))
        if model_input.embeddings is not None:
            arguments["inputs_embeds"] = model_input.embeddings
        else:
            arguments["input_ids"] = model_input.ids
        sampled: Any = model_input.sampled_rows
        if self.fixed_rows:  # the head has the same shape in every step, too: all rows, or one whose result is not used
            sampled = 0 if len(sampled) else torch.zeros(1, dtype=torch.long, device=self.device)
        ours = bool(self.fixed_rows) and self.device.type == "cuda"
        with self.attention.using(model_input.attention), using_fused_experts(self.model) if ours else nullcontext():
            output = self.model(
                position_ids=model_input.positions,
                logits_to_keep=sampled,
                use_cache=False,
                return_dict=True,
                **arguments,
            )
        logits: torch.Tensor = output.logits[0]
        if self.fixed_rows:
            logits = logits.index_select(0, model_input.sampled_rows)
        return _give_prompt_logits(model_input.chunks, logits) if model_input.has_prompt_logits else logits

    def _are_rows_alike(self) -> bool:
        """Return whether equal rows have equal results at all places of a block."""
        count, page = self.fixed_rows, self.cache.pages  # the page for padding
        with torch.inference_mode():
            pages = torch.tensor([page], device=self.device)
            slots = torch.full((count,), page * self.page_size, device=self.device)
            chunks = [PrefillChunk(row, 1, 0, pages) for row in range(count)]
            rows = torch.arange(count, device=self.device)
            positions = torch.full((self.position_rows, 1, count), 7, device=self.device)
            positions = positions[0] if self.position_rows == 1 else positions
            for token in trial_tokens(self.model.config.get_text_config().vocab_size):
                ids = torch.full((1, count), token, device=self.device)
                metadata = AttentionMetadata(slots, [], chunks, each_token=True)
                if not are_alike(self.forward(ModelInput([], ids, positions, None, {}, rows, metadata))):
                    return False
        return True

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the embeddings of tokens, `[count, hidden]`."""
        embeddings: torch.Tensor = self._embed(ids)
        return embeddings

    def close_graphs(self) -> None:
        """Free what was captured of the model. Another runner may compute with the model afterwards."""

    def open_graphs(self) -> None:
        """Capture again what `close_graphs` freed."""

    def wait_for_steps(self) -> None:
        """Wait for steps that were launched and not read."""

    def sleep(self, level: SleepLevel) -> dict[str, int]:
        """Give back the KV cache and the weights; return the bytes by place. May be called again to sleep deeper."""
        weights = self._sleeping or self.placed or SleepingWeights(model_weights(self.model))
        before = weights.bytes
        add_bytes(before, {place_of(self.device): self.cache.bytes})
        self.wait_for_steps()
        if level == 1:
            weights.move_to_host()  # the only step that may fail
        else:
            weights.drop()
        self._sleeping = weights
        if self.placed is None:
            self.close_graphs()
        self.cache.release()
        return difference(before, weights.bytes)

    @property
    def needs_weights(self) -> bool:
        """Whether `wake` needs the weights, because they were dropped."""
        return self._sleeping is not None and self._sleeping.dropped

    def wake(self, fresh: Any | None) -> None:
        """Take the memory again. `fresh`: the same model, just loaded, if `needs_weights`."""
        weights = self._sleeping
        if weights is None:
            return
        try:
            self.cache.restore()
            if weights.dropped:
                weights.put_back([] if fresh is None else model_weights(fresh), "the model")
            else:
                weights.move_back()
            if self.placed is None:
                self.open_graphs()
        except BaseException:
            if self.placed is None:
                self.close_graphs()
            self.cache.release()
            raise
        self._sleeping = None

    def refill(self, read: Callable[[], None]) -> None:
        """Take the memory again after level 2 and call `read`, which writes all weights. Sleeps on if that fails."""
        if self.placed is None or not self.placed.dropped:
            raise RuntimeError("the weights are there, or have no place")
        try:
            self.cache.restore()
            self.placed.take_memory()
            read()
        except BaseException:
            self.placed.drop()
            self.cache.release()
            raise
        self._sleeping = None

    def forget(self) -> None:
        """Forget all sequences and hooks, while it sleeps: another engine will use this runner."""
        self.before_forward = None
        self.extra_arguments = None

    def close(self) -> None:
        """Free the memory of the host and the device."""
        self.attention.close()
        self.cache.close()
        if self.placed is not None:
            self.placed.close()
        self._sleeping = self.placed = self.direct_weights = None
        del self.model, self._embed
        gc.collect()  # transformers models have reference cycles, and are large
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def model_weights(model: Any) -> list[torch.Tensor]:
    """Return the parameters of a model and its quantised weights.

    Its other buffers are small, and not all of them are in its files.
    """
    weights = list(model.parameters())
    for module in model.modules():
        if isinstance(module, QuantizedLinear):
            weights += module.buffers(recurse=False)
    return weights


def position_rows(config: Any) -> int:
    """Return 3 if the model's rotary embedding has sections for time, height and width (M-RoPE), else 1."""
    text = config.get_text_config()
    for name in ("rope_parameters", "rope_scaling"):
        parameters = getattr(text, name, None)
        if isinstance(parameters, Mapping) and "mrope_section" in parameters:
            return 3
    return 1


@dataclass(slots=True)
class ModelInput:
    """The tensors of one step."""

    chunks: Sequence[Chunk]
    ids: torch.Tensor
    """`[1, rows]`."""
    positions: torch.Tensor
    """`[1, rows]`, or `[3, 1, rows]`."""
    embeddings: torch.Tensor | None
    """`[1, rows, hidden]`, if a sequence brings some."""
    arguments: Mapping[str, torch.Tensor]
    """`[1, rows, ...]`: see `PromptInputs.arguments`."""
    sampled_rows: torch.Tensor
    """The rows after which a token is sampled. With `has_prompt_logits`, those for `Sequence.prompt_logprobs` follow."""
    attention: AttentionMetadata
    has_prompt_logits: bool = False


def prepare_input(chunks: Sequence[Chunk], runner: ModelRunner) -> ModelInput:
    """Pack the tokens of all chunks into one row, in their order, padded to `fixed_rows`.

    Call in inference mode; waits for nothing.
    """
    size, device = runner.page_size, runner.device
    ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    sampled_rows: list[int] = []
    prompt_rows: list[int] = []
    decodes: list[tuple[int, Chunk]] = []
    prefills: list[PrefillChunk] = []
    has_prompt_inputs = False
    for chunk in chunks:
        sequence, start, end = chunk.sequence, chunk.start, chunk.end
        first, pages = len(ids), sequence.pages
        if sequence.prompt_inputs is not None:
            has_prompt_inputs = True
        if chunk.count == 1:
            ids.append(chunk.first_token)
            positions.append(start)
            slots.append(pages[start // size] * size + start % size)
        else:
            ids += sequence.tokens[start:end]
            positions += range(start, end)
            slots += [pages[index // size] * size + index % size for index in range(start, end)]
        if chunk.count == 1 and not runner.fixed_rows:
            decodes.append((first, chunk))
        else:
            used = torch.tensor(pages[: (end - 1) // size + 1], device=device)
            prefills.append(PrefillChunk(first, chunk.count, start, used))
        if chunk.samples:
            sampled_rows.append(len(ids) - 1)
        prompt_rows += range(first, first + _prompt_logit_rows(chunk))
    padding = max(0, runner.fixed_rows - len(ids))
    ids += [0] * padding
    positions += [0] * padding
    slots += [runner.cache.pages * size] * padding
    model_input = ModelInput(
        chunks,
        torch.tensor([ids], device=device),
        torch.tensor([positions], device=device),
        None,
        {},
        torch.tensor(sampled_rows + prompt_rows, dtype=torch.long, device=device),
        AttentionMetadata(
            torch.tensor(slots, device=device),
            _decode_batches(decodes, size, device),
            prefills,
            each_token=bool(runner.fixed_rows),
        ),
        bool(prompt_rows),
    )
    if runner.position_rows > 1:
        model_input.positions = model_input.positions.expand(runner.position_rows, 1, -1)
    if has_prompt_inputs:
        _add_prompt_inputs(model_input, runner)
    return model_input


def _prompt_logit_rows(chunk: Chunk) -> int:
    receiver = chunk.sequence.prompt_logprobs
    return 0 if receiver is None else receiver.rows_of(chunk.start, chunk.end)


def _give_prompt_logits(chunks: Sequence[Chunk], logits: torch.Tensor) -> torch.Tensor:
    """Give the logits of prompts to those that want them; return the others."""
    sampled = at = sum(chunk.samples for chunk in chunks)
    for chunk in chunks:
        rows = _prompt_logit_rows(chunk)
        if rows and chunk.sequence.prompt_logprobs is not None:
            chunk.sequence.prompt_logprobs.add(chunk.start, logits[at : at + rows])
        at += rows
    return logits[:sampled]


def _decode_batches(decodes: Sequence[tuple[int, Chunk]], size: int, device: torch.device) -> list[DecodeBatch]:
    """Batch rows with contexts of similar length, so that short ones are not padded to the longest."""
    if not decodes:
        return []
    counts = [(chunk.end - 1) // size + 1 for _, chunk in decodes]
    most = max(counts)
    if most * len(decodes) <= 2 * sum(counts) + 64:
        return [_decode_batch(decodes, most, device)]
    groups: dict[int, list[tuple[int, Chunk]]] = {}
    for entry, count in zip(decodes, counts, strict=True):
        groups.setdefault((count - 1).bit_length(), []).append(entry)
    return [
        _decode_batch(group, max((chunk.end - 1) // size + 1 for _, chunk in group), device)
        for group in groups.values()
    ]


def _decode_batch(group: Sequence[tuple[int, Chunk]], most: int, device: torch.device) -> DecodeBatch:
    table = []
    for _, chunk in group:
        pages = chunk.sequence.pages[:most]
        table.append(pages + [0] * (most - len(pages)))
    numbers = [row for row, _ in group]
    contiguous = numbers[-1] - numbers[0] == len(numbers) - 1
    rows = slice(numbers[0], numbers[-1] + 1) if contiguous else torch.tensor(numbers, device=device)
    lengths = torch.tensor([chunk.end for _, chunk in group], device=device)
    return DecodeBatch(rows, torch.tensor(table, device=device), lengths)


def _add_prompt_inputs(model_input: ModelInput, runner: ModelRunner) -> None:
    """Put the `PromptInputs` of sequences into their rows."""
    positions = model_input.positions.clone()
    embeddings: torch.Tensor | None = None
    arguments: dict[str, torch.Tensor] = {}
    rows = model_input.ids.shape[1]
    row = 0
    for chunk in model_input.chunks:
        inputs, prompt = chunk.sequence.prompt_inputs, chunk.sequence.prompt_length
        prompt_rows = max(0, min(chunk.end, prompt) - chunk.start)
        target, source = slice(row, row + prompt_rows), slice(chunk.start, chunk.start + prompt_rows)
        row += chunk.count
        if inputs is None:
            continue
        if prompt_rows < chunk.count:
            positions[..., row - chunk.count + prompt_rows : row] += inputs.position_delta
        if not prompt_rows:
            continue
        if inputs.positions is not None:
            positions[:, 0, target] = inputs.positions[:, source]
        if inputs.embeddings is not None:
            if embeddings is None:
                embeddings = runner.embed(model_input.ids).clone()
            embeddings[0, target] = inputs.embeddings[source].to(embeddings.dtype)
        for name, tensor in inputs.arguments.items():
            if name not in arguments:
                arguments[name] = tensor.new_zeros((1, rows, *tensor.shape[1:]))
            arguments[name][0, target] = tensor[source]
    model_input.positions, model_input.embeddings, model_input.arguments = positions, embeddings, arguments
