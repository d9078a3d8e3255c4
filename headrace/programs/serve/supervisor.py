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
MAX_POLL_SECONDS = 2 * BEAT_SECONDS
"""Longest time that one check may add: the supervisor itself may have been stopped."""
_BUSY_FACTOR = 10


class Heartbeats:
    """A heartbeat counter for each worker, and whether it serves. Created before the workers are forked."""

    def __init__(self, count: int) -> None:
        self._cells = memoryview(mmap.mmap(-1, 2 * 8 * count)).cast("Q")

    def keep_beating(self, index: int) -> None:
        """In the worker: send heartbeats as long as its event loop runs."""
        self.beat(index)
        asyncio.get_running_loop().call_later(BEAT_SECONDS, self.keep_beating, index)

    def beat(self, index: int) -> None:
        """Send one heartbeat."""
        self._cells[2 * index] += 1

    def serve(self, index: int) -> None:
        """In the worker: record that its models are loaded."""
        self._cells[2 * index + 1] = 1

    def begin(self, index: int) -> int:
        """In the supervisor, before a process starts: reset the worker to "not serving" and return its count."""
        self._cells[2 * index + 1] = 0
        return self._cells[2 * index]

    def beats(self, index: int) -> int:
        """Return the count."""
        return self._cells[2 * index]

    def serves(self, index: int) -> bool:
        """Return whether the worker has started."""
        return bool(self._cells[2 * index + 1])


class ProcessActivity(NamedTuple):
    """The state of a process, from /proc."""

    state: str
    """`D`: waits for a disk. `T`: stopped."""
    ticks: int
    """CPU time of all threads, in hundredths of a second."""
    faults: int
    """Page faults that needed a disk."""

    def worked_since(self, before: ProcessActivity) -> bool:
        """Return whether the process works, or has worked since then."""
        return self.state == "D" or (self.ticks, self.faults) != (before.ticks, before.faults)


def read_activity(pid: int) -> ProcessActivity:
    """Read the state of a process that was not reaped. Without /proc it counts as working."""
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return ProcessActivity("D", 0, 0)
    # The name, in parentheses, may have any characters.
    fields = text[text.rindex(b")") + 2 :].split()
    return ProcessActivity(fields[0].decode(), int(fields[11]) + int(fields[12]), int(fields[9]))


@dataclass(slots=True)
class _Health:
    beats: int
    activity: ProcessActivity | None = None
    """The state at the last check without a new heartbeat."""
    idle_seconds: float = 0.0
    busy_seconds: float = 0.0


class Watchdog:
    """Detects workers that hang: no heartbeat and no CPU time for `seconds`."""

    def __init__(
        self, beats: Heartbeats, seconds: float, *, read_activity: Callable[[int], ProcessActivity] = read_activity
    ) -> None:
        self.seconds = seconds
        self._beats = beats
        self._read_activity = read_activity
        self._health: dict[int, _Health] = {}

    def begin(self, index: int) -> None:
        """Reset the state of a worker: a new process starts."""
        self._health[index] = _Health(self._beats.begin(index))

    def check(self, index: int, pid: int, elapsed: float) -> str:
        """Check a worker, `elapsed` seconds after the last check: return a description of the hang, "" if there is none."""
        health, beats = self._health[index], self._beats.beats(index)
        if beats != health.beats:
            self._health[index] = _Health(beats)
            return ""
        activity, before = self._read_activity(pid), health.activity
        health.activity = activity
        if before is None:
            return ""
        elapsed = min(elapsed, MAX_POLL_SECONDS)
        if activity.worked_since(before):
            # CPU time resets the idle time: on a busy machine a working process is sometimes preempted, and threads that
            # wait for Python's lock wake up briefly.
            health.busy_seconds += elapsed
            health.idle_seconds = max(0.0, health.idle_seconds - elapsed)
        else:
            health.idle_seconds += elapsed
        return self._verdict(health, activity, serves=self._beats.serves(index))

    def _verdict(self, health: _Health, activity: ProcessActivity, *, serves: bool) -> str:
        if health.idle_seconds >= self.seconds:
            silent = "has been stopped" if activity.state in ("T", "t") else "has answered nothing and done nothing"
            return f"{silent} for {health.idle_seconds:.0f} s"
        if serves and health.busy_seconds >= _BUSY_FACTOR * self.seconds:
            return f"has answered nothing for {health.busy_seconds:.0f} s in which it computed"
        return ""


log = logging.getLogger("headrace.apps")

_FIRST_DELAY_SECONDS = 0.5
_MAX_DELAY_SECONDS = 30.0
_STABLE_SECONDS = 60.0
_EARLY_SECONDS = 1.0
"""If a worker reports a bad configuration within this time, and none is older, all are stopped: it would fail again."""
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
    """One of the workers, and its current process."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.pid: int | None = None
        self.started = 0.0
        self.delay = _FIRST_DELAY_SECONDS
        self.due: float | None = 0.0
        """When to start a process; None while one runs, or if none is to run."""
        self.hung = False
        """Whether this process was killed because it hung."""

    def __str__(self) -> str:
        return f"worker {self.index} (pid {self.pid})"


class _Supervisor:
    def __init__(self, count: int, main: Callable[[int], int], watchdog: Watchdog | None = None) -> None:
        self._main = main
        self._watchdog = watchdog
        self._last_check = time.monotonic()
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
                received = self._next_signal()
                if received in (signal.SIGTERM, signal.SIGINT):
                    self._handle_signal(received)
                self._reap()
                self._kill_hung()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            if signal.SIGALRM in signal.sigpending():
                signal.sigwait({signal.SIGALRM})
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _next_signal(self) -> signal.Signals:
        """Wait for the next signal and return it; SIGALRM when a check is due.

        Not `sigtimedwait`: if this process is stopped meanwhile (Ctrl-Z, a paused container) and continues when the
        time is over, Python 3.11 returns stale memory as a signal.
        """
        signal.setitimer(signal.ITIMER_REAL, max(self._timeout(), 0.001))
        return signal.Signals(signal.sigwaitinfo(_SIGNALS).si_signo)

    def _timeout(self) -> float:
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
            _run_worker(worker.index, self._main, mask, parent)
        worker.pid, worker.started, worker.due, worker.hung = pid, now, None, False
        log.info("started %s", worker)

    def _postpone(self, worker: _Worker) -> None:
        worker.due = time.monotonic() + worker.delay
        worker.delay = min(worker.delay * 2, _MAX_DELAY_SECONDS)

    def _handle_signal(self, number: signal.Signals) -> None:
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

    def _kill_hung(self) -> None:
        """Kill workers that hang, also while stopping. `_reap` then restarts them."""
        now = time.monotonic()
        if self._watchdog is None or now - self._last_check < BEAT_SECONDS / 2:
            return
        elapsed, self._last_check = now - self._last_check, now
        for worker in self._workers:
            if worker.pid is None or worker.hung:
                continue
            hangs = self._watchdog.check(worker.index, worker.pid, elapsed)
            if hangs:
                log.error("%s %s: killing it (--worker-timeout-seconds %g)", worker, hangs, self._watchdog.seconds)
                worker.hung = True
                os.kill(worker.pid, signal.SIGKILL)

    def _ended(self, worker: _Worker, name: str, code: int) -> None:
        uptime = time.monotonic() - worker.started
        if self._stopping:
            # A signal may come before the worker has a handler; then there was nothing to drain.
            if code not in (0, -signal.SIGTERM, -signal.SIGINT) and not self._killed:
                log.warning("%s did not stop well: %s", name, _cause(code, hung=worker.hung))
                self._code = self._code or 1
            return
        if code == BAD_CONFIGURATION and uptime < _EARLY_SECONDS and not self._any_serves():
            log.error("%s found the configuration bad: stopping all", name)
            self._code = BAD_CONFIGURATION
            self._stop(signal.SIGTERM)
            return
        if uptime >= _STABLE_SECONDS:
            worker.delay = _FIRST_DELAY_SECONDS
        log.error(
            "%s %s after %.1f s; starting it again in %g s", name, _cause(code, hung=worker.hung), uptime, worker.delay
        )
        self._postpone(worker)

    def _any_serves(self) -> bool:
        # If so, the configuration was good before: a file may be half replaced, which must not stop the others.
        soon = time.monotonic() - _EARLY_SECONDS
        return any(worker.pid is not None and worker.started <= soon for worker in self._workers)


def _cause(code: int, *, hung: bool = False) -> str:
    if hung:
        return "hung and was killed"
    if code >= 0:
        return f"exited with code {code}"
    signal_names = {number.value: number.name for number in signal.Signals}  # Real-time signals have no names.
    hint = " (the kernel does this when memory runs out)" if code == -signal.SIGKILL else ""
    return f"was ended by {signal_names.get(-code, f'signal {-code}')}{hint}"


def _run_worker(index: int, main: Callable[[int], int], mask: set[int | signal.Signals], parent: int) -> NoReturn:
    """Run a forked process, which must never return to the caller of `run_processes`."""
    code = 1
    try:
        _die_with_parent(parent)
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


def _die_with_parent(parent: int) -> None:
    """Request SIGTERM when the parent dies: orphans would hold the port and the GPUs."""
    if sys.platform != "linux":
        return
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    except (OSError, AttributeError):
        log.warning("prctl is missing: workers will outlive a supervisor that is killed")
    if os.getppid() != parent:  # The parent died before the call.
        os._exit(1)
