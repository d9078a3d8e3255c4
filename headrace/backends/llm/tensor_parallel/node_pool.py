# SPDX-License-Identifier: Apache-2.0
"""Node 0's side of a server on several nodes: where the others join, and the ranks that they run.

    pool = NodePool(settings)                  # listens; a node may join at any time, and again
    process = pool.start(1, request)           # a `RankProcess` on node 1
    pool.stop_waiting()                        # whatever waits for a node fails
    pool.close()

Each other node has a control connection, and a connection for each of its ranks. See `node_worker` for the other side.
"""

from __future__ import annotations

import ipaddress
import logging
import secrets
import socket
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import Any

from headrace.backends.llm.tensor_parallel.link import Kind, Link, LinkClosed, LinkTimeout, read_json
from headrace.backends.llm.tensor_parallel.node_link import refuse, welcome
from headrace.backends.llm.tensor_parallel.rank_processes import LocalRanks, RankProcess
from headrace.core.errors import Code, FailedPrecondition, HeadraceError, Unavailable, error_of
from headrace.core.nodes import NodeSettings
from headrace.version import __version__

log = logging.getLogger("headrace.backends.llm")

_MOST_HANDSHAKES = 32
_ACCEPT_SECONDS, _WAIT_SECONDS = 0.5, 0.5
START_SECONDS = 30.0
"""How long a node may take to start a process and connect it, once it has had time to fetch the model."""
REJOIN_SECONDS = 10.0
"""How long a group that is started again waits for a node that has left, before requests are refused."""


class RemoteProcess:
    """A rank on another node. Implements `RankProcess`."""

    link: Link

    def __init__(self, node: _Node) -> None:
        self.id = secrets.token_hex(16)
        self._node = node
        self._pid = 0
        self._folder = ""
        self.error: HeadraceError | None = None
        self._link: Link | None = None
        self._how = ""
        self._ended = threading.Event()

    @property
    def node(self) -> str:
        """See `RankProcess`."""
        return str(self._node)

    @property
    def place(self) -> str:
        """See `RankProcess`."""
        return f"process {self._pid} on {self._node}"

    @property
    def is_started(self) -> bool:
        """Whether it has a connection, or will not get one."""
        return (self._link is not None and bool(self._pid)) or self.error is not None or self._ended.is_set()

    def path_of(self, model_folder: Path, path: Path) -> str:
        """See `RankProcess`: the node has its own folder of the model."""
        path, here = path.absolute(), model_folder.absolute()  # a repository may be named by a relative path
        return str(Path(self._folder) / path.relative_to(here)) if path.is_relative_to(here) else str(path)

    def connected(self, link: Link) -> None:
        """Set the connection of its process."""
        self.link = self._link = link

    def started(self, content: Mapping[str, Any]) -> None:
        """Note what its node says about its start."""
        if "code" in content:
            self.error = error_of(str(content["code"]), str(content["message"]))
        self._pid, self._folder = int(content.get("process", 0)), str(content.get("folder", ""))

    def has_ended(self, how: str) -> None:
        """Note that it has ended. From any thread."""
        if not self._ended.is_set():
            self._how = how
            self._ended.set()

    def ending(self, wait_seconds: float = 0.0) -> str | None:
        """See `RankProcess`."""
        return self._how if self._ended.wait(wait_seconds) else None

    def kill(self) -> None:
        """See `RankProcess`. The process ends with its connection; its node makes sure."""
        if self._link is not None:
            self._link.shut_down()
        self._node.send(Kind.KILL, {"id": self.id})

    def end(self) -> None:
        """See `RankProcess`."""
        self.kill()
        if self._link is not None:
            self._link.close()
        self._node.forget(self)


class _Node:
    """Another node that has joined, by its control connection."""

    def __init__(self, rank: int, host: str, link: Link) -> None:
        self.rank = rank
        self.host = host
        self.link = link
        self.is_open = True
        self._lock = threading.Lock()
        self._processes: dict[str, RemoteProcess] = {}

    def __str__(self) -> str:
        return f"node {self.rank} ({self.host})"

    def send(self, kind: Kind, content: Mapping[str, Any]) -> bool:
        """Send a frame; return whether that was possible. From any thread."""
        with self._lock:
            if not self.is_open:
                return False
            try:
                self.link.send_json(kind, content)
            except (LinkClosed, LinkTimeout):
                self.link.shut_down()  # the thread that reads from it notices
                return False
        return True

    def add(self, process: RemoteProcess) -> None:
        """Expect a process."""
        with self._lock:
            self._processes[process.id] = process

    def forget(self, process: RemoteProcess) -> None:
        """Drop a process."""
        with self._lock:
            self._processes.pop(process.id, None)

    def find(self, process_id: str) -> RemoteProcess | None:
        """Return one of its processes."""
        with self._lock:
            return self._processes.get(process_id)

    def leave(self, how: str) -> None:
        """Note that the node has gone, and all its processes with it: their connections end with it."""
        with self._lock:
            self.is_open = False
            processes = list(self._processes.values())
        for process in processes:
            process.has_ended(how)
        self.link.close()


class NodePool:
    """The other nodes of this server. Thread-safe."""

    def __init__(self, settings: NodeSettings) -> None:
        """Listen. Raises FailedPrecondition."""
        self.count = settings.count
        self._key = settings.key
        self._socket = _listen(settings.host, settings.port)
        self.port = int(self._socket.getsockname()[1])
        self._where = f"{settings.host}:{self.port}"
        self._nodes: dict[int, _Node] = {}
        self._refused: dict[int, str] = {}
        """Why nodes were refused that have not joined since."""
        self._changed = threading.Condition()
        self._waiting = True
        self._closed = threading.Event()
        self._handshakes = threading.BoundedSemaphore(_MOST_HANDSHAKES)
        self._thread = threading.Thread(target=self._accept_all, name="headrace nodes", daemon=True)
        self._thread.start()
        log.info("Node 0 of %d waits for the others at %s.", self.count, self._where)

    @property
    def missing(self) -> list[int]:
        """The nodes that have not joined."""
        with self._changed:
            return [rank for rank in range(1, self.count) if rank not in self._nodes]

    def require(self, seconds: float) -> None:
        """Wait until all nodes have joined. Raises Unavailable, which names those that have not."""
        deadline = monotonic() + seconds
        with self._changed:
            while self._waiting and self.missing and monotonic() < deadline:
                self._changed.wait(min(_WAIT_SECONDS, max(0.0, deadline - monotonic())))
            missing = self.missing
        if not self._waiting:
            raise Unavailable("the server is stopping")
        if missing:
            raise Unavailable(self._absent(missing, seconds))

    def _absent(self, missing: Sequence[int], seconds: float) -> str:
        refused = next((self._refused[rank] for rank in missing if rank in self._refused), "")
        if refused:
            return refused
        names = f"node {missing[0]}" if len(missing) == 1 else f"nodes {', '.join(map(str, missing))}"
        has = "has" if len(missing) == 1 else "have"
        return (
            f"{names} of {self.count} {has} not joined within {seconds:.0f} seconds: start `headrace serve --nnodes "
            f"{self.count} --node-rank {missing[0]} --master-addr HOST` there, with the options of this server; from there, "
            f"HOST:{self.port} has to reach it"
        )

    def start(self, rank: int, request: Mapping[str, Any]) -> RemoteProcess:
        """Have a node start a process; `await_started` waits for it. Raises Unavailable."""
        with self._changed:
            node = self._nodes.get(rank)
        if node is None:
            raise Unavailable(f"node {rank} has left")
        process = RemoteProcess(node)
        node.add(process)
        if not node.send(Kind.START, {**request, "id": process.id}):
            node.forget(process)
            raise Unavailable(f"{node} has left")
        return process

    def await_started(self, processes: Sequence[RemoteProcess], seconds: float) -> None:
        """Wait until all these processes are connected. Raises a HeadraceError otherwise."""
        deadline = monotonic() + seconds
        with self._changed:
            while not all(process.is_started for process in processes):
                if not self._waiting or monotonic() > deadline:
                    break
                self._changed.wait(_WAIT_SECONDS)
        for process in processes:
            if process.error is not None:
                raise process.error
            how = process.ending()
            if how is not None:
                raise Unavailable(f"a rank on {process.node} ended while it started: {how}")
            if not process.is_started:
                raise Unavailable(f"{process.node} has not started a rank within {seconds:.0f} seconds: see its log")

    def keep(self, processes: Sequence[RemoteProcess]) -> None:
        """Tell the nodes that these ranks are in their group: the nodes are ready, and prepare spares."""
        with self._changed:
            nodes = list(self._nodes.values())
        for node in nodes:
            own = [process.id for process in processes if node.find(process.id) is process]
            if own:
                node.send(Kind.KEEP, {"ids": own})

    def stop_waiting(self) -> None:
        """Let whatever waits for a node fail: the server stops. From any thread."""
        with self._changed:
            self._waiting = False
            self._changed.notify_all()

    def close(self) -> None:
        """Close all connections. Ranks on other nodes end."""
        self.stop_waiting()
        self._closed.set()
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._socket.close()
        with self._changed:
            nodes = list(self._nodes.values())
        for node in nodes:
            node.link.shut_down()

    # Connections, in threads

    def _accept_all(self) -> None:
        self._socket.settimeout(_ACCEPT_SECONDS)
        while not self._closed.is_set():
            try:
                sock, _ = self._socket.accept()
            except TimeoutError:
                continue
            except OSError:
                if self._closed.is_set():
                    return
                log.warning("Could not accept a connection from a node.")
                self._closed.wait(_ACCEPT_SECONDS)  # probably too many open files
                continue
            if not self._handshakes.acquire(blocking=False):
                sock.close()
                continue
            threading.Thread(target=self._welcome, args=(sock,), name="headrace node", daemon=True).start()

    def _welcome(self, sock: socket.socket) -> None:
        try:
            link, request = welcome(sock, self._key)
        except (OSError, TimeoutError) as error:
            log.warning("A connection to %s was refused: %s.", self._where, error)
            sock.close()
            return
        finally:
            self._handshakes.release()
        try:
            if "id" in request:
                self._connect_rank(link, request)
            else:
                self._serve_node(link, request)
        except (KeyError, TypeError, ValueError, LinkClosed, LinkTimeout):
            log.warning("A node said something unknown: do all nodes run Headrace %s?", __version__)
            link.close()

    def _connect_rank(self, link: Link, request: Mapping[str, Any]) -> None:
        with self._changed:
            found = [process for node in self._nodes.values() if (process := node.find(str(request["id"]))) is not None]
        if not found:
            refuse(link, Unavailable("the group of this rank has been given up"))
            return
        link.send_json(Kind.READY, {})
        with self._changed:
            found[0].connected(link)
            self._changed.notify_all()

    def _serve_node(self, link: Link, request: Mapping[str, Any]) -> None:
        """Read from the control connection of a node until it ends."""
        node = _Node(int(request["node"]), str(request["host"])[:253], link)
        error = self._refusal(node, request)
        if error is not None:
            log.error("%s may not join: %s.", node, error.message)
            with self._changed:
                self._refused[node.rank] = error.message
            refuse(link, error)
            return
        link.send_json(Kind.READY, {})
        with self._changed:
            before = self._nodes.get(node.rank)
            self._nodes[node.rank] = node
            self._refused.pop(node.rank, None)
            self._changed.notify_all()
        if before is not None:
            log.warning("%s joins again; its connection before is closed.", node)
            text = f"another server has joined as node {node.rank}: give each node a --node-rank of its own"
            before.send(Kind.ERROR, {"code": Code.FAILED_PRECONDITION.value, "message": text})
            before.link.shut_down()
        log.info("%s has joined.", node)
        how = f"{node} has left"
        try:
            self._read(node)
        except LinkClosed:
            pass
        finally:
            with self._changed:
                if self._nodes.get(node.rank) is node:
                    del self._nodes[node.rank]
            if not self._closed.is_set():
                log.warning("%s: its ranks have ended with it.", how)
            node.leave(how)
            with self._changed:
                self._changed.notify_all()

    def _refusal(self, node: _Node, request: Mapping[str, Any]) -> HeadraceError | None:
        if request["headrace"] != __version__:
            return FailedPrecondition(
                f"{node} runs Headrace {str(request['headrace'])[:32]}, and node 0 {__version__}: install the same version "
                "on all nodes"
            )
        if request["count"] != self.count:
            return FailedPrecondition(
                f"{node} was started with --nnodes {str(request['count'])[:8]}, and node 0 with {self.count}: give all "
                "the same"
            )
        if not 0 < node.rank < self.count:
            return FailedPrecondition(f"there is no node {node.rank}: --node-rank is from 1 to {self.count - 1} here")
        return None

    def _read(self, node: _Node) -> None:
        while not self._closed.is_set():
            try:
                kind, payload = node.link.receive()
            except LinkTimeout:
                continue
            content = read_json(payload)
            process = node.find(str(content.get("id")))
            if process is None:
                continue
            if kind is Kind.STARTED:
                process.started(content)
            elif kind is Kind.ENDED:
                process.has_ended(str(content["how"])[:200])
            with self._changed:
                self._changed.notify_all()


class NodeRanks:
    """The ranks of one model over all nodes, those of node 0 first. Implements `RankSource`."""

    def __init__(
        self, pool: NodePool, local: LocalRanks, request: Mapping[str, Any], per_node: int, timeout_seconds: float
    ) -> None:
        """`request`: what another node has to know to start a process. `timeout_seconds`: for the first start."""
        self._pool = pool
        self._local = local
        self._request = request
        self._per_node = per_node
        self._timeout_seconds = timeout_seconds
        self._is_first = True
        self._remote: list[RemoteProcess] = []
        self.host = ""
        """Node 0's address, as the other nodes see it; set by `take`."""

    def take(self, count: int) -> list[RankProcess]:
        """See `RankSource`. Raises Unavailable if a node does not join in time."""
        is_first, self._is_first = self._is_first, False
        self._pool.require(self._timeout_seconds if is_first else min(self._timeout_seconds, REJOIN_SECONDS))
        remote: list[RemoteProcess] = []
        local = self._local.take(self._per_node - 1)
        try:
            for node in range(1, self._pool.count):
                remote += [self._pool.start(node, self._request) for _ in range(self._per_node)]
            self._pool.await_started(remote, self._timeout_seconds if is_first else START_SECONDS)
            self.host = remote[0].link.local_host
        except BaseException:
            for process in (*local, *remote):
                process.end()
            raise
        self._remote = remote
        ranks: list[RankProcess] = [*local, *remote]
        if len(ranks) != count:
            raise ValueError(f"{len(ranks)} ranks on the nodes, and {count} are needed")
        return ranks

    def prepare(self, count: int) -> None:
        """See `RankSource`."""
        self._pool.keep(self._remote)
        self._local.prepare(min(count, self._per_node - 1))

    def close(self) -> None:
        """See `RankSource`."""
        self._local.close()


def _listen(host: str, port: int) -> socket.socket:
    """Listen at an address; for a host's name on all interfaces, because a machine may resolve its own to loopback."""
    try:
        try:
            family = socket.AF_INET6 if ipaddress.ip_address(host).version == 6 else socket.AF_INET
        except ValueError:
            dual = socket.has_dualstack_ipv6()
            family = socket.AF_INET6 if dual else socket.AF_INET
            return socket.create_server(("", port), family=family, dualstack_ipv6=dual)
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise FailedPrecondition(
            f"node 0 cannot listen at {host}:{port} ({error.strerror}): --master-addr names this machine on node 0; choose "
            "another --master-port on all nodes if the port is taken"
        ) from None
