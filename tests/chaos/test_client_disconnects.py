# SPDX-License-Identifier: Apache-2.0
"""Clients that go away at every point of what they say, that dribble, or do not read; beside others who notice nothing.

What a real client of each protocol sends is recorded and sent again up to each of many points: before the head, in it, in
the body, between messages, while the request waits or is computed, while the answer streams.
"""

from __future__ import annotations

import json
import socket
import time
import urllib.request
from collections.abc import Iterator

import numpy as np
import pytest
from chaos_bytes import begin, leave, recorded
from chaos_clients import CLIENTS
from chaos_server import TENSORS, Server, add_model, chaos_models, served
from load_clients import MODELS, LoadClients

from support.waiting import eventually

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
POINTS = 24
AT_ONCE = 20
SLOW = 'backend: "identity"\n' + TENSORS.replace("max_batch_size: 8", "max_batch_size: 0").replace(
    "dims: [ 1 ]", "dims: [ 1, 1 ]"
)
SLOW += 'parameters { key: "sleep_milliseconds" value { string_value: "200" } }\n'
WIDE = SLOW.replace("200", "0").replace("dims: [ 1, 1 ]", "dims: [ -1 ]")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("going")
    models = chaos_models(folder, ("echo", "repeater"))
    add_model(models, "slow", SLOW)
    add_model(models, "wide", WIDE)
    with served(models, folder / "log") as running:
        yield running
        assert running.process.poll() is None


@pytest.fixture
def bystanders(server: Server) -> Iterator[LoadClients]:
    """Others, every one of whom is answered; and of those who have gone nothing is left."""
    eventually(lambda: server.post("/v2/models/echo/infer", b"{}") == 400)
    before = server.descriptors()
    with LoadClients(server.ports) as clients:
        clients.wait_for(5)
        yield clients
        clients.wait_for(5)
    clients.check()
    assert (clients.total("error_answers"), clients.total("cut")) == (0, 0), (
        f"{clients.texts('error_answers')} {clients.texts('cut')}"
    )
    # Connections to the engine are kept for the next chat, as many as there were chats at once; no test has fewer who go.
    eventually(
        lambda: server.descriptors() <= before + AT_ONCE + 2,
        message=lambda: f"{before} then, {server.descriptors()} now",
    )


@pytest.mark.parametrize("protocol", CLIENTS)
def test_at_every_point(server: Server, bystanders: LoadClients, protocol: str) -> None:
    sent = recorded(protocol, server.ports, MODELS[protocol])
    places = sorted({round(part * len(sent) / POINTS) for part in range(POINTS + 1)})
    for place in places:
        for abruptly in (False, True):
            leave(begin(server.ports.http, sent[:place]), abruptly=abruptly)
    # With the first byte of the answer in hand; and several, each in the middle of its own, at the same time.
    for abruptly in (False, True):
        client = begin(server.ports.http, sent)
        assert client.recv(1)
        leave(client, abruptly=abruptly)
    clients = [begin(server.ports.http, sent[:place]) for place in places]
    for number, client in enumerate(clients):
        leave(client, abruptly=bool(number % 2))


def test_requests_whose_clients_disconnect_while_queued_are_not_computed(
    server: Server, bystanders: LoadClients
) -> None:
    sent = recorded("v2 http", server.ports, "slow")
    before = computed(server, "slow")
    queued = [begin(server.ports.http, sent) for _ in range(200)]
    eventually(lambda: computed(server, "slow") > before)
    for client in queued:
        leave(client, abruptly=False)
    # One more goes through the same queue: it is answered when those before it are gone.
    assert recorded("v2 http", server.ports, "slow")
    assert computed(server, "slow") - before < 200


def computed(server: Server, model: str) -> int:
    with urllib.request.urlopen(f"http://127.0.0.1:{server.ports.http}/v2/models/{model}/stats", timeout=100) as answer:
        return int(json.load(answer)["model_stats"][0]["inference_count"])


@pytest.mark.parametrize("protocol", CLIENTS)
def test_slow_writers_are_answered_and_block_no_other_client(
    server: Server, bystanders: LoadClients, protocol: str
) -> None:
    sent = recorded(protocol, server.ports, MODELS[protocol])
    clients = [begin(server.ports.http, b"") for _ in range(AT_ONCE)]
    size = max(1, len(sent) // 12)
    pieces = [sent[place : place + size] for place in range(0, len(sent), size)]
    for piece in pieces[:-1]:
        for client in clients:
            client.sendall(piece)
        time.sleep(0.05)  # and no longer, however slow the others are: a head has ten seconds
    bystanders.wait_for(len(pieces))
    for client in clients:
        client.sendall(pieces[-1])
    for client in clients:
        assert client.recv(1)
        leave(client, abruptly=False)


def test_slow_readers_get_everything_and_block_no_other_client(server: Server, bystanders: LoadClients) -> None:
    array = np.arange(500_000, dtype=np.float32)
    header = {
        "inputs": [
            {
                "name": "INPUT0",
                "datatype": "FP32",
                "shape": [array.size],
                "parameters": {"binary_data_size": array.nbytes},
            }
        ],
        "parameters": {"binary_data_output": True},
    }
    text = json.dumps(header).encode()
    head = (
        f"POST /v2/models/wide/infer HTTP/1.1\r\nhost: a\r\ninference-header-content-length: {len(text)}\r\n"
        f"content-length: {len(text) + array.nbytes}\r\nconnection: close\r\n\r\n"
    )
    clients = []
    for _ in range(AT_ONCE):
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.settimeout(100)
        client.connect(("127.0.0.1", server.ports.http))
        client.sendall(head.encode() + text + array.tobytes())
        assert client.recv(1)
        clients.append(client)
    bystanders.wait_for(20)
    for client in clients[::2]:
        leave(client, abruptly=True)
    for client in clients[1::2]:
        received = bytearray()
        while piece := client.recv(1 << 20):
            received += piece
        assert received.endswith(array.tobytes())
        client.close()
