# SPDX-License-Identifier: Apache-2.0
"""The group of one model instance, as its first rank sees it: start the ranks, supervise them, start them again.

    group = RankGroup(...)              # starts the ranks, which load their shards
    ... the first rank loads its own, with `group.peers` ...
    sizes = group.agree(sizes)          # waits for them and connects all; `open_runner` calls it
    group.await_ready(runner)           # when the first rank's runner is ready: waits for theirs
    group.watch(on_lost)                # from then on, `on_lost` is called when a rank ends
    group.send_step(message)            # before the first rank computes the same step
    group.restore(sizes, make_runner)   # after `RankLost`

If a rank ends, reports an error or does not finish a step in time, all other ranks are killed and the collective operations
of the first end with an error: nothing waits for a rank that does not answer.
"""

from __future__ import annotations

import logging
import select
import shutil
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

import torch

from headrace.backends.contract import Placement
from headrace.backends.llm.model_runner.model_loader import ModelFolder
from headrace.backends.llm.model_runner.runner import ModelRunner, RunnerLost
from headrace.backends.llm.settings import EngineSizes, LlmSettings
from headrace.backends.llm.tensor_parallel.communicator import (
    Peers,
    communicator_of,
    file_store,
    serve_tcp_store,
)
from headrace.backends.llm.tensor_parallel.link import Kind, LinkClosed, LinkTimeout, keep_alive_to, read_json
from headrace.backends.llm.tensor_parallel.loading import load_shard
from headrace.backends.llm.tensor_parallel.rank import (
    rank_threads,
    settings_as_json,
    sizes_as_json,
    sizes_from_json,
    versions,
)
from headrace.backends.llm.tensor_parallel.rank_processes import LocalRanks, RankProcess, RankSource
from headrace.backends.llm.tensor_parallel.shard_reader import folder_fingerprint
from headrace.backends.torch_import import gpu_count
from headrace.core.errors import FailedPrecondition, HeadraceError, Unavailable, error_of

log = logging.getLogger("headrace.backends.llm")

STEP_SECONDS = 120.0
"""A step that takes longer does not end any more: a rank hangs."""
_POLL_SECONDS = 0.5
_GUARD_POLL_SECONDS = 0.05
_ENDING_SECONDS, _ENDING_POLL_SECONDS = 0.5, 0.01
"""How long to wait for a rank to end after a step has failed."""
_EXIT_SECONDS = 5.0


class _StartGuard:
    """Watches the ranks while the first rank prepares its runner, which may wait for them while it captures graphs."""

    def __init__(self, ranks: Sequence[RankProcess], timeout_seconds: float, abandon: Callable[[], None]) -> None:
        self._descriptors = [rank.link.fileno() for rank in ranks]
        self._deadline = monotonic() + timeout_seconds
        self._abandon = abandon
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="llm ranks that start", daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        poll = select.poll()
        for descriptor in self._descriptors:
            poll.register(descriptor, select.POLLRDHUP)
        while not self._ended.is_set():
            if poll.poll(_GUARD_POLL_SECONDS * 1000) or monotonic() > self._deadline:
                if not self._ended.is_set():
                    self._abandon()
                return

    def end(self) -> None:
        """Stop watching."""
        self._ended.set()
        self._thread.join()


class RankGroup:
    """The other ranks of a model instance. `restore` and `send_step` are called by one thread, the engine's."""

    def __init__(
        self,
        name: str,
        checked: ModelFolder,
        settings: LlmSettings,
        devices: Sequence[torch.device],
        *,
        source: RankSource | None = None,
        model_folder: Path | None = None,
        local_ranks: int = 0,
        step_seconds: float | None = None,
    ) -> None:
        """`name`: of the model, for messages. `devices`: of each rank. On several nodes, `local_ranks` are on each."""
        self.name = name
        self.peers = Peers(0, settings.tensor_parallel)
        self._checked = checked
        self._settings = settings
        self._devices = devices
        self._model_folder = model_folder or checked.path
        self._local_ranks = local_ranks
        self._store: Any = None
        self._step_seconds = STEP_SECONDS if step_seconds is None else step_seconds
        self.threads = rank_threads(settings, local_ranks)
        """How many threads a rank on a CPU computes with."""
        self._source = source or LocalRanks(f"headrace rank of {name}", self.threads if devices[0].type == "cpu" else 0)
        self._fingerprint = folder_fingerprint(checked.path, settings.adapters)
        self._folder = Path(tempfile.mkdtemp(prefix="headrace-ranks-"))
        """Where the ranks find each other; only this user can read it."""
        self._starts = 0
        self._ranks: list[RankProcess] = []
        self._lock = threading.Lock()
        self._lost = ""
        """Why the group is lost, for clients; "" while it is whole."""
        self._closing = threading.Event()
        self._step_began = 0.0
        """When the oldest step in flight began; 0 without one."""
        self._steps_in_flight = 0
        self._guard: _StartGuard | None = None
        self._supervisor: threading.Thread | None = None
        self._on_lost: Callable[[RunnerLost], None] | None = None
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    # Starting

    def load(self) -> Any:
        """Load the shard of the first rank. While it does, the others load theirs."""
        return load_shard(self._checked, self._settings, self._devices[0], self.peers)

    def agree(self, sizes: EngineSizes) -> EngineSizes:
        """Wait until all ranks have loaded, connect them, and return the sizes that fit all."""
        return self._connect(sizes, may_shrink=True)

    def await_ready(self, runner: ModelRunner) -> None:
        """Wait until the runners of all ranks are ready; they must be like the first rank's."""
        self._end_guard()
        deadline = monotonic() + self._settings.rank_timeout_seconds
        for number, rank in enumerate(self._ranks, 1):
            theirs = self._receive(number, rank, Kind.READY, deadline)["runner"]
            if theirs != type(runner).__name__:
                raise FailedPrecondition(
                    f"rank {number} of model '{self.name}' computes steps by {theirs} and rank 0 by "
                    f"{type(runner).__name__}: the log has the reason; set parameter cuda_graphs to false"
                )
            rank.link.set_timeout(self._step_seconds)

    def watch(self, on_lost: Callable[[RunnerLost], None]) -> None:
        """Supervise the ranks; call `on_lost`, from a thread, when one has ended."""
        self._on_lost = on_lost
        self._watch()

    @property
    def is_lost(self) -> bool:
        """Whether the ranks must be started again."""
        return bool(self._lost)

    def restore(self, sizes: EngineSizes, make_runner: Callable[[], ModelRunner]) -> ModelRunner:
        """Start all other ranks again and connect them. Raises a `HeadraceError` if that fails; call it again later."""
        self._end_ranks()
        with self._lock:
            self._steps_in_flight, self._step_began = 0, 0.0
        try:
            self._start()
            self._connect(sizes, may_shrink=False)
            runner = make_runner()
            self.await_ready(runner)
        except HeadraceError:
            self._end_ranks()
            raise
        except Exception as error:
            self._end_ranks()
            log.exception("The ranks of model '%s' cannot be started again.", self.name)
            raise Unavailable(
                f"the ranks of model '{self.name}' cannot be started again: the log has the reason"
            ) from error
        with self._lock:
            self._lost = ""
        self._watch()
        return runner

    def _start(self) -> None:
        if self._closing.is_set():
            raise Unavailable(f"model '{self.name}' is being unloaded")
        self._starts += 1
        ranks = self._source.take(len(self._devices) - 1)
        with self._lock:
            self._ranks = ranks
        if self._closing.is_set():
            self._end_ranks()
        for number, rank in enumerate(ranks, 1):
            setup = {
                "rank": number,
                "name": self.name,
                "settings": settings_as_json(self._settings, partial(rank.path_of, self._model_folder)),
                "device": str(self._devices[number]),
                "local_ranks": self._local_ranks,
                "step_seconds": self._step_seconds,
            }
            try:
                rank.link.send_json(Kind.SETUP, setup)
            except LinkClosed:
                raise self._failure(number, rank) from None

    def _connect(self, sizes: EngineSizes, *, may_shrink: bool) -> EngineSizes:
        deadline = monotonic() + self._settings.rank_timeout_seconds
        for number, rank in enumerate(self._ranks, 1):
            self._check_versions(number, rank, self._receive(number, rank, Kind.HELLO, deadline))
        for number, rank in enumerate(self._ranks, 1):
            content = self._receive(number, rank, Kind.SIZED, deadline)
            if content["fingerprint"] != self._fingerprint:
                raise FailedPrecondition(
                    f"rank {number} of model '{self.name}' on {rank.node} has other weights than rank 0: copy the same "
                    "model to all nodes"
                    if rank.node
                    else f"rank {number} of model '{self.name}' has other weights than rank 0: "
                    f"'{self._checked.path.name}' has changed since it was loaded; load the model again"
                )
            theirs = sizes_from_json(content["sizes"])
            if may_shrink:
                sizes = replace(sizes, pages=min(sizes.pages, theirs.pages))
            elif theirs.pages < sizes.pages:
                raise FailedPrecondition(
                    f"rank {number} of model '{self.name}' has memory for {theirs.pages} pages of the KV cache, and the "
                    f"group uses {sizes.pages}: free memory of its device, or set kv_cache_bytes lower and load it again"
                )
        try:
            where = self._open_store()
        except (OSError, RuntimeError) as error:
            log.exception("The ranks of model '%s' have no place to meet.", self.name)
            raise self._unconnected() from error
        for number, rank in enumerate(self._ranks, 1):
            try:
                rank.link.send_json(Kind.CONNECT, {**where, "sizes": sizes_as_json(sizes)})
            except LinkClosed:
                raise self._failure(number, rank) from None
        try:
            self.peers.connect(
                communicator_of(
                    self._store,
                    0,
                    len(self._devices),
                    self._devices[0],
                    timeout_seconds=self._step_seconds,
                    host=self._source.host,
                )
            )
            # gloo waits for an answer without end of a machine that has lost its power.
            keep_alive_to({rank.link.peer_host for rank in self._ranks if rank.node})
        except Exception as error:
            log.exception("The ranks of model '%s' cannot be connected.", self.name)
            raise self._unconnected() from error
        self._guard = _StartGuard(self._ranks, self._settings.rank_timeout_seconds, self._abandon)
        return sizes

    def _open_store(self) -> dict[str, Any]:
        """Open the place where the ranks meet; return what they have to know of it."""
        host = self._source.host
        if host:
            self._store, port = serve_tcp_store(host, timeout_seconds=self._step_seconds)
            return {"host": host, "port": port}
        path = self._folder / f"store-{self._starts}"
        self._store = file_store(path, len(self._devices))
        return {"store": str(path)}

    def _check_versions(self, number: int, rank: RankProcess, content: dict[str, Any]) -> None:
        theirs, own = content.get("versions", {}), versions()
        for name, version in own.items():
            if theirs.get(name) != version:
                runs = f"runs {name} {str(theirs.get(name))[:32]}, and rank 0 {version}"
                raise FailedPrecondition(
                    f"rank {number} of model '{self.name}' on {rank.node} {runs}: install the same versions on all nodes"
                    if rank.node
                    else f"rank {number} of model '{self.name}' {runs}: the installation has changed since the server was "
                    "started; start it again"
                )

    def _receive(self, number: int, rank: RankProcess, wanted: Kind, deadline: float) -> dict[str, Any]:
        """Return what a rank says next; raise if it says anything else, ends, or says nothing in time."""
        try:
            kind, payload = rank.link.receive(max(0.0, deadline - monotonic()))
            content = read_json(payload)
        except LinkClosed:
            raise self._failure(number, rank) from None
        except LinkTimeout:
            raise Unavailable(
                f"rank {number} of model '{self.name}' ({rank.place}) was not ready within "
                f"{self._settings.rank_timeout_seconds} seconds: see its log, or set parameter rank_timeout_seconds higher"
            ) from None
        if kind is Kind.ERROR:
            raise error_of(content["code"], f"rank {number}: {content['message']}")
        if kind is not wanted:
            raise self._failure(number, rank)
        return content

    def _failure(self, number: int, rank: RankProcess) -> HeadraceError:
        if self._closing.is_set():
            return Unavailable(f"model '{self.name}' is being unloaded")
        ended = rank.ending(_EXIT_SECONDS) or "it has closed its connection"
        log.error("Rank %d of model '%s' (%s) ended while it started: %s.", number, self.name, rank.place, ended)
        return Unavailable(
            f"rank {number} of model '{self.name}' ended while it started ({ended}): the log has the reason"
        )

    def _unconnected(self) -> HeadraceError:
        return Unavailable(
            f"the ranks of model '{self.name}' cannot be connected: the log has the reason; check that they reach each other"
        )

    def _abandon(self) -> None:
        """Make the first rank's operations end with an error. From any thread."""
        self._kill_ranks()
        self.peers.disconnect()

    def _end_guard(self) -> None:
        guard, self._guard = self._guard, None
        if guard is not None:
            guard.end()

    # Steps, in the engine's thread

    def send_step(self, message: bytes) -> None:
        """Tell the ranks of a step. Raises `RunnerLost`."""
        with self._lock:
            if self._lost:
                raise RunnerLost(self._lost)
            self._steps_in_flight += 1
            self._step_began = self._step_began or monotonic()
        for number, rank in enumerate(self._ranks, 1):
            try:
                rank.link.send(Kind.STEP, message)
            except (LinkClosed, LinkTimeout):
                raise self.lose(f"rank {number} ({rank.place}) has ended") from None

    def step_finished(self) -> None:
        """Note that the first rank has the results of the oldest step. Raises `RunnerLost` if they cannot be right."""
        with self._lock:
            if self._lost:
                raise RunnerLost(self._lost)
            self._steps_in_flight -= 1
            self._step_began = monotonic() if self._steps_in_flight else 0.0

    def lose(self, reason: str) -> RunnerLost:
        """End the group, because it cannot continue; return the error for its requests.

        From any thread; the first reason stays. If a rank has ended, that is the reason.
        """
        reason = self._ended_rank() or reason
        with self._lock:
            if self._lost:
                return RunnerLost(self._lost)
            self._lost = (
                f"{reason}: model '{self.name}' has lost this request and starts its ranks again; send it again"
            )
        if not self._closing.is_set():
            log.error("Model '%s': %s. Its ranks are started again.", self.name, reason)
        # The first rank may wait for the others: when they are killed, gloo notices; NCCL must be aborted.
        self._abandon()
        return RunnerLost(self._lost)

    def _ended_rank(self) -> str:
        """Return which rank has ended and how; "" if none ends within a moment."""
        deadline = monotonic() + _ENDING_SECONDS
        while not self._lost:
            for number, rank in enumerate(tuple(self._ranks), 1):
                ending = rank.ending()
                if ending is not None:
                    return f"rank {number} ({rank.place}) has ended ({ending})"
            if monotonic() > deadline:
                break
            self._closing.wait(_ENDING_POLL_SECONDS)
        return ""

    # Supervising

    def _watch(self) -> None:
        self._supervisor = threading.Thread(
            target=self._supervise, args=(tuple(self._ranks),), name=f"llm {self.name} ranks", daemon=True
        )
        self._supervisor.start()
        threading.Thread(
            target=self._source.prepare, args=(len(self._ranks),), name=f"llm {self.name} spares", daemon=True
        ).start()

    def _supervise(self, ranks: Sequence[RankProcess]) -> None:
        """Wait until a rank ends, says something or takes too long for a step; then the group is lost. In a thread."""
        poll = select.poll()
        numbers = {}
        for number, rank in enumerate(ranks, 1):
            poll.register(rank.link.fileno(), select.POLLIN | select.POLLRDHUP)
            numbers[rank.link.fileno()] = number
        while True:
            events = poll.poll(_POLL_SECONDS * 1000)
            if self._closing.is_set() or self._lost:
                return
            if events:
                number = numbers[events[0][0]]
                reason = self._reason(number, ranks[number - 1])
                break
            with self._lock:
                began = self._step_began
            if began and monotonic() - began > self._step_seconds:
                reason = f"a rank did not finish a step within {self._step_seconds:.0f} seconds"
                break
        error = self.lose(reason)
        if self._on_lost is not None and not self._closing.is_set():
            self._on_lost(error)

    def _reason(self, number: int, rank: RankProcess) -> str:
        """Return what a rank says that says something."""
        try:
            kind, payload = rank.link.receive(1.0)
            if kind is Kind.ERROR:
                return f"rank {number} ({rank.place}) failed: {read_json(payload)['message']}"
        except (LinkClosed, LinkTimeout):
            pass
        return f"rank {number} ({rank.place}) has closed its connection"

    # Ending

    def interrupt(self) -> None:
        """Make whatever waits for ranks end soon. From any thread."""
        self._closing.set()
        self._kill_ranks()

    def close(self) -> None:
        """End the ranks and free everything."""
        self.interrupt()
        self._end_ranks()
        self._source.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _kill_ranks(self) -> None:
        with self._lock:
            ranks = list(self._ranks)
        for rank in ranks:
            rank.kill()

    def _end_ranks(self) -> None:
        self._abandon()
        self._end_guard()
        supervisor, self._supervisor = self._supervisor, None
        if supervisor is not None and supervisor is not threading.current_thread():
            supervisor.join()
        with self._lock:
            ranks, self._ranks = self._ranks, []
        for rank in ranks:
            rank.end()


def rank_devices(settings: LlmSettings, placement: Placement, nodes: int = 1) -> list[torch.device]:
    """Return the devices of all ranks, those of one node after those of the other.

    Refuses more ranks than GPUs, and ranks that cannot be shared evenly among the nodes.
    """
    degree, present = settings.tensor_parallel, gpu_count()
    if degree % nodes:
        raise FailedPrecondition(
            f"parameter tensor_parallel is {degree}, which {nodes} nodes cannot share evenly: use a multiple of {nodes}"
        )
    here = degree // nodes
    if placement.kind == "cpu" or not present:
        return [torch.device("cpu")] * degree
    if here > present:
        where = "here" if nodes == 1 else f"on node 0 of {nodes}"
        raise FailedPrecondition(
            f"parameter tensor_parallel is {degree}, and PyTorch sees {present} GPUs {where}: use at most as many "
            "ranks as GPUs"
        )
    return [torch.device("cuda", number % here) for number in range(degree)]
