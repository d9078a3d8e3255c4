# SPDX-License-Identifier: Apache-2.0
"""Fake ranks: threads of this process in place of processes, with a fake communicator. Links, loading and steps are real.

async with served_by_threads(folder, tensor_parallel="2") as tiny:     # as `llm_instances.served`
    tiny.ranks.taken[0].kill()                                         # its connection breaks, as when a process ends
"""

from __future__ import annotations

import socket
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from llm_instances import Served, served

from headrace.backends.llm.tensor_parallel import group, rank
from headrace.backends.llm.tensor_parallel.link import Kind, Link, LinkClosed, LinkTimeout, read_json


class FakeGroup:
    """What threads use in place of a process group: each leaves its tensor, and all take the result."""

    def __init__(self, degree: int) -> None:
        self.barrier = threading.Barrier(degree, timeout=60)
        self.left: list[torch.Tensor] = [torch.empty(0)] * degree


class FakeCommunicator:
    """Implements `Communicator` for a thread."""

    def __init__(self, joined: FakeGroup, number: int) -> None:
        self._group = joined
        self._rank = number

    def _exchanged(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        self._group.left[self._rank] = tensor.clone()
        self._group.barrier.wait()
        left = list(self._group.left)
        self._group.barrier.wait()
        return left

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.stack(self._exchanged(tensor)).sum(0)

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat(self._exchanged(tensor), -1)

    def broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._exchanged(tensor)[0]

    def close(self) -> None:
        self._group.barrier.abort()


class FakeProcess:
    """A rank in a thread. Implements `RankProcess`."""

    def __init__(self, hello: dict[str, Any]) -> None:
        ours, self._theirs = socket.socketpair()
        self.link = Link(ours)
        self._hello = hello
        self.signal = ""
        self._rank: rank.Rank | None = None
        self._thread = threading.Thread(target=self._main, daemon=True)
        self._thread.start()

    place, node = "fake process", ""

    def path_of(self, model_folder: Path, path: Path) -> str:
        return str(path)

    def _main(self) -> None:
        link = Link(self._theirs)
        try:
            link.send_json(Kind.HELLO, self._hello)
            kind, payload = link.receive()
            assert kind is Kind.SETUP
            self._rank = rank.Rank(link, read_json(payload))
            self._rank.serve()
        except (LinkClosed, LinkTimeout):
            pass
        link.close()

    def ending(self, wait_seconds: float = 0.0) -> str | None:
        return self.signal or None

    def kill(self) -> None:
        self.signal = self.signal or "signal 9: killed"
        if self._rank is not None:
            self._rank._peers.disconnect()  # the kernel closes a process's connections
        for sock in (self._theirs, self.link._sock):
            with suppress(OSError):  # the thread may close it meanwhile; killing a process that has ended is no error
                sock.shutdown(socket.SHUT_RDWR)

    def end(self) -> None:
        self.kill()
        self._thread.join(30)
        assert not self._thread.is_alive()
        self._theirs.close()
        self.link.close()


class ThreadRanks:
    """Implements `RankSource`."""

    host = ""

    def __init__(self, *_arguments: Any, process: Callable[[], Any] | None = None) -> None:
        self._process = process or (lambda: FakeProcess({"versions": rank.versions()}))
        self.taken: list[Any] = []
        self.starts = 0

    def take(self, count: int) -> list[Any]:
        self.starts += 1
        self.taken = [self._process() for _ in range(count)]
        return self.taken

    def prepare(self, count: int) -> None:
        """Threads need no spares."""

    def close(self) -> None:
        """There are no spares."""


class ServedByThreads(Served):
    """An instance whose other ranks are threads."""

    ranks: ThreadRanks


@asynccontextmanager
async def served_by_threads(
    folder: Path, process: Callable[[], Any] | None = None, **parameters: str
) -> AsyncIterator[ServedByThreads]:
    ranks = ThreadRanks(process=process)
    groups: dict[Path, FakeGroup] = {}

    def connect(store: Path, number: int, degree: int, *_more: Any, **_named: Any) -> FakeCommunicator:
        return FakeCommunicator(groups.setdefault(store, FakeGroup(degree)), number)

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(group, "LocalRanks", return_value=ranks))
        for module in (group, rank):
            stack.enter_context(mock.patch.object(module, "communicator_of", connect))
            stack.enter_context(mock.patch.object(module, "file_store", lambda path, _degree: path))
        async with served(folder, **{"tensor_parallel": "2", **parameters}) as tiny:
            tiny.__class__ = ServedByThreads
            assert isinstance(tiny, ServedByThreads)
            tiny.ranks = ranks
            yield tiny
