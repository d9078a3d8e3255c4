# SPDX-License-Identifier: Apache-2.0
"""Real processes that are started and killed between requests: no request is lost."""

from __future__ import annotations

import random
import threading
import time

import pytest
from activation_router import ProcessScaler, activation_router
from routing import ask

from support.waiting import eventually

_IDLE_SECONDS = 0.1


@pytest.mark.parametrize("cycles", [4, pytest.param(24, marks=pytest.mark.slow)])
def test_no_request_is_lost_in_dozens_of_wakes(cycles: int) -> None:
    """Clients come whenever they like, often just as the process is killed; it dies at once with what it has."""
    scaler = ProcessScaler()
    statuses: list[int] = []
    enough = threading.Event()

    def client(seed: int) -> None:
        chance = random.Random(seed)
        while not enough.is_set():
            statuses.append(ask(router.port, "POST", "/", b"x" * chance.choice((0, 100, 100_000))).status)
            time.sleep(_IDLE_SECONDS * chance.choice((0.5, 0.95, 1.0, 1.05, 1.3, 2.5)))

    with activation_router(scaler.port, scaler=scaler, health="/", idle_seconds=_IDLE_SECONDS) as router:
        threads = [threading.Thread(target=client, args=(seed,)) for seed in range(2)]
        for thread in threads:
            thread.start()
        eventually(lambda: scaler.starts >= cycles, within=240)
        enough.set()
        for thread in threads:
            thread.join(60)
    assert set(statuses) == {200} and len(statuses) >= cycles


def test_a_process_that_listens_is_found_without_the_health_check() -> None:
    """Those who wait are let on as soon as it answers: the next look at everybody's health is an hour away."""
    scaler = ProcessScaler(load_seconds=0.2)
    with activation_router(
        scaler.port, scaler=scaler, health="/", health_seconds=3600.0, idle_seconds=_IDLE_SECONDS
    ) as router:
        for number in range(1, 4):
            router.becomes("asleep")
            assert ask(router.port, "GET", "/").status == 200
            assert scaler.starts == number
