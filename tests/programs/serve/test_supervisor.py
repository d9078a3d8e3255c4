# SPDX-License-Identifier: Apache-2.0
"""The supervisor as a real process with real workers, signalled and killed from outside."""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.programs.serve import supervisor
from headrace.programs.serve.supervisor import run_processes
from support.programs import Program
from support.waiting import eventually

ROOT = Path(__file__).parents[3]

PRELUDE = f"""
    import logging, os, signal, sys, time
    sys.path.insert(0, {str(ROOT)!r})
    from headrace.programs.serve import supervisor
    from headrace.programs.serve.supervisor import run_processes

    supervisor._FIRST_DELAY_SECONDS = 0.05

    def tell(text):
        os.write(1, (text + "\\n").encode())

    def wait_for_signal(index, code=0):
        \"\"\"A worker that drains when told to.\"\"\"
        def stop(number, frame):
            tell(f"drained {{index}}")
            os._exit(code)
        signal.signal(signal.SIGTERM, stop)
        signal.signal(signal.SIGINT, stop)
        tell(f"up {{index}} {{os.getpid()}}")
        while True:
            time.sleep(60)

    logging.basicConfig(level="INFO", format="LOG %(name)s %(message)s", stream=sys.stdout)
"""


class Supervised:
    """A script under the prelude, in a process group of its own."""

    def __init__(self, script: str, folder: Path) -> None:
        text = textwrap.dedent(PRELUDE) + textwrap.dedent(script)
        self._program = Program(command=(sys.executable, "-c", text), log=folder / "log", new_session=True).start()

    @property
    def pid(self) -> int:
        return self._program.pid

    @property
    def text(self) -> str:
        return self._program.log

    @property
    def lines(self) -> list[str]:
        return self.text.splitlines()

    @property
    def workers(self) -> dict[int, int]:
        """The newest process of each index."""
        return {int(index): int(pid) for index, pid in re.findall(r"^up (\d+) (\d+)$", self.text, re.MULTILINE)}

    @property
    def ended(self) -> bool:
        return self._program.process.poll() is not None

    def until(self, check: Callable[[], Any]) -> None:
        """Wait for something that the program does; fail at once if it has ended instead."""

        def happened() -> Any:
            ended = self.ended
            result = check()
            if ended and not result:
                raise RuntimeError(f"it has ended:\n{self.text}")
            return result

        eventually(happened, message=f"it happens in\n{self.text}")

    def signal(self, number: signal.Signals) -> None:
        self._program.send(number)

    def code(self) -> int:
        return self._program.wait()

    def close(self) -> None:
        workers = self.workers.values()
        self._program.kill()
        for pid in workers:
            if alive(pid):
                os.kill(pid, signal.SIGKILL)


Start = Callable[[str], Supervised]


def alive(pid: int) -> bool:
    """Whether it runs; a zombie nobody has reaped does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


@pytest.fixture
def supervised(tmp_path: Path) -> Iterator[Start]:
    started: list[Supervised] = []

    def start(script: str) -> Supervised:
        started.append(Supervised(script, tmp_path))
        return started[-1]

    yield start
    for program in started:
        program.close()


def test_one_process_is_this_process() -> None:
    seen: list[tuple[int, int]] = []

    def main(index: int) -> int:
        seen.append((index, os.getpid()))
        return 7

    assert run_processes(1, main) == 7
    assert seen == [(0, os.getpid())]


def test_no_process_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least one"):
        run_processes(0, lambda index: 0)


def test_threads_are_refused() -> None:
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    try:
        with pytest.raises(RuntimeError, match="before any thread"):
            run_processes(2, lambda index: 0)
    finally:
        stop.set()
        thread.join()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_reaches_every_worker_and_all_drain(supervised: Start, number: signal.Signals) -> None:
    run = supervised("sys.exit(run_processes(3, wait_for_signal))")
    run.until(lambda: len(run.workers) == 3)
    assert run.pid not in run.workers.values()
    run.signal(number)
    assert run.code() == 0, run.text
    assert all(f"drained {index}" in run.text for index in range(3))
    assert not any(alive(pid) for pid in run.workers.values())


def test_a_failed_drain_of_a_worker_is_in_the_exit_code(supervised: Start) -> None:
    run = supervised("sys.exit(run_processes(2, lambda index: wait_for_signal(index, code=3 * index)))")
    run.until(lambda: len(run.workers) == 2)
    run.signal(signal.SIGTERM)
    assert run.code() == 1, run.text
    assert "exited with code 3" in run.text


def test_a_dead_worker_is_replaced_and_the_others_are_not_touched(supervised: Start) -> None:
    run = supervised("sys.exit(run_processes(2, wait_for_signal))")
    run.until(lambda: len(run.workers) == 2)
    first = dict(run.workers)
    os.kill(first[1], signal.SIGKILL)
    run.until(lambda: run.workers[1] != first[1])
    assert f"worker 1 (pid {first[1]}) was ended by SIGKILL" in run.text
    assert run.workers[0] == first[0]
    assert alive(first[0])
    os.kill(run.workers[0], signal.SIGTERM)  # a worker told alone drains, and is replaced: a rolling restart
    run.until(lambda: run.workers[0] != first[0])
    assert "exited with code 0" in run.text
    second = run.workers[1]
    os.kill(second, signal.SIGRTMIN + 3)  # one without a name
    run.until(lambda: run.workers[1] != second)
    assert f"was ended by signal {signal.SIGRTMIN + 3}" in run.text
    run.signal(signal.SIGTERM)
    assert run.code() == 0, run.text


def test_deaths_in_a_row_are_spaced_out(supervised: Start) -> None:
    run = supervised(
        """
        def main(index):
            if index:
                tell(f"crash {time.monotonic()}")
                raise RuntimeError("no luck")
            return wait_for_signal(index)

        sys.exit(run_processes(2, main))
        """
    )
    run.until(lambda: "starting it again in 0.4 s" in run.text)
    starts = [float(line.split()[1]) for line in run.lines if line.startswith("crash")]
    gaps = [late - early for early, late in zip(starts, starts[1:], strict=False)]
    assert gaps[0] >= 0.05
    assert gaps[1] >= 0.1
    assert gaps[2] >= 0.2
    assert "no luck" in run.text
    assert "exited with code 1" in run.text
    run.signal(signal.SIGTERM)  # while one waits for its next start
    assert run.code() == 0, run.text


def test_a_long_life_makes_the_delay_short_again() -> None:
    watched = supervisor._Supervisor(2, lambda index: 0)
    worker = watched._workers[0]
    worker.delay, worker.started = 30.0, time.monotonic() - 30
    watched._ended(worker, "worker 0", 1)
    assert worker.due is not None
    assert worker.due - time.monotonic() > 20
    assert worker.delay == 30.0
    worker.started = time.monotonic() - 61
    watched._ended(worker, "worker 0", 1)
    assert worker.due - time.monotonic() <= 0.5
    assert worker.delay == 1.0


def test_bad_configuration_stops_all(supervised: Start) -> None:
    run = supervised(
        """
        supervisor._EARLY_SECONDS = 60.0

        def main(index):
            return 2 if index else wait_for_signal(index)

        sys.exit(run_processes(2, main))
        """
    )
    assert run.code() == 2, run.text
    assert "configuration" in run.text
    assert run.text.count("started worker 1") == 1
    assert not any(alive(pid) for pid in run.workers.values())


def test_that_code_later_in_life_is_an_accident(supervised: Start) -> None:
    run = supervised(
        """
        supervisor._EARLY_SECONDS = 0.1

        def main(index):
            tell(f"up {index} {os.getpid()}")
            time.sleep(0.2)
            return 2

        sys.exit(run_processes(2, main))
        """
    )
    run.until(lambda: run.text.count("started worker 0") >= 2)
    assert not run.ended


def test_a_worker_that_cannot_start_again_does_not_stop_those_that_serve(supervised: Start, tmp_path: Path) -> None:
    run = supervised(
        f"""
        supervisor._EARLY_SECONDS = 0.1

        def main(index):
            if index and os.path.exists({str(tmp_path / "bad")!r}):
                return 2
            return wait_for_signal(index)

        sys.exit(run_processes(2, main))
        """
    )
    run.until(lambda: len(run.workers) == 2)
    time.sleep(0.15)  # the other one has served for longer than _EARLY_SECONDS
    (tmp_path / "bad").touch()
    os.kill(run.workers[1], signal.SIGKILL)
    run.until(lambda: run.text.count("exited with code 2") >= 2)
    assert alive(run.workers[0])
    run.signal(signal.SIGTERM)
    run.code()
    assert "drained 0" in run.text


def test_a_second_signal_kills(supervised: Start) -> None:
    run = supervised(
        """
        def main(index):
            signal.signal(signal.SIGTERM, lambda number, frame: tell(f"deaf {index}"))
            tell(f"up {index} {os.getpid()}")
            while True:
                time.sleep(60)

        sys.exit(run_processes(2, main))
        """
    )
    run.until(lambda: len(run.workers) == 2)
    run.signal(signal.SIGTERM)
    run.until(lambda: "deaf 0" in run.text and "deaf 1" in run.text)
    assert not run.ended
    run.signal(signal.SIGTERM)
    assert run.code() == 128 + signal.SIGTERM, run.text
    assert not any(alive(pid) for pid in run.workers.values())


def test_workers_end_with_a_supervisor_that_is_killed(supervised: Start) -> None:
    run = supervised("sys.exit(run_processes(2, wait_for_signal))")
    run.until(lambda: len(run.workers) == 2)
    run.signal(signal.SIGKILL)
    run.code()
    eventually(lambda: not any(alive(pid) for pid in run.workers.values()))
    assert "drained 0" in run.text
    assert "drained 1" in run.text


BEATING = """
    import itertools, threading
    from headrace.programs.serve.supervisor import Heartbeats, Watchdog, read_activity

    supervisor.BEAT_SECONDS = 0.05
    beats = Heartbeats(2)
    ticks = itertools.count()

    def effort(pid):
        # As if those that are not stopped computed all the time: a busy machine, too, makes nobody hang but the stopped one.
        told = read_activity(pid)
        return told if told.state == "T" else told._replace(ticks=next(ticks))

    def beating(index):
        def beat():
            while True:
                beats.beat(index)
                time.sleep(0.01)
        threading.Thread(target=beat, daemon=True).start()
        beats.serve(index)
        return wait_for_signal(index)

    sys.exit(run_processes(2, beating, Watchdog(beats, LIMIT, read_activity=effort)))
"""


def test_a_worker_that_is_stopped_is_killed_and_replaced(supervised: Start) -> None:
    run = supervised(BEATING.replace("LIMIT", "0.5"))
    run.until(lambda: len(run.workers) == 2)
    first = dict(run.workers)
    os.kill(first[1], signal.SIGSTOP)
    run.until(lambda: run.workers[1] != first[1])
    assert f"worker 1 (pid {first[1]}) has been stopped for" in run.text
    assert f"worker 1 (pid {first[1]}) hung and was killed" in run.text
    assert "memory runs out" not in run.text
    assert (run.workers[0], alive(first[0]), alive(first[1])) == (first[0], True, False)
    run.signal(signal.SIGTERM)
    assert run.code() == 0, run.text


@pytest.mark.slow  # quick: test_silent_and_at_work_has_ten_times_as_long, test_states_of_real_processes_in_proc
def test_a_busy_worker_is_not_taken_for_a_hanging_one(supervised: Start) -> None:
    """Three times as long as one at rest would have, in one piece, without a beat: as a library with Python's lock does."""
    run = supervised(
        """
        from headrace.programs.serve.supervisor import Heartbeats, Watchdog

        beats = Heartbeats(2)

        def main(index):
            beats.serve(index)
            tell(f"up {index} {os.getpid()}")
            began = time.monotonic()
            while index and time.monotonic() - began < 9:  # with as much of the CPU as the machine has for it
                pass
            tell(f"computed {index}")
            beats.beat(index)
            return wait_for_signal(index)

        sys.exit(run_processes(2, main, Watchdog(beats, 3.0)))
        """
    )
    run.until(lambda: "computed 1" in run.text)
    killed = [line for line in run.lines if "killing" in line]
    assert killed and all("worker 0" in line for line in killed), run.text  # which only waits, and beats no more


def test_a_stopped_worker_does_not_keep_the_program_from_ending(supervised: Start) -> None:
    run = supervised(BEATING.replace("LIMIT", "0.5"))
    run.until(lambda: len(run.workers) == 2)
    os.kill(run.workers[1], signal.SIGSTOP)
    run.signal(signal.SIGTERM)
    assert run.code() == 1, run.text
    assert "drained 0" in run.text
    assert "did not stop well: hung and was killed" in run.text


@pytest.mark.slow  # quick: test_time_in_which_the_supervisor_was_paused_does_not_count
def test_a_supervisor_that_was_stopped_itself_kills_no_worker(supervised: Start) -> None:
    run = supervised(BEATING.replace("LIMIT", "4.0").replace("read_activity=effort", "read_activity=read_activity"))
    run.until(lambda: len(run.workers) == 2)
    os.killpg(run.pid, signal.SIGSTOP)  # all of them, as Ctrl-Z does, or a container that is paused
    time.sleep(6)
    os.killpg(run.pid, signal.SIGCONT)
    time.sleep(1)
    run.signal(signal.SIGTERM)
    assert run.code() == 0, run.text
    assert "killing" not in run.text


SERVERS = """
    import asyncio
    import uvloop
    from headrace.net.server import HttpServer, run_until_signal
    from headrace.net.site import Site
    from headrace.net.sockets import Address, reserve_port

    address, held = reserve_port(Address.parse("127.0.0.1:0"))

    class ProcessNumber(asyncio.Protocol):
        def __init__(self, site):
            self.site = site

        def connection_made(self, transport):
            self.transport = transport
            self.site.connections.add(self)

        def connection_lost(self, error):
            self.site.connections.discard(self)

        def data_received(self, data):
            self.transport.write(b"%d" % os.getpid())

        def drain(self):
            self.transport.close()

        def sweep(self, now):
            pass

        expire = drain

    async def serve(index):
        site = Site()
        server = HttpServer(site, address, lambda: ProcessNumber(site), reuse_port=True)
        await server.start()
        tell(f"up {index} {os.getpid()}")
        return await run_until_signal([server], 20)

    tell(f"port {address.port}")
    sys.exit(run_processes(2, lambda index: uvloop.run(serve(index))))
"""


def test_two_servers_share_one_port_and_a_terminal_stops_them_cleanly(supervised: Start) -> None:
    run = supervised(SERVERS)
    run.until(lambda: len(run.workers) == 2)
    port = next(int(line.split()[1]) for line in run.lines if line.startswith("port"))
    answered = set()
    for _ in range(200):
        with socket.create_connection(("127.0.0.1", port), timeout=30) as client:
            client.sendall(b"who\n")
            answered.add(int(client.recv(100)))
    assert answered == set(run.workers.values())
    with socket.create_connection(("127.0.0.1", port), timeout=30) as client:
        client.sendall(b"who\n")
        client.recv(100)
        os.killpg(run.pid, signal.SIGINT)  # each worker gets it from the terminal and from the supervisor
        assert client.recv(100) == b""  # told to drain, not reset
    assert run.code() == 0, run.text
    assert "stopped without waiting" not in run.text
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=30)
