# SPDX-License-Identifier: Apache-2.0
"""KV events: which blocks of tokens an engine has in its prefix cache, in vLLM's format, which SGLang and others have too.

An engine publishes batches on a ZeroMQ PUB socket: topic, sequence number (8 bytes, big endian), and a msgpack array of the
time and the events. An event is an array with its kind first:

    ["BlockStored", block_hashes, parent_block_hash, token_ids, block_size, lora_id, medium, lora_name]
    ["BlockRemoved", block_hashes, medium]
    ["AllBlocksCleared"]

The medium is "GPU", or "CPU" for blocks that an engine keeps in host memory (vLLM sends no tokens with these).

Who has missed a number asks at a ROUTER socket for the batches from it on, and gets them as (number, batch), the last one
with the number -1. Only hashes of one engine can be compared; tokens mean the same everywhere.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

STORED, REMOVED, CLEARED = "BlockStored", "BlockRemoved", "AllBlocksCleared"
END = (-1).to_bytes(8, "big", signed=True)
"""The sequence number behind the last batch that is sent again."""
BlockHash = int | bytes
GPU, CPU = "GPU", "CPU"
"""Mediums."""


@dataclass(frozen=True, slots=True)
class BlockStored:
    """Consecutive blocks that were added to the prefix cache."""

    hashes: Sequence[BlockHash]
    parent: BlockHash | None
    """The hash of the block before the first one; None at the beginning of a prompt."""
    tokens: Sequence[int]
    """Of all blocks."""
    block_size: int
    adapter: str = ""
    """The name of the LoRA adapter, or its number; "" for the base model."""
    medium: str = GPU


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """Blocks that are no longer in the prefix cache."""

    hashes: Sequence[BlockHash]
    medium: str = GPU


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """The prefix cache is empty."""


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared


class InvalidKVEvents(ValueError):
    """Raised for bytes that are not a batch of KV events."""


def encode_events(events: Sequence[KVEvent], now: float) -> bytes:
    """Return a batch as msgpack."""
    from msgspec import msgpack

    return msgpack.encode([now, [_to_array(event) for event in events]])


def _to_array(event: KVEvent) -> list[Any]:
    if isinstance(event, BlockStored):
        adapter = event.adapter or None
        return [STORED, event.hashes, event.parent, event.tokens, event.block_size, None, event.medium, adapter]
    return [REMOVED, event.hashes, event.medium] if isinstance(event, BlockRemoved) else [CLEARED]


def decode_events(payload: bytes) -> list[KVEvent]:
    """Return the events of a batch; those of other kinds or mediums are left out. Raises `InvalidKVEvents`."""
    from msgspec import DecodeError, msgpack

    try:
        batch = msgpack.decode(payload)
        return [event for fields in batch[1] if (event := _from_array(fields)) is not None]
    except (DecodeError, TypeError, ValueError, OverflowError, IndexError, KeyError, AttributeError) as error:
        raise InvalidKVEvents(str(error)) from None


def _from_array(fields: Any) -> KVEvent | None:
    kind = fields[0]
    if kind == CLEARED:
        return AllBlocksCleared()
    if _medium(fields, {REMOVED: 2, STORED: 6}.get(kind)) != GPU:
        return None
    if kind == REMOVED:
        return BlockRemoved(_hashes(fields[1]))
    if kind != STORED:
        return None
    hashes, parent, tokens, block_size = _hashes(fields[1]), fields[2], fields[3], fields[4]
    if parent is not None:
        _hashes([parent])
    if type(block_size) is not int or block_size < 1 or len(tokens) != len(hashes) * block_size:
        raise InvalidKVEvents("the number of tokens does not fit the blocks")
    tokens = array("I", tokens)
    number = fields[5] if len(fields) > 5 else None
    name = fields[7] if len(fields) > 7 else None
    adapter = name if isinstance(name, str) else "" if number is None else str(number)
    return BlockStored(hashes, parent, tokens, block_size, adapter)


def _medium(fields: Any, index: int | None) -> str:
    """Return the medium of an event. Older engines have no other than the GPU, and do not say it."""
    named = fields[index] if index is not None and len(fields) > index else None
    return named if isinstance(named, str) else GPU


def _hashes(values: Any) -> list[BlockHash]:
    if not isinstance(values, list) or not all(isinstance(value, int | bytes) for value in values):
        raise InvalidKVEvents("a hash is neither a number nor bytes")
    return values
