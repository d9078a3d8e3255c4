# SPDX-License-Identifier: Apache-2.0
"""Publish what the prefix cache of an instance holds (`core.kv_events`), for routers that choose by it.

The scheduler and the page pool report to a `KVEventPublisher`. The engine core calls `flush` after each step; a thread sends
the batches, keeps the last ones, and sends them again to who has missed some.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence as Sequences
from typing import TYPE_CHECKING, Any

from headrace.core.errors import FailedPrecondition
from headrace.core.extras import MissingExtra
from headrace.core.kv_events import CPU, END, GPU, AllBlocksCleared, BlockRemoved, BlockStored, KVEvent, encode_events

if TYPE_CHECKING:
    from headrace.backends.llm.scheduler import Sequence

log = logging.getLogger("headrace.backends.llm")

_KEPT_BATCHES = 10_000
_UNSENT_BATCHES = 100_000
"""Batches that wait for a slow subscriber; it asks for those that were dropped."""
_STOP_SECONDS = 5.0


class KVEventPublisher:
    """The KV events of one instance. Created, flushed and closed in the engine's thread."""

    def __init__(self, endpoint: str, replay_endpoint: str = "", topic: str = "") -> None:
        """Bind the sockets. Raises MissingExtra without pyzmq, FailedPrecondition if an address cannot be bound."""
        try:
            import zmq
        except ImportError:
            raise MissingExtra("parameter kv_events", "kv-events") from None
        self._events: list[KVEvent] = []
        self._last: tuple[Sequence, int] | None = None
        """The sequence and the index behind the last stored page, if that is the last event."""
        self._topic = topic.encode()
        self._context: Any = zmq.Context()
        self._publisher = self._bind(zmq.PUB, endpoint, "kv_events")
        self._replay = self._bind(zmq.ROUTER, replay_endpoint, "kv_events_replay") if replay_endpoint else None
        self.endpoint, self.replay_endpoint = _address_of(self._publisher), _address_of(self._replay)
        """The addresses, with real ports."""
        self._inbox = self._context.socket(zmq.PULL)
        self._inbox.bind("inproc://batches")
        self._outbox = self._context.socket(zmq.PUSH)
        self._outbox.set_hwm(0)
        self._outbox.connect("inproc://batches")
        self._thread = threading.Thread(target=self._run, name="kv events", daemon=True)
        self._thread.start()
        log.info("Publishing KV events at %s.", self.endpoint)

    def _bind(self, kind: int, endpoint: str, parameter: str) -> Any:
        import zmq

        socket = self._context.socket(kind)
        socket.set(zmq.LINGER, 0)
        if kind == zmq.PUB:
            socket.set_hwm(_UNSENT_BATCHES)
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise FailedPrecondition(
                f"parameter {parameter}: {endpoint[:200]!r} cannot be bound ({error.strerror}): write tcp://*:PORT with a "
                "free port; each instance of a model needs its own"
            ) from None
        return socket

    # Called by the scheduler and the page pool.

    def stored(self, sequence: Sequence, index: int, page_size: int) -> None:
        """Report that a page of a sequence is in the prefix cache. Not with images: tokens do not tell them apart."""
        if sequence.prompt_inputs is not None:
            return
        hashes = sequence.page_hashes
        tokens = sequence.tokens[index * page_size : (index + 1) * page_size]
        if self._last == (sequence, index) and isinstance(last := self._events[-1], BlockStored):
            last = BlockStored(
                [*last.hashes, _number(hashes[index])], last.parent, [*last.tokens, *tokens], page_size, last.adapter
            )
            self._events[-1] = last
        else:
            parent = _number(hashes[index - 1]) if index else None
            self._events.append(BlockStored([_number(hashes[index])], parent, tokens, page_size, sequence.adapter))
        self._last = sequence, index + 1

    def removed(self, page_hash: bytes) -> None:
        """Report that a page was evicted."""
        self._removed(page_hash, GPU)

    def host_stored(self, page_hashes: Sequences[bytes], page_size: int) -> None:
        """Report that pages are in host memory: by their hashes, which were reported with their tokens before."""
        self._events.append(BlockStored([_number(each) for each in page_hashes], None, [], page_size, medium=CPU))
        self._last = None

    def host_removed(self, page_hash: bytes) -> None:
        """Report that a page is no longer in host memory."""
        self._removed(page_hash, CPU)

    def _removed(self, page_hash: bytes, medium: str) -> None:
        last = self._events[-1] if self._events else None
        if isinstance(last, BlockRemoved) and last.medium == medium:
            self._events[-1] = BlockRemoved([*last.hashes, _number(page_hash)], medium)
        else:
            self._events.append(BlockRemoved([_number(page_hash)], medium))
        self._last = None

    def cleared(self) -> None:
        """Report that the prefix cache is empty."""
        self._events.append(AllBlocksCleared())
        self._last = None

    # Called by the engine core.

    def flush(self) -> None:
        """Publish what was reported since the last time."""
        if self._events:
            events, self._events, self._last = self._events, [], None
            self._outbox.send(encode_events(events, time.time()))

    def close(self) -> None:
        """Stop the thread and close the sockets."""
        self._outbox.send(b"")
        self._thread.join(_STOP_SECONDS)
        self._context.destroy(linger=0)

    # In the thread.

    def _run(self) -> None:
        import zmq

        kept: deque[tuple[bytes, bytes]] = deque(maxlen=_KEPT_BATCHES)
        poller = zmq.Poller()
        sockets = [socket for socket in (self._inbox, self._replay) if socket is not None]
        for socket in sockets:
            poller.register(socket, zmq.POLLIN)
        number = 0
        while True:
            ready = dict(poller.poll())
            if self._replay is not None and self._replay in ready:
                self._send_again(self._replay, kept)
            if self._inbox in ready:
                batch = self._inbox.recv()
                if not batch:
                    return
                numbered = number.to_bytes(8, "big"), batch
                kept.append(numbered)
                self._publisher.send_multipart((self._topic, *numbered))
                number += 1

    def _send_again(self, replay: Any, kept: deque[tuple[bytes, bytes]]) -> None:
        frames = replay.recv_multipart()
        if len(frames) != 3 or len(frames[2]) != 8:
            return
        client, _, first = frames
        for number, batch in kept:
            if number >= first:
                replay.send_multipart((client, b"", number, batch))
        replay.send_multipart((client, b"", END, b""))


def _number(page_hash: bytes) -> int:
    """Return a hash as other engines send them: a number of 64 bits."""
    return int.from_bytes(page_hash[:8], "big")


def _address_of(socket: Any) -> str:
    if socket is None:
        return ""
    import zmq

    address: bytes = socket.get(zmq.LAST_ENDPOINT)
    return address.rstrip(b"\0").decode()
