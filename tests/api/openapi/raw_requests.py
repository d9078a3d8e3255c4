# SPDX-License-Identifier: Apache-2.0
"""HTTP requests as bytes, so that nothing in between corrects what is wrong with them; and what a right refusal is."""

from __future__ import annotations

import json
import socket
from dataclasses import dataclass
from typing import Any

METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "PURGE")


@dataclass(frozen=True)
class Answer:
    status: int
    fields: dict[str, str]
    body: bytes

    @property
    def error(self) -> str:
        """The text for a person, wherever the protocol of the route puts it; "" for none."""
        if "nv-status" in self.fields:
            return self.fields["nv-status"]
        try:
            document = json.loads(self.body)
        except ValueError:
            return ""
        return str(document["error"]) if isinstance(document, dict) and "error" in document else ""


def ask(
    port: int,
    method: str,
    path: bytes | str,
    body: bytes = b"",
    fields: tuple[bytes, ...] = (),
    length: int | None = None,
) -> Answer:
    """One request on a connection of its own; `length` is another Content-Length than the body has."""
    target = path.encode() if isinstance(path, str) else path
    head = [b"%b %b HTTP/1.1" % (method.encode(), target), b"host: test", b"connection: close", *fields]
    if not any(field.lower().startswith(b"transfer-encoding") for field in fields):
        head.append(b"content-length: %d" % (len(body) if length is None else length))
    return exchange(port, b"\r\n".join([*head, b"", b""]) + body)


def exchange(port: int, sent: bytes) -> Answer:
    with socket.create_connection(("127.0.0.1", port), timeout=60) as sock:
        return send_raw(sock, sent)


def send_raw(sock: socket.socket, sent: bytes) -> Answer:
    """What is answered to these bytes, until the end of the connection."""
    try:
        sock.sendall(sent)
    except (BrokenPipeError, ConnectionResetError):
        pass  # It was refused before it was read; the answer is there all the same.
    received = b""
    try:
        while piece := sock.recv(65536):
            received += piece
    except ConnectionResetError:
        pass
    head, _, body = received.partition(b"\r\n\r\n")
    lines = head.decode("latin-1").split("\r\n")
    fields = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines[1:])}
    if not lines[0].startswith("HTTP/1.1 "):
        raise AssertionError(f"no answer to {sent[:200]!r}: {received[:200]!r}")
    return Answer(int(lines[0].split()[1]), fields, body)


def routes_of(document: dict[str, Any], *, models: bool = False) -> list[tuple[str, str]]:
    """Every method and path of a document; those of single models only if asked for."""
    return [
        (method.upper(), path)
        for path, item in document["paths"].items()
        for method, operation in item.items()
        if models or "x-headrace-model" not in operation
    ]


def filled(path: str, **values: str) -> str:
    """A path with its placeholders filled in: as given, or with something that is right."""
    right = {
        "model": "echo",
        "version": "1",
        "name": "region",
        "key": "key",
        "offset": "0",
        "size": "64",
        "device": "0",
    }
    for name, value in {**right, **values}.items():
        path = path.replace(f"{{{name}}}", value)
    return path
