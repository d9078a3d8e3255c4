# SPDX-License-Identifier: Apache-2.0
"""A step as bytes: what the ranks must know of the chunks that the scheduler has chosen.

Ranks keep the sequences of earlier steps, so that a token of a running sequence takes three integers: its batch index, its
position, and the token (-1: the device has it). Other chunks say more: new pages, tokens of a prompt, the adapter.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Sequences
from typing import Any

from headrace.backends.llm.scheduler import Chunk, Sequence

_INTEGERS = "i"
_LONG = 1 << 20
"""Added to the batch index of a chunk in the long form."""
_SAMPLES, _KNOWN, _NEW, _WANTS_LOGITS = 1, 2, 4, 8
_GREEDY, _SAMPLED = 1, 2


class StepEncoder:
    """Encodes the steps of one scheduler, in their order."""

    def __init__(self, adapters: Sequences[str]) -> None:
        self._adapters = {name: number for number, name in enumerate(adapters, 1)}
        self._sent: dict[int, tuple[Sequence, int, int]] = {}
        """By batch index: the sequence, its preemptions, and how many of its pages the ranks know."""

    def encode(self, chunks: Sequences[Chunk], *, greedy: bool, sampled: bool) -> bytes:
        """Return the message of a step."""
        integers = array(_INTEGERS, (greedy * _GREEDY | sampled * _SAMPLED, len(chunks)))
        sent = self._sent
        for chunk in chunks:
            sequence, start = chunk.sequence, chunk.start
            index, pages = sequence.batch_index, sequence.pages
            known = sent.get(index)
            is_same = known is not None and known[0] is sequence and known[1] == sequence.preemptions
            if (
                is_same
                and known is not None
                and chunk.count == 1
                and chunk.samples
                and known[2] == len(pages)
                and sequence.prompt_logprobs is None
            ):
                integers.extend((index, start, sequence.tokens[start] if chunk.known else -1))
                continue
            pages_known = known[2] if is_same and known is not None else 0
            sent[index] = (sequence, sequence.preemptions, len(pages))
            self._add_long(integers, chunk, pages[pages_known:], is_new=not is_same)
        return integers.tobytes()

    def _add_long(self, integers: Any, chunk: Chunk, pages: list[int], *, is_new: bool) -> None:
        sequence, receiver = chunk.sequence, chunk.sequence.prompt_logprobs
        bits = chunk.samples * _SAMPLES | chunk.known * _KNOWN | is_new * _NEW | (receiver is not None) * _WANTS_LOGITS
        rows = 0 if receiver is None else receiver.rows_of(chunk.start, chunk.end)
        adapter = self._adapters[sequence.adapter] if sequence.adapter else 0
        integers.extend((sequence.batch_index + _LONG, chunk.start, chunk.count, bits, sequence.prompt_length))
        integers.extend((rows, adapter, len(pages)))
        integers.extend(pages)
        if chunk.known:
            integers.extend(sequence.tokens[chunk.start : chunk.end])


class StepDecoder:
    """Decodes the steps in a rank: chunks of sequences that are copies of the scheduler's."""

    def __init__(self, adapters: Sequences[str]) -> None:
        self._adapters = ("", *adapters)
        self._sequences: dict[int, Sequence] = {}
        self._arrivals = 0

    def decode(self, message: bytes) -> tuple[list[Chunk], bool, bool]:
        """Return the chunks of a step, and whether it is greedy and sampled on the device."""
        integers = array(_INTEGERS)
        integers.frombytes(message)
        values = integers.tolist()
        bits, count = values[:2]
        chunks: list[Chunk] = []
        at = 2
        for _ in range(count):
            index = values[at]
            if index >= _LONG:
                chunk, at = self._long(values, at)
                chunks.append(chunk)
                continue
            sequence, start, token = self._sequences[index], values[at + 1], values[at + 2]
            _set_tokens(sequence, start, [token] if token >= 0 else [])
            chunks.append(Chunk(sequence, start, 1, True, token >= 0))
            at += 3
        return chunks, bool(bits & _GREEDY), bool(bits & _SAMPLED)

    def _long(self, values: list[int], at: int) -> tuple[Chunk, int]:
        index, start, count, bits, prompt_length, rows, adapter, pages = values[at : at + 8]
        index -= _LONG
        at += 8
        if bits & _NEW:
            self._arrivals += 1
            sequence = self._sequences[index] = Sequence([], 0, adapter=self._adapters[adapter])
            sequence.arrived, sequence.batch_index = self._arrivals, index
        sequence = self._sequences[index]
        sequence.prompt_length = prompt_length
        sequence.prompt_logprobs = _WantedRows(rows) if bits & _WANTS_LOGITS else None
        sequence.pages += values[at : at + pages]
        at += pages
        known = bool(bits & _KNOWN)
        tokens = values[at : at + count] if known else []
        _set_tokens(sequence, start, tokens)
        return Chunk(sequence, start, count, bool(bits & _SAMPLES), known), at + len(tokens)


class _WantedRows:
    """Stands for the receiver of prompt logits, which is in the first rank: so many rows of a chunk have logits."""

    def __init__(self, rows: int) -> None:
        self._rows = rows

    def rows_of(self, _start: int, _end: int) -> int:
        """Return how many rows of the chunk are wanted."""
        return self._rows

    def add(self, _start: int, _logits: Any) -> None:
        """Drop the logits."""


def _set_tokens(sequence: Sequence, start: int, tokens: list[int]) -> None:
    """Set the tokens of a chunk. Those before it, which steps no longer need, may be missing."""
    own = sequence.tokens
    if len(own) < start:
        own.extend([0] * (start - len(own)))
    own[start:] = tokens
