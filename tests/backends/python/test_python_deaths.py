# SPDX-License-Identifier: Apache-2.0
"""Processes that die, end, or leave something behind."""

from __future__ import annotations

import gc
import logging
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from backends.python.harness import ECHO, WAIT, BackendFixture, FakeWork, python_backend, tensor

from headrace.backends.python import process, protocol
from headrace.backends.restart_backoff import Backoff
from headrace.core.errors import FailedPrecondition, Unavailable
from headrace.core.requests import InferRequest
from support.waiting import eventually


@pytest.fixture
def backend(tmp_path: Path) -> Iterator[BackendFixture]:
    with python_backend(tmp_path) as backend:
        yield backend


MORTAL = """
    import os, signal, time, numpy as np, triton_python_backend_utils as pb_utils
    class TritonPythonModel:
        def initialize(self, args):
            self.file = os.path.join(args["model_repository"], "broken")
            if os.path.exists(self.file):
                raise RuntimeError("still broken")
        def execute(self, requests):
            mode = int(requests[0].inputs()[0].as_numpy().ravel()[0])
            if mode == 1:
                time.sleep(100)
            if mode == 2:
                os._exit(7)
            if mode == 3:
                os.kill(os.getpid(), signal.SIGSEGV)
            if mode == 4:
                open(self.file, "w").close()
                os._exit(8)
            return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([os.getpid()]))]) for r in requests]
"""


def test_a_killed_process_fails_its_requests_and_is_restarted(
    backend: BackendFixture, caplog: pytest.LogCaptureFixture
) -> None:
    opened = backend.open(MORTAL)
    pid = opened.pid
    works = opened.submit([tensor("IN", [1])], [tensor("IN", np.full(50_000, 1))])
    os.kill(pid, signal.SIGKILL)
    opened.finished_events.get(timeout=WAIT)
    for work in works:
        assert isinstance(work.error, Unavailable)
        assert "the process of model instance 'm_0_cpu' died (signal 9: killed)" in work.error.message
        assert "retry" in work.error.message
    # `finished` said that the next one is there.
    assert opened.instance._ready
    assert opened.one(tensor("IN", [0])).arrays()["OUT"] == [opened.pid]
    assert opened.pid != pid
    assert any("died (signal 9" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize(
    ("mode", "status"), [(2, "exit code 7"), pytest.param(3, "signal 11: segmentation fault", marks=pytest.mark.slow)]
)
def test_other_deaths(backend: BackendFixture, mode: int, status: str) -> None:
    opened = backend.open(MORTAL)
    assert status in opened.one(tensor("IN", [mode])).error.message
    assert opened.one(tensor("IN", [0])).arrays()["OUT"] == [opened.pid]


def test_an_idle_process_that_dies_is_replaced_and_work_waits_for_it(backend: BackendFixture) -> None:
    opened = backend.open(MORTAL)
    pid = opened.pid
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: opened.pid != pid)
    assert opened.one(tensor("IN", [0])).arrays()["OUT"] == [opened.pid]


def test_a_restart_that_fails_refuses_requests_until_one_works(backend: BackendFixture) -> None:
    opened = backend.open(MORTAL)
    assert "exit code 8" in opened.one(tensor("IN", [4])).error.message
    error = opened.one(tensor("IN", [0])).error
    assert isinstance(error, Unavailable)
    assert "RuntimeError: still broken" in error.message
    assert error.retry_after_seconds
    assert opened.finished == 2
    (backend.folder / "m" / "broken").unlink()
    eventually(lambda: opened.instance._ready)
    assert opened.one(tensor("IN", [0])).arrays()["OUT"] == [opened.pid]


@pytest.mark.slow  # quick: test_delays_double_up_to_half_a_minute_and_start_again_after_a_minute
def test_a_process_that_keeps_dying_is_started_ever_more_rarely(backend: BackendFixture) -> None:
    opened = backend.open(MORTAL)
    begin = time.monotonic()
    for _ in range(4):
        assert "exit code 7" in opened.one(tensor("IN", [2])).error.message
    # 0 + 0.1 + 0.2 + 0.4 seconds of waiting.
    assert time.monotonic() - begin >= 0.7


def test_delays_double_up_to_half_a_minute_and_start_again_after_a_minute() -> None:
    backoff = Backoff((0.0, 0.1), longest=30.0, lived=60.0)
    delays = [backoff.next_delay(0) for _ in range(12)]
    assert delays[:5] == pytest.approx([0, 0.1, 0.2, 0.4, 0.8])
    assert delays[-1] == 30
    backoff.started(100)
    assert backoff.next_delay(159) == 30
    backoff.started(200)
    assert backoff.next_delay(261) == 0


def test_long_restart_delays_refuse_requests_immediately(backend: BackendFixture) -> None:
    opened = backend.open(MORTAL)
    backend.in_loop(lambda: [opened.instance._backoff.next_delay(0) for _ in range(8)])
    work = opened.one(tensor("IN", [2]))
    assert "exit code 7" in work.error.message
    error = opened.one(tensor("IN", [0])).error
    assert "keeps dying" in error.message
    assert error.retry_after_seconds > 1
    assert opened.finished == 2


def test_signals_for_the_server_do_not_end_the_model(backend: BackendFixture) -> None:
    opened = backend.open(ECHO)
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(opened.pid, number)
    pid = opened.pid
    assert opened.one(tensor("IN", [3])).arrays()["OUT"] == [3]
    assert opened.pid == pid


def test_close_finalises(backend: BackendFixture) -> None:
    opened = backend.open("""
        import atexit, os
        class TritonPythonModel:
            def initialize(self, args):
                self.folder = args["model_repository"]
                atexit.register(lambda: open(self.folder + "/atexit", "w").close())
            def execute(self, requests): pass
            def finalize(self):
                open(self.folder + "/finalized", "w").close()
    """)
    pid = opened.pid
    opened.close()
    assert (backend.folder / "m" / "finalized").exists()
    assert (backend.folder / "m" / "atexit").exists()
    assert not psutil.pid_exists(pid)


def test_close_does_not_wait_for_ever(
    backend: BackendFixture, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("headrace.backends.python.instance.FINALIZE_SECONDS", 0.2)
    monkeypatch.setattr("headrace.backends.python.instance._KILL_SECONDS", 0.2)
    opened = backend.open("""
        import ctypes
        class TritonPythonModel:
            def execute(self, requests): pass
            def finalize(self):
                ctypes.PyDLL(None).sleep(100)   # holds the interpreter's lock: no signal is handled
    """)
    pid = opened.pid
    opened.close()
    assert not psutil.pid_exists(pid)
    assert any("did not stop in time" in record.getMessage() for record in caplog.records)


def test_close_with_work_under_way_answers_it(backend: BackendFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.backends.python.instance._BUSY_SECONDS", 0.1)
    monkeypatch.setattr("headrace.backends.python.instance._KILL_SECONDS", 0.1)
    opened = backend.open(MORTAL)
    (work,) = opened.submit([tensor("IN", [1])])
    opened.close()
    assert "being unloaded" in work.error.message
    assert opened.finished == 1
    assert "being unloaded" in opened.one(tensor("IN", [0])).error.message


def test_a_model_that_leaves_threads_behind_is_ended(backend: BackendFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.backends.python.instance._KILL_SECONDS", 0.2)
    opened = backend.open("""
        import threading, time
        class TritonPythonModel:
            def initialize(self, args):
                threading.Thread(target=time.sleep, args=(100,)).start()
            def execute(self, requests): pass
    """)
    pid = opened.pid
    opened.close()
    assert not psutil.pid_exists(pid)


def descriptors() -> Counter[str]:
    """What the open descriptors refer to: with inodes, so that one left behind is seen beside one closed."""
    counts: Counter[str] = Counter()
    for number in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the one of the listing itself
            counts[os.readlink(f"/proc/self/fd/{number}")] += 1
    return counts


def shared_mappings() -> int:
    return sum("memfd:headrace" in line for line in Path("/proc/self/maps").read_text().splitlines())


def test_nothing_is_left_behind(backend: BackendFixture) -> None:
    gc.collect()  # what other tests have left is not counted
    before = descriptors(), shared_mappings()
    opened = backend.open(ECHO)
    child = psutil.Process(opened.pid)
    array = np.arange(300_000)
    opened.infer([tensor("IN", array)], [tensor("IN", array)])
    settled = descriptors(), child.num_fds()
    for _ in range(200):
        first, second = opened.infer([tensor("IN", array)], [tensor("IN", array)])
        assert first.arrays()["OUT"][-1] == second.arrays()["OUT"][-1] == 299_999
        del first, second
    # What an earlier test left may be closed meanwhile: only what is new counts.
    assert not descriptors() - settled[0]
    assert child.num_fds() == settled[1]
    # 2 requests of 2.4 MB each way are on their way at most, beside those not told of yet.
    assert opened.instance._process.arena.size <= 32 << 20
    opened.close()
    del opened
    assert not descriptors() - before[0]
    assert shared_mappings() == before[1]


def test_responses_stay_valid_after_the_process_is_gone(backend: BackendFixture) -> None:
    opened = backend.open(ECHO)
    work = opened.one(tensor("IN", np.arange(100_000)))
    opened.close()
    assert work.arrays()["OUT"].sum() == sum(range(100_000))


def test_an_unread_stream_of_large_responses_does_not_grow(backend: BackendFixture) -> None:
    opened = backend.open(
        """
        import numpy as np, triton_python_backend_utils as pb_utils
        class TritonPythonModel:
            def execute(self, requests):
                sender = requests[0].get_response_sender()
                for index in range(300):
                    sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.full(100_000, index))]))
                size = np.array([sender._state._channel.arena.size])
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", size)]), flags=1)
        """,
        decoupled=True,
    )

    # A work that forgets its replies, as a server does that has sent them.
    class Forgetful(FakeWork):
        def reply(self, outputs: object, *, final: bool = True, parameters: object = ()) -> None:
            if final:
                super().reply(outputs, final=final)

    work = Forgetful(InferRequest("m", [tensor("IN", [1])]))
    backend.in_loop(lambda: opened.instance.execute([work], lambda: None))
    assert work.over.wait(WAIT)
    # 240 MB went through.
    assert work.arrays()["OUT"][0] <= 64 << 20


def test_without_shared_memory_everything_is_sent_over_the_socket(
    backend: BackendFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "make_region", lambda name: -1)
    opened = backend.open(ECHO)
    array = np.arange(1_000_000)
    assert np.array_equal(opened.one(tensor("IN", array)).arrays()["OUT"], array)


def test_blocks_are_reused_joined_and_trimmed() -> None:
    fd = protocol.make_region("headrace-test")
    try:
        written, read = protocol.Arena(fd), protocol.ArenaView(fd)
        offsets = [written.put(bytes([index]) * 1000) for index in range(5)]
        blocks = [read.block(offset, 1000) for offset in offsets]
        assert [bytes(block)[:1] for block in blocks] == [bytes([index]) for index in range(5)]
        assert not read.take_freed()
        for index in (1, 3, 2, 0, 4):
            blocks[index] = None
        assert read.take_freed() == [offsets[index] for index in (1, 3, 2, 0, 4)]
        for index in (1, 3, 2, 0, 4):
            written.release(offsets[index])
        assert written.empty
        assert written._free == [(0, written.size)]
        big = written.put(bytes(protocol.KEPT_BYTES + 5_000_000))
        assert os.fstat(fd).st_blocks * 512 > protocol.KEPT_BYTES
        written.release(big)
        written.trim()
        assert os.fstat(fd).st_blocks * 512 <= protocol.KEPT_BYTES
        assert bytes(read.block(written.put(b"again"), 5)) == b"again"
    finally:
        os.close(fd)


PARENT = """
    import os, signal, sys, time
    from pathlib import Path
    sys.path.insert(0, {tests!r})
    from backends.python.harness import ECHO, BackendFixture
    backend = BackendFixture(Path({folder!r}))
    opened = backend.open(ECHO)
    print(opened.pid, flush=True)
    time.sleep(100)
"""


def test_a_killed_server_leaves_no_orphan(tmp_path: Path) -> None:
    source = textwrap.dedent(PARENT).format(tests=str(Path(__file__).parents[2]), folder=str(tmp_path))
    parent = subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, text=True)
    try:
        child = int(parent.stdout.readline())
        assert psutil.pid_exists(child)
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()
    eventually(lambda: not psutil.pid_exists(child))


def test_forked_helpers_of_a_model_cannot_answer_for_it(
    backend: BackendFixture, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "headrace.model.m")
    opened = backend.open("""
        import os, triton_python_backend_utils as pb_utils
        class TritonPythonModel:
            def execute(self, requests):
                pid = os.fork()
                if pid == 0:
                    pb_utils.Logger.log_info("from the fork")
                    requests.clear()
                    os._exit(0)
                os.waitpid(pid, 0)
                return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", r.inputs()[0].as_numpy())]) for r in requests]
    """)
    assert opened.one(tensor("IN", [6])).arrays()["OUT"] == [6]
    assert not caplog.records


def test_a_death_is_noticed_without_pidfds_too(backend: BackendFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pid: int) -> int:
        raise OSError("not here")

    monkeypatch.setattr(os, "pidfd_open", refuse)
    opened = backend.open(MORTAL)
    assert "exit code 7" in opened.one(tensor("IN", [2])).error.message
    assert opened.one(tensor("IN", [0])).arrays()["OUT"] == [opened.pid]


def test_shared_memory_that_cannot_grow_is_done_without(backend: BackendFixture) -> None:
    opened = backend.open(ECHO)

    def refuse(need: int) -> None:
        raise OSError("no memory")

    backend.in_loop(lambda: setattr(opened.instance._process.arena, "_grow", refuse))
    array = np.arange(200_000)
    assert np.array_equal(opened.one(tensor("IN", array)).arrays()["OUT"], array)


def test_calls_of_a_dead_process_are_cancelled(backend: BackendFixture) -> None:
    opened = backend.open("""
        import triton_python_backend_utils as pb_utils
        class TritonPythonModel:
            def execute(self, requests):
                pb_utils.InferenceRequest(model_name="hang", inputs=[], requested_output_names=[]).exec()
    """)
    (work,) = opened.submit([tensor("IN", [1])])
    eventually(lambda: bool(backend.services.requests))
    os.kill(opened.pid, signal.SIGKILL)
    assert work.over.wait(WAIT)
    eventually(lambda: backend.services.cancelled > 0)
    assert backend.services.cancelled == 1


def test_a_failed_start_with_threads_left_behind_ends(backend: BackendFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.backends.python.instance._KILL_SECONDS", 0.2)
    with pytest.raises(FailedPrecondition, match="ValueError: no"):
        backend.open("""
            import threading, time
            class TritonPythonModel:
                def initialize(self, args):
                    threading.Thread(target=time.sleep, args=(100,)).start()
                    raise ValueError("no")
                def execute(self, requests): pass
        """)


def test_close_works_when_the_loop_has_stopped(tmp_path: Path) -> None:
    backend = BackendFixture(tmp_path)
    opened = backend.open(ECHO)
    pid = opened.pid
    backend.opened.clear()
    backend.loop.call_soon_threadsafe(backend.loop.stop)
    backend._thread.join()
    opened.instance.close()
    assert not psutil.pid_exists(pid)
    backend.loop.close()


def test_an_alarm_of_the_model_does_not_cut_the_line(backend: BackendFixture) -> None:
    opened = backend.open("""
        import signal, triton_python_backend_utils as pb_utils
        def ring(*_):
            raise TimeoutError("took too long")
        class TritonPythonModel:
            def execute(self, requests):
                signal.signal(signal.SIGALRM, ring)
                try:
                    signal.setitimer(signal.ITIMER_REAL, 0.05)
                    pb_utils.InferenceRequest(model_name="hang", inputs=[], requested_output_names=[]).exec()
                except TimeoutError:
                    pass
                tensor = pb_utils.Tensor("OUT", requests[0].inputs()[0].as_numpy())
                return [pb_utils.InferenceResponse([tensor])]
    """)
    for value in (1, 2):
        assert opened.one(tensor("IN", [value])).arrays()["OUT"] == [value]


def test_memory_of_a_large_request_is_given_back_later(
    backend: BackendFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "_TRIM_SECONDS", 0.1)
    opened = backend.open(ECHO)
    regions = opened.instance._process._started
    held: list[int] = []

    class Measured(FakeWork):
        """As the answer comes, in the loop's thread: no timer can have been quicker."""

        def reply(self, outputs: object, *, final: bool = True, parameters: Any = ()) -> None:
            held.extend(os.fstat(fd).st_blocks * 512 for fd in (regions.incoming, regions.outgoing))
            super().reply(outputs, final=final, parameters=parameters)

    work = Measured(InferRequest("m", [tensor("IN", np.ones(6_000_000))]))
    backend.in_loop(partial(opened.instance.execute, [work], lambda: None))
    assert work.over.wait(WAIT)
    assert len(held) == 2 and min(held) > protocol.KEPT_BYTES
    del work
    # The child hears of the freed response with the next frame.
    opened.one(tensor("IN", [1]))
    eventually(
        lambda: all(os.fstat(fd).st_blocks * 512 <= protocol.KEPT_BYTES for fd in (regions.incoming, regions.outgoing))
    )
    assert opened.one(tensor("IN", np.ones(6_000_000))).arrays()["OUT"].sum() == 6_000_000
