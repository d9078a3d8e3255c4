# SPDX-License-Identifier: Apache-2.0
"""Clients of a gateway that write records, and remember what they were told there is.

with gateway(tmp_path) as running, Writers(running) as writers:
    writers.wait_for(10)
    ...                      # something happens to the gateway, or to its database
    writers.check_kept()
"""

from __future__ import annotations

import http.client
import threading

from gateway_process import Gateway

from support.waiting import eventually

EXPERIMENTS = "/api/v1/orgs/acme/experiments"


class Writers:
    """Threads that make experiments, each with a name of its own, and note those that they were told there are."""

    def __init__(self, running: Gateway) -> None:
        self._running = running
        self._token = running.login(running.command("users", "add", "alice", "--org", "acme").strip(), "acme")
        self._stop = threading.Event()
        self.made: list[tuple[str, str]] = []
        """Identity and name."""
        self.error_answers: list[tuple[int, bytes]] = []
        self.cut = 0
        self._threads = [threading.Thread(target=self._run, args=(number,), daemon=True) for number in range(4)]

    def __enter__(self) -> Writers:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(100)
            assert not thread.is_alive()

    def _run(self, number: int) -> None:
        turn = 0
        while not self._stop.is_set():
            turn += 1
            name = f"e-{number}-{turn}"
            wish = {"network_arch": "classification", "name": name}
            try:
                got = self._running.ask("POST", EXPERIMENTS, wish, self._token)
            except (OSError, http.client.HTTPException):
                self.cut += 1
                self._stop.wait(0.05)
                continue
            if got.status == 200:
                self.made.append((got.json["id"], name))
            else:
                self.error_answers.append((got.status, got.body))

    def wait_for(self, count: int) -> None:
        """Until so many more are made."""
        wanted = len(self.made) + count
        eventually(
            lambda: len(self.made) >= wanted, message=lambda: (self.error_answers[-3:], self._running.log[-900:])
        )

    def check_kept(self) -> None:
        """Everything that somebody was told there is, is there, and is what it was."""
        for identity, name in list(self.made):
            got = self._running.ask("GET", f"{EXPERIMENTS}/{identity}", token=self._token)
            assert (got.status, got.json["name"]) == (200, name), got.body
