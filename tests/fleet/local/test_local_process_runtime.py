# SPDX-License-Identifier: Apache-2.0
"""Containers as processes of this machine, one at a time and without a daemon: start, limits, end, and the next daemon."""

from __future__ import annotations

import asyncio
import inspect
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from simulated_fleet import FakeDriver, FakeRunning

from headrace.core.files import read_json
from headrace.fleet.local import process_runtime
from headrace.fleet.local.cgroups import Cgroups
from headrace.fleet.local.container_command import ContainerCommand, ContainerStartError
from headrace.fleet.local.container_runtime import (
    LOG,
    RECORD,
    ContainerRuntime,
    ContainerSpec,
    ExitStatus,
    ResourceLimits,
    RunningContainer,
    VolumeMount,
)
from headrace.fleet.local.docker_runtime import DockerContainer, DockerRuntime
from headrace.fleet.local.process_runtime import LimitWatcher, ProcessContainer, ProcessRuntime
from headrace.platforms.processes import read_stat, session_members
from support.waiting import eventually_async

pytestmark = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs Linux")

SLEEPS = ("sleep", "3600")


def driver() -> ProcessRuntime:
    """Of a machine that lets it have no cgroups."""
    return ProcessRuntime(Cgroups({}), LimitWatcher(0.01))


def spec(folder: Path, *words: str, variables: dict[str, str] | None = None, **more: Any) -> ContainerSpec:
    folder.mkdir(exist_ok=True)
    return ContainerSpec(
        "uid", "main", folder, ContainerCommand(words or SLEEPS, variables or {}, False), folder, **more
    )


def lives(pid: int | None) -> bool:
    stat = read_stat(pid or 0)
    return stat is not None and stat.is_alive


@pytest.mark.parametrize("made", [ProcessRuntime, DockerRuntime, FakeDriver])
def test_every_driver_and_the_fake_one_are_what_containers_are_written_against(made: type) -> None:
    runs = {ProcessRuntime: ProcessContainer, DockerRuntime: DockerContainer, FakeDriver: FakeRunning}[made]
    for contract, found in ((ContainerRuntime, made), (RunningContainer, runs)):
        for name, item in vars(contract).items():
            if not name.startswith("_") and callable(item):
                wanted, has = inspect.signature(item), inspect.signature(getattr(found, name))
                assert list(has.parameters) == list(wanted.parameters), name
                assert inspect.iscoroutinefunction(getattr(found, name)) == inspect.iscoroutinefunction(item), name
            elif isinstance(item, property):
                assert isinstance(getattr(found, name), property), name


@pytest.mark.parametrize(("words", "code"), [("exit 3", 3), ("kill -9 $$", -9), ("exit 0", 0)])
def test_how_a_container_ends_and_its_output(tmp_path: Path, words: str, code: int) -> None:
    async def run() -> None:
        running = await driver().start(
            spec(tmp_path / "c", "sh", "-c", f"echo said $WHAT; {words}", variables={"WHAT": "it"})
        )
        assert running.label == f"process {running.session}"
        assert await running.wait() == ExitStatus(code)
        assert await running.logs(10, 1000) == "said it"
        await running.remove()

    asyncio.run(run())


def test_a_stopped_process_has_its_grace_and_is_killed_after_it(tmp_path: Path) -> None:
    stubborn = "trap '' TERM; echo up; while :; do sleep 0.01; done"

    async def run() -> None:
        both = driver()
        polite = await both.start(spec(tmp_path / "polite"))
        await polite.stop(60.0)
        assert await polite.wait() == ExitStatus(-15)
        rude = await both.start(spec(tmp_path / "rude", "sh", "-c", stubborn))
        await eventually_async(lambda: (tmp_path / "rude" / LOG).read_text())
        await rude.stop(0.05)
        assert await rude.wait() == ExitStatus(-9) and not session_members(rude.session or 0)
        await both.close()

    asyncio.run(run())


def test_the_next_daemon_finds_what_runs_and_ends_it(tmp_path: Path) -> None:
    async def first() -> int:
        running = await driver().start(spec(tmp_path / "c"))
        running.detach()
        return running.session or 0

    async def second(pid: int) -> None:
        result = driver().adopt(tmp_path / "c")
        assert result is not None and result.session == pid
        assert await result.exec(["test", "-e", str(tmp_path)], {}, 30.0)
        assert not await result.exec(["test", "-e", str(tmp_path / "absent")], {}, 30.0)
        os.kill(pid, signal.SIGKILL)
        assert (await result.wait()).code is None, "only who started it hears how it ended"
        await result.remove()
        assert driver().adopt(tmp_path / "c") is None

    pid = asyncio.run(first())
    assert lives(pid)
    asyncio.run(second(pid))


def test_who_it_is_is_kept_before_it_does_anything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where that cannot be, nothing runs."""
    seen: list[int] = []

    def full(path: Path, record: dict[str, Any], **_: Any) -> None:
        seen.append(record["pid"])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("headrace.fleet.local.process_runtime.write_json", full)

    async def run() -> None:
        with pytest.raises(OSError, match="No space left"):
            await driver().start(spec(tmp_path / "c", "touch", str(tmp_path / "began")))

    asyncio.run(run())
    assert not lives(seen[0]) and not (tmp_path / "began").exists()


@pytest.mark.parametrize(
    ("limits", "line", "how"),
    [
        (
            ResourceLimits(memory=64 << 20),
            "kept = b'x' * (200 << 20)",
            ExitStatus(-9, "OOMKilled", "its limit is 64 MiB"),
        ),
        (
            ResourceLimits(tasks=10),
            "[threading.Thread(target=time.sleep, args=(3600,), daemon=True).start() for _ in range(30)]",
            ExitStatus(-9, "Error", "may have 10: raise --max-processes"),
        ),
    ],
    ids=["memory", "tasks"],
)
def test_a_process_over_its_memory_limit_is_ended_by_the_watcher(
    tmp_path: Path, limits: ResourceLimits, line: str, how: ExitStatus
) -> None:
    program = f"import threading, time; {line}; time.sleep(3600)"

    async def run() -> None:
        both = driver()
        running = await both.start(spec(tmp_path / "c", sys.executable, "-c", program, limits=limits))
        ended = await running.wait()
        assert (ended.code, ended.reason) == (how.code, how.reason) and how.message in ended.message
        assert not lives(running.session)
        record = read_json(tmp_path / "c" / RECORD) or {}
        assert record["watched"] == {"memory": limits.memory, "tasks": limits.tasks}
        await running.remove()
        await both.close()

    asyncio.run(run())


def test_one_within_its_limits_ends_as_it_likes(tmp_path: Path) -> None:
    async def run() -> None:
        both = driver()
        running = await both.start(spec(tmp_path / "c", "sh", "-c", "exit 5", limits=ResourceLimits(memory=1 << 40)))
        assert await running.wait() == ExitStatus(5)
        await both.close()

    asyncio.run(run())


@pytest.mark.skipif(len(getattr(os, "sched_getaffinity", lambda _: {0})(0)) < 2, reason="needs two cores")
def test_a_limit_of_cores_ties_it_to_some_and_the_next_to_others(tmp_path: Path) -> None:
    async def run() -> None:
        both = driver()
        one, other = [
            await both.start(spec(tmp_path / name, limits=ResourceLimits(cores=0.5))) for name in ("one", "other")
        ]
        cores = [os.sched_getaffinity(entry.session or 0) for entry in (one, other)]
        assert [len(core) for core in cores] == [1, 1] and cores[0] != cores[1]
        # The next daemon knows who has which.
        again = driver()
        assert again.adopt(tmp_path / "one") is not None
        third = await again.start(spec(tmp_path / "third", limits=ResourceLimits(cores=0.5)))
        assert os.sched_getaffinity(third.session or 0) != cores[0]
        for item in (one, other, third):
            await item.stop(0.0)
            await item.remove()

    asyncio.run(run())


def test_a_low_priority_process_gets_normal_priority_when_ready(tmp_path: Path) -> None:
    late = os.SCHED_IDLE if process_runtime.can_restore_priority() else os.SCHED_OTHER

    async def run() -> None:
        modest = await driver().start(spec(tmp_path / "modest", low_priority=True))
        usual = await driver().start(spec(tmp_path / "usual"))
        assert os.sched_getscheduler(modest.session or 0) == late
        assert os.sched_getscheduler(usual.session or 0) == os.SCHED_OTHER
        result = driver().adopt(tmp_path / "modest")
        assert result is not None
        result.mark_ready()
        assert os.sched_getscheduler(modest.session or 0) == os.SCHED_OTHER
        for item in (modest, usual):
            await item.stop(0.0)

    asyncio.run(run())


def test_a_group_that_cannot_be_made_is_done_without(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    async def run() -> None:
        both = ProcessRuntime(Cgroups({"memory": tmp_path / "file"}), LimitWatcher(0.01))
        running = await both.start(spec(tmp_path / "c", limits=ResourceLimits(memory=1 << 40)))
        assert lives(running.session) and (read_json(tmp_path / "c" / RECORD) or {})["groups"] == []
        await running.stop(0.0)
        await both.close()

    asyncio.run(run())


def test_a_missing_program_is_reported(tmp_path: Path) -> None:
    async def run() -> None:
        with pytest.raises(ContainerStartError, match="no-such-program is not on this machine: install it"):
            await driver().start(spec(tmp_path / "c", "no-such-program"))

    asyncio.run(run())


def test_temporary_files_and_variables_of_the_daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_OF_THE_DAEMON", "x")
    mounts = [VolumeMount("/tmp", str(tmp_path / "mounted"))]

    async def run() -> None:
        arguments = ("sh", "-c", "echo $TMPDIR $SECRET_OF_THE_DAEMON")
        plain = await driver().start(spec(tmp_path / "plain", *arguments))
        mounted = await driver().start(spec(tmp_path / "mounted", *arguments, mounts=mounts))
        for item in (plain, mounted):
            await item.wait()
        assert await plain.logs(1, 1000) == str(tmp_path / "plain")
        assert await mounted.logs(1, 1000) == str(tmp_path / "mounted")

    asyncio.run(run())
