# SPDX-License-Identifier: Apache-2.0
"""Clients of every protocol that send requests until they are stopped, and the outcome of every request.

    with LoadClients(ports) as clients:
        clients.wait_for(200)          # answers of each protocol
        ...                          # something happens to the server
    clients.check()                    # each request: answered once with its own number, or told, or cut. None lost

Counts decide, never times: `wait_for` waits for as long as answers are due.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from collections.abc import Iterable
from typing import Any

from chaos_clients import CLIENTS, Cut, ErrorAnswer, Ports

from support.waiting import eventually

MODELS = dict.fromkeys(CLIENTS, "echo") | {"openai events": "repeater"}


class Account:
    """What became of the requests of one protocol. Each number is written down when it is sent and when it is over."""

    def __init__(self) -> None:
        self.sent = 0
        self.answered = 0
        self.error_answers: list[str] = []
        self.cut: list[str] = []
        self.wrong: list[str] = []
        self._lock = threading.Lock()

    def begin(self) -> None:
        with self._lock:
            self.sent += 1

    def end(self, value: int, got: int | None, error: Exception | None) -> None:
        with self._lock:
            if error is None and got == value:
                self.answered += 1
            elif isinstance(error, ErrorAnswer):
                self.error_answers.append(str(error))
            elif isinstance(error, Cut):
                self.cut.append(str(error))
            else:
                self.wrong.append(f"{value}: {got} {error!r}")

    @property
    def over(self) -> int:
        return self.answered + len(self.error_answers) + len(self.cut) + len(self.wrong)


class LoadClients:
    """`each` clients of each protocol.

    `most`: how many requests all of them send together; None for no end. `until_gone`: a client ends with its first request
    that is not answered.
    """

    def __init__(
        self,
        ports: Ports,
        protocols: Iterable[str] = tuple(CLIENTS),
        *,
        each: int = 2,
        models: dict[str, str] | None = None,
        most: int | None = None,
        until_gone: bool = False,
    ) -> None:
        self._until_gone = until_gone
        self._ports = ports
        self._models = MODELS | (models or {})
        self.accounts = {name: Account() for name in protocols}
        self._numbers = iter(range(1, most + 1)) if most is not None else itertools.count(1)
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(name,), daemon=True) for name in self.accounts for _ in range(each)
        ]

    def __enter__(self) -> LoadClients:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        self._stop.set()
        self.join()

    def join(self, seconds: float = 110.0) -> None:
        ends = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, ends - time.monotonic()))
        left = sum(thread.is_alive() for thread in self._threads)
        assert not left, f"{left} clients still wait for an answer: {self}"

    def wait_for(self, answers: int, protocols: Iterable[str] | None = None) -> None:
        """Until each of these protocols has had so many more right answers than now."""
        wanted = {name: self.accounts[name].answered + answers for name in protocols or self.accounts}
        eventually(
            lambda: all(self.accounts[name].answered >= count for name, count in wanted.items()), message=self.__str__
        )

    def total(self, kind: str) -> int:
        return sum(
            len(value) if isinstance(value := getattr(account, kind), list) else value
            for account in self.accounts.values()
        )

    def check(self) -> None:
        """Every request is over, once, and none with what was not its own. Call it when the clients have stopped."""
        for name, account in self.accounts.items():
            assert account.wrong == [], f"{name}: {account.wrong[:5]}"
            assert account.over == account.sent, f"{name}: {account.sent} sent, {account.over} over"

    def texts(self, kind: str) -> Counter[str]:
        """What was told, or how connections ended, by protocol; for messages of failed tests and for checks."""
        return Counter(
            f"{name}: {text[:160]}" for name, account in self.accounts.items() for text in getattr(account, kind)
        )

    def __str__(self) -> str:
        rows = (
            f"{name}: {a.sent} sent, {a.answered} answered, {len(a.error_answers)} errors, "
            f"{len(a.cut)} cut, {len(a.wrong)} wrong"
            for name, a in self.accounts.items()
        )
        return "; ".join(rows)

    def _number(self) -> int | None:
        with self._lock:
            return next(self._numbers, None)

    def _run(self, name: str) -> None:
        client: Any = None
        while not self._stop.is_set() and (value := self._number()) is not None:
            self.accounts[name].begin()
            got, error = None, None
            try:
                client = client or CLIENTS[name](self._ports, self._models[name])
                got = client.ask(value)
            except Exception as caught:
                error = caught
            self.accounts[name].end(value, got, error)
            if error is not None and self._until_gone:
                break
            if error is not None and not isinstance(error, ErrorAnswer):
                if client is not None:
                    client.close()
                client = None
                self._stop.wait(0.05)  # while the server is away: not as fast as the loop can
        if client is not None:
            client.close()
