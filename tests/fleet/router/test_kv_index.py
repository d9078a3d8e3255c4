# SPDX-License-Identifier: Apache-2.0
"""The index of KV events: whose cache has how much of a prompt, and the format of the events."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as some
from msgspec import msgpack

from headrace.core.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    InvalidKVEvents,
    KVEvent,
    decode_events,
    encode_events,
)
from headrace.fleet.router.kv_index import KVIndex, pack_tokens

PROMPT = list(range(100, 160))


def stored(
    tokens: list[int], first: int = 0, *, parent: int | None = None, size: int = 4, adapter: str = ""
) -> BlockStored:
    """The full blocks of these tokens, whose hashes are numbers from `first` on."""
    blocks = len(tokens) // size
    return BlockStored(list(range(first, first + blocks)), parent, tokens[: blocks * size], size, adapter)


def found(index: KVIndex[str], tokens: list[int], adapter: str = "") -> tuple[int, set[str]]:
    packed = pack_tokens(tokens)
    assert packed is not None
    return index.longest(packed, adapter)


def test_the_longest_prefix_wins_whatever_hashes_an_engine_has() -> None:
    index: KVIndex[str] = KVIndex(1000)
    index.apply("a", [stored(PROMPT[:20])])
    index.apply("b", [stored(PROMPT[:40], first=700)])
    assert found(index, PROMPT) == (40, {"b"})
    assert found(index, PROMPT[:22]) == (20, {"a", "b"})
    assert found(index, [1, *PROMPT]) == (0, set())
    index.apply("a", [stored(PROMPT[20:60], first=50, parent=4)])
    assert found(index, PROMPT) == (60, {"a"})
    assert (index.size("a"), index.size("b"), index.blocks) == (15, 10, 25)


def test_blocks_that_were_evicted_are_found_no_more() -> None:
    index: KVIndex[str] = KVIndex(1000)
    index.apply("a", [stored(PROMPT)])
    index.apply("b", [stored(PROMPT[:8])])
    index.apply("a", [BlockRemoved(list(range(14, 4, -1))), BlockRemoved([999])])
    assert found(index, PROMPT) == (20, {"a"})
    index.apply("a", [AllBlocksCleared()])
    assert found(index, PROMPT) == (8, {"b"})
    index.clear("b")
    assert (index.blocks, dict(index.sizes), found(index, PROMPT)) == (0, {}, (0, set()))


def test_adapters_and_block_sizes_are_kept_apart() -> None:
    index: KVIndex[str] = KVIndex(1000)
    index.apply("a", [stored(PROMPT[:16], adapter="french")])
    index.apply("b", [stored(PROMPT[:24], size=8)])
    assert found(index, PROMPT) == (24, {"b"})
    assert found(index, PROMPT, "french") == (16, {"a"})
    assert index.adapters == {"french"}


def test_a_block_behind_an_unknown_one_is_left_out() -> None:
    index: KVIndex[str] = KVIndex(1000)
    index.apply("a", [stored(PROMPT[20:40], first=5, parent=4)])
    assert (index.blocks, index.orphans) == (0, 5)


def test_the_memory_is_bounded_and_the_oldest_go_first() -> None:
    index: KVIndex[str] = KVIndex(6)
    index.apply("a", [stored(PROMPT[:16])])
    index.apply("b", [stored(PROMPT[:16])])
    assert (index.blocks, index.evicted, index.size("a"), index.size("b")) == (6, 2, 4, 2)


@given(some.integers(0, 2**32), some.integers(1, 90))
def test_it_agrees_with_a_search_of_everything(seed: int, size: int) -> None:
    chosen = Random(seed)
    index: KVIndex[int] = KVIndex(10_000)
    prompt = [chosen.randrange(50) for _ in range(400)]
    held = {}
    for worker in range(6):
        blocks = chosen.randrange(0, len(prompt) // size + 1)
        held[worker] = blocks * size
        if blocks:
            index.apply(worker, [BlockStored(list(range(blocks)), None, prompt[: blocks * size], size)])
    packed = pack_tokens(prompt)
    assert packed is not None
    most = max(held.values())
    expected = (most, {worker for worker, count in held.items() if count == most} if most else set())
    assert index.longest(packed) == expected


EVENTS: list[KVEvent] = [stored(PROMPT[:8], parent=3, adapter="x"), BlockRemoved([1, b"hash"]), AllBlocksCleared()]


def plain(events: list[KVEvent]) -> list[Any]:
    return [
        (list(event.hashes), event.parent, list(event.tokens), event.block_size, event.adapter)
        if isinstance(event, BlockStored)
        else event
        for event in events
    ]


def test_events_are_read_as_they_were_written() -> None:
    assert plain(decode_events(encode_events(EVENTS, 1.5))) == plain(EVENTS)


def test_the_bytes_are_those_of_vllm() -> None:
    batch = msgpack.decode(encode_events(EVENTS, 1.5))
    assert batch == [
        1.5,
        [
            ["BlockStored", [0, 1], 3, PROMPT[:8], 4, None, "GPU", "x"],
            ["BlockRemoved", [1, b"hash"], "GPU"],
            ["AllBlocksCleared"],
        ],
    ]


def test_events_of_other_releases_of_vllm_are_read() -> None:
    old = [0.0, [["BlockStored", [1], None, [5, 6], 2, 7], ["BlockRemoved", [1]], ["AllBlocksCleared"]]]
    new = [0.0, [["BlockStored", [b"x"], None, [5, 6], 2, None, "GPU", None, None, 0], ["Something", 3]], 1]
    assert plain(decode_events(msgpack.encode(old))) == [
        ([1], None, [5, 6], 2, "7"),
        BlockRemoved([1]),
        AllBlocksCleared(),
    ]
    assert plain(decode_events(msgpack.encode(new))) == [([b"x"], None, [5, 6], 2, "")]


def test_what_an_engine_keeps_in_host_memory_is_left_out() -> None:
    """vLLM sends it without tokens; what is on the GPU stays known."""
    host = [["BlockStored", [1, 2], None, [], 2, None, "CPU", None], ["BlockRemoved", [1], "CPU"]]
    assert decode_events(msgpack.encode([0.0, [*host, ["BlockRemoved", [3], "GPU"]]])) == [BlockRemoved([3])]
    written = encode_events([BlockStored([1, 2], None, [], 2, medium="CPU"), BlockRemoved([1], "CPU")], 0.0)
    assert msgpack.decode(written)[1] == host


@pytest.mark.parametrize(
    "batch",
    [
        3,
        [],
        [0.0],
        [0.0, 5],
        [0.0, [[]]],
        [0.0, [["BlockStored"]]],
        [0.0, [["BlockStored", [1], None, [5, 6, 7], 2]]],
        [0.0, [["BlockStored", [1], None, [5, -6], 2]]],
        [0.0, [["BlockStored", [1], None, [5, 1 << 40], 2]]],
        [0.0, [["BlockStored", [1], None, ["a", 6], 2]]],
        [0.0, [["BlockStored", [[1]], None, [5, 6], 2]]],
        [0.0, [["BlockStored", [1], [1], [5, 6], 2]]],
        [0.0, [["BlockStored", [], None, [], 0]]],
        [0.0, [["BlockRemoved", 7]]],
    ],
)
def test_what_is_no_batch_is_refused(batch: Any) -> None:
    with pytest.raises(InvalidKVEvents):
        decode_events(msgpack.encode(batch))


def test_bytes_that_are_no_msgpack_are_refused() -> None:
    with pytest.raises(InvalidKVEvents):
        decode_events(b"\xc1")


def test_tokens_that_are_none_are_not_packed() -> None:
    assert [pack_tokens(tokens) for tokens in ("ab", None, [1.5], ["x"], [-1], [1 << 32])] == [None] * 6
