# SPDX-License-Identifier: Apache-2.0
"""A real router before two real servers, clients of every protocol through it, and signals to each of the three."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from chaos_clients import CLIENTS, Ports
from chaos_server import Server, chaos_models, running, served
from load_clients import LoadClients

from support.ports import free_port
from support.waiting import eventually

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
EACH = 2
ONE_BY_ONE = ("v2 http", "v1 http", "predict", "openai events", "v2 grpc", "v1 grpc")
"""Protocols whose requests end; the others are streams, which only their two ends know the end of."""


@contextmanager
def routed(folder: Path, *options: str) -> Iterator[tuple[Server, Server, Server]]:
    """The router, as a server; and the two behind it."""
    models = chaos_models(folder, ("echo", "repeater"))
    with ExitStack() as stack:
        one, two = (stack.enter_context(served(models, folder / f"log{number}")) for number in range(2))
        port = free_port()
        arguments: list[str | Path] = ["router", "--port", str(port), *options]
        for server in (one, two):
            arguments += ["--backend", f"http://127.0.0.1:{server.ports.http}"]
        router = stack.enter_context(running(folder / "router.log", Ports(port, port), *arguments))
        yield router, one, two


def test_a_backend_that_is_killed_costs_what_it_had_and_one_that_hangs_nothing_that_is_wrong(tmp_path: Path) -> None:
    with routed(tmp_path) as (router, one, two):
        with LoadClients(router.ports, each=EACH) as clients:
            clients.wait_for(10)
            # Stopped: those that it holds wait for it, new ones go to the other when its checks have failed.
            os.kill(two.process.pid, signal.SIGSTOP)
            answered = clients.total("answered")
            eventually(lambda: clients.total("answered") > answered + 20, message=clients.__str__)
            os.kill(two.process.pid, signal.SIGCONT)
            clients.wait_for(10)
            os.kill(one.process.pid, signal.SIGKILL)
            clients.wait_for(10)
        clients.check()
    failed = clients.total("error_answers") + clients.total("cut")
    assert failed <= 6 * EACH * len(CLIENTS), f"{clients.texts('error_answers')} {clients.texts('cut')}"


def test_a_stopped_backend_loses_no_http_request(tmp_path: Path) -> None:
    with routed(tmp_path) as (router, one, two):
        with LoadClients(router.ports, ONE_BY_ONE, each=EACH) as clients:
            clients.wait_for(10)
            one.process.terminate()
            assert one.ended() == 0
            clients.wait_for(10)
        clients.check()
        assert (clients.total("error_answers"), clients.total("cut")) == (0, 0), (
            f"{clients.texts('error_answers')} {clients.texts('cut')}"
        )
        assert two.process.poll() is None


def test_a_stopped_router_answers_open_requests_and_cuts_streams_after_its_grace(tmp_path: Path) -> None:
    with routed(tmp_path, "--grace-seconds", "5") as (router, _, _):
        with LoadClients(router.ports, each=EACH, until_gone=True) as clients:
            clients.wait_for(10)
            router.process.terminate()
            assert router.ended() == 1, router.log  # what its log says: streams were cut
            clients.join()
        clients.check()
        assert f"{EACH * 3} connections were cut" in router.log
        for name in ONE_BY_ONE:
            account = clients.accounts[name]
            assert len(account.error_answers) + len(account.cut) == EACH, f"{name}: {clients}"


def test_a_killed_router_leaves_no_client_waiting(tmp_path: Path) -> None:
    with routed(tmp_path) as (router, _, _):
        with LoadClients(router.ports, each=EACH, until_gone=True) as clients:
            clients.wait_for(10)
            router.process.kill()
            clients.join()
        clients.check()
        assert all(len(account.cut) == EACH for account in clients.accounts.values()), str(clients)
