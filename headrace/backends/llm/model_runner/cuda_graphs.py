# SPDX-License-Identifier: Apache-2.0
"""The model runner for CUDA: steps are replays of captured CUDA graphs.

Launching a model's kernels one by one costs more than computing them. With graphs a step is one copy of a few integers to
the device, one replay and one copy of tokens back. There is a graph for each of some decode batch sizes, and for each of
some numbers of tokens of prompts and decoding sequences together; a step uses the next larger one, and its padding rows
write to a page and a batch index that no sequence has.

The device keeps the last token and the pages of each batch index between steps. A step carries only what changed, so that
it can be launched before the host knows the tokens of the previous one (async scheduling).

With fixed rows (see `fixed_rows`) there is one graph, and a step is as many replays of it as it needs.
"""

from __future__ import annotations

import logging
import math
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from headrace.backends.llm.model_runner import cuda_attention
from headrace.backends.llm.model_runner.fixed_rows import are_alike, blocks_of, trial_tokens
from headrace.backends.llm.model_runner.fused_experts import using_fused_experts
from headrace.backends.llm.model_runner.runner import ModelRunner, Sample, Step
from headrace.backends.llm.scheduler import Chunk
from headrace.core.telemetry.load_stages import COMPILE, stage

if TYPE_CHECKING:
    from headrace.backends.llm.lora import LoraAdapters
    from headrace.backends.sleeping_weights import PlacedWeights

log = logging.getLogger("headrace.backends.llm")

_CAPTURE_LOCK = threading.Lock()
"""Held while graphs are captured: the compiler's settings are global."""

IntArray = npt.NDArray[np.int32]
StepOutput = tuple[torch.Tensor, torch.Tensor]
"""Likeliest tokens, and logits."""

TABLE_UPDATES = 1024
"""Changes to the page table that the inputs of a step can carry."""
MAX_PROMPTS = 64
"""Prompt chunks in one replay."""
_MIXED_SIZES = (64, 128, 192, 256, 320, 384, 448, 512, 640, 768, 1024, 1536, 2048, 4096, 8192)
_MIXED_CONTEXT = 4096
"""Sequences that are longer than this decode in a replay of their own, whose attention divides their keys."""
STEPS_AHEAD = 2
"""Steps in flight: their inputs wait in pinned memory until the device reads them."""


class CudaGraphStep(Step):
    """A step of one or more graph replays."""

    __slots__ = ("_arrived", "_host", "_parts", "_used")

    def __init__(self, chunks: Sequence[Chunk], host: torch.Tensor) -> None:
        self.chunks = chunks
        self._host = host
        """Pinned memory for one token per chunk."""
        self._used = 0
        self._parts: list[tuple[list[int], torch.Tensor, torch.Tensor]] = []
        """Per replay: indices of the step's chunks, their tokens on the host, their logits."""
        self._arrived = torch.cuda.Event(blocking=True)  # waits without spinning

    def add(self, indices: list[int], tokens: torch.Tensor, logits: torch.Tensor) -> None:
        """Add the rows of a replay, one per chunk index."""
        host = self._host[self._used : self._used + len(indices)]
        self._used += len(indices)
        host.copy_(tokens, non_blocking=True)
        self._parts.append((indices, host, logits))

    def launched(self) -> None:
        """Record that all replays are queued."""
        self._arrived.record()

    def wait(self) -> None:
        """Wait for the device."""
        self._arrived.synchronize()

    @property
    def logits(self) -> torch.Tensor:
        """`[rows, vocabulary]` in float32. Valid until the next launch: replays overwrite their outputs."""
        sampling = self._sampling()
        if len(self._parts) == 1 and self._parts[0][0] == sampling:
            return self._parts[0][2][: len(sampling)].float()
        rows = {index: logits[row] for indices, _, logits in self._parts for row, index in enumerate(indices)}
        return torch.stack([rows[index] for index in sampling]).float()

    def tokens(self) -> list[int]:
        """Return the sampled or likeliest token of each row that samples. Waits for the device."""
        self.wait()
        sampling = self._sampling()
        if len(self._parts) == 1 and self._parts[0][0] == sampling:
            tokens: list[int] = self._parts[0][1].tolist()
            return tokens
        by_index: dict[int, int] = {}
        for indices, host, _ in self._parts:
            by_index.update(zip(indices, host.tolist(), strict=True))
        return [by_index[index] for index in sampling]

    def _sampling(self) -> list[int]:
        return [index for index, chunk in enumerate(self.chunks) if chunk.samples]


class CudaGraphRunner(ModelRunner):
    """A model runner that replays CUDA graphs where possible.

    Decode rows and prompt chunks are one replay together, so that the weights are read once. Prompts with images, prompts
    whose log-probabilities are wanted and rows of a LoRA adapter that has no slot are computed by the base class, kernel by
    kernel.
    """

    async_scheduling = True

    def __init__(
        self,
        model: Any,
        attention: Any,
        cache: Any,
        *,
        page_size: int,
        max_running: int,
        max_length: int,
        max_step_tokens: int,
        compiled: bool = True,
        placed: PlacedWeights | None = None,
        fixed_rows: int = 0,
    ) -> None:
        super().__init__(model, attention, cache, page_size=page_size, placed=placed, fixed_rows=fixed_rows)
        self._max_running = max_running
        self._max_length = max_length
        self._max_step_tokens = max(max_step_tokens, max_running + page_size)  # as in `Scheduler`
        self._compiled = compiled
        self._graph_rows = min(fixed_rows, self._max_step_tokens)
        self.open_graphs()
        self._in_flight: deque[CudaGraphStep] = deque()
        self._hosts = deque(pinned_tensor(max_running, torch.int64) for _ in range(STEPS_AHEAD + 2))
        """Buffers for the tokens of steps; a step is read before its buffer is used again."""

    def open_graphs(self) -> None:
        """See `ModelRunner`."""
        before = _reserved_bytes(self.device)
        with stage(COMPILE):
            self.graphs = self._capture()
            while self._graph_rows > 1 and not self.graphs.are_rows_alike():
                log.warning(
                    "Equal rows in a block of %d have different results on this device: trying smaller blocks.",
                    self._graph_rows,
                )
                self._graph_rows //= 2
                self.graphs.close()
                self.graphs = self._capture()
        self.graph_bytes = max(0, _reserved_bytes(self.device) - before)

    def _capture(self) -> CudaGraphs:
        return CudaGraphs(
            self.model,
            self.attention.modules,
            page_size=self.page_size,
            max_running=self._max_running,
            max_length=self._max_length,
            max_step_tokens=self._max_step_tokens,
            position_rows=self.position_rows,
            compiled=self._compiled,
            fixed_rows=self._graph_rows,
        )

    @property
    def block_rows(self) -> int:
        """See `ModelRunner`."""
        return self._graph_rows

    def launch(self, chunks: Sequence[Chunk], *, greedy: bool, sample: Sample | None = None) -> Step:
        """Queue a step on the device, without waiting for the previous one."""
        step = self._new_step(chunks)
        rows: list[int] = []
        prompts: list[int] = []
        others: list[int] = []
        largest = self.graphs.mixed[-1].size
        for index, chunk in enumerate(chunks):
            sequence = chunk.sequence
            has_images = sequence.prompt_inputs is not None and chunk.start < sequence.prompt_length
            wants_logits = sequence.prompt_logprobs is not None and chunk.start < sequence.prompt_length
            has_no_slot = bool(sequence.adapter) and self.graphs.slot_of(sequence.adapter) < 0
            if has_no_slot or has_images or wants_logits or (chunk.count > largest and not self._graph_rows):
                others.append(index)
            elif chunk.count == 1:
                rows.append(index)
            else:
                prompts.append(index)
        with torch.inference_mode():
            if self._graph_rows:
                self._launch_blocks(step, [*rows, *prompts], others, greedy, sample)
                rows, prompts, others = [], [], []
            if rows and not (prompts and self._may_mix([chunks[index] for index in rows], chunks[prompts[0]])):
                self._launch_rows(step, rows, sample)
                rows = []
            while prompts:
                prompts = self._launch_mixed(step, rows, prompts, greedy, sample)
                rows = []
            if others:
                self._launch_others(step, others, sample, chunks)
            step.launched()
        return step

    def _launch_blocks(
        self, step: CudaGraphStep, indices: list[int], others: list[int], greedy: bool, sample: Sample | None
    ) -> None:
        """Launch a step in blocks of fixed rows. Of the `others` only what is in the prompt is computed kernel by kernel."""
        parts = list(step.chunks)
        if others:
            heads = list(step.chunks)
            for index in others:
                chunk, end = heads[index], heads[index].sequence.prompt_length
                if chunk.end > end:  # it was preempted while it generated
                    heads[index] = replace(chunk, count=end - chunk.start, samples=False)
                    parts[index] = replace(chunk, start=end, count=chunk.end - end)
                    indices.append(index)
            self._launch_others(step, others, sample, heads)
        graph = self.graphs.mixed[0]
        singles = min(graph.size, self.graphs.rows_of(graph.size))
        for block in blocks_of(parts, indices, graph.size, most_singles=singles, most_others=MAX_PROMPTS):
            inputs, ended = graph.next_buffer(), block.ended
            self._write_mixed(inputs, graph, block.parts, block.singles)
            self.graphs.table.write(inputs)
            graph.replay()
            if ended:
                tokens = self._sampled(step, ended, graph.tokens, graph.logits, sample)
                logits = graph.logits[: len(ended)]
                step.add(ended, tokens, logits.clone() if not greedy and sample is None else logits)

    def _new_step(self, chunks: Sequence[Chunk]) -> CudaGraphStep:
        """Create a step; wait while too many are in flight, because they use the buffers in current."""
        while len(self._in_flight) >= STEPS_AHEAD:
            self._in_flight.popleft().wait()
        self._hosts.rotate()
        step = CudaGraphStep(chunks, self._hosts[0])
        self._in_flight.append(step)
        return step

    def _launch_rows(self, step: CudaGraphStep, indices: list[int], sample: Sample | None) -> None:
        graph = _smallest_fitting(self.graphs.batches_for([step.chunks[index] for index in indices]), len(indices))
        size, table = graph.size, self.graphs.table
        inputs = graph.next_buffer()
        batch_indices, positions, rotary, given = inputs[: 4 * size].reshape(4, size)
        count = len(indices)
        batch_indices[count:] = self.graphs.max_running
        positions[count:] = 0
        rotary[count:] = 0
        given[count:] = 0
        chunks = [step.chunks[index] for index in indices]
        sequences = [chunk.sequence for chunk in chunks]
        for sequence in sequences:
            table.set(sequence.batch_index, sequence.pages, (sequence.arrived, sequence.preemptions))
        batch_indices[:count] = [sequence.batch_index for sequence in sequences]
        positions[:count] = rotary[:count] = [chunk.start for chunk in chunks]
        given[:count] = [chunk.first_token if chunk.known else -1 for chunk in chunks]
        if self.position_rows > 1:
            rotary[:count] += self._position_deltas(chunks)
        self.graphs.write_slots(graph, inputs, chunks)
        table.write(inputs)
        graph.replay()
        step.add(indices, self._sampled(step, indices, graph.tokens, graph.logits, sample), graph.logits)

    def _may_mix(self, rows: Sequence[Chunk], first_prompt: Chunk) -> bool:
        """Return whether decode rows can be computed together with prompts, of which the first has to fit beside them."""
        fits = len(rows) + first_prompt.count <= self.graphs.mixed[-1].size
        return fits and all(chunk.end <= _MIXED_CONTEXT for chunk in rows)

    def _launch_mixed(
        self, step: CudaGraphStep, rows: list[int], prompts: list[int], greedy: bool, sample: Sample | None
    ) -> list[int]:
        """Launch decode rows and as many prompt chunks as a graph takes; return the other prompt chunks."""
        most, taken, tokens = self.graphs.mixed[-1].size, 0, len(rows)
        for index in prompts[:MAX_PROMPTS]:
            if taken and tokens + step.chunks[index].count > most:
                break
            taken += 1
            tokens += step.chunks[index].count
        here = [*rows, *prompts[:taken]]
        chunks = [step.chunks[index] for index in here]
        graph = _smallest_fitting(self.graphs.mixed_for(chunks), tokens)
        inputs = graph.next_buffer()
        self._write_mixed(inputs, graph, chunks, len(rows))
        self.graphs.write_slots(graph, inputs, chunks)
        self.graphs.table.write(inputs)
        graph.replay()
        tokens_of_rows = self._sampled(step, here, graph.tokens, graph.logits, sample)
        # Cloned if they are read later: another replay of the same graph in this step would overwrite them.
        read_later = not greedy and sample is None
        step.add(here, tokens_of_rows, graph.logits.clone() if read_later else graph.logits)
        return prompts[taken:]

    def _sampled(
        self, step: CudaGraphStep, indices: list[int], tokens: torch.Tensor, logits: torch.Tensor, sample: Sample | None
    ) -> torch.Tensor:
        """Return the tokens of a replay's rows, one per index. With `sample`, the next step continues from sampled ones."""
        tokens = tokens[: len(indices)]
        rows = [] if sample is None else [row for row, index in enumerate(indices) if step.chunks[index].samples]
        if sample is None or not rows:
            return tokens
        chunks = [step.chunks[indices[row]] for row in rows]
        where = self._to_device(rows)
        every = len(rows) == len(indices)
        chosen = sample(chunks, logits[: len(indices)] if every else logits.index_select(0, where))
        batch_indices = self._to_device([chunk.sequence.batch_index for chunk in chunks])
        self.graphs.last_tokens.index_copy_(0, batch_indices, chosen)
        return chosen if every else tokens.index_copy(0, where, chosen)

    def _to_device(self, values: Sequence[int]) -> torch.Tensor:
        """Copy numbers to the device without waiting."""
        return torch.from_numpy(np.asarray(values, np.int64)).to(self.device, non_blocking=True)

    def _write_mixed(self, inputs: IntArray, graph: CudaGraph, chunks: Sequence[Chunk], rows: int) -> None:
        """Write the inputs of a replay for chunks, of which the first `rows` are of one token."""
        size, padding, length = graph.size, self.graphs.max_running, self.graphs.tile
        ids, positions, rotary, batch_indices, row_tiles, tiles, sampled_rows, sampled_indices = (
            self.graphs.mixed_inputs(size, inputs)
        )
        sampled_indices[:] = padding
        sampled_rows[:] = 0
        row_tiles[:] = 0
        for chunk in chunks:
            sequence = chunk.sequence
            self.graphs.table.set(sequence.batch_index, sequence.pages, (sequence.arrived, sequence.preemptions))
        if rows:
            decodes = chunks[:rows]
            ids[:rows] = [chunk.first_token if chunk.known else -1 for chunk in decodes]
            positions[:rows] = rotary[:rows] = [chunk.start for chunk in decodes]
            batch_indices[:rows] = [chunk.sequence.batch_index for chunk in decodes]
            if self.position_rows > 1:
                rotary[:rows] += self._position_deltas(decodes)
            row_tiles[:rows, 0] = batch_indices[:rows]
            row_tiles[:rows, 1] = np.arange(rows)
            row_tiles[:rows, 2] = 1
            row_tiles[:rows, 3] = positions[:rows]
            sampled_rows[:rows] = np.arange(rows)
            sampled_indices[:rows] = batch_indices[:rows]
        first, tile = rows, 0
        for number, chunk in enumerate(chunks[rows:], rows):
            sequence, here = chunk.sequence, slice(first, first + chunk.count)
            ids[here] = sequence.tokens[chunk.start : chunk.end]
            positions[here] = rotary[here] = np.arange(chunk.start, chunk.end)
            batch_indices[here] = sequence.batch_index
            cuts = np.arange(0, chunk.count, length)
            cut = tiles[tile : tile + len(cuts)]
            cut[:, 0] = sequence.batch_index
            cut[:, 1] = first + cuts
            cut[:, 2] = np.minimum(chunk.count - cuts, length)
            cut[:, 3] = chunk.start + cuts
            tile += len(cuts)
            first += chunk.count
            sampled_rows[number] = first - 1
            sampled_indices[number] = sequence.batch_index
        tiles[tile:] = 0
        batch_indices[first:] = padding
        ids[first:] = positions[first:] = rotary[first:] = 0

    @staticmethod
    def _position_deltas(chunks: Sequence[Chunk]) -> list[int]:
        """Return by how much the positions of sequences with images differ from their tokens'."""
        return [chunk.sequence.prompt_inputs.position_delta if chunk.sequence.prompt_inputs else 0 for chunk in chunks]

    def _launch_others(
        self, step: CudaGraphStep, indices: list[int], sample: Sample | None, parts: Sequence[Chunk]
    ) -> None:
        """Compute chunks of a step, or `parts` of them, kernel by kernel. Waits for tokens that the host does not know."""
        chunks = [parts[index] for index in indices]
        last = self.graphs.last_tokens
        unknown = [chunk for chunk in chunks if not chunk.known]
        for chunk in unknown:
            chunk.sequence.tokens.append(int(last[chunk.sequence.batch_index]))
        try:
            logits = self.compute(chunks)
        finally:
            for chunk in unknown:
                chunk.sequence.tokens.pop()
        sampling = [index for index in indices if parts[index].samples]
        if not sampling:
            return
        tokens = logits.argmax(dim=-1) if sample is None else sample([step.chunks[index] for index in sampling], logits)
        batch_indices = torch.tensor(
            [step.chunks[index].sequence.batch_index for index in sampling], device=self.device
        )
        last.index_copy_(0, batch_indices, tokens)
        step.add(sampling, tokens, logits)

    def wait_for_steps(self) -> None:
        """See `ModelRunner`."""
        while self._in_flight:
            self._in_flight.popleft().wait()

    def forget(self) -> None:
        """See `ModelRunner`."""
        super().forget()
        self.wait_for_steps()
        self.graphs.table.forget()

    def close_graphs(self) -> None:
        """See `ModelRunner`."""
        self.wait_for_steps()
        if hasattr(self, "graphs"):
            self.graphs.close()
            del self.graphs

    def close(self) -> None:
        """Free the memory of the host and the device."""
        self.close_graphs()
        super().close()


def _reserved_bytes(device: torch.device) -> int:
    """Return what PyTorch's allocator has taken of a GPU."""
    if device.type != "cuda":
        return 0
    torch.cuda.empty_cache()
    return int(torch.cuda.memory_reserved(device))


def _smallest_fitting(graphs: Sequence[CudaGraph], size: int) -> CudaGraph:
    for graph in graphs:
        if graph.size >= size:
            return graph
    raise ValueError(f"a step of {size} is larger than the largest captured graph, {graphs[-1].size}")


def batch_sizes(max_running: int) -> list[int]:
    """Return the decode batch sizes to capture."""
    sizes = [size for size in (1, 2, 4, 8, 12, 16, 24, 32, 40, 48, 56, 64) if size < max_running]
    sizes += range(80, max_running, 16 if max_running <= 128 else 32)
    return [*sizes, max_running]


def mixed_sizes(max_step_tokens: int) -> list[int]:
    """Return the numbers of tokens of prompts and decode rows to capture."""
    return [size for size in _MIXED_SIZES if size < max_step_tokens] + [max_step_tokens]


def pinned_tensor(count: int, dtype: torch.dtype) -> torch.Tensor:
    """Return pinned host memory, which the device reads and writes directly."""
    return torch.empty(count, dtype=dtype, pin_memory=True)


@cache
def _capture_stream(device: int) -> torch.cuda.Stream:
    """Return one stream for all models: CUDA libraries keep memory for every stream forever."""
    return torch.cuda.Stream(device)


def capture(step: Callable[[], StepOutput], pool: Any) -> tuple[Any, StepOutput]:
    """Capture a step as a graph; return it and its output tensors. Other threads may use the device meanwhile."""
    graph = torch.cuda.CUDAGraph()
    stream = _capture_stream(torch.cuda.current_device())
    with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
        results = step()
    return graph, results


@dataclass(slots=True)
class CudaGraph:
    """A captured step and its input buffers."""

    graph: Any
    size: int
    inputs: torch.Tensor
    tokens: torch.Tensor
    logits: torch.Tensor
    buffers: list[torch.Tensor]
    arrays: list[IntArray]
    """Views of `buffers`."""
    slots_at: int = -1
    """Where its inputs have the slots of the rows' adapters; -1 for a graph that computes no adapters."""
    current: int = 0

    def next_buffer(self) -> IntArray:
        """Return the buffer to write the inputs of the next replay to."""
        self.current = (self.current + 1) % len(self.buffers)
        return self.arrays[self.current]

    def replay(self) -> None:
        """Queue the step on the device."""
        self.inputs.copy_(self.buffers[self.current], non_blocking=True)
        self.graph.replay()


class PageTable:
    """The page table on the device: the pages of each batch index. The next step carries the changes."""

    def __init__(self, rows: int, pages_per_row: int, padding_page: int, device: torch.device) -> None:
        self.tensor = torch.full((rows + 1, pages_per_row), padding_page, dtype=torch.int32, device=device)
        self._written: list[tuple[object, int]] = [(None, 0)] * rows
        """Per batch index: the version and the number of pages that were written."""
        self._width = pages_per_row
        self._padding_entry = (rows + 1) * pages_per_row - 1
        """An entry of the padding row, which no sequence uses."""
        self._padding_page = padding_page
        self._offsets: list[int] = []
        self._values: list[int] = []

    def set(self, batch_index: int, pages: list[int], version: object) -> None:
        """Set the pages of a batch index. While the version is the same, pages were only appended."""
        before, same = self._written[batch_index]
        count = len(pages)
        if before != version:
            same = 0
        elif same == count:
            return
        base = batch_index * self._width
        self._offsets.extend(range(base + same, base + count))
        self._values.extend(pages[same:])
        self._written[batch_index] = (version, count)

    def forget(self) -> None:
        """Forget all sequences: the next ones may have the versions of earlier ones."""
        self._written = [(None, 0)] * len(self._written)
        self._offsets.clear()
        self._values.clear()

    def write(self, inputs: IntArray) -> None:
        """Write the changes into the last `2 * TABLE_UPDATES` inputs of a step."""
        count = len(self._offsets)
        offsets, values = inputs[-2 * TABLE_UPDATES : -TABLE_UPDATES], inputs[-TABLE_UPDATES:]
        offsets[:] = self._padding_entry
        values[:] = self._padding_page
        if not count:
            return
        if count > TABLE_UPDATES:
            device = self.tensor.device
            self.tensor.view(-1).index_copy_(
                0,
                torch.tensor(self._offsets, device=device),
                torch.tensor(self._values, dtype=torch.int32, device=device),
            )
        else:
            offsets[:count] = self._offsets
            values[:count] = self._values
        self._offsets.clear()
        self._values.clear()


class CudaGraphs:
    """The captured graphs of one model on one device."""

    def __init__(
        self,
        model: Any,
        modules: Sequence[Any],
        *,
        page_size: int,
        max_running: int,
        max_length: int,
        max_step_tokens: int,
        position_rows: int = 1,
        compiled: bool = True,
        fixed_rows: int = 0,
    ) -> None:
        """`modules` are the attention modules with their `headrace_cache`, whose last page is for padding.

        `fixed_rows`: the size of the only graph; 0: there are graphs of many sizes.
        """
        keys = modules[0].headrace_cache.keys
        self.model = model
        self.device = keys.device
        self.page_size = page_size
        self.max_running = max_running
        """Also the padding row of the page table and of `last_tokens`."""
        self.table = PageTable(max_running, -(-max_length // page_size), len(keys) // page_size - 1, self.device)
        self.group = model.config.get_text_config().num_attention_heads // keys.shape[1]
        self.split = cuda_attention.split_tokens(max_length) if fixed_rows else 0
        """Keys whose attention is summed together; 0: as many as suit the step."""
        self.tile = cuda_attention.tile_tokens(self.group, self.split)
        self.last_tokens = torch.zeros(max_running + 1, dtype=torch.int64, device=self.device)
        self._position_rows = position_rows
        self._fixed_rows = fixed_rows
        self._max_step_tokens = max_step_tokens
        self._modules = modules
        self._no_tiles = torch.zeros(cuda_attention.NO_TILES, 4, dtype=torch.int32, device=self.device)
        self._pool: Any = None
        self._adapters: LoraAdapters | None = getattr(model, "headrace_adapters", None)
        self.adapter_batches: list[CudaGraph] = []
        """As `batches`, for rows of which some have adapters: their products are in the graph, for all slots."""
        self.adapter_mixed: list[CudaGraph] = []
        cuda_attention.register()
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # for this thread, which launches all steps
        with _CAPTURE_LOCK:
            try:
                self._capture_all(max_step_tokens, compiled)
            except Exception:
                if not compiled:
                    raise
                # No C compiler, or a layer that cannot be traced: graphs alone give most of the speed.
                log.warning(
                    "The layers of %s are not compiled: steps take longer.", type(model).__name__, exc_info=True
                )
                self._capture_all(max_step_tokens, False)

    # What a step computes. Its inputs are int32: 4 per row of a decode batch; for others see `mixed_inputs`.

    def _batch_step(self, size: int, inputs: torch.Tensor) -> StepOutput:
        batch_indices, positions, rotary, given = inputs[: 4 * size].view(4, size)
        self._update(inputs)
        index = batch_indices.long()
        row_tiles = torch.stack([batch_indices, self._counting(size), torch.ones_like(batch_indices), positions], dim=1)
        return self._forward(given, index, positions, rotary, row_tiles, self._no_tiles, None, index)

    def _mixed_step(self, size: int, inputs: torch.Tensor) -> StepOutput:
        ids, positions, rotary, batch_indices, row_tiles, tiles, sampled_rows, sampled_indices = self.mixed_inputs(
            size, inputs
        )
        self._update(inputs)
        return self._forward(
            ids, batch_indices.long(), positions, rotary, row_tiles, tiles, sampled_rows.long(), sampled_indices.long()
        )

    def mixed_inputs(self, size: int, inputs: Any) -> list[Any]:
        """Return the parts of the inputs of a replay for `size` tokens, decode rows first.

        Token ids (-1: the sequence's last token, which the device knows), positions, rotary positions and batch indices; the
        tiles of decode rows and those of prompts; rows and batch indices for which a token is sampled.
        """
        rows, sampled = self.rows_of(size), self.rows_of(size) + MAX_PROMPTS
        parts, at = [], 0
        for shape in [(size,)] * 4 + [(rows, 4), (self.tiles_of(size), 4)] + [(sampled,)] * 2:
            count = math.prod(shape)
            parts.append(inputs[at : at + count].reshape(shape))
            at += count
        return parts

    def _forward(
        self,
        given: torch.Tensor,
        batch_indices: torch.Tensor,
        positions: torch.Tensor,
        rotary: torch.Tensor,
        row_tiles: torch.Tensor,
        tiles: torch.Tensor,
        sampled_rows: torch.Tensor | None,
        sampled_indices: torch.Tensor,
    ) -> StepOutput:
        ids = torch.where(given >= 0, given.long(), self.last_tokens[batch_indices])
        pages = self.table.tensor[batch_indices, (positions // self.page_size).long()]
        rotary = rotary.long()[None]
        output = self.model(
            input_ids=ids[None],
            position_ids=rotary if self._position_rows == 1 else rotary.expand(self._position_rows, 1, -1),
            logits_to_keep=0 if sampled_rows is None else sampled_rows,
            use_cache=False,
            return_dict=True,
            headrace_slots=pages * self.page_size + positions % self.page_size,
            headrace_table=self.table.tensor,
            headrace_row_tiles=row_tiles,
            headrace_tiles=tiles,
        )
        logits = output.logits[0]
        tokens = logits.argmax(dim=-1)
        self.last_tokens.index_copy_(0, sampled_indices, tokens)
        return tokens, logits

    def _update(self, inputs: torch.Tensor) -> None:
        offsets, values = inputs[-2 * TABLE_UPDATES : -TABLE_UPDATES], inputs[-TABLE_UPDATES:]
        self.table.tensor.view(-1).index_copy_(0, offsets.long(), values)

    def _counting(self, size: int) -> torch.Tensor:
        return torch.arange(size, dtype=torch.int32, device=self.device)

    # LoRA adapters: a second set of graphs has their products, so that steps without adapters pay nothing.

    def slot_of(self, adapter: str) -> int:
        """Return the slot of an adapter; -1 if it has none."""
        return -1 if self._adapters is None else self._adapters.slot_of(adapter)

    def batches_for(self, chunks: Sequence[Chunk]) -> Sequence[CudaGraph]:
        """Return the graphs for decode rows."""
        return self.adapter_batches if any(chunk.sequence.adapter for chunk in chunks) else self.batches

    def mixed_for(self, chunks: Sequence[Chunk]) -> Sequence[CudaGraph]:
        """Return the graphs for prompts and decode rows."""
        return self.adapter_mixed if any(chunk.sequence.adapter for chunk in chunks) else self.mixed

    def write_slots(self, graph: CudaGraph, inputs: IntArray, chunks: Sequence[Chunk]) -> None:
        """Write the slots of chunks, in the order of their rows, into the inputs of a replay."""
        if graph.slots_at < 0:
            return
        slots = inputs[graph.slots_at : graph.slots_at + graph.size]
        first = 0
        for chunk in chunks:
            slots[first : first + chunk.count] = self.slot_of(chunk.sequence.adapter)
            first += chunk.count
        slots[first:] = -1

    def _using_slots(
        self, size: int, inputs: torch.Tensor, slots_at: int, *, batch: bool
    ) -> AbstractContextManager[None]:
        """Compute the adapters of the rows, or none."""
        if self._adapters is None:
            return nullcontext()
        if slots_at < 0:
            return self._adapters.captured()
        slots = inputs[slots_at : slots_at + size]
        head = slots if batch else slots[self.mixed_inputs(size, inputs)[6].long()]
        return self._adapters.captured(slots, head)

    def tiles_of(self, size: int) -> int:
        """Return the number of prompt tiles for `size` tokens."""
        return -(-size // self.tile) + MAX_PROMPTS

    def rows_of(self, size: int) -> int:
        """Return the number of decode rows that a replay for `size` tokens takes."""
        return max(2, min(size, self.max_running))

    # Capturing

    def _capture_all(self, max_step_tokens: int, compiled: bool) -> None:
        """Capture the largest graphs first: smaller ones reuse their memory."""
        if self._fixed_rows:
            with torch.inference_mode(), self._prepared(compiled):
                self.mixed, self.batches = [self._capture(self._fixed_rows, batch=False)], []
            return
        with torch.inference_mode(), self._prepared(compiled):
            mixed, batches = mixed_sizes(max_step_tokens)[::-1], batch_sizes(self.max_running)[::-1]
            self.mixed = [self._capture(size, batch=False) for size in mixed][::-1]
            self.batches = [self._capture(size, batch=True) for size in batches if size > 1][::-1]
            if self._adapters is not None:
                self.adapter_mixed = [self._capture(size, batch=False, adapters=True) for size in mixed][::-1]
                self.adapter_batches = [self._capture(size, batch=True, adapters=True) for size in batches][::-1]
        # For one row, the compiler's tuned matrix-vector kernels are faster than cuBLAS.
        with torch.inference_mode(), self._prepared(compiled, coordinate_descent_tuning=True):
            self.batches.insert(0, self._capture(1, batch=True))

    @contextmanager
    def _prepared(self, compiled: bool, **options: Any) -> Iterator[None]:
        """Use our attention and experts, and compiled layers if wanted, while graphs are captured."""
        model, config = self.model, self.model.config.get_text_config()
        before = config._attn_implementation
        names = set(getattr(model, "_no_split_modules", None) or ())
        layers = [module for module in model.modules() if type(module).__name__ in names] if compiled else []
        try:
            for module in self._modules:
                cuda_attention.attach(module, self.split)
            config._attn_implementation = cuda_attention.ATTENTION
            with using_fused_experts(model), _compiler_settings(bool(self._fixed_rows)) if compiled else nullcontext():
                for layer in layers:
                    layer.compile(dynamic=True, options=options)
                yield
        finally:
            for layer in layers:
                layer._compiled_call_impl = None
            for module in self._modules:
                cuda_attention.detach(module)
            config._attn_implementation = before

    def _capture(self, size: int, *, batch: bool, adapters: bool = False) -> CudaGraph:
        count = 4 * size if batch else self._mixed_inputs_size(size)
        slots_at = count if adapters else -1
        count += size if adapters else 0
        inputs = torch.empty(count + 2 * TABLE_UPDATES, dtype=torch.int32, device=self.device)
        replays = 1 if batch else -(-self.max_running // MAX_PROMPTS) + 2
        if self._fixed_rows:
            replays += -(-self._max_step_tokens // size) + -(-self.max_running // min(size, self.rows_of(size)))
        compute = self._batch_step if batch else self._mixed_step

        def step() -> StepOutput:
            with self._using_slots(size, inputs, slots_at, batch=batch):
                return compute(size, inputs)

        buffers = [pinned_tensor(len(inputs), torch.int32) for _ in range((STEPS_AHEAD + 1) * replays)]
        padding_inputs = self._padding_inputs(size, batch, len(inputs))
        inputs.copy_(torch.from_numpy(padding_inputs))
        step()
        graph, (tokens, logits) = capture(step, self._pool)
        self._pool = self._pool or graph.pool()
        arrays = [buffer.numpy() for buffer in buffers]
        return CudaGraph(graph, size, inputs, tokens, logits, buffers, arrays, slots_at)

    def _mixed_inputs_size(self, size: int) -> int:
        return 4 * (size + self.rows_of(size) + self.tiles_of(size)) + 2 * (self.rows_of(size) + MAX_PROMPTS)

    def _padding_inputs(self, size: int, batch: bool, count: int) -> IntArray:
        """Return the inputs of a step of padding rows only."""
        inputs = np.zeros(count, np.int32)
        if batch:
            inputs[:size] = self.max_running
        else:
            *_, batch_indices, _, _, _, sampled_indices = self.mixed_inputs(size, inputs)
            batch_indices[:] = self.max_running
            sampled_indices[:] = self.max_running
        self.table.write(inputs)
        return inputs

    def are_rows_alike(self) -> bool:
        """Return whether equal tokens have equal logits at all places of the only graph, as far as logits are computed."""
        graph = self.mixed[0]
        size, rows = graph.size, min(graph.size, self.rows_of(graph.size))
        with torch.inference_mode():
            for token in trial_tokens(self.model.config.get_text_config().vocab_size):
                inputs = self._padding_inputs(size, False, len(graph.inputs))
                ids, _, rotary, _, row_tiles, tiles, sampled_rows, _ = self.mixed_inputs(size, inputs)
                ids[:], rotary[:] = token, 7
                row_tiles[:rows, 0], row_tiles[:rows, 1], row_tiles[:rows, 2] = self.max_running, np.arange(rows), 1
                # Some of the other rows, as prompts of one token.
                others = np.unique(np.linspace(rows, size - 1, min(MAX_PROMPTS, size - rows)).astype(np.int32))
                tiles[: len(others), 0], tiles[: len(others), 1], tiles[: len(others), 2] = self.max_running, others, 1
                sampled_rows[:rows] = np.arange(rows)
                sampled_rows[rows : rows + len(others)] = others
                graph.inputs.copy_(torch.from_numpy(inputs))
                graph.graph.replay()
                if not are_alike(graph.logits):
                    return False
        return True

    def close(self) -> None:
        """Free the graphs and the model."""
        self.mixed.clear()
        self.batches.clear()
        self.adapter_mixed.clear()
        self.adapter_batches.clear()
        del self.model, self._modules, self._adapters, self._pool, self.last_tokens, self.table


@contextmanager
def _compiler_settings(fixed: bool) -> Iterator[None]:
    """Configure the compiler to start no processes, and to compile for any number of models of one class.

    `fixed`: kernels are not chosen by timing them, so that they are the same after the next start.
    """
    from torch._dynamo import config as dynamo
    from torch._inductor import config as inductor

    choice = {"deterministic": True} if fixed and hasattr(inductor, "deterministic") else {}
    with (
        inductor.patch(compile_threads=1, **choice),
        dynamo.patch(recompile_limit=1024, accumulated_recompile_limit=1 << 16),
    ):
        yield
