# SPDX-License-Identifier: Apache-2.0
"""`headrace router` inside this process: the command in the main thread, which gets the signals, and a test beside it.

def talk(router: Running) -> None:
    assert ask(router.port, "GET", "/hello").status == 200

assert run_router("--backend", url, talk=talk).returncode == 0
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from routing import ask

from support.ports import free_port
from support.programs import Finished, run
from support.waiting import eventually

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Running(logging.Handler):
    """A running router: its port, and what it logs."""

    def __init__(self, port: int) -> None:
        super().__init__(logging.INFO)
        self.port = port
        self.said: list[str] = []
        self.told_to_end = False

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())

    def send(self, number: signal.Signals) -> None:
        self.told_to_end = self.told_to_end or number != signal.SIGHUP
        os.kill(os.getpid(), number)


def run_router(*options: str, talk: Callable[[Running], None]) -> Finished:
    """Run the command until `talk`, called in a thread once the port is open, has returned; then SIGTERM."""
    running = Running(free_port())
    failed: list[BaseException] = []

    def wait_and_talk() -> None:
        try:
            eventually(lambda: _listens(running.port) or ended.is_set())
            if not ended.is_set():
                talk(running)
        except BaseException as error:
            failed.append(error)
        finally:
            if not ended.is_set() and not running.told_to_end:
                running.send(signal.SIGTERM)

    ended = threading.Event()
    thread = threading.Thread(target=wait_and_talk)
    with _signals_kept(), _logged(running):
        thread.start()
        try:
            finished = run("router", "--port", str(running.port), *options)
        finally:
            ended.set()
            thread.join(100)
    if failed:
        raise failed[0]
    return finished


def _listens(port: int) -> bool:
    """The port is opened before signals are taken, and answers only when both are done."""
    try:
        return ask(port, "GET", "/router/status").status == 200
    except OSError:
        return False


@contextmanager
def _logged(running: Running) -> Iterator[None]:
    ours = logging.getLogger("headrace")
    ours.addHandler(running)
    try:
        yield
    finally:
        ours.removeHandler(running)


@contextmanager
def _signals_kept() -> Iterator[None]:
    """The command keeps a signal for a moment after its end, as a copy of it may be on its way; a test must not."""
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    # Whatever comes after the end, or before the beginning, must not end the tests.
    for number in _SIGNALS:
        signal.signal(number, lambda *_: None)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
