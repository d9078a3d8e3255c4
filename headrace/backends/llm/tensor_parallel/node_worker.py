# SPDX-License-Identifier: Apache-2.0
"""The part of a server on a node other than 0: it joins node 0, and starts and ends ranks as node 0 says.

    worker = NodeWorker(settings, find_folder)
    worker.run()            # blocks; raises a HeadraceError if node 0 refuses, or does not come (back) in time
    worker.is_ready         # whether it has joined, and its ranks are in their group
    worker.drain()          # ends when its ranks are not needed any more
    worker.stop()           # ends now

Each rank is a process with its own connection to node 0: no step goes through this one. If the connection to node 0 ends,
the ranks are killed, and this node joins again. See `node_pool` for the other side.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import Any

from headrace.backends.llm.tensor_parallel.link import Kind, Link, LinkClosed, LinkTimeout, read_json
from headrace.backends.llm.tensor_parallel.node_link import join
from headrace.backends.llm.tensor_parallel.rank_processes import LocalProcess, LocalRanks
from headrace.core.errors import HeadraceError, Internal, Unavailable, error_of
from headrace.core.nodes import NodeSettings
from headrace.version import __version__

log = logging.getLogger("headrace.backends.llm")

_RETRY_SECONDS = (0.2, 0.5, 1.0, 2.0)
_REAP_SECONDS = 1.0


class NodeWorker:
    """This node's ranks. `run` is called by one thread; the rest is for any."""

    def __init__(self, settings: NodeSettings, find_folder: Callable[[str], Path]) -> None:
        """`find_folder` returns this node's folder of a model; it raises a HeadraceError if there is none. May block."""
        self._settings = settings
        self._find_folder = find_folder
        self._stopped = threading.Event()
        self._draining = False
        self._lock = threading.Lock()
        self._link: Link | None = None
        self._processes: dict[str, LocalProcess] = {}
        self._kept: set[str] = set()
        """Ranks that are in their group."""
        self._sources: dict[int, LocalRanks] = {}
        """By the threads of a rank; 0 for ranks on GPUs."""

    @property
    def is_ready(self) -> bool:
        """Whether this node has joined, and all its ranks are in their group.

        Node 0 may ask for none: its models may not be divided, or not be loaded yet.
        """
        with self._lock:
            return self._link is not None and self._processes.keys() <= self._kept

    def run(self) -> None:
        """Join node 0, and again when the connection has ended, until `stop`. Raises a HeadraceError."""
        try:
            while not self._stopped.is_set():
                link = self._join()
                if link is None:
                    break
                log.info("Joined node 0 as node %d of %d.", self._settings.rank, self._settings.count)
                try:
                    self._serve(link)
                except (LinkClosed, KeyError, TypeError, ValueError):
                    if not (self._stopped.is_set() or self._draining):
                        log.warning(
                            "The connection to node 0 has ended: its ranks are ended, and this node joins again."
                        )
                finally:
                    self._leave()
                if self._draining:
                    break
        finally:
            self._leave()
            for source in self._sources.values():
                source.close()

    def drain(self) -> None:
        """End when node 0 has ended the ranks, which its requests need, or has gone. From any thread."""
        with self._lock:
            self._draining = True
            is_idle = not self._processes
        if is_idle:
            self.stop()

    def stop(self) -> None:
        """End everything. From any thread."""
        self._stopped.set()
        with self._lock:
            if self._link is not None:
                self._link.shut_down()

    def _join(self) -> Link | None:
        settings, began, tries = self._settings, monotonic(), 0
        request = {
            "node": settings.rank,
            "count": settings.count,
            "headrace": __version__,
            "host": socket.gethostname(),
        }
        while not self._stopped.is_set():
            try:
                return join((settings.host, settings.port), settings.key, request)
            except Unavailable as error:
                if monotonic() - began > settings.join_seconds:
                    raise Unavailable(
                        f"{error.message}; tried for {settings.join_seconds:.0f} seconds: start the server with "
                        "--node-rank 0 there, or set --node-join-seconds higher"
                    ) from None
                if tries == 0:
                    log.info("Waiting for node 0: %s.", error.message)
                self._stopped.wait(_RETRY_SECONDS[min(tries, len(_RETRY_SECONDS) - 1)])
                tries += 1
        return None

    def _serve(self, link: Link) -> None:
        """Do what node 0 says until the connection ends. Raises LinkClosed."""
        with self._lock:
            self._link = link
        while not self._stopped.is_set():
            try:
                kind, payload = link.receive()
            except LinkTimeout:
                continue
            content = read_json(payload)
            if kind is Kind.START:
                # In a thread: a model may have to be fetched, and others are to be killed meanwhile.
                threading.Thread(
                    target=self._start, args=(link, content), name="headrace rank start", daemon=True
                ).start()
            elif kind is Kind.KILL:
                self._kill(str(content["id"]))
            elif kind is Kind.KEEP:
                self._keep({str(process_id) for process_id in content["ids"]})
            elif kind is Kind.ERROR:
                raise error_of(str(content["code"]), str(content["message"]))

    def _leave(self) -> None:
        """Kill the ranks, and forget the connection."""
        with self._lock:
            link, self._link = self._link, None
            processes = list(self._processes.values())
            self._kept.clear()
        for process in processes:
            process.kill()
        if link is not None:
            link.close()

    # Ranks

    def _start(self, link: Link, content: Mapping[str, Any]) -> None:
        process_id = str(content["id"])
        try:
            started = self._started(link, content)
        except HeadraceError as error:
            log.error("A rank cannot be started: %s.", error.message)
            started = {"code": error.code.value, "message": f"node {self._settings.rank}: {error.message}"}
        except Exception:
            log.exception("A rank cannot be started.")
            started = {
                "code": Internal.code.value,
                "message": f"node {self._settings.rank} cannot start a rank: see its log",
            }
        self._say(link, Kind.STARTED, {"id": process_id, **started})
        if "process" in started:
            self._reap(link, process_id)

    def _started(self, link: Link, content: Mapping[str, Any]) -> dict[str, Any]:
        process_id = str(content["id"])
        folder = self._find_folder(str(content["model"]))
        threads = max(1, len(os.sched_getaffinity(0)) // int(content["ranks"])) if content["on_cpu"] else 0
        with self._lock:
            source = self._sources.get(threads)
            if source is None:
                source = self._sources[threads] = LocalRanks(f"headrace rank of node {self._settings.rank}", threads)
        address = (self._settings.host, self._settings.port)
        connection = join(address, self._settings.key, {"node": self._settings.rank, "id": process_id})
        try:
            (process,) = source.take_local(1)
        except BaseException:
            connection.close()
            raise
        with self._lock:
            self._processes[process_id] = process
            if self._link is not link:
                process.kill()  # node 0 has gone meanwhile
        with suppress(LinkClosed):  # a process that ends at once is reported by `_reap`
            process.link.send_link(connection)
        return {"process": process.pid, "folder": str(folder)}

    def _reap(self, link: Link, process_id: str) -> None:
        """Wait until a rank ends, and tell node 0."""
        process = self._processes[process_id]
        while (how := process.ending(_REAP_SECONDS)) is None:
            pass
        process.end()
        with self._lock:
            del self._processes[process_id]
            self._kept.discard(process_id)
            is_over = self._draining and not self._processes
        self._say(link, Kind.ENDED, {"id": process_id, "how": how})
        if is_over:
            self.stop()

    def _say(self, link: Link, kind: Kind, content: Mapping[str, Any]) -> None:
        with self._lock:
            if self._link is link:
                with suppress(LinkClosed, LinkTimeout):
                    link.send_json(kind, content)

    def _kill(self, process_id: str) -> None:
        with self._lock:
            process = self._processes.get(process_id)
        if process is not None:
            process.kill()

    def _keep(self, process_ids: set[str]) -> None:
        """Note that these ranks are in their group, and prepare as many spares."""
        with self._lock:
            self._kept = process_ids | (self._kept & self._processes.keys())
            sources = list(self._sources.values())
        for source in sources:
            threading.Thread(
                target=source.prepare, args=(len(process_ids),), name="headrace spare ranks", daemon=True
            ).start()
