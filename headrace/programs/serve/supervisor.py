# SPDX-License-Identifier: Apache-2.0
"""Start, watch, restart and stop several worker processes; detect workers that hang."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import mmap
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, NoReturn

from headrace.core.errors import BAD_CONFIGURATION

BEAT_SECONDS = 1.0
LONGEST_LOOK_SECONDS = 2 * BEAT_SECONDS
"""Time between two polls that still counts."""
_AT_WORK = 10


class Heartbeats:
    """A heartbeat counter for each worker, and whether it serves. Made before the workers are forked."""

    def __init__(self, count: int) -> None:
        self._cells = memoryview(mmap.mmap(-1, 2 * 8 * count)).cast("Q")

    def keep_beating(self, index: int) -> None:
        """In the worker: beat as long as its event loop runs."""
        self.beat(index)
        asyncio.get_running_loop().call_later(BEAT_SECONDS, self.keep_beating, index)

    def beat(self, index: int) -> None:
        """Beat once."""
        self._cells[2 * index] += 1

    def serve(self, index: int) -> None:
        """In the worker: its models are loaded."""
        self._cells[2 * index + 1] = 1

    def begin(self, index: int) -> int:
        """In the supervisor, before a new process: keep the count of its predecessors."""
        self._cells[2 * index + 1] = 0
        return self._cells[2 * index]

    def beats(self, index: int) -> int:
        """Return the count."""
        return self._cells[2 * index]

    def serves(self, index: int) -> bool:
        """Return whether the worker has started."""
        return bool(self._cells[2 * index + 1])


class Effort(NamedTuple):
    """The state of a process, from /proc."""

    state: str
    """`D`: waits for a disk. `T`: stopped."""
    ticks: int
    """CPU time of all threads, in hundredths of a second."""
    faults: int
    """Page faults that needed a disk."""

    def since(self, before: Effort) -> bool:
        """Return whether the process works, or has worked since then."""
        return self.state == "D" or (self.ticks, self.faults) != (before.ticks, before.faults)


def effort_of(pid: int) -> Effort:
    """Read a process that was not reaped. Without /proc it counts as working."""
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return Effort("D", 0, 0)
    # The name, in parentheses, may have any characters.
    fields = text[text.rindex(b")") + 2 :].split()
    return Effort(fields[0].decode(), int(fields[11]) + int(fields[12]), int(fields[9]))


@dataclass(slots=True)
class _Pulse:
    beats: int
    effort: Effort | None = None
    """The state when it was last found silent."""
    resting: float = 0.0
    working: float = 0.0


class Watchdog:
    """Detects workers that hang: silent and idle for `seconds`."""

    def __init__(self, beats: Heartbeats, seconds: float, *, effort_of: Callable[[int], Effort] = effort_of) -> None:
        self.seconds = seconds
        self._beats = beats
        self._effort_of = effort_of
        self._pulses: dict[int, _Pulse] = {}

    def begin(self, index: int) -> None:
        """A new process gets this place."""
        self._pulses[index] = _Pulse(self._beats.begin(index))

    def looked(self, index: int, pid: int, passed: float) -> str:
        """Check a worker, `seconds` after the last check: return how it hangs, or ""."""
        pulse, beats = self._pulses[index], self._beats.beats(index)
        if beats != pulse.beats:
            self._pulses[index] = _Pulse(beats)
            return ""
        effort, before = self._effort_of(pid), pulse.effort
        pulse.effort = effort
        if before is None:
            return ""
        passed = min(passed, LONGEST_LOOK_SECONDS)
        if effort.since(before):
            # Work makes up for idleness: on a crowded machine a computing worker has to wait now and then, and threads that
            # wait for Python's lock wake up briefly.
            pulse.working += passed
            pulse.resting = max(0.0, pulse.resting - passed)
        else:
            pulse.resting += passed
        return self._judged(pulse, effort, serves=self._beats.serves(index))

    def _judged(self, pulse: _Pulse, effort: Effort, *, serves: bool) -> str:
        if pulse.resting >= self.seconds:
            silent = "has been stopped" if effort.state in ("T", "t") else "has answered nothing and done nothing"
            return f"{silent} for {pulse.resting:.0f} s"
        if serves and pulse.working >= _AT_WORK * self.seconds:
            return f"has answered nothing for {pulse.working:.0f} s in which it computed"
        return ""


log = logging.getLogger("headrace.apps")

_FIRST_DELAY_SECONDS = 0.5
_LONGEST_DELAY_SECONDS = 30.0
_LONG_LIFE_SECONDS = 60.0
_EARLY_SECONDS = 1.0
"""If a worker fails by its configuration within this time, and no other is older, all are stopped: it would fail again."""
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD, signal.SIGALRM)
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def run_processes(count: int, main: Callable[[int], int], watchdog: Watchdog | None = None) -> int:
    """Run `main(index)` in `count` processes until SIGTERM or SIGINT; return the program's exit code.

    A single process is this one. Several are forked; a worker that ends by itself is restarted, and with a watchdog so
    is one that hangs. The first signal is passed on, so that workers drain; the second kills them. 0 if all ended well.
    """
    if count < 1:
        raise ValueError("there must be at least one process")
    if count == 1:
        return main(0)
    if threading.active_count() > 1:
        raise RuntimeError("run_processes must come before any thread: a forked worker would inherit its locks")
    return _Supervisor(count, main, watchdog).run()


class _Worker:
    """One place for a process, and its process."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.pid: int | None = None
        self.started = 0.0
        self.delay = _FIRST_DELAY_SECONDS
        self.due: float | None = 0.0
        """When to start a process; None while one runs, or if none shall run."""
        self.hung = False
        """Whether this process was killed because it hung."""

    def __str__(self) -> str:
        return f"worker {self.index} (pid {self.pid})"


class _Supervisor:
    def __init__(self, count: int, main: Callable[[int], int], watchdog: Watchdog | None = None) -> None:
        self._main = main
        self._watchdog = watchdog
        self._looked = time.monotonic()
        self._workers = [_Worker(index) for index in range(count)]
        self._stopping = False
        self._killed = False
        self._code = 0

    def run(self) -> int:
        # Signals are blocked and waited for, never handled, so that none is lost between a check and a wait.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        try:
            while True:
                self._start_due(before)
                if all(worker.pid is None and worker.due is None for worker in self._workers):
                    return self._code
                arrived = self._arrived()
                if arrived in (signal.SIGTERM, signal.SIGINT):
                    self._signalled(arrived)
                self._reap()
                self._look()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            if signal.SIGALRM in signal.sigpending():
                signal.sigwait({signal.SIGALRM})
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _arrived(self) -> signal.Signals:
        """Return the next signal; SIGALRM when it is time for a check.

        Not `sigtimedwait`: if this process is stopped meanwhile (Ctrl-Z, a paused container) and continues when the
        time is over, Python 3.11 returns stale memory as a signal.
        """
        signal.setitimer(signal.ITIMER_REAL, max(self._patience(), 0.001))
        return signal.Signals(signal.sigwaitinfo(_SIGNALS).si_signo)

    def _patience(self) -> float:
        dues = [worker.due for worker in self._workers if worker.due is not None]
        longest = 60.0 if self._watchdog is None else BEAT_SECONDS
        return min(longest, max(0.0, min(dues) - time.monotonic())) if dues else longest

    def _start_due(self, mask: set[int | signal.Signals]) -> None:
        now = time.monotonic()
        for worker in self._workers:
            if worker.due is not None and worker.due <= now:
                self._start(worker, now, mask)

    def _start(self, worker: _Worker, now: float, mask: set[int | signal.Signals]) -> None:
        sys.stdout.flush()  # Buffered output would be written once per worker.
        sys.stderr.flush()
        parent = os.getpid()
        if self._watchdog is not None:
            self._watchdog.begin(worker.index)
        try:
            pid = os.fork()
        except OSError as error:  # Out of memory or processes, for now.
            log.error("cannot start worker %d: %s; trying again in %g s", worker.index, error.strerror, worker.delay)
            self._postpone(worker)
            return
        if pid == 0:
            _be_worker(worker.index, self._main, mask, parent)
        worker.pid, worker.started, worker.due, worker.hung = pid, now, None, False
        log.info("started %s", worker)

    def _postpone(self, worker: _Worker) -> None:
        worker.due = time.monotonic() + worker.delay
        worker.delay = min(worker.delay * 2, _LONGEST_DELAY_SECONDS)

    def _signalled(self, number: signal.Signals) -> None:
        if not self._stopping:
            log.info("%s: stopping the workers", number.name)
            self._stop(number)
        elif not self._killed:
            log.warning("%s again: killing the workers", number.name)
            self._killed = True
            self._code = 128 + number
            self._send(signal.SIGKILL)

    def _stop(self, number: signal.Signals) -> None:
        self._stopping = True
        for worker in self._workers:
            worker.due = None
        self._send(number)

    def _send(self, number: signal.Signals) -> None:
        for worker in self._workers:
            if worker.pid is not None:  # Not reaped yet, so the pid is still its own.
                os.kill(worker.pid, number)

    def _reap(self) -> None:
        for worker in self._workers:
            if worker.pid is not None:
                pid, status = os.waitpid(worker.pid, os.WNOHANG)
                if pid:
                    name = str(worker)
                    worker.pid = None
                    self._ended(worker, name, os.waitstatus_to_exitcode(status))

    def _look(self) -> None:
        """Kill workers that hang, also while stopping. `_reap` finds them, and they are restarted."""
        now = time.monotonic()
        if self._watchdog is None or now - self._looked < BEAT_SECONDS / 2:
            return
        passed, self._looked = now - self._looked, now
        for worker in self._workers:
            if worker.pid is None or worker.hung:
                continue
            hangs = self._watchdog.looked(worker.index, worker.pid, passed)
            if hangs:
                log.error("%s %s: killing it (--worker-timeout-seconds %g)", worker, hangs, self._watchdog.seconds)
                worker.hung = True
                os.kill(worker.pid, signal.SIGKILL)

    def _ended(self, worker: _Worker, name: str, code: int) -> None:
        lived = time.monotonic() - worker.started
        if self._stopping:
            # A signal may come before the worker has a handler; then there was nothing to drain.
            if code not in (0, -signal.SIGTERM, -signal.SIGINT) and not self._killed:
                log.warning("%s did not stop well: %s", name, _cause(code, hung=worker.hung))
                self._code = self._code or 1
            return
        if code == BAD_CONFIGURATION and lived < _EARLY_SECONDS and not self._any_serves():
            log.error("%s found the configuration bad: stopping all", name)
            self._code = BAD_CONFIGURATION
            self._stop(signal.SIGTERM)
            return
        if lived >= _LONG_LIFE_SECONDS:
            worker.delay = _FIRST_DELAY_SECONDS
        log.error(
            "%s %s after %.1f s; starting it again in %g s", name, _cause(code, hung=worker.hung), lived, worker.delay
        )
        self._postpone(worker)

    def _any_serves(self) -> bool:
        # The configuration was good before: a file may be half replaced, which is no reason to stop the others.
        soon = time.monotonic() - _EARLY_SECONDS
        return any(worker.pid is not None and worker.started <= soon for worker in self._workers)


def _cause(code: int, *, hung: bool = False) -> str:
    if hung:
        return "hung and was killed"
    if code >= 0:
        return f"exited with code {code}"
    known = {number.value: number.name for number in signal.Signals}  # Real-time signals have no names.
    hint = " (the kernel does this when memory runs out)" if code == -signal.SIGKILL else ""
    return f"was ended by {known.get(-code, f'signal {-code}')}{hint}"


def _be_worker(index: int, main: Callable[[int], int], mask: set[int | signal.Signals], parent: int) -> NoReturn:
    """Run a forked process, which must never return to the caller of `run_processes`."""
    code = 1
    try:
        _end_with_parent(parent)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        code = main(index)
    except KeyboardInterrupt:  # SIGINT before the worker had a handler.
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 1
    except BaseException:
        log.exception("worker %d failed", index)
    finally:
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _end_with_parent(parent: int) -> None:
    """Request SIGTERM when the parent dies: orphans would hold the port and the GPUs."""
    if sys.platform != "linux":
        return
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    except (OSError, AttributeError):
        log.warning("prctl is missing: workers will outlive a supervisor that is killed")
    if os.getppid() != parent:  # It died before the request.
        os._exit(1)
