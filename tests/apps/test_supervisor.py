# SPDX-License-Identifier: Apache-2.0
"""The supervisor as a real process with real workers, signalled and killed from outside."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.apps import supervisor
from headrace.apps.supervisor import run_processes

ROOT = Path(__file__).parents[2]

PRELUDE = f"""
    import logging, os, signal, sys, time
    sys.path.insert(0, {str(ROOT)!r})
    from headrace.apps.supervisor import run_processes

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


class Program:
    """A script under the prelude, in a process group of its own; what it prints is collected as it comes."""

    def __init__(self, script: str) -> None:
        text = textwrap.dedent(PRELUDE) + textwrap.dedent(script)
        self.process = subprocess.Popen(
            [sys.executable, "-c", text], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
        )
        self.lines: list[str] = []
        self.workers: dict[int, int] = {}
        """The newest process of each index."""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        if self.process.stdout is None:
            return
        for line in self.process.stdout:
            words = line.decode().split()
            if words[:1] == ["up"]:
                self.workers[int(words[1])] = int(words[2])
            self.lines.append(line.decode().rstrip())

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    def until(self, condition: Callable[[], Any], seconds: float = 100.0) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                raise AssertionError("it did not happen in time:\n" + self.text)
            time.sleep(0.02)

    def signal(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def code(self) -> int:
        code = self.process.wait(timeout=100)
        self._reader.join(timeout=100)
        return code

    def close(self) -> None:
        for pid in [self.process.pid, *self.workers.values()]:
            if alive(pid):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(timeout=30)
        self._reader.join(timeout=30)
        if self.process.stdout is not None:
            self.process.stdout.close()


def alive(pid: int) -> bool:
    """Whether it runs; a zombie nobody has reaped does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


@pytest.fixture
def program() -> Iterator[Callable[[str], Program]]:
    begun: list[Program] = []

    def begin(script: str) -> Program:
        begun.append(Program(script))
        return begun[-1]

    yield begin
    for one in begun:
        one.close()


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
def test_a_signal_reaches_every_worker_and_all_drain(program: Callable[[str], Program], number: signal.Signals) -> None:
    run = program("sys.exit(run_processes(3, wait_for_signal))")
    run.until(lambda: len(run.workers) == 3)
    assert run.process.pid not in run.workers.values()
    run.signal(number)
    assert run.code() == 0, run.text
    assert all(f"drained {index}" in run.text for index in range(3))
    assert not any(alive(pid) for pid in run.workers.values())


def test_a_worker_that_drains_badly_is_told_in_the_exit_code(program: Callable[[str], Program]) -> None:
    run = program("sys.exit(run_processes(2, lambda index: wait_for_signal(index, code=3 * index)))")
    run.until(lambda: len(run.workers) == 2)
    run.signal(signal.SIGTERM)
    assert run.code() == 1, run.text
    assert "exited with code 3" in run.text


def test_a_worker_that_dies_is_replaced_and_the_others_are_left_alone(program: Callable[[str], Program]) -> None:
    run = program("sys.exit(run_processes(2, wait_for_signal))")
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


def test_deaths_in_a_row_are_spaced_out(program: Callable[[str], Program]) -> None:
    run = program(
        """
        def main(index):
            if index:
                tell(f"crash {time.monotonic()}")
                raise RuntimeError("no luck")
            return wait_for_signal(index)

        sys.exit(run_processes(2, main))
        """
    )
    run.until(lambda: "starting it again in 4 s" in run.text)
    starts = [float(line.split()[1]) for line in run.lines if line.startswith("crash")]
    gaps = [late - early for early, late in zip(starts, starts[1:], strict=False)]
    assert gaps[0] >= 0.5
    assert gaps[1] >= 1.0
    assert gaps[2] >= 2.0
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


def test_bad_configuration_stops_all(program: Callable[[str], Program]) -> None:
    run = program(
        """
        from headrace.apps import supervisor

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


def test_that_code_later_in_life_is_an_accident(program: Callable[[str], Program]) -> None:
    run = program(
        """
        def main(index):
            tell(f"up {index} {os.getpid()}")
            time.sleep(2.5)
            return 2

        sys.exit(run_processes(2, main))
        """
    )
    run.until(lambda: run.text.count("started worker 0") >= 2)
    assert run.process.poll() is None


def test_a_worker_that_cannot_start_again_does_not_stop_those_that_serve(
    program: Callable[[str], Program], tmp_path: Path
) -> None:
    run = program(
        f"""
        def main(index):
            if index and os.path.exists({str(tmp_path / "bad")!r}):
                return 2
            return wait_for_signal(index)

        sys.exit(run_processes(2, main))
        """
    )
    run.until(lambda: len(run.workers) == 2)
    time.sleep(1.5)  # the other one has served for a while
    (tmp_path / "bad").touch()
    os.kill(run.workers[1], signal.SIGKILL)
    run.until(lambda: run.text.count("exited with code 2") >= 2)
    assert alive(run.workers[0])
    run.signal(signal.SIGTERM)
    run.code()
    assert "drained 0" in run.text


def test_a_second_signal_kills(program: Callable[[str], Program]) -> None:
    run = program(
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
    assert run.process.poll() is None
    run.signal(signal.SIGTERM)
    assert run.code() == 128 + signal.SIGTERM, run.text
    assert not any(alive(pid) for pid in run.workers.values())


def test_workers_end_with_a_supervisor_that_is_killed(program: Callable[[str], Program]) -> None:
    run = program("sys.exit(run_processes(2, wait_for_signal))")
    run.until(lambda: len(run.workers) == 2)
    run.signal(signal.SIGKILL)
    run.until(lambda: not any(alive(pid) for pid in run.workers.values()))
    run.code()  # all that they said was read, too
    assert "drained 0" in run.text
    assert "drained 1" in run.text


BEATING = """
    import threading
    from headrace.apps import supervisor
    from headrace.apps.heartbeats import Heartbeats, Watchdog

    supervisor.BEAT_SECONDS = 0.05

    beats = Heartbeats(2)

    def beating(index):
        def beat():
            while True:
                beats.beat(index)
                time.sleep(0.01)
        threading.Thread(target=beat, daemon=True).start()
        beats.serve(index)
        return wait_for_signal(index)

    sys.exit(run_processes(2, beating, Watchdog(beats, 4.0)))
"""


def test_a_worker_that_is_stopped_is_killed_and_replaced(program: Callable[[str], Program]) -> None:
    run = program(BEATING)
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


def test_a_worker_that_computes_is_not_taken_for_one_that_hangs(program: Callable[[str], Program]) -> None:
    """Three times as long as one at rest would have, in one piece, without a beat: as a library with Python's lock does."""
    run = program(
        """
        from headrace.apps.heartbeats import Heartbeats, Watchdog

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


def test_a_stopped_worker_does_not_keep_the_program_from_ending(program: Callable[[str], Program]) -> None:
    run = program(BEATING)
    run.until(lambda: len(run.workers) == 2)
    os.kill(run.workers[1], signal.SIGSTOP)
    run.signal(signal.SIGTERM)
    assert run.code() == 1, run.text
    assert "drained 0" in run.text
    assert "did not stop well: hung and was killed" in run.text


def test_a_supervisor_that_was_stopped_itself_kills_nobody(program: Callable[[str], Program]) -> None:
    run = program(BEATING)
    run.until(lambda: len(run.workers) == 2)
    os.killpg(run.process.pid, signal.SIGSTOP)  # all of them, as Ctrl-Z does, or a container that is paused
    time.sleep(6)
    os.killpg(run.process.pid, signal.SIGCONT)
    time.sleep(1)
    run.signal(signal.SIGTERM)
    assert run.code() == 0, run.text
    assert "killing" not in run.text


SERVERS = f"""
    sys.path.insert(0, {str(ROOT / "tests" / "wire")!r})
    import uvloop
    from test_server import Line
    from headrace.wire.server import WireServer, run_until_signal
    from headrace.wire.site import Site
    from headrace.wire.sockets import Address, reserve_port

    address, held = reserve_port(Address.parse("127.0.0.1:0"))

    class Named(Line):
        def answer(self, line):
            super().answer(b"%d" % os.getpid() if line == b"who" else line)

    async def serve(index):
        site = Site()
        server = WireServer(site, address, lambda: Named(site), reuse_port=True)
        await server.start()
        tell(f"up {{index}} {{os.getpid()}}")
        return await run_until_signal([server], 20)

    tell(f"port {{address.port}}")
    sys.exit(run_processes(2, lambda index: uvloop.run(serve(index))))
"""


def test_two_servers_share_one_port_and_a_terminal_stops_them_cleanly(program: Callable[[str], Program]) -> None:
    run = program(SERVERS)
    run.until(lambda: len(run.workers) == 2)
    port = next(int(line.split()[1]) for line in run.lines if line.startswith("port"))
    answered = set()
    for _ in range(200):
        with socket.create_connection(("127.0.0.1", port), timeout=30) as client:
            client.sendall(b"who\n")
            answered.add(int(client.recv(100).split()[1]))
    assert answered == set(run.workers.values())
    with socket.create_connection(("127.0.0.1", port), timeout=30) as client:
        client.sendall(b"who\n")
        client.recv(100)
        os.killpg(run.process.pid, signal.SIGINT)  # each worker gets it from the terminal and from the supervisor
        assert client.recv(100) == b""  # told to drain, not reset
    assert run.code() == 0, run.text
    assert "stopped without waiting" not in run.text
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=30)
