# SPDX-License-Identifier: Apache-2.0
"""A polled repository: versions and models come, change and go while requests are served."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest
from repository_fakes import Bench, FakeVersion, drop_version, put_model, put_version, write_config

from headrace.core.errors import FailedPrecondition, InvalidArgument, NotFound, Unavailable
from headrace.engine.dataplane import DataPlane
from headrace.engine.repository.states import State
from support.waiting import eventually_async


def test_a_new_version_is_ready_before_the_old_one_retires(tmp_path: Path) -> None:
    async def main() -> None:
        folder = put_model(tmp_path, "m", 1)
        async with Bench(tmp_path) as bench:
            put_version(folder, 2)
            await bench.poll()
            assert bench.opener.log == [
                "open m/1", "opened m/1", "open m/2", "opened m/2", "retire m/1", "retired m/1",
            ]  # fmt: skip
            assert bench.served("m") == ["2"]
            assert bench.states("m") == ["1 UNAVAILABLE unloaded", "2 READY"]

    asyncio.run(main())


@pytest.mark.parametrize(
    ("policy", "served"),
    [("latest:1", "3"), ("latest:2", "2 3"), ("latest:9", "1 2 3"), ("all", "1 2 3"), ("specific:1,3,8", "1 3")],
)
def test_the_policy_decides_which_versions_serve(tmp_path: Path, policy: str, served: str) -> None:
    async def main() -> None:
        put_model(tmp_path, "m", 1, 2, 3, policy=policy)
        async with Bench(tmp_path, mode="none") as bench:
            assert bench.served("m") == served.split()
            assert str(bench.newest("m")) == "m/3"
            assert bench.control.ready()

    asyncio.run(main())


def test_unchanged_versions_are_not_touched_when_others_are_added_or_removed(tmp_path: Path) -> None:
    async def main() -> None:
        folder = put_model(tmp_path, "m", 1, 2, policy="all")
        async with Bench(tmp_path) as bench:
            two = bench.control.directory.find("m", "2")
            put_version(folder, 10)
            drop_version(folder, 1)
            await bench.poll()
            assert bench.served("m") == ["2", "10"]
            assert bench.control.directory.find("m", "2") is two
            drop_version(folder, 10)
            await bench.poll()
            assert bench.newest("m") is two
            assert bench.states("m") == ["1 UNAVAILABLE unloaded", "2 READY", "10 UNAVAILABLE unloaded"]

    asyncio.run(main())


@pytest.mark.parametrize("what", ["configuration", "labels", "weights"])
def test_a_change_reloads_and_the_old_copy_serves_meanwhile(tmp_path: Path, what: str) -> None:
    async def main() -> None:
        folder = put_model(tmp_path, "m", 1)
        async with Bench(tmp_path) as bench:
            old = bench.newest("m")
            gate = bench.opener.gates["m/1"] = asyncio.Event()
            if what == "configuration":
                write_config(folder, tag="new")
            elif what == "labels":
                (folder / "labels.txt").write_text("cat\ndog\n")
            else:
                put_version(folder, 1, "other weights")
            await bench.look()
            await eventually_async(lambda: bench.opener.running == 1)
            assert bench.newest("m") is old and not old.retired
            assert bench.control.ready()
            state = bench.control.state_of("m", 1)
            assert state is not None and state.state is State.READY
            assert state.progress is not None and state.progress.message == "reading weights"
            bench.opener.retiring.clear()
            gate.set()
            await bench.control.settled()
            assert bench.newest("m") is not old
            # Requests in flight are still on the old copy; that does not show.
            assert old.retired and bench.states("m") == ["1 READY"]
            bench.opener.retiring.set()

    asyncio.run(main())


@pytest.mark.parametrize("failure", ["open", "configuration", "policy", "unexpected"])
def test_a_failed_reload_keeps_the_old_copy_and_states_the_reason(tmp_path: Path, failure: str) -> None:
    async def main() -> None:
        folder = put_model(tmp_path, "m", 1)
        async with Bench(tmp_path) as bench:
            old = bench.newest("m")
            if failure == "configuration":
                write_config(folder, bad="input.dims: missing")
            elif failure == "policy":
                write_config(folder, policy="specific:7")
            else:
                put_version(folder, 1, "broken")
                error = InvalidArgument("input.dims: missing") if failure == "open" else RuntimeError("secret path")
                bench.opener.failures["m/1"] = error
            await bench.poll()
            assert bench.newest("m") is old and not old.retired
            (state,) = bench.states("m")
            assert state.startswith("1 READY serves as it was loaded before; the last reload failed: ")
            expected = {
                "policy": "under the version policy of model 'm'; there are 1",
                "unexpected": "RuntimeError while",
            }
            assert expected.get(failure, "input.dims: missing") in state
            assert "secret" not in state
            assert bench.control.ready()
            bench.opener.failures.clear()
            write_config(folder, tag="right again")
            await bench.poll()
            assert bench.states("m") == ["1 READY"]
            assert old.retired

    asyncio.run(main())


def test_a_new_version_that_fails_leaves_the_old_one_serving(tmp_path: Path) -> None:
    async def main() -> None:
        folder = put_model(tmp_path, "m", 1)
        async with Bench(tmp_path) as bench:
            bench.opener.failures["m/2"] = InvalidArgument("not an ONNX file")
            put_version(folder, 2)
            await bench.poll()
            assert bench.served("m") == ["1"]
            assert bench.states("m")[1] == "2 UNAVAILABLE not an ONNX file"
            assert bench.control.ready()
            drop_version(folder, 2)
            await bench.poll()
            assert bench.states("m") == ["1 READY", "2 UNAVAILABLE unloaded"]

    asyncio.run(main())


def test_a_model_that_fails_is_not_tried_again_until_it_changes(tmp_path: Path) -> None:
    async def main() -> None:
        folder = put_model(tmp_path, "m", 1, bad="no backend")
        put_model(tmp_path, "good", 1)
        async with Bench(tmp_path) as bench:
            assert bench.states("m") == ["UNAVAILABLE no backend"]
            assert not bench.control.ready() and bench.control.ready(strict=False)
            assert bench.served("good") == ["1"]
            for _ in range(3):
                await bench.poll()
            assert bench.opener.log == ["open good/1", "opened good/1"]
            write_config(folder)
            await bench.poll()
            assert bench.states("m") == ["1 READY"]
            assert bench.control.ready()

    asyncio.run(main())


def test_a_half_copied_folder_is_not_loaded(tmp_path: Path) -> None:
    async def main() -> None:
        folder = put_model(tmp_path, "m", 1)
        async with Bench(tmp_path) as bench:
            for size in range(4):
                put_version(folder, 2, "x" * size)
                assert await bench.control.poll_once(), "there is something to look at again soon"
                await bench.control.settled()
                assert bench.served("m") == ["1"]
            assert not await bench.control.poll_once()
            await bench.control.settled()
            assert bench.served("m") == ["2"]

    asyncio.run(main())


def test_a_removed_model_stays_listed_and_starts_fresh_when_it_returns(tmp_path: Path) -> None:
    async def main() -> None:
        put_model(tmp_path, "m", 1, 2, policy="all")
        async with Bench(tmp_path) as bench:
            shutil.rmtree(tmp_path / "m")
            bench.opener.retiring.clear()
            await bench.look()
            await bench.control.settled()
            assert bench.served("m") == [] and "m" not in bench.control.directory.models
            assert bench.states("m") == ["1 UNLOADING unloaded", "2 UNLOADING unloaded"]
            bench.opener.retiring.set()
            await bench.control.settled(retired=True)
            assert bench.states("m") == ["1 UNAVAILABLE unloaded", "2 UNAVAILABLE unloaded"]
            assert bench.control.ready()
            put_model(tmp_path, "m", 7)
            await bench.poll()
            assert bench.states("m") == ["7 READY"]

    asyncio.run(main())


def test_a_model_without_versions_stops_serving(tmp_path: Path) -> None:
    async def main() -> None:
        folder = put_model(tmp_path, "m", 1)
        async with Bench(tmp_path) as bench:
            drop_version(folder, 1)
            await bench.poll()
            assert bench.served("m") == []
            assert "make a folder m/1 with the model's file" in bench.states("m")[0]
            put_version(folder, 1)
            await bench.poll()
            assert bench.states("m") == ["1 READY"]

    asyncio.run(main())


def test_duplicates_fail_alone_and_serve_when_one_is_removed(tmp_path: Path) -> None:
    async def main() -> None:
        one, two = tmp_path / "one", tmp_path / "two"
        put_model(one, "m", 1)
        put_model(two, "m", 2)
        put_model(two, "other", 1)
        async with Bench(one, two) as bench:
            assert bench.served("m") == [] and bench.served("other") == ["1"]
            assert f"{one / 'm'} and {two / 'm'}" in bench.states("m")[0]
            shutil.rmtree(one / "m")
            await bench.poll()
            assert bench.states("m") == ["2 READY"]

    asyncio.run(main())


def test_a_repository_that_vanishes_for_a_while_unloads_nothing(tmp_path: Path) -> None:
    async def main() -> None:
        repository = tmp_path / "mounted"
        put_model(repository, "m", 1)
        async with Bench(repository) as bench:
            repository.rename(tmp_path / "unmounted")
            await bench.poll()
            (tmp_path / "unmounted").rename(repository)
            await bench.poll()
            assert bench.opener.log == ["open m/1", "opened m/1"]

    asyncio.run(main())


def test_the_poll_loop_finds_changes_by_itself(tmp_path: Path) -> None:
    async def main() -> None:
        folder = put_model(tmp_path, "m", 1)
        async with Bench(tmp_path, poll_seconds=0.01, settle_seconds=0.01) as bench:
            put_version(folder, 2)
            await eventually_async(lambda: bench.served("m") == ["2"])

    asyncio.run(main())


def test_start_names_every_failure_on_a_separate_line(tmp_path: Path) -> None:
    async def main() -> None:
        put_model(tmp_path, "a", 1, bad="input.dims: missing")
        put_model(tmp_path, "b", 1)
        put_model(tmp_path, "c", 1)
        bench = Bench(tmp_path, mode="none", exit_on_error=True)
        bench.opener.failures["c/1"] = InvalidArgument("no such file")
        with pytest.raises(FailedPrecondition) as raised:
            await bench.control.start()
        assert raised.value.message == "2 of 3 models failed to load: a: input.dims: missing; c: no such file"
        await bench.control.close(1)
        assert bench.opener.live() == []

    asyncio.run(main())


def test_a_load_that_never_ends_is_abandoned_and_others_may_start(tmp_path: Path) -> None:
    async def tried() -> None:
        put_model(tmp_path, "m", 1)
        bench = Bench(tmp_path, model_load_thread_count=1, load_seconds=0.05)
        bench.opener.gates["m/1"] = asyncio.Event()
        async with bench:
            await bench.control.settled()
            assert not bench.control._context.loading.locked()
            [state] = bench.states("m")
            assert state.startswith(
                "1 UNAVAILABLE model 'm' version 1 was not loaded within 0.05 s: see the server's log"
            )
            await eventually_async(lambda: "cancelled m/1" in bench.opener.log)

    asyncio.run(tried())


def test_loads_run_in_parallel_up_to_the_bound(tmp_path: Path) -> None:
    async def main() -> None:
        for number in range(10):
            put_model(tmp_path, f"m{number}", 1, 2, policy="all")
        bench = Bench(tmp_path, model_load_thread_count=3)
        bench.opener.pause = lambda: asyncio.sleep(0.005)
        async with bench:
            assert bench.opener.most_running == 3
            assert len(bench.opener.opened) == 20

    asyncio.run(main())


def test_one_slow_model_does_not_delay_another(tmp_path: Path) -> None:
    async def main() -> None:
        slow, quick = put_model(tmp_path, "slow", 1), put_model(tmp_path, "quick", 1)
        async with Bench(tmp_path) as bench:
            gate = bench.opener.gates["slow/2"] = asyncio.Event()
            put_version(slow, 2)
            await bench.look()
            put_version(quick, 2)
            await bench.look()
            await eventually_async(lambda: bench.served("quick") == ["2"])
            # Meanwhile more comes for the slow one: only the last wish is fulfilled after the first.
            for version in (3, 4, 5):
                put_version(slow, version)
                await bench.look()
            gate.set()
            await bench.control.settled(retired=True)
            assert bench.served("slow") == ["5"]
            assert "open slow/3" not in bench.opener.log and "open slow/4" not in bench.opener.log

    asyncio.run(main())


def test_close_while_a_model_loads(tmp_path: Path) -> None:
    async def main() -> None:
        put_model(tmp_path, "ready", 1)
        put_model(tmp_path, "loading", 1)
        bench = Bench(tmp_path)
        bench.opener.gates["loading/1"] = asyncio.Event()
        starting = asyncio.create_task(bench.control.start())
        await eventually_async(lambda: bench.served("ready") == ["1"] and bench.opener.running == 1)
        assert not bench.control.ready()
        await bench.control.close(7)
        await starting
        assert "cancelled loading/1" in bench.opener.log
        assert bench.opener.live() == [] and bench.opener.opened[0].grace == 7
        assert bench.control.directory.models == {}
        assert not bench.control.ready(strict=False)
        await bench.control.close(7)

    asyncio.run(main())


def test_while_the_first_models_load_none_is_unknown_for_ever(tmp_path: Path) -> None:
    async def main() -> None:
        put_model(tmp_path, "loading", 1)
        bench = Bench(tmp_path)
        plane = DataPlane(bench.control.directory, bench.control)
        with pytest.raises(Unavailable, match="'loading' is not found yet: models are loading, try again soon"):
            plane.config("loading")
        gate = bench.opener.gates["loading/1"] = asyncio.Event()
        starting = asyncio.create_task(bench.control.start())
        await eventually_async(lambda: bench.opener.running == 1)
        with pytest.raises(Unavailable, match="'loading' version 1 is not at ready state: it is loading"):
            plane.config("loading")
        with pytest.raises(Unavailable, match="'later' is not found yet"):
            plane.config("later")
        gate.set()
        await starting
        with pytest.raises(NotFound, match="'later' is not found$"):
            plane.config("later")
        await bench.control.close(1)

    asyncio.run(main())


def test_close_while_the_start_scans_the_folders(tmp_path: Path) -> None:
    async def main() -> None:
        put_model(tmp_path, "m", 1)
        bench = Bench(tmp_path, exit_on_error=True)
        starting = asyncio.create_task(bench.control.start())
        await asyncio.sleep(0)
        await bench.control.close(1)
        await asyncio.wait({starting})
        error = starting.exception()
        assert error is None or isinstance(error, Unavailable)
        assert bench.opener.log == [], "nothing is begun after the end"

    asyncio.run(main())


def test_close_waits_for_what_retires_already_but_not_for_ever(tmp_path: Path) -> None:
    async def main() -> None:
        folder = put_model(tmp_path, "m", 1)
        async with Bench(tmp_path) as bench:
            bench.opener.retiring.clear()
            old = bench.newest("m")
            put_version(folder, 2)
            await bench.look()
            await eventually_async(lambda: old.retired)
            closing = asyncio.create_task(bench.control.close(5))
            await eventually_async(lambda: bench.served("m") == [])
            assert not closing.done()
            bench.opener.retiring.set()
            await closing
            assert bench.opener.log[-2:] == ["retired m/1", "retired m/2"]

    asyncio.run(main())


def test_requests_never_see_a_version_that_is_retired_or_not_ready(tmp_path: Path) -> None:
    async def main() -> None:
        folder = put_model(tmp_path, "m", 1, policy="latest:2")
        async with Bench(tmp_path) as bench:
            opener, directory = bench.opener, bench.control.directory
            opener.pause = lambda: asyncio.sleep(0)
            stop = False
            seen: set[int] = set()

            async def hammer() -> None:
                while not stop:
                    model = directory.models["m"]
                    newest = model.newest
                    assert isinstance(newest, FakeVersion)
                    assert newest in opener.opened and not newest.retired
                    assert model.versions[str(newest.version)] is newest
                    assert not any(version.retired for version in model.versions.values())  # type: ignore[attr-defined]
                    seen.add(newest.version)
                    # Not 0: a loop that never rests keeps the interpreter's lock from the thread that scans.
                    await asyncio.sleep(0.0002)

            hammers = [asyncio.create_task(hammer()) for _ in range(16)]
            for flip in range(2, 202):
                put_version(folder, flip)
                if flip > 3:
                    drop_version(folder, flip - 2)
                await bench.look()
                await bench.control.settled()
            stop = True
            await asyncio.gather(*hammers)
            assert len(seen) > 190
            await bench.control.settled(retired=True)
            assert len(opener.live()) == 2

    asyncio.run(main())
