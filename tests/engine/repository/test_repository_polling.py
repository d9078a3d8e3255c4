# SPDX-License-Identifier: Apache-2.0
"""A polled repository: versions and models come, change and go while requests are served."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest
from repository_fakes import FakeVersion, RepositoryFixture, drop_version, put_model, put_version, write_config

from headrace.core.errors import FailedPrecondition, InvalidArgument, NotFound, Unavailable
from headrace.engine.dataplane import DataPlane
from headrace.engine.repository.states import State
from support.waiting import eventually_async


def test_a_new_version_is_ready_before_the_old_one_retires(tmp_path: Path) -> None:
    async def main() -> None:
        folder = put_model(tmp_path, "m", 1)
        async with RepositoryFixture(tmp_path) as fixture:
            put_version(folder, 2)
            await fixture.poll()
            assert fixture.opener.log == [
                "open m/1", "opened m/1", "open m/2", "opened m/2", "retire m/1", "retired m/1",
            ]  # fmt: skip
            assert fixture.served("m") == ["2"]
            assert fixture.states("m") == ["1 UNAVAILABLE unloaded", "2 READY"]

    asyncio.run(main())


@pytest.mark.parametrize(
    ("policy", "served"),
    [("latest:1", "3"), ("latest:2", "2 3"), ("latest:9", "1 2 3"), ("all", "1 2 3"), ("specific:1,3,8", "1 3")],
)
def test_the_policy_decides_which_versions_serve(tmp_path: Path, policy: str, served: str) -> None:
    async def main() -> None:
        put_model(tmp_path, "m", 1, 2, 3, policy=policy)
        async with RepositoryFixture(tmp_path, mode="none") as fixture:
            assert fixture.served("m") == served.split()
            assert str(fixture.newest("m")) == "m/3"
            assert fixture.control.ready()

    asyncio.run(main())


def test_unchanged_versions_are_not_touched_when_others_are_added_or_removed(tmp_path: Path) -> None:
    async def main() -> None:
        folder = put_model(tmp_path, "m", 1, 2, policy="all")
        async with RepositoryFixture(tmp_path) as fixture:
            two = fixture.control.directory.find("m", "2")
            put_version(folder, 10)
            drop_version(folder, 1)
            await fixture.poll()
            assert fixture.served("m") == ["2", "10"]
            assert fixture.control.directory.find("m", "2") is two
            drop_version(folder, 10)
            await fixture.poll()
            assert fixture.newest("m") is two
            assert fixture.states("m") == ["1 UNAVAILABLE unloaded", "2 READY", "10 UNAVAILABLE unloaded"]

    asyncio.run(main())


@pytest.mark.parametrize("what", ["configuration", "labels", "weights"])
def test_a_change_reloads_and_the_old_copy_serves_meanwhile(tmp_path: Path, what: str) -> None:
    async def main() -> None:
        folder = put_model(tmp_path, "m", 1)
        async with RepositoryFixture(tmp_path) as fixture:
            old = fixture.newest("m")
            gate = fixture.opener.gates["m/1"] = asyncio.Event()
            if what == "configuration":
                write_config(folder, tag="new")
            elif what == "labels":
                (folder / "labels.txt").write_text("cat\ndog\n")
            else:
                put_version(folder, 1, "other weights")
            await fixture.poll_twice()
            await eventually_async(lambda: fixture.opener.running == 1)
            assert fixture.newest("m") is old and not old.retired
            assert fixture.control.ready()
            state = fixture.control.state_of("m", 1)
            assert state is not None and state.state is State.READY
            assert state.progress is not None and state.progress.message == "reading weights"
            fixture.opener.retiring.clear()
            gate.set()
            await fixture.control.settled()
            assert fixture.newest("m") is not old
            # Requests in flight are still on the old copy; that does not show.
            assert old.retired and fixture.states("m") == ["1 READY"]
            fixture.opener.retiring.set()

    asyncio.run(main())


@pytest.mark.parametrize("failure", ["open", "configuration", "policy", "unexpected"])
def test_a_failed_reload_keeps_the_old_copy_and_states_the_reason(tmp_path: Path, failure: str) -> None:
    async def main() -> None:
        folder = put_model(tmp_path, "m", 1)
        async with RepositoryFixture(tmp_path) as fixture:
            old = fixture.newest("m")
            if failure == "configuration":
                write_config(folder, bad="input.dims: missing")
            elif failure == "policy":
                write_config(folder, policy="specific:7")
            else:
                put_version(folder, 1, "broken")
                error = InvalidArgument("input.dims: missing") if failure == "open" else RuntimeError("secret path")
                fixture.opener.failures["m/1"] = error
            await fixture.poll()
            assert fixture.newest("m") is old and not old.retired
            (state,) = fixture.states("m")
            assert state.startswith("1 READY serves as it was loaded before; the last reload failed: ")
            expected = {
                "policy": "under the version policy of model 'm'; there are 1",
                "unexpected": "RuntimeError while",
            }
            assert expected.get(failure, "input.dims: missing") in state
            assert "secret" not in state
            assert fixture.control.ready()
            fixture.opener.failures.clear()
            write_config(folder, tag="right again")
            await fixture.poll()
            assert fixture.states("m") == ["1 READY"]
            assert old.retired

    asyncio.run(main())


def test_a_new_version_that_fails_leaves_the_old_one_serving(tmp_path: Path) -> None:
    async def main() -> None:
        folder = put_model(tmp_path, "m", 1)
        async with RepositoryFixture(tmp_path) as fixture:
            fixture.opener.failures["m/2"] = InvalidArgument("not an ONNX file")
            put_version(folder, 2)
            await fixture.poll()
            assert fixture.served("m") == ["1"]
            assert fixture.states("m")[1] == "2 UNAVAILABLE not an ONNX file"
            assert fixture.control.ready()
            drop_version(folder, 2)
            await fixture.poll()
            assert fixture.states("m") == ["1 READY", "2 UNAVAILABLE unloaded"]

    asyncio.run(main())


def test_a_model_that_fails_is_not_tried_again_until_it_changes(tmp_path: Path) -> None:
    async def main() -> None:
        folder = put_model(tmp_path, "m", 1, bad="no backend")
        put_model(tmp_path, "good", 1)
        async with RepositoryFixture(tmp_path) as fixture:
            assert fixture.states("m") == ["UNAVAILABLE no backend"]
            assert not fixture.control.ready() and fixture.control.ready(strict=False)
            assert fixture.served("good") == ["1"]
            for _ in range(3):
                await fixture.poll()
            assert fixture.opener.log == ["open good/1", "opened good/1"]
            write_config(folder)
            await fixture.poll()
            assert fixture.states("m") == ["1 READY"]
            assert fixture.control.ready()

    asyncio.run(main())


def test_a_half_copied_folder_is_not_loaded(tmp_path: Path) -> None:
    async def main() -> None:
        folder = put_model(tmp_path, "m", 1)
        async with RepositoryFixture(tmp_path) as fixture:
            for size in range(4):
                put_version(folder, 2, "x" * size)
                assert await fixture.control.poll_once(), "there is something to look at again soon"
                await fixture.control.settled()
                assert fixture.served("m") == ["1"]
            assert not await fixture.control.poll_once()
            await fixture.control.settled()
            assert fixture.served("m") == ["2"]

    asyncio.run(main())


def test_a_removed_model_stays_listed_and_starts_fresh_when_it_returns(tmp_path: Path) -> None:
    async def main() -> None:
        put_model(tmp_path, "m", 1, 2, policy="all")
        async with RepositoryFixture(tmp_path) as fixture:
            shutil.rmtree(tmp_path / "m")
            fixture.opener.retiring.clear()
            await fixture.poll_twice()
            await fixture.control.settled()
            assert fixture.served("m") == [] and "m" not in fixture.control.directory.models
            assert fixture.states("m") == ["1 UNLOADING unloaded", "2 UNLOADING unloaded"]
            fixture.opener.retiring.set()
            await fixture.control.settled(retired=True)
            assert fixture.states("m") == ["1 UNAVAILABLE unloaded", "2 UNAVAILABLE unloaded"]
            assert fixture.control.ready()
            put_model(tmp_path, "m", 7)
            await fixture.poll()
            assert fixture.states("m") == ["7 READY"]

    asyncio.run(main())


def test_a_model_without_versions_stops_serving(tmp_path: Path) -> None:
    async def main() -> None:
        folder = put_model(tmp_path, "m", 1)
        async with RepositoryFixture(tmp_path) as fixture:
            drop_version(folder, 1)
            await fixture.poll()
            assert fixture.served("m") == []
            assert "make a folder m/1 with the model's file" in fixture.states("m")[0]
            put_version(folder, 1)
            await fixture.poll()
            assert fixture.states("m") == ["1 READY"]

    asyncio.run(main())


def test_duplicates_fail_alone_and_serve_when_one_is_removed(tmp_path: Path) -> None:
    async def main() -> None:
        one, two = tmp_path / "one", tmp_path / "two"
        put_model(one, "m", 1)
        put_model(two, "m", 2)
        put_model(two, "other", 1)
        async with RepositoryFixture(one, two) as fixture:
            assert fixture.served("m") == [] and fixture.served("other") == ["1"]
            assert f"{one / 'm'} and {two / 'm'}" in fixture.states("m")[0]
            shutil.rmtree(one / "m")
            await fixture.poll()
            assert fixture.states("m") == ["2 READY"]

    asyncio.run(main())


def test_a_repository_that_vanishes_for_a_while_unloads_nothing(tmp_path: Path) -> None:
    async def main() -> None:
        repository = tmp_path / "mounted"
        put_model(repository, "m", 1)
        async with RepositoryFixture(repository) as fixture:
            repository.rename(tmp_path / "unmounted")
            await fixture.poll()
            (tmp_path / "unmounted").rename(repository)
            await fixture.poll()
            assert fixture.opener.log == ["open m/1", "opened m/1"]

    asyncio.run(main())


def test_the_poll_loop_finds_changes_by_itself(tmp_path: Path) -> None:
    async def main() -> None:
        folder = put_model(tmp_path, "m", 1)
        async with RepositoryFixture(tmp_path, poll_seconds=0.01, settle_seconds=0.01) as fixture:
            put_version(folder, 2)
            await eventually_async(lambda: fixture.served("m") == ["2"])

    asyncio.run(main())


def test_start_names_every_failure_on_a_separate_line(tmp_path: Path) -> None:
    async def main() -> None:
        put_model(tmp_path, "a", 1, bad="input.dims: missing")
        put_model(tmp_path, "b", 1)
        put_model(tmp_path, "c", 1)
        fixture = RepositoryFixture(tmp_path, mode="none", exit_on_error=True)
        fixture.opener.failures["c/1"] = InvalidArgument("no such file")
        with pytest.raises(FailedPrecondition) as raised:
            await fixture.control.start()
        assert raised.value.message == "2 of 3 models failed to load: a: input.dims: missing; c: no such file"
        await fixture.control.close(1)
        assert fixture.opener.live() == []

    asyncio.run(main())


def test_a_load_that_never_ends_is_abandoned_and_others_may_start(tmp_path: Path) -> None:
    async def tried() -> None:
        put_model(tmp_path, "m", 1)
        fixture = RepositoryFixture(tmp_path, model_load_thread_count=1, load_seconds=0.05)
        fixture.opener.gates["m/1"] = asyncio.Event()
        async with fixture:
            await fixture.control.settled()
            assert not fixture.control._context.loading.locked()
            [state] = fixture.states("m")
            assert state.startswith(
                "1 UNAVAILABLE model 'm' version 1 was not loaded within 0.05 s: see the server's log"
            )
            await eventually_async(lambda: "cancelled m/1" in fixture.opener.log)

    asyncio.run(tried())


def test_loads_run_in_parallel_up_to_the_bound(tmp_path: Path) -> None:
    async def main() -> None:
        for number in range(10):
            put_model(tmp_path, f"m{number}", 1, 2, policy="all")
        fixture = RepositoryFixture(tmp_path, model_load_thread_count=3)
        fixture.opener.pause = lambda: asyncio.sleep(0.005)
        async with fixture:
            assert fixture.opener.most_running == 3
            assert len(fixture.opener.opened) == 20

    asyncio.run(main())


def test_one_slow_model_does_not_delay_another(tmp_path: Path) -> None:
    async def main() -> None:
        slow, quick = put_model(tmp_path, "slow", 1), put_model(tmp_path, "quick", 1)
        async with RepositoryFixture(tmp_path) as fixture:
            gate = fixture.opener.gates["slow/2"] = asyncio.Event()
            put_version(slow, 2)
            await fixture.poll_twice()
            put_version(quick, 2)
            await fixture.poll_twice()
            await eventually_async(lambda: fixture.served("quick") == ["2"])
            # Meanwhile more comes for the slow one: only the last wish is fulfilled after the first.
            for version in (3, 4, 5):
                put_version(slow, version)
                await fixture.poll_twice()
            gate.set()
            await fixture.control.settled(retired=True)
            assert fixture.served("slow") == ["5"]
            assert "open slow/3" not in fixture.opener.log and "open slow/4" not in fixture.opener.log

    asyncio.run(main())


def test_close_while_a_model_loads(tmp_path: Path) -> None:
    async def main() -> None:
        put_model(tmp_path, "ready", 1)
        put_model(tmp_path, "loading", 1)
        fixture = RepositoryFixture(tmp_path)
        fixture.opener.gates["loading/1"] = asyncio.Event()
        starting = asyncio.create_task(fixture.control.start())
        await eventually_async(lambda: fixture.served("ready") == ["1"] and fixture.opener.running == 1)
        assert not fixture.control.ready()
        await fixture.control.close(7)
        await starting
        assert "cancelled loading/1" in fixture.opener.log
        assert fixture.opener.live() == [] and fixture.opener.opened[0].grace == 7
        assert fixture.control.directory.models == {}
        assert not fixture.control.ready(strict=False)
        await fixture.control.close(7)

    asyncio.run(main())


def test_while_the_first_models_load_none_is_unknown_for_ever(tmp_path: Path) -> None:
    async def main() -> None:
        put_model(tmp_path, "loading", 1)
        fixture = RepositoryFixture(tmp_path)
        plane = DataPlane(fixture.control.directory, fixture.control)
        with pytest.raises(Unavailable, match="'loading' is not found yet: models are loading, try again soon"):
            plane.config("loading")
        gate = fixture.opener.gates["loading/1"] = asyncio.Event()
        starting = asyncio.create_task(fixture.control.start())
        await eventually_async(lambda: fixture.opener.running == 1)
        with pytest.raises(Unavailable, match="'loading' version 1 is not at ready state: it is loading"):
            plane.config("loading")
        with pytest.raises(Unavailable, match="'later' is not found yet"):
            plane.config("later")
        gate.set()
        await starting
        with pytest.raises(NotFound, match="'later' is not found$"):
            plane.config("later")
        await fixture.control.close(1)

    asyncio.run(main())


def test_close_while_the_start_scans_the_folders(tmp_path: Path) -> None:
    async def main() -> None:
        put_model(tmp_path, "m", 1)
        fixture = RepositoryFixture(tmp_path, exit_on_error=True)
        starting = asyncio.create_task(fixture.control.start())
        await asyncio.sleep(0)
        await fixture.control.close(1)
        await asyncio.wait({starting})
        error = starting.exception()
        assert error is None or isinstance(error, Unavailable)
        assert fixture.opener.log == [], "nothing is begun after the end"

    asyncio.run(main())


def test_close_waits_for_what_retires_already_but_not_for_ever(tmp_path: Path) -> None:
    async def main() -> None:
        folder = put_model(tmp_path, "m", 1)
        async with RepositoryFixture(tmp_path) as fixture:
            fixture.opener.retiring.clear()
            old = fixture.newest("m")
            put_version(folder, 2)
            await fixture.poll_twice()
            await eventually_async(lambda: old.retired)
            closing = asyncio.create_task(fixture.control.close(5))
            await eventually_async(lambda: fixture.served("m") == [])
            assert not closing.done()
            fixture.opener.retiring.set()
            await closing
            assert fixture.opener.log[-2:] == ["retired m/1", "retired m/2"]

    asyncio.run(main())


def test_requests_never_see_a_version_that_is_retired_or_not_ready(tmp_path: Path) -> None:
    async def main() -> None:
        folder = put_model(tmp_path, "m", 1, policy="latest:2")
        async with RepositoryFixture(tmp_path) as fixture:
            opener, directory = fixture.opener, fixture.control.directory
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
                await fixture.poll_twice()
                await fixture.control.settled()
            stop = True
            await asyncio.gather(*hammers)
            assert len(seen) > 190
            await fixture.control.settled(retired=True)
            assert len(opener.live()) == 2

    asyncio.run(main())
