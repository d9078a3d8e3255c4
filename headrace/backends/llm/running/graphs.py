# SPDX-License-Identifier: Apache-2.0
"""The runner for CUDA: steps are replays of captured graphs (`cuda_graphs`) wherever they can be.

Made by the backend in place of a `Runner` when the device is a GPU and `cuda_graphs` is not false. Rows of one token
are one replay, pieces of prompts others. What a graph does not know goes the runner's own way, kernel by kernel: prompts
with pictures, and rows of an adapter.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from headrace.backends.llm.running.cuda_graphs import PROMPTS, STEPS_AHEAD, Graph, Numbers, StepGraphs, pinned
from headrace.backends.llm.running.packing import pack
from headrace.backends.llm.running.runner import Runner, Step
from headrace.backends.llm.scheduling.sequences import Piece


class GraphStep(Step):
    """A step of one or more replays."""

    __slots__ = ("_arrived", "_host", "_parts", "_used")

    def __init__(self, pieces: Sequence[Piece], host: torch.Tensor) -> None:
        self.pieces = pieces
        self._host = host
        """Pinned memory for a token of each piece."""
        self._used = 0
        self._parts: list[tuple[list[int], torch.Tensor, torch.Tensor]] = []
        """Of each replay: which of the step's pieces, their tokens on the host, their logits."""
        self._arrived = torch.cuda.Event(blocking=True)  # or waiting would keep a core busy

    def add(self, places: list[int], tokens: torch.Tensor, logits: torch.Tensor) -> None:
        """The rows of a replay, one for each place."""
        host = self._host[self._used : self._used + len(places)]
        self._used += len(places)
        host.copy_(tokens, non_blocking=True)
        self._parts.append((places, host, logits))

    def launched(self) -> None:
        """All of it is with the device."""
        self._arrived.record()

    def wait(self) -> None:
        """Until the device has done it."""
        self._arrived.synchronize()

    @property
    def logits(self) -> torch.Tensor:
        """`[rows, vocabulary]` in float32. Only before the next launch: graphs write where they wrote before."""
        sampling = self._sampling()
        if len(self._parts) == 1 and self._parts[0][0] == sampling:
            return self._parts[0][2][: len(sampling)].float()
        rows = {place: logits[row] for places, _, logits in self._parts for row, place in enumerate(places)}
        return torch.stack([rows[place] for place in sampling]).float()

    def tokens(self) -> list[int]:
        """The likeliest token of each row that samples. Waits for the device."""
        self.wait()
        if len(self._parts) == 1 and all(piece.samples for piece in self.pieces):
            tokens: list[int] = self._parts[0][1].tolist()
            return tokens
        found: dict[int, int] = {}
        for places, host, _ in self._parts:
            found.update(zip(places, host.tolist(), strict=True))
        return [found[place] for place in self._sampling()]

    def _sampling(self) -> list[int]:
        return [place for place, piece in enumerate(self.pieces) if piece.samples]


class GraphRunner(Runner):
    """A runner whose steps are graphs."""

    ahead = True

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
    ) -> None:
        super().__init__(model, attention, cache, page_size=page_size)
        self.graphs = StepGraphs(
            model,
            attention.modules,
            page_size=page_size,
            max_running=max_running,
            max_length=max_length,
            max_step_tokens=max(max_step_tokens, max_running + page_size),  # as the scheduler has it
            position_rows=self.position_rows,
            compiled=compiled,
        )
        self._flying: deque[GraphStep] = deque()
        self._hosts = deque(pinned(max_running, torch.int64) for _ in range(STEPS_AHEAD + 2))
        """For the tokens of that many steps; a step's are read before so many others are launched."""

    def launch(self, pieces: Sequence[Piece], *, greedy: bool) -> Step:
        """Give a step to the device. Does not wait for the step before."""
        step = self._new_step(pieces)
        rows: list[int] = []
        prompts: list[int] = []
        others: list[int] = []
        largest = self.graphs.prompts[-1].size
        for place, piece in enumerate(pieces):
            sequence = piece.sequence
            pictures = sequence.extras is not None and piece.start < sequence.prompt_length
            if sequence.adapter or pictures or piece.count > largest:
                others.append(place)
            elif piece.count == 1:
                rows.append(place)
            else:
                prompts.append(place)
        with torch.inference_mode():
            if rows:
                self._launch_rows(step, rows)
            while prompts:
                prompts = self._launch_prompts(step, prompts, greedy)
            if others:
                self._launch_others(step, others)
            step.launched()
        return step

    def _new_step(self, pieces: Sequence[Piece]) -> GraphStep:
        """Waits while too many steps are under way: their numbers and tokens are in memory that is used in turns."""
        while len(self._flying) >= STEPS_AHEAD:
            self._flying.popleft().wait()
        self._hosts.rotate()
        step = GraphStep(pieces, self._hosts[0])
        self._flying.append(step)
        return step

    def _launch_rows(self, step: GraphStep, places: list[int]) -> None:
        graph = _fitting(self.graphs.batches, len(places))
        size, table = graph.size, self.graphs.table
        numbers = graph.stage()
        seats, positions, turned, given = numbers[: 4 * size].reshape(4, size)
        count = len(places)
        seats[count:] = self.graphs.seats
        positions[count:] = 0
        turned[count:] = 0
        given[count:] = 0
        pieces = [step.pieces[place] for place in places]
        sequences = [piece.sequence for piece in pieces]
        for sequence in sequences:
            table.set(sequence.seat, sequence.pages, (sequence.arrived, sequence.preemptions))
        seats[:count] = [sequence.seat for sequence in sequences]
        positions[:count] = turned[:count] = [piece.start for piece in pieces]
        given[:count] = [piece.sequence.tokens[piece.start] if piece.known else -1 for piece in pieces]
        if self.position_rows > 1:
            turned[:count] += [sequence.extras.delta if sequence.extras else 0 for sequence in sequences]
        table.write(numbers)
        graph.replay()
        step.add(places, graph.tokens[:count], graph.logits)

    def _launch_prompts(self, step: GraphStep, places: list[int], greedy: bool) -> list[int]:
        """As many of these pieces as a graph takes; returns the others."""
        most, taken, tokens = self.graphs.prompts[-1].size, 0, 0
        for place in places[:PROMPTS]:
            if taken and tokens + step.pieces[place].count > most:
                break
            taken += 1
            tokens += step.pieces[place].count
        graph = _fitting(self.graphs.prompts, tokens)
        numbers = graph.stage()
        self._write_prompts(numbers, graph, [step.pieces[place] for place in places[:taken]])
        self.graphs.table.write(numbers)
        graph.replay()
        # Another replay of the same graph in this step would overwrite them.
        step.add(places[:taken], graph.tokens[:taken], graph.logits if greedy else graph.logits.clone())
        return places[taken:]

    def _write_prompts(self, numbers: Numbers, graph: Graph, pieces: Sequence[Piece]) -> None:
        size, nobody, length = graph.size, self.graphs.seats, self.graphs.tile
        ids, positions, turned, seats = numbers[: 4 * size].reshape(4, size)
        tiles = numbers[4 * size : 4 * size + 4 * self.graphs.tiles_of(size)].reshape(-1, 4)
        sampled, samplers = numbers[4 * size + tiles.size :][: 2 * PROMPTS].reshape(2, PROMPTS)
        first, tile = 0, 0
        samplers[:] = nobody
        sampled[:] = 0
        for number, piece in enumerate(pieces):
            sequence, here = piece.sequence, slice(first, first + piece.count)
            self.graphs.table.set(sequence.seat, sequence.pages, (sequence.arrived, sequence.preemptions))
            ids[here] = sequence.tokens[piece.start : piece.end]
            positions[here] = turned[here] = np.arange(piece.start, piece.end)
            seats[here] = sequence.seat
            cuts = np.arange(0, piece.count, length)
            cut = tiles[tile : tile + len(cuts)]
            cut[:, 0] = sequence.seat
            cut[:, 1] = first + cuts
            cut[:, 2] = np.minimum(piece.count - cuts, length)
            cut[:, 3] = piece.start + cuts
            tile += len(cuts)
            first += piece.count
            sampled[number] = first - 1
            samplers[number] = sequence.seat
        tiles[tile:] = 0
        seats[first:] = nobody
        ids[first:] = positions[first:] = turned[first:] = 0

    def _launch_others(self, step: GraphStep, places: list[int]) -> None:
        """Kernel by kernel. A token that is not known here is waited for."""
        pieces = [step.pieces[place] for place in places]
        last = self.graphs.last
        lent = [piece for piece in pieces if not piece.known]
        for piece in lent:
            piece.sequence.tokens.append(int(last[piece.sequence.seat]))
        try:
            logits = self.forward(pack(pieces, self))
        finally:
            for piece in lent:
                piece.sequence.tokens.pop()
        sampling = [place for place in places if step.pieces[place].samples]
        if not sampling:
            return
        tokens = logits.argmax(dim=-1)
        seats = torch.tensor([step.pieces[place].sequence.seat for place in sampling], device=self.device)
        last.index_copy_(0, seats, tokens)
        step.add(sampling, tokens, logits)

    def close(self) -> None:
        """Let go of the memory, the device's too."""
        while self._flying:
            self._flying.popleft().wait()
        self.graphs.close()
        del self.graphs
        super().close()


def _fitting(graphs: Sequence[Graph], size: int) -> Graph:
    for graph in graphs:
        if graph.size >= size:
            return graph
    raise ValueError(f"a step of {size} is larger than the {graphs[-1].size} that were captured")
