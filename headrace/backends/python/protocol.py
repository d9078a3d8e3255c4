# SPDX-License-Identifier: Apache-2.0
"""The protocol between the server and a model's process: a fixed header, a JSON part, and tensors.

Small tensors are inside the frame, large ones in shared memory: one region per direction, written by one side and
viewed by the other.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import socket
import struct
import threading
import weakref
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np

from headrace.core.dtypes import BYTES, DTYPES, decode_bytes_elements
from headrace.core.tensors import Tensor

try:
    from orjson import dumps as _orjson_dumps
    from orjson import loads as _orjson_loads
except ImportError:  # the model's own interpreter may lack it
    _orjson_dumps = _orjson_loads = None  # type: ignore[assignment]

Buffer = bytes | bytearray | memoryview
Meta = dict[str, Any]

_HEADER = struct.Struct("<BxxxIQ")
_READ_BYTES = 262_144


class Kind(IntEnum):
    """The kind of a frame; the comment says which side sends it."""

    INIT = 1  # server: load the model and initialise it, or complete its configuration
    READY = 2  # child: initialised; with the completed configuration if the server asked for it
    FAILED = 3  # child: initialisation failed, with the reason
    EXECUTE = 4  # server: a batch of requests
    ANSWER = 5  # child: responses, and whether `execute` returned
    CANCEL = 6  # server: the clients of these requests have cancelled
    CALL = 7  # child: a call to the server
    REPLY = 8  # server: the result of a call
    LOG = 9  # child: a log line
    NOTE = 10  # both: only what every frame may carry (freed memory, metrics)
    TRIM = 11  # server: give unused memory back to the system
    CLOSE = 12  # server: finalise and exit
    BYE = 13  # child: finalised


class Frame(NamedTuple):
    """One message."""

    kind: int
    meta: Meta
    payload: Buffer


def encode_frame(kind: int, meta: Meta, pieces: Sequence[Buffer] = ()) -> list[Buffer]:
    """Return the buffers to write for a message, in order; the pieces follow the JSON without a copy."""
    text = encode_json(meta)
    return [_HEADER.pack(kind, len(text), sum(map(len, pieces))) + text, *pieces]


def encode_json(value: Any) -> bytes:
    """Encode JSON with the fastest encoder of this interpreter."""
    if _orjson_dumps is not None:
        try:
            return _orjson_dumps(value)
        except TypeError:
            # Integers over 64 bits and lone surrogates need the slower encoder.
            pass
    return json.dumps(value).encode()


def decode_json(text: Buffer) -> Any:
    """Decode JSON with the fastest decoder of this interpreter."""
    if _orjson_loads is not None:
        try:
            return _orjson_loads(text)
        except ValueError:
            pass
    return json.loads(bytes(text))


class FrameReader:
    """Splits received bytes into frames."""

    def __init__(self) -> None:
        self._rest = bytearray()
        # Reused: allocating this buffer for every read would cost more than the read.
        self._buffer = memoryview(bytearray(_READ_BYTES))

    def read(self, sock: socket.socket, flags: int = 0) -> bytes:
        """Read from the socket; empty at its end."""
        size = sock.recv_into(self._buffer, 0, flags)
        return bytes(self._buffer[:size])

    def feed(self, data: bytes) -> list[Frame]:
        """Return the frames that are complete. Their payloads are copies."""
        buffer: bytes | bytearray = data
        if self._rest:
            self._rest += data
            buffer = self._rest
        frames: list[Frame] = []
        position, end = 0, len(buffer)
        while end - position >= _HEADER.size:
            kind, text_bytes, payload_bytes = _HEADER.unpack_from(buffer, position)
            text_at = position + _HEADER.size
            payload_at = text_at + text_bytes
            after = payload_at + payload_bytes
            if after > end:
                break
            meta = decode_json(buffer[text_at:payload_at])
            frames.append(Frame(kind, meta, buffer[payload_at:after]))
            position = after
        if buffer is self._rest:
            del self._rest[:position]
        elif position < end:
            self._rest += memoryview(buffer)[position:]
        return frames


INLINE_BYTES = 8192
"""Smaller tensors are copied through the socket: that costs less than managing a block."""

Packed = list[Any]


def pack(tensors: Iterable[Tensor], arena: Arena | None, pieces: list[Buffer]) -> list[Packed]:
    """Place tensors in shared memory or in the frame; those in the frame are appended to `pieces`."""
    packed: list[Packed] = []
    for tensor in tensors:
        buffer = tensor.to_buffer()
        size = len(buffer)
        offset = -1
        if size >= INLINE_BYTES and arena is not None:
            try:
                offset = arena.put(buffer)
            except OSError:
                pass  # Shared memory is exhausted: use the socket, which is slower.
        if offset < 0:
            pieces.append(buffer)
        packed.append([tensor.name, tensor.dtype.name, tensor.shape, size, offset])
    return packed


class Unpacker:
    """Reads the tensors of one frame, in order."""

    def __init__(self, payload: Buffer, view: ArenaView | None) -> None:
        self._payload = memoryview(payload)
        self._position = 0
        self._view = view

    def take(self, size: int) -> memoryview:
        """Return the next bytes of the frame."""
        start = self._position
        self._position = start + size
        return self._payload[start : self._position]

    def tensors(self, packed: Sequence[Packed]) -> list[Tensor]:
        """Return the next tensors: as writable as the payload, or views of shared memory."""
        tensors: list[Tensor] = []
        for name, dtype_name, shape, size, offset in packed:
            dtype = DTYPES[dtype_name]
            if offset < 0 or self._view is None:
                source: Any = self.take(size)
            else:
                source = self._view.block(offset, size)
            if dtype is BYTES:
                count = 1
                for length in shape:
                    count *= length
                array = decode_bytes_elements(source if offset < 0 else memoryview(bytes(source)), count)
            elif size:
                array = np.frombuffer(source, dtype.numpy)
            else:
                array = np.empty(0, dtype.numpy)
            tensors.append(Tensor(name, dtype, array.reshape(shape)))
        return tensors


KEPT_BYTES = 32 << 20
"""Bytes that a region keeps when it is trimmed."""

_ALIGNMENT = 64
_FIRST_BYTES = 1 << 20


def make_region(name: str) -> int:
    """Return the descriptor of an empty region, or -1 if the system has none."""
    try:
        return os.memfd_create(name)
    except OSError:
        return -1


class Arena:
    """The writer of a shared-memory region; thread-safe."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._lock = threading.Lock()
        self._map: mmap.mmap | None = None
        self._view = memoryview(b"")
        self._sizes: dict[int, int] = {}
        # Free blocks by offset; adjacent blocks are always merged.
        self._free: list[tuple[int, int]] = []
        self.size = 0
        self.put_bytes = 0
        """Total bytes ever placed: if it has not changed, the region was not used."""

    @property
    def empty(self) -> bool:
        """Whether no block is in use."""
        return not self._sizes

    def put(self, buffer: Buffer) -> int:
        """Copy a buffer into a new block and return its offset."""
        need = max(1, (len(buffer) + _ALIGNMENT - 1) // _ALIGNMENT) * _ALIGNMENT
        with self._lock:
            offset = self._take(need)
            view = self._view
            self.put_bytes += need
        view[offset : offset + len(buffer)] = buffer
        return offset

    def release(self, offset: int) -> None:
        """Free a block that the reader no longer uses."""
        with self._lock:
            size = self._sizes.pop(offset, 0)
            if size:
                self._give(offset, size)

    def trim(self) -> None:
        """Give memory back to the system, if no block is in use."""
        with self._lock:
            if self._map is not None and not self._sizes and self.size > KEPT_BYTES:
                # A hole, not a shorter file: the other side still maps the whole region.
                self._map.madvise(mmap.MADV_REMOVE, KEPT_BYTES, self.size - KEPT_BYTES)

    def close(self) -> None:
        """Unmap the region; the caller owns the descriptor."""
        with self._lock:
            self._view = memoryview(b"")
            self._map = None
            self._sizes.clear()
            self._free.clear()

    def _take(self, need: int) -> int:
        for index, (offset, size) in enumerate(self._free):
            if size >= need:
                if size == need:
                    del self._free[index]
                else:
                    self._free[index] = (offset + need, size - need)
                self._sizes[offset] = need
                return offset
        self._grow(need)
        return self._take(need)

    def _grow(self, need: int) -> None:
        old = self.size
        size = max(_FIRST_BYTES, old * 2)
        while size - old < need:
            size *= 2
        os.ftruncate(self._fd, size)
        self._map = mmap.mmap(self._fd, size)
        self._view = memoryview(self._map)
        self.size = size
        self._give(old, size - old)

    def _give(self, offset: int, size: int) -> None:
        index = bisect_left(self._free, (offset, 0))
        if index < len(self._free) and self._free[index][0] == offset + size:
            size += self._free.pop(index)[1]
        if index and sum(self._free[index - 1]) == offset:
            index -= 1
            start, before = self._free.pop(index)
            offset, size = start, before + size
        self._free.insert(index, (offset, size))


class ArenaView:
    """The reader of a shared-memory region."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._map: mmap.mmap | None = None
        self.mapped = 0
        self._blocks: dict[int, weakref.ref[Any]] = {}
        self._freed: deque[tuple[int, int]] = deque()

    def block(self, offset: int, size: int) -> Any:
        """Return writable memory that numpy can view; it is freed when its last view is gone."""
        if offset + size > self.mapped or self._map is None:
            self.mapped = os.fstat(self._fd).st_size
            self._map = mmap.mmap(self._fd, self.mapped)
        block = (ctypes.c_ubyte * size).from_buffer(self._map, offset)
        freed, blocks = self._freed, self._blocks

        def gone(_: object) -> None:
            # Runs during garbage collection, in any thread: it must not block or send.
            blocks.pop(offset, None)
            freed.append((offset, size))

        # Later views of the same block are created only after this one was freed.
        blocks[offset] = weakref.ref(block, gone)
        return block

    def take_freed(self) -> list[int]:
        """Return the blocks freed since the last call."""
        freed = self._freed
        offsets: list[int] = []
        while freed:
            offsets.append(freed.popleft()[0])
        return offsets

    def freed_bytes(self) -> int:
        """Return how many bytes wait to be freed."""
        return sum(size for _, size in list(self._freed))

    def close(self) -> None:
        """Unmap the region; existing views keep it mapped."""
        self._map = None
        self.mapped = 0
