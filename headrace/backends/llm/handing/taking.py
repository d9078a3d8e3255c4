# SPDX-License-Identifier: Apache-2.0
"""From an offer to its bytes: out of the shared memory of this machine where they lie there, else over TCP.

Called by `hands`, in a thread. Whatever goes wrong is `NotTaken` with one word for the metrics: the prompt is computed then.
"""

from __future__ import annotations

import hmac
import os
import secrets
import socket
import time
from io import FileIO
from pathlib import Path

from headrace.backends.llm.handing.giving import (
    ANSWER,
    GONE,
    MAGIC,
    OK,
    QUESTION,
    VERSION,
    proof_of_answer,
    proof_of_question,
    receive_into,
    received,
)
from headrace.core.handing import Offer


class NotTaken(Exception):
    """The pages were not to be had. `reason` is one word."""

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason


def take(offer: Offer, first: int, into: memoryview, folder: Path, key: bytes, seconds: float) -> str:
    """Fill `into` with the pages from `first` on; the way it took, `shared_memory` or `tcp`. Raises NotTaken."""
    if offer.file and _from_file(folder / offer.file, offer, first, into):
        return "shared_memory"
    if not offer.port:
        raise NotTaken("gone", "they do not lie on this machine any more, and there is no other way")
    try:
        _from_server(offer, first, into, key, seconds)
    except TimeoutError:
        raise NotTaken("timeout", f"they did not come within {seconds:g} seconds") from None
    except OSError:
        raise NotTaken("unreachable", f"{offer.host}:{offer.port} could not be reached, or went away") from None
    return "tcp"


def leave(offer: Offer, folder: Path) -> None:
    """The pages are not needed: let go of them where that costs nothing. Elsewhere they go by themselves."""
    if offer.file:
        (folder / offer.file).unlink(missing_ok=True)


def _from_file(path: Path, offer: Offer, first: int, into: memoryview) -> bool:
    try:
        stream = FileIO(os.open(path, os.O_RDONLY | os.O_NOFOLLOW))
    except OSError:
        return False  # of another machine, or of another container
    with stream:
        if os.fstat(stream.fileno()).st_size != offer.size:
            return False
        # Nobody else is to take it, and nobody need remove it if this process is killed now.
        path.unlink(missing_ok=True)
        stream.seek(first * offer.page_bytes)
        while into:
            got = stream.readinto(into)
            if not got:
                raise NotTaken("broken", "the file is shorter than it was")
            into = into[got:]
    return True


def _from_server(offer: Offer, first: int, into: memoryview, key: bytes, seconds: float) -> None:
    ends = time.monotonic() + seconds
    with socket.create_connection((offer.host, offer.port), seconds) as connection:
        nonce, named = secrets.token_bytes(16), bytes.fromhex(offer.id)
        count = offer.pages - first
        proof = proof_of_question(key, named, first, count, nonce)
        connection.sendall(QUESTION.pack(MAGIC, VERSION, named, first, count, nonce, proof))
        status, length, proof = ANSWER.unpack(received(connection, ANSWER.size, ends))
        if not hmac.compare_digest(proof, proof_of_answer(key, status, length, nonce)):
            raise NotTaken("refused", "who answered does not know our key")
        if status == GONE:
            raise NotTaken("gone", "they are not kept any more")
        if status != OK or length != into.nbytes:
            raise NotTaken("refused", "the prefill does not give them")
        receive_into(connection, into, ends)
