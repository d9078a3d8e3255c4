# SPDX-License-Identifier: Apache-2.0
"""Several worker processes under one parent: start, watch, restart, stop.

Called by composition roots before they make a loop, a thread or a GPU context: workers are plain forks. Turns signals
to the parent into signals to the workers and their ends into one exit code; knows nothing of what a worker does. Linux.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import NoReturn

from headrace.core.exit_codes import BAD_CONFIGURATION
from headrace.programs.serve.heartbeats import BEAT_SECONDS, Watchdog

log = logging.getLogger("headrace.apps")

_FIRST_DELAY_SECONDS = 0.5
_LONGEST_DELAY_SECONDS = 30.0
_LONG_LIFE_SECONDS = 60.0
_EARLY_SECONDS = 1.0
"""A worker that finds its configuration bad in this time, when no other is older, would do so again: all are stopped."""
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD, signal.SIGALRM)
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def run_processes(count: int, main: Callable[[int], int], watchdog: Watchdog | None = None) -> int:
    """Run `main(index)` in `count` processes until SIGTERM or SIGINT; returns the exit code of the program.

    One process is this very one. Several are forked, and a worker that ends without being told to is started again; with a
    watchdog, so is one that hangs. A first signal is passed on, so that workers drain; a second kills them. 0 when all ended
    well.
    """
    if count < 1:
        raise ValueError("there must be at least one process")
    if count == 1:
        return main(0)
    if threading.active_count() > 1:
        raise RuntimeError("run_processes must come before any thread: a forked worker would inherit its locks")
    return _Supervisor(count, main, watchdog).run()


class _Worker:
    """One place for a process, and the process in it."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.pid: int | None = None
        self.started = 0.0
        self.delay = _FIRST_DELAY_SECONDS
        self.due: float | None = 0.0
        """When to start a process here; None while one runs, or when none is to run any more."""
        self.hung = False
        """Whether this process was killed for that."""

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
        # Blocked and asked for, never handled: no signal can be lost between a look and a wait.
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
        """The next signal; SIGALRM when it is time for a look.

        Not `sigtimedwait`: if this process was stopped meanwhile (Ctrl-Z, a paused container) and goes on when the time is
        over, Python gives back what lay in its memory as if it were a signal. Seen with 3.11.
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
        sys.stdout.flush()  # what is buffered here would come out once per worker
        sys.stderr.flush()
        parent = os.getpid()
        if self._watchdog is not None:
            self._watchdog.begin(worker.index)
        try:
            pid = os.fork()
        except OSError as error:  # no memory or no process left, for now
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
            if worker.pid is not None:  # not reaped yet, so the number is still its own
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
        """Kill whoever hangs; while stopping, too, for it would never end. `_reap` finds it, and it is started again."""
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
            # A signal may also come before the worker has a handler for it; then there was nothing to drain.
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
        # Then the configuration was good not long ago: a file may be half replaced, and is no reason to stop the rest.
        soon = time.monotonic() - _EARLY_SECONDS
        return any(worker.pid is not None and worker.started <= soon for worker in self._workers)


def _cause(code: int, *, hung: bool = False) -> str:
    if hung:
        return "hung and was killed"
    if code >= 0:
        return f"exited with code {code}"
    known = {number.value: number.name for number in signal.Signals}  # those of real time have no names
    hint = " (the kernel does this when memory runs out)" if code == -signal.SIGKILL else ""
    return f"was ended by {known.get(-code, f'signal {-code}')}{hint}"


def _be_worker(index: int, main: Callable[[int], int], mask: set[int | signal.Signals], parent: int) -> NoReturn:
    """The life of a forked process, which must never return into the code that called `run_processes`."""
    code = 1
    try:
        _end_with_parent(parent)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        code = main(index)
    except KeyboardInterrupt:  # SIGINT before the worker had a handler for it
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
    """Ask for SIGTERM when the parent dies, however it dies: orphans would hold the port and the GPUs."""
    if sys.platform != "linux":
        return
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    except (OSError, AttributeError):
        log.warning("prctl is missing: workers will outlive a supervisor that is killed")
    if os.getppid() != parent:  # it died before the request
        os._exit(1)
