# SPDX-License-Identifier: Apache-2.0
"""The response cache: the same question has the same answer, computed once; and nobody gets another's."""

from __future__ import annotations

import asyncio
from itertools import count
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.clock import ManualClock
from headrace.core.dtypes import BF16, BYTES, DTYPES, UINT16
from headrace.core.errors import Cancelled, Internal
from headrace.core.requests import GuidedRequest, InferRequest, RequestedOutput
from headrace.core.telemetry.exposition import render
from headrace.core.telemetry.metrics import Registry
from headrace.core.tensors import Tensor
from headrace.engine.cache import ResponseCache, cache_key
from headrace.models.config.types import OutputSpec
from support.engines import (
    Recorder,
    RecordingCaller,
    answers,
    array_of,
    config_of,
    counted,
    serving_plane,
    submit,
    tensors_of,
)

MIB = 1024 * 1024


def outputs(count: int = 1, value: int = 0) -> list[Tensor]:
    return tensors_of(OUTPUT0=np.full(count, value, np.int64))


def test_a_stored_answer_is_found() -> None:
    cache = ResponseCache(MIB)
    assert cache.get(b"a") is None
    cache.put(b"a", outputs(3, 7))
    (tensor,) = cache.get(b"a") or ()
    assert (tensor.name, tensor.dtype.name, tensor.array.tolist()) == ("OUTPUT0", "INT64", [7, 7, 7])
    assert len(cache) == 1


def test_a_stored_answer_is_a_copy_that_cannot_be_changed() -> None:
    cache = ResponseCache(MIB)
    batch = np.arange(1000)
    cache.put(b"a", tensors_of(OUTPUT0=batch[:1]))
    batch[0] = 99
    (tensor,) = cache.get(b"a") or ()
    assert tensor.array.tolist() == [0]
    assert not np.shares_memory(tensor.array, batch)
    with pytest.raises(ValueError, match="read-only"):
        tensor.array[0] = 1


def test_the_cache_is_bounded_and_evicts_the_least_recently_used() -> None:
    cache = ResponseCache(10_000)
    for number in range(1000):
        cache.put(b"%d" % number, outputs(64))
        assert cache.used_bytes <= 10_000
    kept = len(cache)
    assert 2 < kept < 20
    oldest, second = (b"%d" % (1000 - kept + n) for n in range(2))
    assert cache.get(oldest) is not None
    cache.put(b"new", outputs(64))
    assert cache.get(oldest) is not None
    assert cache.get(second) is None


def test_an_answer_larger_than_the_cache_is_not_stored_and_evicts_nothing() -> None:
    cache = ResponseCache(10_000)
    cache.put(b"a", outputs())
    cache.put(b"b", outputs(10_000))
    assert len(cache) == 1
    assert cache.get(b"a") is not None


def test_putting_a_key_again_replaces_it() -> None:
    cache = ResponseCache(MIB)
    cache.put(b"a", outputs(100, 1))
    used = cache.used_bytes
    cache.put(b"a", outputs(100, 2))
    assert (len(cache), cache.used_bytes) == (1, used)
    assert (cache.get(b"a") or ())[0].array[0] == 2


def test_strings_count_with_their_content() -> None:
    cache = ResponseCache(MIB)
    array = np.full(10, b"x" * 1000, object)
    cache.put(b"a", [Tensor("OUTPUT0", BYTES, array)])
    assert cache.used_bytes >= 10_000


def test_unloading_a_version_deletes_its_answers_and_no_others() -> None:
    cache = ResponseCache(MIB)
    for prefix in (b"1/", b"11/", b"2/"):
        for number in range(3):
            cache.put(prefix + b"%d" % number, outputs())
    cache.remove_version(b"1/")
    assert len(cache) == 6
    assert cache.get(b"11/0") is not None
    cache.remove_version(b"11/")
    cache.remove_version(b"2/")
    assert (len(cache), cache.used_bytes) == (0, 0)


# Keys.


def request(*tensors: Tensor, wanted: str = "", parameters: Any = None, id: str = "", **arrays: Any) -> InferRequest:
    names = [RequestedOutput(name) for name in wanted.split()]
    return InferRequest("m", [*tensors, *tensors_of(**arrays)], id=id, outputs=names, parameters=parameters or {})


def test_whatever_an_answer_depends_on_is_in_the_key() -> None:
    ones = np.ones((1, 4), np.uint8)
    different = [
        request(A=ones),
        request(B=ones),
        request(A=ones + 1),
        request(A=ones.reshape(4, 1)),
        request(A=ones.reshape(4)),
        request(A=ones.view(np.int8)),
        request(A=ones.view(np.uint32)),
        request(A=ones.view(bool)),
        request(A=ones.view(np.uint16)),
        request(Tensor("A", BF16, ones.view(np.uint16))),
        request(A=ones, B=ones),
        request(A=ones, wanted="X"),
        request(A=ones, wanted="Y"),
        request(A=ones, wanted="X Y"),
        request(A=ones, wanted="Y X"),
        request(A=ones, wanted="XY"),
        request(A=ones, parameters={"p": 1}),
        request(A=ones, parameters={"p": 2}),
        request(A=ones, parameters={"p": "1"}),
        request(A=ones, parameters={"p": True}),
        request(A=ones, parameters={"p": 1.0}),
        request(A=ones, parameters={"q": 1}),
        request(A=ones, parameters={"p": 1, "q": 1}),
        request(A=np.array([b"ab", b"c"], object)),
        request(A=np.array([b"a", b"bc"], object)),
        request(A=np.array([b"abc", b""], object)),
        request(A=np.zeros((0, 2), np.uint8)),
        request(A=np.zeros((2, 0), np.uint8)),
        request(),
    ]
    keys = {cache_key(b"1/", one) for one in different}
    assert len(keys) == len(different)
    assert cache_key(b"2/", different[0]) not in keys
    assert all(key.startswith(b"1/") for key in keys)


def test_whatever_an_answer_does_not_depend_on_is_not() -> None:
    a, b = np.arange(4).reshape(2, 2), np.arange(2)
    key = cache_key(b"", request(A=a, B=b, parameters={"p": 1, "q": 2}, id="one"))
    assert cache_key(b"", request(B=b, A=a, parameters={"q": 2, "p": 1}, id="two")) == key
    assert cache_key(b"", request(A=np.asfortranarray(a), B=np.arange(4)[::2] // 2, parameters={"p": 1, "q": 2})) == key


NAMES = st.sampled_from(["A", "B", "AB", "A1", "1:A", "1>A", "\u00e9", "INT8(1,)"])
ARRAYS = st.tuples(
    st.sampled_from(["INT8", "UINT8", "UINT16", "BF16", "INT16", "BYTES", "BOOL"]),
    st.lists(st.integers(0, 1), max_size=4),
    st.booleans(),
)
REQUESTS = st.tuples(
    st.dictionaries(NAMES, ARRAYS, max_size=2),
    st.lists(NAMES, max_size=2, unique=True),
    st.dictionaries(NAMES, st.sampled_from([True, 1, 1.0, "1", "", "';'", 0, False]), max_size=2),
)


def made(plan: Any) -> InferRequest:
    inputs, wanted, parameters = plan
    tensors = []
    for name, (kind, values, column) in inputs.items():
        dtype = DTYPES[kind]
        array = np.empty(len(values), dtype.numpy)
        array[:] = [b"1" * value for value in values] if dtype is BYTES else values
        tensors.append(Tensor(name, dtype, array.reshape(-1, 1) if column else array))
    return InferRequest("m", tensors, outputs=[RequestedOutput(name) for name in wanted], parameters=parameters)


def plain(plan: Any) -> Any:
    """The same for the same question, by Python's own comparison."""
    inputs, wanted, parameters = plan
    return (
        sorted((name, kind, tuple(values), column) for name, (kind, values, column) in inputs.items()),
        list(wanted),
        sorted((name, type(value).__name__, repr(value)) for name, value in parameters.items()),
    )


@given(REQUESTS, REQUESTS)
def test_equal_keys_mean_equal_requests(first: Any, second: Any) -> None:
    assert (cache_key(b"", made(first)) == cache_key(b"", made(second))) == (plain(first) == plain(second))


# Through a real plane.


def cached(**more: Any) -> Any:
    return config_of("m", response_cache=True, **more)


def row(number: int) -> Any:
    return np.array([[number]])


def test_a_hit_is_a_success_and_no_execution() -> None:
    async def main() -> None:
        model = Recorder(lambda rows: rows * 2)
        async with serving_plane([(cached(), model)], cache=ResponseCache(MIB)) as plane:
            for number in (1, 1, 2, 1):
                result = await submit(plane, "m", INPUT0=row(number), request={"id": f"{number}"}).answer()
                assert array_of(result).item() == 2 * number
                assert result.id == f"{number}"
            assert [call.item() for call in model.received] == [1, 2]
            statistics = counted(plane, "m")
            total = statistics.total()
            assert (statistics.executions, statistics.inferences) == (2, 2)
            assert (total.success, total.hit, total.miss, total.computed) == (4, 2, 2, 2)
            assert total.hit_ns > 0 < total.miss_ns
            assert (statistics.received, statistics.in_flight) == (4, 0)

    asyncio.run(main())


def test_a_hit_is_delivered_after_infer_has_returned() -> None:
    async def main() -> None:
        async with serving_plane([(cached(), Recorder())], cache=ResponseCache(MIB)) as plane:
            await submit(plane, "m", INPUT0=row(1)).answer()
            request = submit(plane, "m", INPUT0=row(1))
            assert not request.received
            await request.answer()

    asyncio.run(main())


def test_models_without_the_setting_are_not_cached() -> None:
    async def main() -> None:
        model = Recorder()
        cache = ResponseCache(MIB)
        async with serving_plane([(config_of("m"), model)], cache=cache) as plane:
            for _ in range(3):
                await submit(plane, "m", INPUT0=row(1)).answer()
            assert len(model.received) == 3
            assert len(cache) == 0
            assert counted(plane, "m").total().miss == 0

    asyncio.run(main())


def test_models_do_not_get_each_other_s_answers_and_retiring_forgets() -> None:
    async def main() -> None:
        cache = ResponseCache(MIB)
        models = [
            (config_of(name, response_cache=True), Recorder(lambda rows, add=add: rows + add))
            for name, add in (("a", 10), ("b", 20))
        ]
        async with serving_plane(models, cache=cache) as plane:
            for _ in range(2):
                assert array_of(await submit(plane, "a", INPUT0=row(1)).answer()).item() == 11
                assert array_of(await submit(plane, "b", INPUT0=row(1)).answer()).item() == 21
            assert len(cache) == 2
            (version,) = plane.statistics("a")
            await version.retire(1)
            assert len(cache) == 1
            assert array_of(await submit(plane, "b", INPUT0=row(1)).answer()).item() == 21
        assert len(cache) == 0

    asyncio.run(main())


def test_different_requested_outputs_are_different_keys() -> None:
    async def main() -> None:
        def compute(inputs: Any) -> Any:
            return {"A": inputs["INPUT0"] + 1, "B": inputs["INPUT0"] + 2}

        config = cached(outputs=(OutputSpec("A", None, None), OutputSpec("B", None, None)))
        async with serving_plane([(config, compute)], cache=ResponseCache(MIB)) as plane:
            for names in (["A"], ["B"], ["B", "A"], [], ["A"]):
                wanted = {"outputs": [RequestedOutput(name) for name in names]}
                result = await submit(plane, "m", INPUT0=row(0), request=wanted).answer()
                assert [output.name for output in result.outputs] == (names or ["A", "B"])
            assert counted(plane, "m").total().hit == 1

    asyncio.run(main())


def test_failures_are_not_kept() -> None:
    async def main() -> None:
        broken = [True]

        def compute(inputs: Any) -> Any:
            if broken[0]:
                raise Internal("not now")
            return {"OUTPUT0": inputs["INPUT0"]}

        async with serving_plane([(cached(), compute)], cache=ResponseCache(MIB)) as plane:
            assert isinstance(await submit(plane, "m", INPUT0=row(1)).answer(), Internal)
            broken[0] = False
            assert array_of(await submit(plane, "m", INPUT0=row(1)).answer()).item() == 1

    asyncio.run(main())


def test_a_cancelled_hit_is_not_a_negative_execution() -> None:
    async def main() -> None:
        async with serving_plane([(cached(), Recorder())], cache=ResponseCache(MIB)) as plane:
            await submit(plane, "m", INPUT0=row(1)).answer()
            request = submit(plane, "m", INPUT0=row(1))
            request.pending.cancel()
            assert isinstance(await request.answer(), Cancelled)
            await asyncio.sleep(0)
            total = counted(plane, "m").total()
            assert (total.success, total.fail, total.computed) == (1, 1, 1)
            assert len(request.received) == 1

    asyncio.run(main())


def test_equal_requests_in_one_turn_are_each_answered() -> None:
    async def main() -> None:
        async with serving_plane([(cached(), Recorder())], cache=ResponseCache(MIB)) as plane:
            results = await answers([submit(plane, "m", INPUT0=row(5)) for _ in range(10)])
            assert [array_of(result).item() for result in results] == [5] * 10
            assert counted(plane, "m").total().success == 10

    asyncio.run(main())


def test_types_of_one_numpy_form_do_not_share_an_answer() -> None:
    async def main() -> None:
        bits = np.array([[1]], np.uint16)
        async with serving_plane([(cached(), Recorder())], cache=ResponseCache(MIB)) as plane:
            for dtype in (BF16, UINT16, BF16):
                result = await submit(plane, "m", INPUT0=Tensor("INPUT0", dtype, bits)).answer()
                assert result.outputs[0].dtype is dtype

    asyncio.run(main())


# Time to live, and who wants nothing that was kept.


def test_an_answer_lives_as_long_as_it_may() -> None:
    clock = ManualClock()
    cache = ResponseCache(MIB, 10, clock)
    cache.put(b"a", outputs(1, 1))
    clock.advance(9.9)
    assert cache.get(b"a") is not None
    clock.advance(0.1)  # being asked for does not make it younger
    assert cache.get(b"a") is None
    assert (len(cache), cache.used_bytes) == (0, 0)
    assert (cache.hits, cache.misses, cache.expired, cache.evictions) == (1, 1, 1, 0)
    cache.put(b"a", outputs(1, 2))
    clock.advance(5)
    cache.put(b"a", outputs(1, 3))
    clock.advance(9)
    assert (cache.get(b"a") or ())[0].array[0] == 3


def test_without_a_time_to_live_nothing_grows_old() -> None:
    clock = ManualClock()
    cache = ResponseCache(MIB, clock=clock)
    cache.put(b"a", outputs())
    clock.advance(1e9)
    assert cache.get(b"a") is not None


def test_evictions_are_counted() -> None:
    cache = ResponseCache(10_000)
    for number in range(100):
        cache.put(b"%d" % number, outputs(64))
    assert cache.evictions == 100 - len(cache)
    registry = Registry(ManualClock())
    cache.add_to(registry)
    reported = render(registry).decode()
    assert f"headrace_response_cache_entries {len(cache)}\n" in reported
    assert f"headrace_response_cache_evictions_total {cache.evictions}\n" in reported
    assert f"headrace_response_cache_used_bytes {cache.used_bytes}\n" in reported


def test_who_wants_a_fresh_answer_gets_one_and_it_is_kept() -> None:
    async def main() -> None:
        calls = count(1)

        def compute(inputs: Any) -> Any:
            return {"OUTPUT0": inputs["INPUT0"] * 0 + next(calls)}

        async with serving_plane([(cached(), compute)], cache=ResponseCache(MIB)) as plane:

            async def asked(fresh: bool) -> int:
                reported = RecordingCaller()
                request = GuidedRequest("m", tensors_of(INPUT0=row(1)), bypass_cache=fresh)
                reported.pending = plane.infer(request, reported)
                return int(array_of(await reported.answer()).item())

            assert [await asked(fresh) for fresh in (False, False, True, False, False)] == [1, 1, 2, 2, 2]
            total = counted(plane, "m").total()
            assert (total.hit, total.miss) == (3, 2)

    asyncio.run(main())
