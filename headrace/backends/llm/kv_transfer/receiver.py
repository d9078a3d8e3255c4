# SPDX-License-Identifier: Apache-2.0
"""Fetches the KV pages of a transfer token: from shared memory if they are on this machine, else over TCP.

Called by `connector`, in a thread. Every failure is a `TransferError` with a reason for the metrics; the prompt is computed
locally then.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import socket
import time
from io import FileIO
from pathlib import Path

from headrace.backends.llm.kv_transfer.sender import (
    EXPIRED,
    MAGIC,
    OK,
    REQUEST,
    RESPONSE,
    VERSION,
    read_exactly,
    read_into,
    request_proof,
    response_proof,
)
from headrace.core.kv_transfer import TransferToken


class TransferError(Exception):
    """The pages could not be fetched. `reason` is a metric label."""

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason


def fetch_pages(token: TransferToken, first: int, into: memoryview, folder: Path, key: bytes, seconds: float) -> str:
    """Fill `into` with the pages from `first` on; return the transport, `shared_memory` or `tcp`. Raises TransferError."""
    if token.file and _read_file(folder / token.file, token, first, into):
        return "shared_memory"
    if not token.port:
        raise TransferError("gone", "they are no longer in shared memory, and the token has no address")
    try:
        _read_socket(token, first, into, key, seconds)
    except TimeoutError:
        raise TransferError("timeout", f"they did not arrive within {seconds:g} seconds") from None
    except OSError:
        raise TransferError(
            "unreachable", f"{token.host}:{token.port} is unreachable or closed the connection"
        ) from None
    return "tcp"


def discard_pages(token: TransferToken, folder: Path) -> None:
    """Remove pages that are not needed, if they are in shared memory. Elsewhere they expire."""
    if token.file:
        with contextlib.suppress(OSError):
            (folder / token.file).unlink(missing_ok=True)


def _read_file(path: Path, token: TransferToken, first: int, into: memoryview) -> bool:
    try:
        stream = FileIO(os.open(path, os.O_RDONLY | os.O_NOFOLLOW))
    except OSError:
        return False  # on another machine, or in another container
    with stream:
        try:
            if os.fstat(stream.fileno()).st_size != token.size:
                return False
            # Removed first: no other process reads it, and nothing is left behind if this process is killed now.
            path.unlink(missing_ok=True)
            stream.seek(first * token.page_bytes)
            while into:
                count = stream.readinto(into)
                if not count:
                    raise TransferError("broken", "the file was truncated")
                into = into[count:]
        except OSError:
            raise TransferError("broken", "the file cannot be read") from None
    return True


def _read_socket(token: TransferToken, first: int, into: memoryview, key: bytes, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    with socket.create_connection((token.host, token.port), seconds) as connection:
        nonce, pages_id = secrets.token_bytes(16), bytes.fromhex(token.id)
        count = token.pages - first
        proof = request_proof(key, pages_id, first, count, nonce)
        connection.sendall(REQUEST.pack(MAGIC, VERSION, pages_id, first, count, nonce, proof))
        status, length, proof = RESPONSE.unpack(read_exactly(connection, RESPONSE.size, deadline))
        if not hmac.compare_digest(proof, response_proof(key, status, length, nonce)):
            raise TransferError("refused", "the server does not have our key")
        if status == EXPIRED:
            raise TransferError("gone", "the prefill server no longer keeps them")
        if status != OK or length != into.nbytes:
            raise TransferError("refused", "the prefill server refused the request")
        read_into(connection, into, deadline)
