# SPDX-License-Identifier: Apache-2.0
"""SIGTERM while clients of every protocol ask: readiness goes first, what was accepted is answered, the exit is clean.

Real `headrace serve` in a process of its own. A client stops at the first sign that the server takes no more: a refused
connection, a connection that was closed before its request was read, or an answer that says so.
"""

from __future__ import annotations

import http.client
import queue
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc
from ports import free_port
from tritonclient.utils import InferenceServerException

from headrace.api.v1.schema import SERVICE, message_class

CONFIG = """backend: "identity"
max_batch_size: 8
input { name: "INPUT0" data_type: TYPE_FP32 dims: [ 4 ] }
output { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ 4 ] }
dynamic_batching { }
instance_group [{ kind: KIND_CPU count: 2 }]
parameters { key: "sleep_milliseconds" value { string_value: "15" } }
"""
ROW = np.arange(4, dtype=np.float32)
V0_HEADER = 'batch_size: 1 input { name: "INPUT0" byte_size: 16 } output { name: "OUTPUT0" byte_size: 16 }'
V2_BODY = b'{"inputs":[{"name":"INPUT0","datatype":"FP32","shape":[1,4],"data":[0,1,2,3]}]}'


class Gone(Exception):
    """The server takes no more."""


class Notes:
    """What the clients saw."""

    def __init__(self) -> None:
        self.right: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.gone: Counter[str] = Counter()


def v2_http(http_port: int, _: int) -> Iterator[None]:
    connection = http.client.HTTPConnection("127.0.0.1", http_port, timeout=30)
    while True:
        response, body = exchanged(connection, "/v2/models/m/infer", V2_BODY, {})
        if response.status == 503:
            raise Gone
        assert response.status == 200, body
        assert b"[0.0,1.0,2.0,3.0]" in body
        yield


def v0_http(http_port: int, _: int) -> Iterator[None]:
    connection = http.client.HTTPConnection("127.0.0.1", http_port, timeout=30)
    while True:
        response, body = exchanged(connection, "/api/infer/m", ROW.tobytes(), {"NV-InferRequest": V0_HEADER})
        if "UNAVAILABLE" in response.headers["NV-Status"]:
            raise Gone
        assert response.status == 200, response.headers["NV-Status"]
        assert body[:16] == ROW.tobytes()
        yield


def exchanged(
    connection: http.client.HTTPConnection, path: str, body: bytes, headers: dict[str, str]
) -> tuple[http.client.HTTPResponse, bytes]:
    try:
        connection.request("POST", path, body, headers)
    except (ConnectionError, http.client.CannotSendRequest):
        raise Gone from None
    try:
        response = connection.getresponse()
    except (http.client.RemoteDisconnected, ConnectionResetError):
        # Between two requests a server may close; the request that crosses it was not read (RFC 9112, 9.3.1).
        raise Gone from None
    return response, response.read()


def v2_grpc(_: int, grpc_port: int) -> Iterator[None]:
    with tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{grpc_port}", channel_args=OWN) as client:
        given = [tritonclient.grpc.InferInput("INPUT0", [1, 4], "FP32")]
        given[0].set_data_from_numpy(ROW[None])
        while True:
            try:
                answer = client.infer("m", given)
            except InferenceServerException as error:
                raise gone_or(error, "UNAVAILABLE" in str(error.status())) from None
            assert answer.as_numpy("OUTPUT0").tolist() == [ROW.tolist()]
            yield


def v2_stream(_: int, grpc_port: int) -> Iterator[None]:
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
    with tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{grpc_port}", channel_args=OWN) as client:
        client.start_stream(lambda result, error: answers.put(error or result))
        given = [tritonclient.grpc.InferInput("INPUT0", [1, 4], "FP32")]
        given[0].set_data_from_numpy(ROW[None])
        while True:
            try:
                client.async_stream_infer("m", given)
                answer = answers.get(timeout=20)
            except (InferenceServerException, queue.Empty):
                raise Gone from None  # the stream has ended: the server does so when nothing is due on it
            if isinstance(answer, InferenceServerException):
                raise gone_or(answer, "UNAVAILABLE" in str(answer) or "stopping" in str(answer))
            assert answer.as_numpy("OUTPUT0").tolist() == [ROW.tolist()]
            yield


def v1_grpc(_: int, grpc_port: int) -> Iterator[None]:
    answer_class = message_class("InferResponse")
    header = message_class("InferRequestHeader")(batch_size=1)
    header.input.add(name="INPUT0")
    header.output.add(name="OUTPUT0")
    request = message_class("InferRequest")(
        model_name="m", model_version=-1, meta_data=header, raw_input=[ROW.tobytes()]
    )
    with grpc.insecure_channel(f"127.0.0.1:{grpc_port}", options=OWN) as channel:
        infer = channel.unary_unary(f"/{SERVICE}/Infer")
        while True:
            try:
                answer = answer_class.FromString(infer(request.SerializeToString(), timeout=30))
            except grpc.RpcError as error:
                raise gone_or(error, error.code() is grpc.StatusCode.UNAVAILABLE) from None
            if answer.request_status.code == 6:  # UNAVAILABLE
                raise Gone
            assert answer.raw_output[0] == ROW.tobytes(), answer.request_status
            yield


OWN = [("grpc.use_local_subchannel_pool", 1)]


def gone_or(error: Exception, gone: bool) -> Exception:
    return Gone() if gone else error


PROTOCOLS: dict[str, Callable[[int, int], Iterator[None]]] = {
    "v2 http": v2_http,
    "v2 grpc": v2_grpc,
    "v2 stream": v2_stream,
    "v0 http": v0_http,
    "v1 grpc": v1_grpc,
}


def client(name: str, ports: tuple[int, int], notes: Notes) -> None:
    try:
        for _ in PROTOCOLS[name](*ports):
            notes.right[name] += 1
    except Gone:
        notes.gone[name] += 1
    except BaseException as error:  # an assertion too: a thread has nobody to tell but us
        notes.wrong.append(f"{name}: {error!r}")


@contextmanager
def served(folder: Path, *options: str) -> Iterator[tuple[int, int, subprocess.Popen[bytes]]]:
    ports = free_port(), free_port()
    program = Path(sys.executable).with_name("headrace")
    told = ["--http-port", str(ports[0]), "--grpc-port", str(ports[1]), "--allow-metrics", "false"]
    server = subprocess.Popen([program, "serve", folder, *told, *options])
    try:
        ends = time.monotonic() + 60
        while status(ports[0]) != 200:
            assert time.monotonic() < ends, "it did not become ready"
            time.sleep(0.05)
        yield *ports, server
    finally:
        server.kill()
        server.wait(30)


def status(port: int) -> int:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/v2/health/ready", timeout=30) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


@pytest.mark.parametrize("workers", [1, 2])
def test_nothing_that_was_accepted_is_lost(tmp_path: Path, workers: int) -> None:
    (tmp_path / "m" / "1").mkdir(parents=True)
    (tmp_path / "m" / "config.pbtxt").write_text(CONFIG)
    notes = Notes()
    with served(tmp_path, "--workers", str(workers)) as (http_port, grpc_port, server):
        threads = [
            threading.Thread(target=client, args=(name, (http_port, grpc_port), notes), daemon=True)
            for name in PROTOCOLS
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        ends = time.monotonic() + 60
        while any(notes.right[name] < 20 for name in PROTOCOLS) and time.monotonic() < ends:
            time.sleep(0.05)
        server.send_signal(signal.SIGTERM)
        ends = time.monotonic() + 30
        while status(http_port) == 200:
            assert time.monotonic() < ends, "it is still ready"
        assert server.wait(30) == 0
        for thread in threads:
            thread.join(30)
            assert not thread.is_alive()
    assert notes.wrong == []
    assert all(notes.right[name] >= 20 for name in PROTOCOLS), notes.right
    assert notes.gone == dict.fromkeys(PROTOCOLS, 4)
