# SPDX-License-Identifier: Apache-2.0
"""Slots and host memory without a model: who gets a slot and when, and when a load that failed is tried again."""

from __future__ import annotations

import random
import threading
from pathlib import Path
from typing import Any

import pytest

from headrace.backends.llm.adapter_fit import LoadedAdapter
from headrace.backends.llm.adapter_slots import _MOST_PASSES, AdapterSlots
from headrace.backends.llm.adapter_store import AdapterStore
from headrace.backends.llm.metrics import AdapterMetrics, LlmMetrics
from headrace.core.clock import SystemClock
from headrace.core.errors import FailedPrecondition, HeadraceError, Unavailable
from headrace.core.telemetry.metrics import Registry
from headrace.models.adapters import CONFIG, AdapterPlaces, AdapterSource, ModelAdapters


def adapter(name: str, content: bytes = b"1") -> LoadedAdapter:
    return LoadedAdapter(name, content, {})


class Request:
    def __init__(self, name: str, content: bytes = b"1") -> None:
        self.adapter: LoadedAdapter | None = adapter(name, content)


class FakeLora:
    """What is in which slot."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.placed: dict[int, str] = {}
        self.error: Exception | None = None

    def place(self, slot: int, name: str, weights: Any, replaced: str) -> None:
        assert self.placed.pop(slot, "") == replaced
        if self.error is not None:
            raise self.error
        self.placed[slot] = name


def made(count: int) -> tuple[AdapterSlots[Request], FakeLora, LlmMetrics]:
    metrics, lora = LlmMetrics(Registry(SystemClock())), FakeLora(count)
    slots: AdapterSlots[Request] = AdapterSlots(lora, AdapterMetrics(metrics, {"model": "m", "version": "1"}))  # type: ignore[arg-type]
    return slots, lora, metrics


def waiting(metrics: LlmMetrics) -> float:
    return metrics.adapter_requests.labels(model="m", version="1").value


def test_requests_wait_in_their_order_for_a_slot() -> None:
    slots, lora, metrics = made(1)
    first, second, third, fourth = Request("a"), Request("b"), Request("c"), Request("b")
    assert slots.acquire(first)
    assert not any(slots.acquire(each) for each in (second, third, fourth))
    assert waiting(metrics) == 3 and slots.take_ready() == []
    slots.release(first)
    assert slots.take_ready() == [second, fourth], "with the same adapter they run together"
    assert lora.placed == {0: "b"}
    slots.release(second)
    assert slots.take_ready() == []
    slots.release(fourth)
    assert slots.take_ready() == [third]
    assert waiting(metrics) == 0


def test_requests_of_adapters_in_slots_pass_but_not_for_ever() -> None:
    slots, lora, _ = made(1)
    running = [Request("a")]
    assert slots.acquire(running[0])
    late = Request("b")
    assert not slots.acquire(late)
    while slots.acquire(request := Request("a")):
        running.append(request)
    assert len(running) == 1 + _MOST_PASSES
    for each in running:
        assert slots.take_ready() == []
        slots.release(each)
    assert slots.take_ready() == [late]
    slots.release(late)
    assert slots.take_ready() == [request]
    assert lora.placed == {0: "a"}


def test_other_content_under_a_name_waits_for_those_who_use_the_old() -> None:
    slots, lora, _ = made(2)
    old, new = Request("a", b"old"), Request("a", b"new")
    assert slots.acquire(old)
    assert not slots.acquire(new)
    assert lora.placed == {1: "a"} or lora.placed == {0: "a"}
    slots.release(old)
    assert slots.take_ready() == [new]
    assert len(lora.placed) == 1 and slots.resident == ["a"]


def test_who_gives_up_waiting_makes_room_for_the_next() -> None:
    slots, _, metrics = made(1)
    running, given_up, last = Request("a"), Request("b"), Request("c")
    assert slots.acquire(running) and not slots.acquire(given_up) and not slots.acquire(last)
    slots.release(given_up)
    assert slots.queued() == [last] and waiting(metrics) == 1
    slots.release(running)
    assert slots.take_ready() == [last]


def test_a_copy_that_fails_costs_no_slot() -> None:
    slots, lora, _ = made(1)
    lora.error = MemoryError()
    with pytest.raises(MemoryError):
        slots.acquire(Request("a"))
    lora.error = None
    used, waits = Request("b"), Request("c")
    assert slots.acquire(used) and not slots.acquire(waits)
    lora.error = MemoryError()
    slots.release(used)
    assert slots.take_ready() == [waits]
    with pytest.raises(MemoryError):
        slots.acquire(waits)
    lora.error = None
    slots.release(waits)
    assert slots.acquire(Request("d"))


@pytest.mark.parametrize("seed", range(20))
def test_adapters_in_use_are_never_replaced_and_every_waiter_gets_a_slot(seed: int) -> None:
    chance = random.Random(seed)
    slots, lora, metrics = made(chance.randint(1, 3))
    running: list[Request] = []
    all_waiting: list[Request] = []
    for _ in range(300):
        if chance.random() < 0.5:
            request = Request(chance.choice("abcdef"), chance.choice([b"1", b"2"]))
            (running if slots.acquire(request) else all_waiting).append(request)
        elif running and chance.random() < 0.8:
            slots.release(running.pop(chance.randrange(len(running))))
        elif all_waiting:
            slots.release(all_waiting.pop(chance.randrange(len(all_waiting))))
        for ready in slots.take_ready():
            all_waiting.remove(ready)
            running.append(ready)
        used = {(each.adapter.name, each.adapter.digest) for each in running if each.adapter}
        assert len(used) == len({name for name, _ in used}) <= lora.slots
        assert {name for name, _ in used} <= set(lora.placed.values()) == set(slots.resident)
        assert running or not all_waiting
        assert waiting(metrics) == len(all_waiting) == slots.waiting
    while running:
        slots.release(running.pop())
        running += (ready := slots.take_ready())
        all_waiting = [each for each in all_waiting if each not in ready]
    assert not all_waiting


class ManualClock:
    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        return self.now


class Store:
    """A store whose adapters are read by `read`, and ways to ask it."""

    def __init__(self, folder: Path, capacity: int = 2) -> None:
        self.clock = ManualClock()
        metrics = AdapterMetrics(LlmMetrics(Registry(SystemClock())), {"model": "m", "version": "1"})
        self.store = AdapterStore(ModelAdapters("m", AdapterPlaces(folder)), capacity, metrics, self.clock)
        self.store.read = self.read
        self.error: HeadraceError | None = None
        self.reads = 0

    def read(self, source: AdapterSource) -> LoadedAdapter:
        self.reads += 1
        if self.error is not None:
            raise self.error
        return adapter(source.name)

    def get(self, name: str) -> Any:
        results: list[Any] = []
        came = threading.Event()

        def done(result: Any) -> None:
            results.append(result)
            came.set()

        self.store.get(name, self, done)
        assert came.wait(30)
        return results[0]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in "abc":
        (tmp_path / name).mkdir()
        (tmp_path / name / CONFIG).write_text("{}")
    return tmp_path


def test_a_failed_load_is_tried_again_after_a_pause_that_grows(folder: Path) -> None:
    made = Store(folder)
    made.error = Unavailable("no network")
    tried: list[float] = []
    for _ in range(200):
        before = made.reads
        error = made.get("a")
        assert error.message == "no network"
        if made.reads > before:
            tried.append(made.clock.now - 1000)
        else:
            assert 0 < error.retry_after_seconds <= 60
        made.clock.now += 0.5
    pauses = [later - earlier for earlier, later in zip(tried, tried[1:], strict=False)]
    assert pauses == [1, 2, 4, 8, 16, 32]
    made.error, made.clock.now = None, made.clock.now + 60
    assert made.get("a").name == "a"
    made.store.close()


def test_changed_files_are_tried_at_once(folder: Path) -> None:
    made = Store(folder)
    made.error = FailedPrecondition("damaged")
    assert made.get("a") is not None and made.get("a").code is FailedPrecondition.code
    assert made.reads == 1
    (folder / "a" / CONFIG).write_text("{ }")
    made.error = None
    assert made.get("a").name == "a"
    made.store.close()


def test_the_least_recently_asked_leaves_host_memory(folder: Path) -> None:
    made = Store(folder)
    for name in "abac":
        made.get(name)
    assert made.store.loaded == ["a", "c"] and made.reads == 3
    made.store.forget("a")
    assert made.store.loaded == ["c"]
    made.store.close()
    assert isinstance(made.get("b"), Unavailable)


def test_a_load_that_ends_while_another_request_looks_for_its_files_serves_both(folder: Path) -> None:
    stored = Store(folder)
    find = stored.store._adapters.find

    def slow_find(name: str) -> AdapterSource | None:
        stored.store._adapters.find = find  # type: ignore[method-assign]
        assert stored.get("a").name == "a"
        return find(name)

    stored.store._adapters.find = slow_find  # type: ignore[method-assign]
    assert stored.get("a").name == "a"
    assert stored.reads == 1
    stored.store.close()


def test_no_callback_comes_after_detach(folder: Path) -> None:
    made, go = Store(folder), threading.Event()
    made.store.read = lambda source: go.wait(30) and adapter(source.name)  # type: ignore[assignment,return-value]
    owner, other, told = object(), object(), []
    came = threading.Event()
    made.store.get("a", owner, lambda result: told.append(("owner", result)))
    made.store.get("a", other, lambda result: (told.append(("other", result)), came.set()))
    made.store.detach(owner, Unavailable("closing"))
    assert [who for who, _ in told] == ["owner"]
    go.set()
    assert came.wait(30)
    assert [who for who, _ in told] == ["owner", "other"]
    made.store.close()


def test_a_load_in_place_overtakes_the_one_before(folder: Path) -> None:
    made, go = Store(folder), threading.Event()
    reads: list[AdapterSource] = []

    def read(source: AdapterSource) -> LoadedAdapter:
        reads.append(source)
        if source.folder == folder / "a":
            assert go.wait(30)
        return adapter("a", str(source.folder).encode())

    made.store.read = read
    told: list[Any] = []
    came, loaded = threading.Event(), threading.Event()
    made.store.get("a", made, lambda result: (told.append(result), came.set()))
    made.store.load(AdapterSource("a", folder / "b"), lambda error: (told.append(error), loaded.set()))
    assert came.wait(30) and loaded.wait(30)
    assert [getattr(each, "digest", each) for each in told] == [str(folder / "b").encode(), None]
    go.set()
    made.store.close()
    assert len(told) == 2
