# SPDX-License-Identifier: Apache-2.0
"""Send the same bad requests, disconnects and SIGTERM under load to Headrace and its peers.

    .venv/bin/python bench/scenarios/reliability.py                       # headrace, triton-python, mlserver
    .venv/bin/python bench/scenarios/reliability.py headrace triton-python

Servers are those of `bench` (the peers are installed by it), each with its model `identity`. Prints a table for
docs/reliability.md. After each bad request a good one must be answered right; a server that has died or stopped answering is
counted and started again. Counts are what it is about: times are the machine's.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import signal
import socket
import struct
import sys
import threading
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
from malformed_requests import GOOD, INFER, TENSOR, call, in_grpc, in_the_json, message, on_the_wire, post

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.running import RunningServer, running, self_description
from bench.servers import SERVERS
from bench.venvs import install, is_installed

PATIENCE_SECONDS = 15.0
POINTS, ROUNDS, BYSTANDERS, CLIENTS, BEFORE_SIGTERM = 25, 40, 4, 16, 2_000


class Target:
    """A server that is started again when it has died."""

    def __init__(self, name: str, stack: ExitStack) -> None:
        self.name = name
        self._own = ExitStack()
        stack.callback(self.close)
        self.deaths: list[str] = []
        self.server: RunningServer
        self.start()

    def start(self) -> None:
        """Begin anew."""
        self._own.close()
        self._own = ExitStack()
        self.server = self._own.enter_context(running(SERVERS[self.name]))
        self.process = psutil.Process(self.server.pid)

    def close(self) -> None:
        """End it."""
        self._own.close()

    def check(self, after: str) -> None:
        """Whether it lives and answers; started again if not."""
        for _ in range(3):
            try:
                if self.process.is_running() and ask(self.server.ports.http, 17) == 17:
                    return
            except (OSError, http.client.HTTPException, ValueError, KeyError):
                time.sleep(2)
        self.deaths.append(after)
        self.start()

    def descriptors(self) -> int:
        """Of the server and what it has started."""
        return sum(child.num_fds() for child in (self.process, *self.process.children(recursive=True)))


def body_of(value: int) -> bytes:
    """A good request with a number of its own."""
    return json.dumps({"inputs": [TENSOR | {"shape": [1, 1], "data": [value]}]}).encode()


def ask(port: int, value: int, connection: http.client.HTTPConnection | None = None) -> int:
    """The number that comes back."""
    used = connection or http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_SECONDS)
    try:
        used.request("POST", INFER, body_of(value), {"Content-Type": "application/json"})
        answer = used.getresponse()
        content = answer.read()
    finally:
        if connection is None:
            used.close()
    if answer.status != 200:
        raise ValueError(f"{answer.status} {content[:200]!r}")
    return int(json.loads(content)["outputs"][0]["data"][0])


def sent(port: int, content: bytes) -> str:
    """What a server says to these bytes, in a word."""
    received = b""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_SECONDS) as client:
            try:
                client.sendall(content)
            except OSError:
                pass  # it has answered, or hung up, before the end
            while piece := client.recv(65536):
                received += piece
                if received.startswith(b"HTTP/1.1 ") or 0 in frames(received) or len(received) > 1 << 20:
                    break
    except TimeoutError:
        return "no answer" if not received else spoken(received)
    except OSError:
        pass
    return spoken(received) if received else "hung up"


def spoken(received: bytes) -> str:
    """The same of an answer. In gRPC, only one that is good has data."""
    if received.startswith(b"HTTP/1.1 "):
        return {b"2": "accepted", b"4": "refused", b"5": "a fault (5xx)"}.get(received[9:10], "refused")
    return "accepted" if 0 in frames(received) else "refused"


def frames(received: bytes) -> list[int]:
    """The kinds of the frames of HTTP/2, so far."""
    kinds, place = [], 0
    while place + 9 <= len(received) and not received.startswith(b"HTTP"):
        kinds.append(received[place + 3])
        place += 9 + int.from_bytes(received[place : place + 3])
    return kinds


def bad_requests(target: Target) -> dict[str, Any]:
    """Each bad request, and a good one after it."""
    said: dict[str, str] = {}
    for number, group in enumerate((on_the_wire(), in_the_json(), in_grpc())):
        for name, content in group.items():
            port = target.server.ports.grpc if number == 2 else target.server.ports.http
            said[name] = sent(port, content)
            target.check(name)
    counted = Counter(said.values())
    silent = sorted(name for name, word in said.items() if word == "no answer")
    accepted = sorted(name for name, word in said.items() if word == "accepted")
    faults = sorted(name for name, word in said.items() if word.startswith("a fault"))
    return {"bad requests": len(said), **counted, "_silent": silent, "_accepted": accepted, "_faults": faults}


def storm(target: Target) -> dict[str, Any]:
    """Connections that end at every point of a request, beside clients who want their answers."""
    ports = target.server.ports
    stop, right, wrong = threading.Event(), Counter[str](), list[str]()

    def bystander(first: int) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", ports.http, timeout=PATIENCE_SECONDS)
        value = first
        while not stop.is_set():
            value += 1
            try:
                got = ask(ports.http, value, connection)
                right["answers"] += got == value
                if got != value:
                    wrong.append(f"{value} {got}")
            except (OSError, http.client.HTTPException, ValueError) as error:
                wrong.append(repr(error))
                connection.close()
        connection.close()

    threads = [threading.Thread(target=bystander, args=(number * 1_000_000,)) for number in range(BYSTANDERS)]
    before = target.descriptors()
    for thread in threads:
        thread.start()
    broken = 0
    for turn in range(ROUNDS):
        for port, content in ((ports.http, post(GOOD)), (ports.grpc, call(message()))):
            places = range(0, len(content) + 1, max(1, len(content) // POINTS))
            clients = []
            for place in places:
                try:
                    client = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_SECONDS)
                    client.sendall(content[:place])
                except OSError:
                    continue
                clients.append(client)
            for number, client in enumerate(clients):
                if (number + turn) % 2:
                    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                client.close()
                broken += 1
    stop.set()
    for thread in threads:
        thread.join()
    target.check("the storm of disconnects")
    time.sleep(2)
    return {
        "connections broken off": broken,
        "answers to others meanwhile": right["answers"],
        "others' requests that failed": len(wrong),
        "descriptors left": target.descriptors() - before,
    }


def stop_under_load(target: Target) -> dict[str, Any]:
    """SIGTERM while clients ask: what is lost."""
    port, ended = target.server.ports.http, Counter[str]()

    def client(first: int) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        value = first
        while True:
            value += 1
            try:
                connection.connect() if connection.sock is None else None
            except OSError:
                ended["refused"] += 1
                return
            try:
                got = ask(port, value, connection)
                ended["answered" if got == value else "wrong"] += 1
            except ValueError:
                ended["told"] += 1
                return
            except TimeoutError:
                ended["without an end"] += 1
                return
            except (OSError, http.client.HTTPException):
                ended["lost"] += 1
                connection.close()

    threads = [threading.Thread(target=client, args=(number * 1_000_000,)) for number in range(CLIENTS)]
    for thread in threads:
        thread.start()
    while ended["answered"] < BEFORE_SIGTERM and target.process.is_running():
        time.sleep(0.05)
    began = time.monotonic()
    os.kill(target.server.pid, signal.SIGTERM)
    try:
        code: int | None = target.process.wait(90)
    except psutil.TimeoutExpired:
        code = None
    took = time.monotonic() - began
    for thread in threads:
        thread.join(100)
    return {
        "answered before and after SIGTERM": ended["answered"],
        "sent on an open connection, never answered": ended["lost"] + ended["without an end"],
        "wrong answers": ended["wrong"],
        "exit status": "did not end" if code is None else code,
        "_seconds to end": round(took, 1),
    }


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("servers", nargs="*", default=["headrace", "triton-python", "mlserver"])
    names = parser.parse_args().servers
    columns: dict[str, dict[str, Any]] = {}
    for name in names:
        peer = name if SERVERS[name].environment is None else SERVERS[name].environment
        if peer and not is_installed(peer):
            install(peer)
        with ExitStack() as stack:
            target = Target(name, stack)
            column = {"version": " ".join(self_description(target.server).values())}
            column |= bad_requests(target)
            column |= storm(target)
            column["died, or stopped answering"] = len(target.deaths)
            column["_after"] = target.deaths
            column |= stop_under_load(target)
            columns[name] = column
        print(json.dumps({name: column}), flush=True)
    rows = list(dict.fromkeys(row for column in columns.values() for row in column if not row.startswith("_")))
    print(f"| | {' | '.join(names)} |\n| --- |{' ---: |' * len(names)}")
    for row in rows:
        print(f"| {row} | {' | '.join(str(columns[name].get(row, 0)) for name in names)} |")


if __name__ == "__main__":
    main()
