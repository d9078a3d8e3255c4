# SPDX-License-Identifier: Apache-2.0
"""The process driver, with real processes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
import uuid
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from headrace.core.errors import AlreadyExists, InvalidArgument, ResourceExhausted
from headrace.platforms import process
from headrace.platforms.contract import PORT, SECRET, Handle, LaunchSpec
from headrace.platforms.node_resources import PortAllocator, is_port_free
from headrace.platforms.process import ProcessDriver
from headrace.platforms.processes import boot_id, command_line, is_dead, process_name, read_stat
from support.ports import service_ports
from support.waiting import eventually, eventually_async

HERE = str(Path(__file__).parent)
RANGE = service_ports()


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "launch"
    left = [
        process.pid for process in psutil.process_iter(["cmdline"]) if str(tmp_path) in str(process.info["cmdline"])
    ]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert left == []


def driver_of(root: Path, **more: Any) -> ProcessDriver:
    return ProcessDriver(
        root, ports=RANGE, environ={**os.environ, "PYTHONPATH": HERE, "GATEWAY_KEY": "gw-secret"}, **more
    )


def spec(target: str = "serve", *words: str, **more: Any) -> LaunchSpec:
    return LaunchSpec(str(uuid.uuid4()), f"launched_programs:{target}", ("--port", PORT, *words), **more)


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(work)


async def answer(driver: ProcessDriver, handle: Handle) -> Any:
    url = await driver.endpoint(handle)
    assert url is not None

    async def answered() -> Any:
        try:
            return await asyncio.to_thread(lambda: json.load(urllib.request.urlopen(url, timeout=5)))
        except OSError:
            return None

    return await eventually_async(answered)


def lives(pid: int) -> bool:
    stat = read_stat(pid)
    return stat is not None and stat.is_alive


def empty(root: Path) -> bool:
    jobs, ports = root / "jobs", root / "ports"
    return not list(jobs.iterdir()) and [path.name for path in ports.iterdir()] in ([], [".lock"])


def test_a_service_is_started_reached_and_stopped_without_a_trace(root: Path) -> None:
    async def main() -> None:
        driver = driver_of(root)
        assert all(check.passed for check in await driver.preflight())
        wanted = spec("serve", SECRET % "job", environment={"MODE": "x"}, secrets={"job": 's3cret {"a": 1}'})
        handle = await driver.start(wanted)
        result = await answer(driver, handle)
        assert result["words"] == ["--port", str(handle.data["port"]), 's3cret {"a": 1}']
        assert result["environ"]["MODE"] == "x"
        assert "GATEWAY_KEY" not in result["environ"]
        assert result["environ"]["TMPDIR"].startswith(str(root))
        command = Path(f"/proc/{result['pid']}/cmdline").read_text()
        assert "s3cret" not in command and wanted.job_id in command
        assert os.getsid(result["pid"]) == result["pid"] != os.getsid(0)
        for file in (root / "jobs" / wanted.job_id).glob("*.json"):
            assert file.stat().st_mode & 0o077 == 0
        observed = await driver.status(Handle(wanted.job_id, "process"))
        assert (observed.phase, observed.pod_phase) == ("running", "Running") and str(result["pid"]) in observed.name
        assert "serving" in await driver.logs(handle, 10)
        assert list(await driver.list_services()) == [wanted.job_id]
        with pytest.raises(AlreadyExists):
            await driver.start(wanted)
        await driver.stop(handle, 10)
        await driver.stop(handle, 10)
        assert not lives(result["pid"]) and empty(root)
        assert (await driver.status(handle)).phase == "gone"
        assert await driver.endpoint(handle) is None and await driver.logs(handle, 10) == ""
        assert is_port_free("127.0.0.1", handle.data["port"])
        await driver.close()

    run(main())


def test_children_and_the_stubborn_are_killed(root: Path) -> None:
    async def main() -> None:
        driver = driver_of(root)
        handle = await driver.start(spec("serve", "--stubborn", "--family"))
        result = await answer(driver, handle)
        family = [result["pid"], *(child.pid for child in psutil.Process(result["pid"]).children())]
        assert len(family) == 2
        await driver.stop(handle, 0.2)
        assert not any(map(lives, family)) and empty(root)
        await driver.close()

    run(main())


def test_the_end_of_a_service_is_reported_with_its_code_and_its_log(root: Path) -> None:
    async def main() -> None:
        driver = driver_of(root)
        failed = await driver.start(spec("fail"))

        async def ended() -> bool:
            return (await driver.status(failed)).phase == "ended"

        await eventually_async(ended)
        observed = await driver.status(failed)
        assert (observed.pod_phase, observed.exit_code) == ("Failed", 3) and "code 3" in observed.reason
        assert "the reason why" in await driver.logs(failed, 100)
        killed = await driver.start(spec("serve"))
        result = await answer(driver, killed)
        os.kill(result["pid"], signal.SIGKILL)

        async def dead() -> bool:
            return (await driver.status(killed)).phase == "ended"

        await eventually_async(dead)
        assert "SIGKILL" in (await driver.status(killed)).reason
        for handle in (failed, killed):
            await driver.stop(handle, 1)
        assert empty(root)
        await driver.close()

    run(main())


def test_a_log_is_bounded(root: Path) -> None:
    async def main() -> None:
        driver = driver_of(root, log_bytes=50_000)
        handle = await driver.start(spec("chatter"))
        path = root / "jobs" / handle.job_id / "log"

        async def log_is_complete() -> bool:
            return "line 19999" in await driver.logs(handle, 1)

        await eventually_async(log_is_complete)
        await driver.status(handle)
        assert path.stat().st_size <= 50_000
        lines = (await driver.logs(handle, 5)).splitlines()
        assert [line.split()[1] for line in lines] == ["19995", "19996", "19997", "19998", "19999"]
        await driver.stop(handle, 5)
        await driver.close()

    run(main())


STARTER = """
import asyncio, os, sys
from pathlib import Path
from headrace.platforms.contract import PORT, LaunchSpec
from headrace.platforms import process, processes
async def main():
    if sys.argv[3] == "before the gate":
        processes._open_gate = lambda child: (print(child.pid, flush=True), os.kill(os.getpid(), 9))
    ports = int(sys.argv[4]), int(sys.argv[5])
    driver = process.ProcessDriver(Path(sys.argv[1]), ports=ports, environ={**os.environ})
    await driver.start(LaunchSpec(sys.argv[2], "launched_programs:serve", ("--port", PORT)))
    print("started", flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""


def start_elsewhere(root: Path, job_id: str, how: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", STARTER, str(root), job_id, how, *map(str, RANGE)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": HERE},
    )


def test_a_service_outlives_the_gateway_and_is_found_by_the_next(root: Path) -> None:
    job_id = str(uuid.uuid4())
    with start_elsewhere(root, job_id, "to the end") as gateway:
        assert gateway.stdout is not None and gateway.stdout.readline() == "started\n"
        gateway.kill()

    async def main() -> None:
        driver = driver_of(root)
        handle = Handle(job_id, "process")
        assert (await driver.list_services()) == {job_id: await driver.status(handle)} and (
            await driver.status(handle)
        ).phase == "running"
        result = await answer(driver, handle)
        await driver.stop(handle, 10)
        assert not lives(result["pid"]) and empty(root)
        await driver.close()

    run(main())


def test_a_gateway_killed_before_the_gate_leaves_no_process(root: Path) -> None:
    job_id = str(uuid.uuid4())
    with start_elsewhere(root, job_id, "before the gate") as gateway:
        assert gateway.stdout is not None
        pid = int(gateway.stdout.readline())
        gateway.wait(30)
    eventually(lambda: not lives(pid))

    async def main() -> None:
        driver = driver_of(root)
        assert (await driver.status(Handle(job_id, "process"))).phase == "ended"
        assert "serving" not in await driver.logs(Handle(job_id, "process"), 10)
        await driver.stop(Handle(job_id, "process"), 1)
        assert empty(root)
        await driver.close()

    run(main())


@pytest.mark.parametrize("change", [{"started": 1}, {"boot": "another"}, {"job_id": "other"}])
def test_a_process_with_a_reused_pid_is_not_touched(root: Path, change: dict[str, Any]) -> None:
    async def main() -> None:
        driver = driver_of(root)
        job_id = str(uuid.uuid4())
        folder = root / "jobs" / job_id
        folder.mkdir(parents=True)
        stranger = await asyncio.create_subprocess_exec(sys.executable, "-c", "import time; time.sleep(600)")
        stat = read_stat(stranger.pid)
        assert stat is not None
        while not command_line(stranger.pid):  # the kernel is about to give it its words
            await asyncio.sleep(0.01)
        meta = {
            "job_id": job_id,
            "pid": stranger.pid,
            "started": stat.started,
            "boot": boot_id(),
            "port": 1,
            "host": "h",
        }
        (folder / "launch.json").write_text(json.dumps(meta | change))
        assert (await driver.status(Handle(job_id, "process"))).phase == "ended"
        await driver.stop(Handle(job_id, "process"), 1)
        assert lives(stranger.pid) and not folder.exists()
        stranger.kill()
        await stranger.wait()
        await driver.close()

    run(main())


def test_a_process_between_fork_and_exec_counts_as_alive(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two steps of an exec, /proc has none; on a machine that is busy enough somebody looks just then."""

    async def main() -> None:
        driver = driver_of(root)
        handle = await driver.start(spec())
        with monkeypatch.context() as patch:
            patch.setattr(process, "command_line", lambda _: [])
            assert (await driver.status(handle)).phase == "running"
        assert (await driver.status(handle)).phase == "running"
        await driver.stop(handle, 30)
        assert empty(root)
        await driver.close()

    run(main())


def test_ports_are_bound_before_they_are_given_and_given_in_turn(tmp_path: Path) -> None:
    first, last = service_ports(4)
    with socket.create_server(("127.0.0.1", first + 1)):
        ports = PortAllocator(tmp_path / "ports", "127.0.0.1", first, last)
        known = {"a", "b", "c"}
        given = [ports.claim(name, known.__contains__) for name in "abc"]
        turn = [first, first + 2, first + 3]
        assert given in (turn, turn[1:] + turn[:1], turn[2:] + turn[:2])
        with pytest.raises(ResourceExhausted):
            ports.claim("d", known.__contains__)
        ports.release("a")
        assert ports.claim("d", (known | {"d"}).__contains__) == given[0]
        assert ports.claim("e", {"a"}.__contains__) == given[1]  # b, c and d are gone: not the port just given


def test_folders_that_share_the_ports_do_not_all_begin_with_the_same(tmp_path: Path) -> None:
    """Nobody listens yet where the first service of another folder is about to."""
    first, last = service_ports()
    given = [
        PortAllocator(tmp_path / str(number), "127.0.0.1", first, last).claim("a", {"a"}.__contains__)
        for number in range(10)
    ]
    again = PortAllocator(tmp_path / "0", "127.0.0.1", first, last)
    again.release("a")
    assert len(set(given)) > 1 and again.claim("b", {"b"}.__contains__) == given[0] + 1 - (
        last - first + 1 if given[0] == last else 0
    )


def test_a_failed_start_leaves_nothing(root: Path) -> None:
    async def main() -> None:
        only = service_ports(1)
        driver = ProcessDriver(root, ports=only, environ={"PYTHONPATH": HERE, **os.environ})
        with socket.create_server(("127.0.0.1", only[0])), pytest.raises(ResourceExhausted):
            await driver.start(spec())
        assert empty(root) and await driver.list_services() == {}
        await driver.close()

    run(main())


@pytest.mark.parametrize("bad", ["", "..", "../../etc", "a/b", "x\0y", "{00000000-0000-0000-0000-000000000000}"])
def test_a_job_id_that_is_not_a_uuid_reaches_no_file(root: Path, bad: str) -> None:
    async def main() -> None:
        driver = driver_of(root)
        for call in (driver.status(Handle(bad, "process")), driver.stop(Handle(bad, "process"), 1)):
            with pytest.raises(InvalidArgument):
                await call
        with pytest.raises(InvalidArgument):
            await driver.start(LaunchSpec(bad, "launched_programs:serve", ()))
        await driver.close()

    run(main())


def test_who_lives() -> None:
    mine = process_name("x")
    assert not is_dead(mine)
    host, started_boot, pid, started, extra = mine.split("/")
    assert is_dead("/".join((host, started_boot, pid, "1", extra)))
    assert is_dead("/".join((host, "another-boot", pid, started, extra)))
    assert not is_dead("/".join(("another-host", started_boot, pid, "1", extra)))
    assert not is_dead("") and not is_dead("nonsense")
