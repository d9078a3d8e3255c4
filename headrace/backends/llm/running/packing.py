# SPDX-License-Identifier: Apache-2.0
"""Pieces of sequences to the tensors of one step. Called by the runner; copies to the device, waits for nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from headrace.backends.llm.scheduling.sequences import Piece

if TYPE_CHECKING:
    from headrace.backends.llm.running.runner import Runner


@dataclass(slots=True)
class Together:
    """Rows of one token each, whose contexts are read as one padded batch."""

    rows: torch.Tensor | slice
    """Which of the step's."""
    pages: torch.Tensor
    """`[rows, most pages]`, padded with page 0."""
    lengths: torch.Tensor
    """`[rows]`, of the contexts, the row's own token included."""
    masks: dict[int | None, torch.Tensor] = field(default_factory=dict)
    """By window, `[rows, 1, 1, slots]`: made when the first layer asks."""


@dataclass(slots=True)
class Run:
    """Rows of one sequence that follow each other."""

    first: int
    count: int
    start: int
    """The place of the first of them in its sequence."""
    pages: torch.Tensor
    masks: dict[int | None, torch.Tensor | None] = field(default_factory=dict)


@dataclass(slots=True)
class Layout:
    """What attention needs to know of a step."""

    slots: torch.Tensor
    """`[rows]`: where each row's key and value are written."""
    together: Sequence[Together]
    runs: Sequence[Run]


@dataclass(slots=True)
class Packed:
    """A step."""

    pieces: Sequence[Piece]
    ids: torch.Tensor
    """`[1, rows]`."""
    positions: torch.Tensor
    """`[1, rows]`, or `[3, 1, rows]`."""
    embeddings: torch.Tensor | None
    """`[1, rows, hidden]`, where a sequence brings some."""
    arguments: Mapping[str, torch.Tensor]
    """`[1, rows, ...]`: see `Extras.arguments`."""
    sampled: torch.Tensor
    """The rows after which a token is sampled."""
    layout: Layout


def pack(pieces: Sequence[Piece], runner: Runner) -> Packed:
    """One row of all tokens, in the order of the pieces. In inference mode."""
    size, device = runner.page_size, runner.device
    ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    sampled: list[int] = []
    single: list[tuple[int, Piece]] = []
    runs: list[Run] = []
    special = False
    for piece in pieces:
        sequence, start, end = piece.sequence, piece.start, piece.end
        first, pages = len(ids), sequence.pages
        if sequence.extras is not None:
            special = True
        if piece.count == 1:
            ids.append(sequence.tokens[start])
            positions.append(start)
            slots.append(pages[start // size] * size + start % size)
            single.append((first, piece))
        else:
            ids += sequence.tokens[start:end]
            positions += range(start, end)
            slots += [pages[place // size] * size + place % size for place in range(start, end)]
            used = torch.tensor(pages[: (end - 1) // size + 1], device=device)
            runs.append(Run(first, piece.count, start, used))
        if piece.samples:
            sampled.append(len(ids) - 1)
    packed = Packed(
        pieces,
        torch.tensor([ids], device=device),
        torch.tensor([positions], device=device),
        None,
        {},
        torch.tensor(sampled, dtype=torch.long, device=device),
        Layout(torch.tensor(slots, device=device), _grouped(single, size, device), runs),
    )
    if runner.position_rows > 1:
        packed.positions = packed.positions.expand(runner.position_rows, 1, -1)
    if special:
        _add_extras(packed, runner)
    return packed


def _grouped(single: Sequence[tuple[int, Piece]], size: int, device: torch.device) -> list[Together]:
    """Rows with contexts of like length together: the short ones do not pay for the longest."""
    if not single:
        return []
    counts = [(piece.end - 1) // size + 1 for _, piece in single]
    most = max(counts)
    if most * len(single) <= 2 * sum(counts) + 64:
        return [_together(single, most, device)]
    groups: dict[int, list[tuple[int, Piece]]] = {}
    for entry, count in zip(single, counts, strict=True):
        groups.setdefault((count - 1).bit_length(), []).append(entry)
    return [
        _together(group, max((piece.end - 1) // size + 1 for _, piece in group), device) for group in groups.values()
    ]


def _together(group: Sequence[tuple[int, Piece]], most: int, device: torch.device) -> Together:
    table = []
    for _, piece in group:
        pages = piece.sequence.pages[:most]
        table.append(pages + [0] * (most - len(pages)))
    numbers = [row for row, _ in group]
    in_line = numbers[-1] - numbers[0] == len(numbers) - 1
    rows = slice(numbers[0], numbers[-1] + 1) if in_line else torch.tensor(numbers, device=device)
    lengths = torch.tensor([piece.end for _, piece in group], device=device)
    return Together(rows, torch.tensor(table, device=device), lengths)


def _add_extras(packed: Packed, runner: Runner) -> None:
    """What the sequences bring themselves, in the rows that are theirs."""
    positions = packed.positions.clone()
    embeddings: torch.Tensor | None = None
    arguments: dict[str, torch.Tensor] = {}
    rows = packed.ids.shape[1]
    row = 0
    for piece in packed.pieces:
        extras, prompt = piece.sequence.extras, piece.sequence.prompt_length
        inside = max(0, min(piece.end, prompt) - piece.start)  # how many rows are of the prompt
        here, brought = slice(row, row + inside), slice(piece.start, piece.start + inside)
        row += piece.count
        if extras is None:
            continue
        if inside < piece.count:
            positions[..., row - piece.count + inside : row] += extras.delta
        if not inside:
            continue
        if extras.positions is not None:
            positions[:, 0, here] = extras.positions[:, brought]
        if extras.embeddings is not None:
            if embeddings is None:
                embeddings = runner.embed(packed.ids).clone()
            embeddings[0, here] = extras.embeddings[brought].to(embeddings.dtype)
        for name, tensor in extras.arguments.items():
            if name not in arguments:
                arguments[name] = tensor.new_zeros((1, rows, *tensor.shape[1:]))
            arguments[name][0, here] = tensor[brought]
    packed.positions, packed.embeddings, packed.arguments = positions, embeddings, arguments
