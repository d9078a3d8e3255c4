# SPDX-License-Identifier: Apache-2.0
"""Gives kept pages to decoders of other machines, over TCP. Made by `hands` for a server with the role prefill.

One question for each connection, one answer, and the end:

    decoder   "HRKV" 1   id of 16 bytes   first page, count: 4 bytes each   nonce of 16 bytes   proof of 32 bytes
    prefill   status: 1 byte   length: 8 bytes   proof of 32 bytes, which the nonce is part of   the bytes

All numbers are big-endian. The proofs are HMACs with the key that all servers of a fleet have: the decoder's shows that it
may have the pages, the prefill's that the bytes come from one of the fleet. They are not encrypted: see the guide.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import ipaddress
import logging
import socket
import struct
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from io import FileIO

from headrace.backends.llm.handing.keeping import Keeper, Kept
from headrace.core.errors import FailedPrecondition
from headrace.core.handing import signature

log = logging.getLogger("headrace.backends.llm")

QUESTION = struct.Struct(">4sB16sII16s32s")
ANSWER = struct.Struct(">BQ32s")
MAGIC, VERSION = b"HRKV", 1
OK, GONE, REFUSED = 0, 1, 2
_GIVERS = 8
"""Decoders that are served at once; the others wait in the line of the socket."""
_WAITING = 128
_ASK_SECONDS = 5.0
"""For the whole question, so that strangers who say it a byte at a time keep nobody out for long."""
_GIVE_SECONDS = 30.0
"""The longest silence of a decoder while it reads."""
_SWEEP_SECONDS = 1.0


def proof_of_question(key: bytes, id: bytes, first: int, count: int, nonce: bytes) -> bytes:
    """That the asker may have these pages."""
    return bytes.fromhex(signature(key, b"take", id, b"%d" % first, b"%d" % count, nonce))


def proof_of_answer(key: bytes, status: int, length: int, nonce: bytes) -> bytes:
    """That the answer is of one who knows the key, and to this question."""
    return bytes.fromhex(signature(key, b"give", b"%d" % status, b"%d" % length, nonce))


class Giver:
    """Listens, and sweeps what is kept now and then."""

    def __init__(
        self, keeper: Keeper, key: bytes, host: str, port: int, *, clock: Callable[[], float] = time.time
    ) -> None:
        self._keeper = keeper
        self._key = key
        self._clock = clock
        self._socket = _listening(host, port)
        self._socket.settimeout(_SWEEP_SECONDS)
        self.port: int = self._socket.getsockname()[1]
        self._closed = False
        self._open: set[socket.socket] = set()
        """Connections that are served, or wait to be."""
        self._threads = ThreadPoolExecutor(_GIVERS, thread_name_prefix="llm handing")
        self._free = threading.Semaphore(_GIVERS)
        self._thread = threading.Thread(target=self._accept, name="llm handing", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Listen and give no more: a decoder that does not read must not keep this server from ending."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread; it must not wait for a number that is reused
        self._thread.join()
        self._socket.close()
        for each in tuple(self._open):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        self._threads.shutdown(cancel_futures=True)
        for each in self._open:
            each.close()

    def _accept(self) -> None:
        while not self._closed:
            self._keeper.sweep(self._clock())
            # Nobody is let in who could not be served: each is a descriptor, and the server has need of its own.
            if self._free.acquire(timeout=_SWEEP_SECONDS) and not self._let_in():
                self._free.release()

    def _let_in(self) -> bool:
        """Give the next decoder to a thread, if there is one; whether it was."""
        try:
            connection, _ = self._socket.accept()
        except TimeoutError:
            return False
        except OSError:
            if not self._closed:
                log.warning("a decoder could not be let in")
                time.sleep(_SWEEP_SECONDS)  # too many open files, most likely
            return False
        self._open.add(connection)
        self._threads.submit(self._serve, connection)
        return True

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            try:
                self._answer(connection)
            except OSError as error:
                log.debug("a decoder went away: %s", error)
            except Exception:
                log.exception("pages could not be given to a decoder")
        self._open.discard(connection)
        self._free.release()

    def _answer(self, connection: socket.socket) -> None:
        asked = received(connection, QUESTION.size, time.monotonic() + _ASK_SECONDS)
        magic, version, named, first, count, nonce, proof = QUESTION.unpack(asked)
        wanted = proof_of_question(self._key, named, first, count, nonce)
        if magic != MAGIC or version != VERSION or not hmac.compare_digest(proof, wanted):
            self._say(connection, REFUSED, 0, nonce)
            return
        connection.settimeout(_GIVE_SECONDS)
        found = self._keeper.open(named.hex(), self._clock())
        if found is None:
            self._say(connection, GONE, 0, nonce)
            return
        descriptor, kept = found
        with FileIO(descriptor) as stream:
            if count:
                self._give(connection, stream, kept, first, count, nonce)
            else:  # nothing of it is needed
                self._say(connection, OK, 0, nonce)
        self._keeper.remove(kept.id)

    def _give(
        self, connection: socket.socket, stream: FileIO, kept: Kept, first: int, count: int, nonce: bytes
    ) -> None:
        size = kept.bytes // kept.pages
        begin, end = first * size, (first + count) * size
        if end > kept.bytes:
            self._say(connection, GONE, 0, nonce)
            return
        self._say(connection, OK, end - begin, nonce)
        connection.sendfile(stream, begin, end - begin)

    def _say(self, connection: socket.socket, status: int, length: int, nonce: bytes) -> None:
        connection.sendall(ANSWER.pack(status, length, proof_of_answer(self._key, status, length, nonce)))


def _listening(host: str, port: int) -> socket.socket:
    """Raises FailedPrecondition."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        try:
            return socket.create_server(address[:2], family=family, backlog=_WAITING)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or not ipaddress.ip_address(address[0]).is_loopback:
                raise
            # No firewall lets through this port and no other, and tickets tell the decoders which it is.
            log.warning("port %d of %s is taken: another is used", port, host)
            return socket.create_server((address[0], 0), family=family, backlog=_WAITING)
    except OSError:
        raise FailedPrecondition(
            f"--handing-address {host}:{port} cannot be listened on: name a free port of this machine"
        ) from None


def received(connection: socket.socket, count: int, ends: float) -> bytes:
    """So many bytes. Raises as `receive_into`."""
    data = bytearray(count)
    receive_into(connection, memoryview(data), ends)
    return bytes(data)


def receive_into(connection: socket.socket, view: memoryview, ends: float) -> None:
    """Fill this. Raises ConnectionError if there are fewer bytes, TimeoutError if not all are there when `ends` has come.

    ends: of `time.monotonic`. All of it has this one limit: with one for each piece, drops would come for ever.
    """
    while view:
        left = ends - time.monotonic()
        if left <= 0:
            raise TimeoutError
        connection.settimeout(left)
        got = connection.recv_into(view)
        if not got:
            raise ConnectionError("the other side closed the connection")
        view = view[got:]
