# SPDX-License-Identifier: Apache-2.0
"""Models that load on demand: who loads what, who waits, who is evicted, and what a failure tells whom."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from repository_fakes import FakeVersion, RepositoryFixture, put_model, put_version, write_config

from headrace.core.errors import FailedPrecondition, HeadraceError, InvalidArgument, NotFound, Unavailable
from headrace.core.kept_memory import Kept, KeptMemory
from headrace.engine.repository.memory_budget import MemoryUse
from support.virtual_time import LoopClock, run_virtual

MB = 1_000_000


class FakeProbe:
    """Memory that the models of a repository take: each version by name, others nothing."""

    def __init__(self, sizes: dict[str, int] | None = None, limit: int = 100 * MB) -> None:
        self.sizes = sizes or {}
        self.limit = limit
        self.repository: RepositoryFixture | None = None
        self.reads = 0
        self.kept = KeptMemory()

    def free(self) -> MemoryUse:
        return {"host": self.limit}

    def read(self) -> MemoryUse:
        self.reads += 1
        assert self.repository is not None
        live = [version for version in self.repository.opener.opened if not version.retired]
        kept = self.kept.bytes.get("host", 0)
        return {"host": 50 * MB + kept + sum(self.sizes.get(version.config.name, 30 * MB) for version in live)}


class Waiter:
    """A request that waits for a model."""

    def __init__(self, repository: RepositoryFixture, name: str) -> None:
        self.outcome: list[HeadraceError | None] = []
        self.cancel = repository.control.on_demand.wait(name, self.outcome.append)

    @property
    def served(self) -> bool:
        return self.outcome == [None]

    @property
    def error(self) -> HeadraceError:
        (error,) = self.outcome
        assert error is not None
        return error


def on_demand(
    *folders: Path, probe: FakeProbe | None = None, clock: LoopClock | None = None, **settings: Any
) -> RepositoryFixture:
    probe = probe or FakeProbe()
    settings = {"mode": "on-demand", "wait_seconds": 60.0, "kept_memory": probe.kept} | settings
    probe.repository = RepositoryFixture(*folders, memory=probe, clock=clock, **settings)
    return probe.repository


def truncate(folder: Path, size: int) -> None:
    """Make the file of version 1 as long as the model should be expected to be."""
    with open(folder / "1" / "model.bin", "wb") as file:
        file.truncate(size)


def virtual(scenario: Callable[[LoopClock], Coroutine[Any, Any, None]]) -> None:
    clock = LoopClock()
    run_virtual(scenario(clock), clock)


async def loads(repository: RepositoryFixture, *names: str) -> None:
    """Ask for models one after the other."""
    for name in names:
        waiter = Waiter(repository, name)
        while not waiter.outcome:
            await asyncio.sleep(0.01)
        assert waiter.served, waiter.outcome
        repository.newest(name).last_used_ns = next_ns()


_ticks = [10**18]


def next_ns() -> int:
    _ticks[0] += 1
    return _ticks[0]


def served(repository: RepositoryFixture) -> list[str]:
    return sorted(repository.control.directory.models)


def test_nothing_is_loaded_until_a_request_names_it(tmp_path: Path) -> None:
    async def main(clock: LoopClock) -> None:
        for name in ("a", "b"):
            put_model(tmp_path, name, 1, 2)
        async with on_demand(tmp_path, clock=clock) as repository:
            assert repository.opener.log == []
            assert repository.control.ready()
            assert repository.states("a") == ["2 UNAVAILABLE not loaded: the first request that names it loads it"]
            assert [entry.name for entry in await repository.control.index()] == ["a", "b"]
            waiter = Waiter(repository, "a")
            assert not waiter.outcome
            await loads(repository, "a")
            assert waiter.served
            assert repository.opener.log == ["open a/2", "opened a/2"], "two requests, one load"
            assert repository.states("a") == ["2 READY"]
            assert repository.states("b") == ["2 UNAVAILABLE not loaded: the first request that names it loads it"]

    virtual(main)


def test_the_least_recently_used_model_makes_room(tmp_path: Path) -> None:
    async def main(clock: LoopClock) -> None:
        for name in ("a", "b", "c", "d"):
            put_model(tmp_path, name, 1)
        async with on_demand(tmp_path, clock=clock) as repository:
            await loads(repository, "a", "b", "c")
            assert served(repository) == ["a", "b", "c"], "three of 30 MB are within 100 MB"
            repository.newest("a").last_used_ns = next_ns()
            await loads(repository, "d")
            assert served(repository) == ["a", "c", "d"]
            assert repository.states("b") == ["1 UNAVAILABLE evicted to make room for model 'd'"]
            assert repository.opener.live() == ["a/1", "c/1", "d/1"], "its memory is free before the next is loaded"
            await loads(repository, "b")
            assert served(repository) == ["a", "b", "d"]
            reports = {report.name: report for report in repository.control.on_demand.residencies()}
            assert (reports["b"].state, reports["b"].loads, reports["b"].evictions) == ("resident", 2, 1)
            assert (reports["c"].state, reports["c"].reason) == ("evicted", "evicted to make room for model 'b'")
            assert repository.control.on_demand.memory.used() == {"host": 90 * MB}

    virtual(main)


def test_what_is_kept_of_evicted_models_makes_room_before_loaded_ones_do(tmp_path: Path) -> None:
    async def main(clock: LoopClock) -> None:
        for name in ("a", "b", "c"):
            put_model(tmp_path, name, 1)
        probe = FakeProbe()
        freed: list[int] = []
        assert probe.kept.put(Kept("host", 20 * MB, lambda: freed.append(1)))
        async with on_demand(tmp_path, probe=probe, clock=clock) as repository:
            await loads(repository, "a", "b")
            assert freed == [], "60 MB and 20 MB are within 100 MB"
            await loads(repository, "c")
            assert freed == [1]
            assert served(repository) == ["a", "b", "c"]
            assert repository.control.on_demand.memory.used() == {"host": 90 * MB}, "it belongs to none of them"

    virtual(main)


def test_pinned_models_and_models_in_use_stay(tmp_path: Path) -> None:
    async def main(clock: LoopClock) -> None:
        put_model(tmp_path, "pinned", 1)
        put_model(tmp_path, "chosen", 1, residency="pinned")
        put_model(tmp_path, "busy", 1)
        put_model(tmp_path, "next", 1)
        truncate(tmp_path / "next", 30 * MB)
        async with on_demand(tmp_path, clock=clock, pinned_models=("pinned",)) as repository:
            assert served(repository) == ["chosen", "pinned"], "loaded at the start"
            await loads(repository, "busy")
            repository.newest("busy").in_use = True
            waiter = Waiter(repository, "next")
            await asyncio.sleep(10)
            assert not waiter.outcome
            (report,) = [report for report in repository.control.on_demand.residencies() if report.name == "next"]
            assert (report.state, report.reason, report.waiting) == ("loading", "waiting for memory", 1)
            repository.newest("busy").in_use = False
            await asyncio.sleep(1)
            assert waiter.served
            assert served(repository) == ["chosen", "next", "pinned"]

    virtual(main)


def test_a_wait_has_a_bound_and_the_load_goes_on(tmp_path: Path) -> None:
    async def main(clock: LoopClock) -> None:
        put_model(tmp_path, "slow", 1)
        async with on_demand(tmp_path, clock=clock) as repository:
            repository.opener.gates["slow/1"] = asyncio.Event()
            waiter = Waiter(repository, "slow")
            await asyncio.sleep(61)
            assert isinstance(waiter.error, Unavailable)
            assert waiter.error.retry_after_seconds == 5
            assert waiter.error.message == (
                "model 'slow' is not loaded after 60 s: reading weights; the load goes on, send the request again"
            )
            second = Waiter(repository, "slow")
            repository.opener.gates["slow/1"].set()
            await asyncio.sleep(1)
            assert second.served
            assert repository.opener.log == ["open slow/1", "opened slow/1"]

    virtual(main)


def test_no_room_in_time_is_reported_and_tried_again(tmp_path: Path) -> None:
    async def main(clock: LoopClock) -> None:
        for name in ("busy", "next"):
            put_model(tmp_path, name, 1)
        async with on_demand(tmp_path, clock=clock, probe=FakeProbe({"busy": 60 * MB, "next": 60 * MB})) as repository:
            await loads(repository, "busy")
            await loads(repository, "next")
            await loads(repository, "busy")
            repository.newest("busy").in_use = True
            waiters = [Waiter(repository, "next") for _ in range(3)]
            await asyncio.sleep(100)
            assert all(isinstance(waiter.error, Unavailable) for waiter in waiters)
            assert len({id(waiter.error) for waiter in waiters}) == 3, "protocols add to an error"
            repository.newest("busy").in_use = False
            await loads(repository, "next")

    virtual(main)


def test_a_request_that_gives_up_does_not_stop_the_load(tmp_path: Path) -> None:
    async def main(clock: LoopClock) -> None:
        put_model(tmp_path, "m", 1)
        async with on_demand(tmp_path, clock=clock) as repository:
            repository.opener.gates["m/1"] = asyncio.Event()
            first, second = Waiter(repository, "m"), Waiter(repository, "m")
            await asyncio.sleep(1)
            first.cancel()
            repository.opener.gates["m/1"].set()
            await asyncio.sleep(1)
            assert (first.outcome, second.served) == ([], True)

    virtual(main)


def test_a_failed_load_is_reported_to_all_and_tried_again_after_a_growing_pause(tmp_path: Path) -> None:
    async def main(clock: LoopClock) -> None:
        put_model(tmp_path, "m", 1)
        async with on_demand(tmp_path, clock=clock) as repository:
            repository.opener.failures["m/1"] = InvalidArgument("the file is damaged: export it again")
            waiters = [Waiter(repository, "m") for _ in range(3)]
            await asyncio.sleep(0.1)
            assert [waiter.error.message for waiter in waiters] == ["the file is damaged: export it again"] * 3
            assert repository.control.ready(), "one broken model of many does not take the server down"
            assert not repository.control.on_demand.can_serve("m")
            pauses = []
            for _ in range(8):
                with pytest.raises(Unavailable, match="the file is damaged") as refused:
                    Waiter(repository, "m")
                assert refused.value.retry_after_seconds is not None
                pauses.append(round(refused.value.retry_after_seconds))
                await asyncio.sleep(refused.value.retry_after_seconds + 0.1)
                Waiter(repository, "m")
                await asyncio.sleep(0.1)
            assert pauses == [1, 2, 4, 8, 16, 32, 60, 60]
            del repository.opener.failures["m/1"]
            await asyncio.sleep(61)
            await loads(repository, "m")
            (report,) = repository.control.on_demand.residencies()
            assert (report.state, report.loads, report.failed_loads) == ("resident", 1, 9)

    virtual(main)


def test_a_model_that_cannot_fit_says_so_at_once_with_the_sum(tmp_path: Path) -> None:
    async def main(clock: LoopClock) -> None:
        put_model(tmp_path, "pinned", 1, residency="pinned")
        put_model(tmp_path, "large", 1)
        put_model(tmp_path, "huge", 1)
        probe = FakeProbe({"large": 80 * MB})
        async with on_demand(tmp_path, clock=clock, probe=probe) as repository:
            truncate(tmp_path / "huge", 101 * MB)
            unmeasured = Waiter(repository, "huge")
            await asyncio.sleep(0.1)
            assert isinstance(unmeasured.error, FailedPrecondition)
            assert unmeasured.error.message == (
                "model 'huge' cannot fit in host memory: 101.0 MB + 30.0 MB (pinned models) is more than the 100.0 MB of "
                "--host-memory-limit; raise the limit, unpin a model, or serve it elsewhere"
            )
            assert "open huge/1" not in repository.opener.log, "the size of its files is enough"
            measured = Waiter(repository, "large")
            await asyncio.sleep(0.1)
            assert isinstance(measured.error, FailedPrecondition)
            assert served(repository) == ["pinned"], "loaded, measured and unloaded again"
            with pytest.raises(FailedPrecondition, match="80.0 MB"):
                Waiter(repository, "large")  # at once: its size is known now

    virtual(main)


def test_a_load_that_takes_more_than_expected_evicts_others(tmp_path: Path) -> None:
    async def main(clock: LoopClock) -> None:
        for name in ("a", "b", "large"):
            put_model(tmp_path, name, 1)
        async with on_demand(tmp_path, clock=clock, probe=FakeProbe({"large": 70 * MB})) as repository:
            await loads(repository, "a", "b", "large")
            await repository.control.settled(retired=True)
            assert served(repository) == ["b", "large"]

    virtual(main)


def test_sizes_are_remembered_by_content(tmp_path: Path) -> None:
    async def main(clock: LoopClock) -> None:
        models, sizes = tmp_path / "models", tmp_path / "sizes"
        put_model(models, "m", 1)
        put_model(models, "twin", 1)
        for expected_reads in (2, 0):
            probe = FakeProbe({"m": 40 * MB})
            async with on_demand(models, clock=clock, probe=probe, sizes_folder=sizes) as repository:
                await loads(repository, "m", "twin")
                assert probe.reads == expected_reads, "the twin has the same content"
                assert repository.control.on_demand.memory.used() == {"host": 80 * MB}
        (file,) = sizes.iterdir()
        assert json.loads(file.read_text())["memory"] == {"host": 40 * MB}
        put_version(models / "m", 1, "other weights")
        probe = FakeProbe({"m": 45 * MB})
        async with on_demand(models, clock=clock, probe=probe, sizes_folder=sizes) as repository:
            await loads(repository, "m")
            assert repository.control.on_demand.memory.used() == {"host": 45 * MB}
        assert len(list(sizes.iterdir())) == 2
        for file in sizes.iterdir():
            file.write_text("half of a fi")
        probe = FakeProbe({"m": 45 * MB})
        async with on_demand(models, clock=clock, probe=probe, sizes_folder=sizes) as repository:
            await loads(repository, "m")
            assert probe.reads == 2, "a damaged file counts as none"

    virtual(main)


def test_loads_of_known_size_run_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(6)))

    async def main(clock: LoopClock) -> None:
        models, sizes = tmp_path / "models", tmp_path / "sizes"
        for name in ("a", "b", "c"):
            put_model(models, name, 1)
            put_version(models / name, 1, name)

        async def pause() -> None:
            await asyncio.sleep(1)

        for expected in (1, 3):
            async with on_demand(models, clock=clock, sizes_folder=sizes) as repository:
                repository.opener.pause = pause
                waiters = [Waiter(repository, name) for name in ("a", "b", "c")]
                await asyncio.sleep(10)
                assert all(waiter.served for waiter in waiters)
                assert repository.opener.most_running == expected

    virtual(main)


def test_changes_of_the_folder(tmp_path: Path) -> None:
    async def main(clock: LoopClock) -> None:
        for name in ("a", "b"):
            put_model(tmp_path, name, 1)
        async with on_demand(tmp_path, clock=clock) as repository:
            await loads(repository, "a", "b")
            put_model(tmp_path, "new", 1)
            put_version(tmp_path / "a", 2)
            write_config(tmp_path / "b", bad="no such field")
            old = repository.newest("a")
            await repository.poll()
            assert repository.states("new") == ["1 UNAVAILABLE not loaded: the first request that names it loads it"]
            assert repository.served("a") == ["2"], "a loaded model that changed is loaded again"
            assert old.retired
            assert repository.served("b") == ["1"], "the old copy serves on"
            assert "the last reload failed" in repository.states("b")[0]
            assert repository.control.on_demand.memory.used() == {"host": 60 * MB}
            waiter = Waiter(repository, "new")
            await asyncio.sleep(1)
            assert waiter.served
            for path in sorted((tmp_path / "new").rglob("*"), reverse=True):
                path.unlink() if path.is_file() else path.rmdir()
            (tmp_path / "new").rmdir()
            await repository.poll()
            assert served(repository) == ["a", "b"]
            assert not repository.control.on_demand.knows("new")
            assert repository.control.on_demand.memory.used() == {"host": 60 * MB}

    virtual(main)


def test_a_model_that_is_removed_while_it_loads(tmp_path: Path) -> None:
    async def main(clock: LoopClock) -> None:
        folder = put_model(tmp_path, "m", 1)
        async with on_demand(tmp_path, clock=clock) as repository:
            repository.opener.gates["m/1"] = asyncio.Event()
            waiter = Waiter(repository, "m")
            await asyncio.sleep(1)
            folder.rename(tmp_path / ".gone")
            await repository.poll_twice()
            assert isinstance(waiter.error, NotFound)
            repository.opener.gates["m/1"].set()
            await repository.control.settled(retired=True)
            assert repository.opener.live() == []
            assert repository.control.on_demand.memory.used() == {}

    virtual(main)


def test_both_copies_of_a_changed_model_have_to_fit(tmp_path: Path) -> None:
    async def main(clock: LoopClock) -> None:
        put_model(tmp_path, "m", 1)
        async with on_demand(tmp_path, clock=clock, probe=FakeProbe({"m": 60 * MB})) as repository:
            await loads(repository, "m")
            old = repository.newest("m")
            truncate(tmp_path / "m", 55 * MB)
            await repository.poll()
            assert repository.newest("m") is not old
            assert repository.opener.log == [
                "open m/1",
                "opened m/1",
                "retire m/1",
                "retired m/1",
                "open m/1",
                "opened m/1",
            ]

    virtual(main)


def test_load_and_unload_on_request(tmp_path: Path) -> None:
    async def main(clock: LoopClock) -> None:
        put_model(tmp_path, "m", 1)
        async with on_demand(tmp_path, clock=clock) as repository:
            await repository.control.load("m")
            assert served(repository) == ["m"]
            with pytest.raises(InvalidArgument, match="leave out config and files"):
                await repository.control.load("m", "{}")
            with pytest.raises(NotFound, match="failed to poll"):
                await repository.control.load("unknown")
            put_model(tmp_path, "later", 1)
            await repository.control.load("later")
            assert served(repository) == ["later", "m"]
            await repository.control.unload("m")
            assert served(repository) == ["later"]
            assert repository.states("m") == [
                "1 UNAVAILABLE unloaded on request: the next request that names it loads it"
            ]
            await loads(repository, "m")

    virtual(main)


def test_an_ensemble_brings_its_models_and_leaves_with_them(tmp_path: Path) -> None:
    async def main(clock: LoopClock) -> None:
        for name in ("one", "two", "other", "another"):
            put_model(tmp_path, name, 1)
        put_model(tmp_path, "both", steps=["one", "two"])
        async with on_demand(tmp_path, clock=clock) as repository:
            await loads(repository, "other", "both")
            assert served(repository) == ["both", "one", "other", "two"]
            both = repository.newest("both")
            both.in_use = True
            await loads(repository, "another")
            assert served(repository) == ["another", "both", "one", "two"], "models of an ensemble in use are in use"
            both.in_use = False
            repository.newest("two").last_used_ns = next_ns()
            repository.newest("another").last_used_ns = next_ns()
            await loads(repository, "other")
            assert served(repository) == ["another", "other", "two"]
            assert repository.states("both") == ["1 UNAVAILABLE evicted to make room for model 'other'"]
            await loads(repository, "both")
            assert served(repository) == ["both", "one", "two"] or len(served(repository)) == 4

    virtual(main)


def test_an_ensemble_whose_models_do_not_fit_together(tmp_path: Path) -> None:
    async def main(clock: LoopClock) -> None:
        for name in ("one", "two"):
            put_model(tmp_path, name, 1)
        put_model(tmp_path, "both", steps=["one", "two"])
        probe = FakeProbe({"one": 60 * MB, "two": 60 * MB})
        async with on_demand(tmp_path, clock=clock, probe=probe) as repository:
            waiter = Waiter(repository, "both")
            await asyncio.sleep(1)
            assert isinstance(waiter.error, FailedPrecondition)
            assert "60.0 MB (models of the same ensemble)" in waiter.error.message
            await loads(repository, "two")

    virtual(main)


@pytest.mark.parametrize("mode", ["none", "poll"])
def test_a_model_of_another_mode_may_load_on_demand(tmp_path: Path, mode: str) -> None:
    async def main(clock: LoopClock) -> None:
        put_model(tmp_path, "always", 1)
        put_model(tmp_path, "lazy", 1, residency="on-demand")
        put_model(tmp_path, "step", 1, residency="on-demand")
        put_model(tmp_path, "chain", steps=["step"])
        async with on_demand(tmp_path, clock=clock, mode=mode, probe=FakeProbe({"lazy": 80 * MB})) as repository:
            assert served(repository) == ["always", "chain", "step"], (
                "an ensemble that is always loaded keeps its models"
            )
            with pytest.raises(Unavailable, match="not allowed"):
                await repository.control.load("always")
            waiter = Waiter(repository, "lazy")
            await asyncio.sleep(0.1)
            assert waiter.served
            await repository.control.unload("lazy")
            assert served(repository) == ["always", "chain", "step"]
            if mode == "poll":
                write_config(tmp_path / "lazy")
                write_config(tmp_path / "always", residency="on-demand")
                await repository.poll()
                assert served(repository) == ["chain", "lazy", "step"]

    virtual(main)


def test_names_that_are_no_models_fail_the_start(tmp_path: Path) -> None:
    async def main(clock: LoopClock) -> None:
        put_model(tmp_path, "m", 1)
        async with on_demand(tmp_path, clock=clock, load_models=("m",), pinned_models=("typo",)) as repository:
            assert served(repository) == ["m"]
        repository = on_demand(tmp_path, clock=clock, pinned_models=("typo",), exit_on_error=True)
        with pytest.raises(FailedPrecondition, match="typo: no such model in the repository"):
            await repository.control.start()
        await repository.control.close(1)

    virtual(main)


def test_closing_answers_who_waits(tmp_path: Path) -> None:
    async def main(clock: LoopClock) -> None:
        put_model(tmp_path, "m", 1)
        repository = on_demand(tmp_path, clock=clock)
        await repository.control.start()
        repository.opener.gates["m/1"] = asyncio.Event()
        waiter = Waiter(repository, "m")
        await asyncio.sleep(1)
        await repository.control.close(1)
        assert isinstance(waiter.error, Unavailable)
        assert repository.opener.live() == []
        with pytest.raises(Unavailable, match="stopping"):
            Waiter(repository, "m")

    virtual(main)


def test_versions_are_retired_before_their_memory_counts_as_free(tmp_path: Path) -> None:
    async def main(clock: LoopClock) -> None:
        for name in ("a", "b"):
            put_model(tmp_path, name, 1)
        async with on_demand(tmp_path, clock=clock, probe=FakeProbe({"a": 60 * MB, "b": 60 * MB})) as repository:
            await loads(repository, "b", "a")
            repository.opener.retiring.clear()
            waiter = Waiter(repository, "b")
            await asyncio.sleep(5)
            assert repository.states("a") == ["1 UNLOADING evicted to make room for model 'b'"]
            assert not waiter.outcome
            back = Waiter(repository, "a")
            repository.opener.retiring.set()
            await asyncio.sleep(5)
            assert waiter.served
            assert back.served, "a waits for its turn, and evicts b again"
            assert isinstance(repository.control.directory.find("a"), FakeVersion)

    virtual(main)
