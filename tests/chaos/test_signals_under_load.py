# SPDX-License-Identifier: Apache-2.0
"""SIGKILL and SIGSTOP of each process of a server while clients of every protocol ask. SIGTERM: `test_stop_under_load`.

Whoever is with a process that is killed sees its connection end, once; nobody gets what was not its own, and nobody waits
for ever.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from chaos_clients import CLIENTS
from chaos_server import Server, chaos_models, served
from load_clients import LoadClients

from support.waiting import eventually

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
EACH = 2
SNAKES = {name: "snake" for name in CLIENTS if name != "openai events"}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One process, and those of its models."""
    folder = tmp_path_factory.mktemp("alone")
    with served(chaos_models(folder), folder / "log") as server:
        yield server


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Two workers that are ready, and may be stopped for as long as it takes."""
    folder = tmp_path_factory.mktemp("pair")
    patient = ("--workers", "2", "--worker-timeout-seconds", "0")
    with served(chaos_models(folder), folder / "log", *patient) as server:
        eventually(lambda: ready(server) == 2, message=lambda: server.log)
        yield server


def ready(server: Server) -> int:
    """How many workers have said so until now."""
    return server.log.count("ready: ")


def family(server: Server) -> list[psutil.Process]:
    process = psutil.Process(server.process.pid)
    return [process, *process.children(recursive=True)]


def test_a_killed_worker_costs_its_own_clients_one_request_each(pair: Server) -> None:
    before = ready(pair)
    with LoadClients(pair.ports, each=EACH) as clients:
        for turn in range(2):
            clients.wait_for(20)
            killed = pair.worker(turn)
            os.kill(killed, signal.SIGKILL)
            eventually(lambda turn=turn, killed=killed: pair.worker(turn) != killed, message=lambda: pair.log)
            clients.wait_for(20)
            eventually(lambda turn=turn: ready(pair) == before + 1 + turn, message=lambda: pair.log)
    clients.check()
    assert clients.total("error_answers") == 0, clients.texts("error_answers")
    assert all(len(account.cut) <= 2 * EACH for account in clients.accounts.values()), clients.texts("cut")
    assert 0 < clients.total("cut") < 2 * EACH * len(CLIENTS), "those of the other worker noticed nothing"


def test_a_stopped_worker_answers_everything_when_it_continues(pair: Server) -> None:
    with LoadClients(pair.ports, each=EACH) as clients:
        clients.wait_for(10)
        os.kill(pair.worker(1), signal.SIGSTOP)
        answered = clients.total("answered")
        eventually(lambda: clients.total("answered") > answered + 300, message=clients.__str__)
        os.kill(pair.worker(1), signal.SIGCONT)
        clients.wait_for(10)
    clients.check()
    assert (clients.total("error_answers"), clients.total("cut")) == (0, 0), (
        f"{clients.texts('error_answers')} {clients.texts('cut')}"
    )


def test_a_worker_that_hangs_is_replaced_and_costs_its_own_clients_one_request_each(tmp_path: Path) -> None:
    """Stopped for good. Nobody waits for ever, and who was with the other worker notices nothing."""
    with served(chaos_models(tmp_path), tmp_path / "log", "--workers", "2", "--worker-timeout-seconds", "8") as server:
        eventually(lambda: ready(server) == 2, message=lambda: server.log)
        item = 3  # 27 connections: that all are with one worker happens once in 70 million times
        with LoadClients(server.ports, each=item) as clients:
            clients.wait_for(10)
            hung = server.worker(1)
            os.kill(hung, signal.SIGSTOP)
            eventually(lambda: server.worker(1) != hung, message=lambda: server.log)
            eventually(lambda: ready(server) == 3, message=lambda: server.log)
            clients.wait_for(10)
        assert f"worker 1 (pid {hung}) has been stopped for" in server.log
        assert "hung and was killed" in server.log
        assert not psutil.pid_exists(hung)
    clients.check()
    assert clients.total("error_answers") == 0, clients.texts("error_answers")
    assert all(len(account.cut) <= item for account in clients.accounts.values()), clients.texts("cut")
    assert 0 < clients.total("cut") < item * len(CLIENTS), clients.texts("cut")


def test_a_stopped_parent_does_not_stop_its_workers(pair: Server) -> None:
    with LoadClients(pair.ports, each=EACH) as clients:
        clients.wait_for(5)
        os.kill(pair.process.pid, signal.SIGSTOP)
        clients.wait_for(30)
        os.kill(pair.process.pid, signal.SIGCONT)
    clients.check()
    assert (clients.total("error_answers"), clients.total("cut")) == (0, 0), (
        f"{clients.texts('error_answers')} {clients.texts('cut')}"
    )


def test_a_killed_server_leaves_no_client_waiting_and_nothing_behind(tmp_path: Path) -> None:
    with served(chaos_models(tmp_path), tmp_path / "log") as server:
        processes = family(server)
        assert len(processes) >= 3
        with LoadClients(server.ports, each=EACH, until_gone=True) as clients:
            clients.wait_for(10)
            server.process.kill()
            clients.join()
        clients.check()
        assert all(len(account.cut) == EACH for account in clients.accounts.values()), str(clients)
        gone, left = psutil.wait_procs(processes[1:], timeout=60)
        assert not left, left


def test_a_stopped_server_answers_everything_when_it_continues(alone: Server) -> None:
    with LoadClients(alone.ports, each=EACH) as clients:
        for _ in range(3):
            clients.wait_for(5)
            os.kill(alone.process.pid, signal.SIGSTOP)
            eventually(lambda: psutil.Process(alone.process.pid).status() == psutil.STATUS_STOPPED)
            os.kill(alone.process.pid, signal.SIGCONT)
        clients.wait_for(5)
    clients.check()
    assert (clients.total("error_answers"), clients.total("cut")) == (0, 0), (
        f"{clients.texts('error_answers')} {clients.texts('cut')}"
    )


def test_a_stopped_python_model_delays_only_its_own_requests(alone: Server) -> None:
    with LoadClients(alone.ports, SNAKES, models=SNAKES) as held, LoadClients(alone.ports) as free:
        held.wait_for(10)
        pid = alone.child("snake")
        os.kill(pid, signal.SIGSTOP)
        free.wait_for(30)
        os.kill(pid, signal.SIGCONT)
        held.wait_for(10)
    for clients in (held, free):
        clients.check()
        assert (clients.total("error_answers"), clients.total("cut")) == (0, 0), (
            f"{clients.texts('error_answers')} {clients.texts('cut')}"
        )


def test_a_killed_python_model_fails_only_its_own_requests(alone: Server) -> None:
    with LoadClients(alone.ports, SNAKES, models=SNAKES) as mortal, LoadClients(alone.ports) as free:
        for _ in range(3):
            mortal.wait_for(10)
            os.kill(alone.child("snake"), signal.SIGKILL)
        mortal.wait_for(10)
        free.wait_for(10)
    for clients in (mortal, free):
        clients.check()
    assert (free.total("error_answers"), free.total("cut")) == (0, 0), (
        f"{free.texts('error_answers')} {free.texts('cut')}"
    )
    # gRPC's word for it is UNAVAILABLE, which these clients count as cut; each says which model it was.
    failed = mortal.texts("error_answers") + mortal.texts("cut")
    assert 0 < failed.total() <= 3 * 2 * len(SNAKES)
    assert all("snake" in text or "stream" in text for text in failed), failed


def test_a_killed_engine_costs_the_chats_that_it_had(alone: Server) -> None:
    with LoadClients(alone.ports) as clients:
        for _ in range(2):
            clients.wait_for(10)
            pid = alone.child("fake_engine")
            os.kill(pid, signal.SIGKILL)
            clients.wait_for(10)
    clients.check()
    others = {name: account for name, account in clients.accounts.items() if name != "openai events"}
    assert all(account.answered == account.sent for account in others.values()), str(clients)
