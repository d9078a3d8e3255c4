# SPDX-License-Identifier: Apache-2.0
"""Steps as CUDA graphs: what a model does for so many tokens, captured once and replayed.

Used by `graphs`. Launching a model's kernels one by one costs more than computing them, so each step is one copy of
a few numbers to the device, one replay, one copy of tokens back. There is a graph for each of some sizes of a decoding
batch, and for each of some numbers of prompt tokens; a step takes the next larger one, and what is left over writes to a
page and a seat that nobody has.

What the device keeps between steps: the last token of each seat (a running sequence's number), and each seat's pages. A
step brings only what changed, so it can be launched before the tokens of the step before are known to the host.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from headrace.backends.llm.running import cuda_attention

log = logging.getLogger("headrace.backends.llm")

_ONE_AT_A_TIME = threading.Lock()
"""Held while graphs are captured: the compiler's settings are the process's."""

Numbers = npt.NDArray[np.int32]
Results = tuple[torch.Tensor, torch.Tensor]
"""Tokens, and the logits that they were the likeliest of."""

UPDATES = 256
"""How many entries of the page table a step can change on its way."""
PROMPTS = 16
"""How many sequences' pieces of prompts are computed in one replay."""
_PROMPT_SIZES = (64, 128, 256, 384, 512, 768, 1024, 1536, 2048, 4096, 8192)
STEPS_AHEAD = 2
"""How many steps may be under way: their numbers wait on the host for the device to fetch them."""


def batch_sizes(max_running: int) -> list[int]:
    """The sizes of decoding batches that are captured."""
    sizes = [size for size in (1, 2, 4, 8, 12, 16, 24, 32, 40, 48, 56, 64) if size < max_running]
    sizes += range(80, max_running, 16 if max_running <= 128 else 32)
    return [*sizes, max_running]


def prompt_sizes(max_step_tokens: int) -> list[int]:
    """The numbers of prompt tokens that are captured."""
    return [size for size in _PROMPT_SIZES if size < max_step_tokens] + [max_step_tokens]


def pinned(count: int, dtype: torch.dtype) -> torch.Tensor:
    """Memory of the host that the device can read and write by itself."""
    return torch.empty(count, dtype=dtype, pin_memory=True)


@cache
def _capturing(device: int) -> torch.cuda.Stream:
    """One for all models: the libraries keep memory for each stream that they have seen, for good."""
    return torch.cuda.Stream(device)


def recorded(step: Callable[[], Results], pool: Any) -> tuple[Any, Results]:
    """A step as a graph, and where its results will lie. Other threads may use the device meanwhile."""
    graph = torch.cuda.CUDAGraph()
    stream = _capturing(torch.cuda.current_device())
    with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
        results = step()
    return graph, results


@dataclass(slots=True)
class Graph:
    """A captured step."""

    graph: Any
    size: int
    inputs: torch.Tensor
    tokens: torch.Tensor
    logits: torch.Tensor
    stages: list[torch.Tensor]
    arrays: list[Numbers]
    """The same memory as `stages`."""
    turn: int = 0

    def stage(self) -> Numbers:
        """Where the numbers of the next replay are to be written."""
        self.turn = (self.turn + 1) % len(self.stages)
        return self.arrays[self.turn]

    def replay(self) -> None:
        """Give the step to the device."""
        self.inputs.copy_(self.stages[self.turn], non_blocking=True)
        self.graph.replay()


class PageTable:
    """Which pages each seat has: on the device, and as the host last told it."""

    def __init__(self, seats: int, pages_per_seat: int, nobodys_page: int, device: torch.device) -> None:
        self.device = torch.full((seats + 1, pages_per_seat), nobodys_page, dtype=torch.int32, device=device)
        self._known: list[tuple[object, int]] = [(None, 0)] * seats
        self._width = pages_per_seat
        self._nowhere = (seats + 1) * pages_per_seat - 1
        """An entry of nobody's seat, which may be written at will."""
        self._nobodys_page = nobodys_page
        self._places: list[int] = []
        self._values: list[int] = []

    def set(self, seat: int, pages: list[int], stamp: object) -> None:
        """A seat's pages are these. As long as the stamp is the same, pages were only added."""
        before, same = self._known[seat]
        count = len(pages)
        if before != stamp:
            same = 0
        elif same == count:
            return
        base = seat * self._width
        self._places.extend(range(base + same, base + count))
        self._values.extend(pages[same:])
        self._known[seat] = (stamp, count)

    def write(self, numbers: Numbers) -> None:
        """Write the changes into the last `2 * UPDATES` numbers of a step."""
        count = len(self._places)
        places, values = numbers[-2 * UPDATES : -UPDATES], numbers[-UPDATES:]
        places[:] = self._nowhere
        values[:] = self._nobodys_page
        if not count:
            return
        if count > UPDATES:
            device = self.device.device
            self.device.view(-1).index_copy_(
                0,
                torch.tensor(self._places, device=device),
                torch.tensor(self._values, dtype=torch.int32, device=device),
            )
        else:
            places[:count] = self._places
            values[:count] = self._values
        self._places.clear()
        self._values.clear()


class StepGraphs:
    """The graphs of one model on one device."""

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
    ) -> None:
        """`modules` attend, and have their `headrace_cache`, whose last page is nobody's."""
        keys = modules[0].headrace_cache.keys
        self.model = model
        self.device = keys.device
        self.page_size = page_size
        self.seats = max_running
        self.table = PageTable(max_running, -(-max_length // page_size), len(keys) // page_size - 1, self.device)
        self.group = model.config.get_text_config().num_attention_heads // keys.shape[1]
        self.tile = cuda_attention.tokens_of_tile(self.group)
        self.last = torch.zeros(max_running + 1, dtype=torch.int64, device=self.device)
        self._position_rows = position_rows
        self._modules = modules
        self._pool: Any = None
        cuda_attention.register()
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # of this thread, which launches all steps
        with _ONE_AT_A_TIME:
            try:
                self._capture_all(max_step_tokens, compiled)
            except Exception:
                if not compiled:
                    raise
                # No C compiler, a layer that cannot be traced ...: graphs without it are still the larger part.
                log.warning("layers of %s are not compiled: steps take longer", type(model).__name__, exc_info=True)
                self._capture_all(max_step_tokens, False)

    # What a step computes. Numbers are int32: 4 for each row of a batch; for prompts see `_prompt_numbers`.

    def _batch_step(self, size: int, numbers: torch.Tensor) -> Results:
        seats, positions, turned, given = numbers[: 4 * size].view(4, size)
        self._update(numbers)
        index = seats.long()
        ids = torch.where(given >= 0, given.long(), self.last[index])
        tiles = torch.stack([seats, self._counting(size), torch.ones_like(seats), positions], dim=1)
        return self._forward(ids, index, positions, turned, tiles, None, index)

    def _prompt_step(self, size: int, numbers: torch.Tensor) -> Results:
        ids, positions, turned, seats = numbers[: 4 * size].view(4, size)
        tiles = numbers[4 * size : 4 * size + 4 * self.tiles_of(size)].view(-1, 4)
        sampled, samplers = numbers[4 * size + tiles.numel() :][: 2 * PROMPTS].view(2, PROMPTS)
        self._update(numbers)
        return self._forward(ids.long(), seats.long(), positions, turned, tiles, sampled.long(), samplers.long())

    def _forward(
        self,
        ids: torch.Tensor,
        seats: torch.Tensor,
        positions: torch.Tensor,
        turned: torch.Tensor,
        tiles: torch.Tensor,
        sampled: torch.Tensor | None,
        samplers: torch.Tensor,
    ) -> Results:
        pages = self.table.device[seats, (positions // self.page_size).long()]
        turned = turned.long()[None]
        output = self.model(
            input_ids=ids[None],
            position_ids=turned if self._position_rows == 1 else turned.expand(self._position_rows, 1, -1),
            logits_to_keep=0 if sampled is None else sampled,
            use_cache=False,
            return_dict=True,
            headrace_slots=pages * self.page_size + positions % self.page_size,
            headrace_table=self.table.device,
            headrace_tiles=tiles,
        )
        logits = output.logits[0]
        tokens = logits.argmax(dim=-1)
        self.last.index_copy_(0, samplers, tokens)
        return tokens, logits

    def _update(self, numbers: torch.Tensor) -> None:
        places, values = numbers[-2 * UPDATES : -UPDATES], numbers[-UPDATES:]
        self.table.device.view(-1).index_copy_(0, places.long(), values)

    def _counting(self, size: int) -> torch.Tensor:
        return torch.arange(size, dtype=torch.int32, device=self.device)

    def tiles_of(self, size: int) -> int:
        """How many tiles there are for so many prompt tokens."""
        return -(-size // self.tile) + PROMPTS

    def _prompt_numbers(self, size: int) -> int:
        return 4 * size + 4 * self.tiles_of(size) + 2 * PROMPTS

    # Capturing

    def _capture_all(self, max_step_tokens: int, compiled: bool) -> None:
        """The largest first: the others find their memory in what it needed."""
        with torch.inference_mode(), self._prepared(compiled):
            sizes = prompt_sizes(max_step_tokens)[::-1]
            self.prompts = [self._capture(size, self._prompt_step, self._prompt_numbers(size)) for size in sizes][::-1]
            sizes = batch_sizes(self.seats)[::-1]
            self.batches = [self._capture(size, self._batch_step, 4 * size) for size in sizes if size > 1][::-1]
        # One row times a matrix is a sum that the compiler's own kernels do better than the library's, if they are tuned.
        with torch.inference_mode(), self._prepared(compiled, coordinate_descent_tuning=True):
            self.batches.insert(0, self._capture(1, self._batch_step, 4))

    @contextmanager
    def _prepared(self, compiled: bool, **options: Any) -> Iterator[None]:
        """With our attention, and with compiled layers if wanted, as long as graphs are captured."""
        model, config = self.model, self.model.config.get_text_config()
        before = config._attn_implementation
        names = set(getattr(model, "_no_split_modules", None) or ())
        layers = [module for module in model.modules() if type(module).__name__ in names] if compiled else []
        try:
            for module in self._modules:
                cuda_attention.attach(module)
            config._attn_implementation = cuda_attention.ATTENTION
            with _compiling() if compiled else nullcontext():
                for layer in layers:
                    layer.compile(dynamic=True, options=options)
                yield
        finally:
            for layer in layers:
                layer._compiled_call_impl = None
            for module in self._modules:
                cuda_attention.detach(module)
            config._attn_implementation = before

    def _capture(self, size: int, step: Any, count: int) -> Graph:
        inputs = torch.empty(count + 2 * UPDATES, dtype=torch.int32, device=self.device)
        turns = (STEPS_AHEAD + 1) * (1 if step == self._batch_step else -(-self.seats // PROMPTS) + 2)
        stages = [pinned(len(inputs), torch.int32) for _ in range(turns)]
        idle = self._idle(size, step == self._batch_step, len(inputs))
        inputs.copy_(torch.from_numpy(idle))
        step(size, inputs)
        graph, (tokens, logits) = recorded(lambda: step(size, inputs), self._pool)
        self._pool = self._pool or graph.pool()
        return Graph(graph, size, inputs, tokens, logits, stages, [stage.numpy() for stage in stages])

    def _idle(self, size: int, batch: bool, count: int) -> Numbers:
        """The numbers of a step of nobody's tokens."""
        numbers = np.zeros(count, np.int32)
        if batch:
            numbers[:size] = self.seats
        else:
            numbers[3 * size : 4 * size] = self.seats
            numbers[count - 2 * UPDATES - PROMPTS : count - 2 * UPDATES] = self.seats
        self.table.write(numbers)
        return numbers

    def close(self) -> None:
        """Let go of the graphs and of the model."""
        self.prompts.clear()
        self.batches.clear()
        del self.model, self._modules, self._pool, self.last, self.table


@contextmanager
def _compiling() -> Iterator[None]:
    """With a compiler that starts no processes of its own, and that compiles for any number of models of one class."""
    from torch._dynamo import config as dynamo
    from torch._inductor import config as inductor

    with inductor.patch(compile_threads=1), dynamo.patch(recompile_limit=1024, accumulated_recompile_limit=1 << 16):
        yield
