# SPDX-License-Identifier: Apache-2.0
"""A model on several nodes: joining, refusals, and a group over two nodes whose ranks are threads of this process.

Beside test_llm_nodes_processes.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as some
from llm_instances import served
from rank_threads import FakeCommunicator, FakeGroup, FakeProcess

from headrace.backends.contract import Placement
from headrace.backends.llm.settings import LlmSettings
from headrace.backends.llm.tensor_parallel import group, node_pool, node_worker, rank
from headrace.backends.llm.tensor_parallel.group import rank_devices
from headrace.backends.llm.tensor_parallel.link import (
    Kind,
    Link,
    LinkClosed,
    LinkTimeout,
    keep_alive_to,
    read_json,
)
from headrace.backends.llm.tensor_parallel.node_link import join, welcome
from headrace.backends.llm.tensor_parallel.node_pool import NodePool, RemoteProcess
from headrace.backends.llm.tensor_parallel.node_worker import NodeWorker
from headrace.core.errors import FailedPrecondition, HeadraceError, NotFound, Unavailable
from headrace.core.generation import Generation, Sampling
from headrace.core.nodes import NodeSettings
from headrace.version import __version__
from support import llm_models
from support.ports import free_port
from support.waiting import eventually

GREEDY = Sampling(temperature=0.0, max_tokens=10)
LONG = Sampling(temperature=0.0, max_tokens=1500, ignore_eos=True)
PROMPTS = [("the quick brown fox jumps over Grüße " * 4)[number : 3 + 9 * number] for number in range(1, 9)]


def nodes_of(count: int) -> NodeSettings:
    """Settings of node 0."""
    return NodeSettings(count, 0, "127.0.0.1", free_port(), b"a key of many bytes", 30.0)


@contextmanager
def pool_of(count: int) -> Iterator[tuple[NodePool, NodeSettings]]:
    settings = nodes_of(count)
    pool = NodePool(settings)
    try:
        yield pool, settings
    finally:
        pool.close()


def request_of(settings: NodeSettings, **changed: Any) -> dict[str, Any]:
    return {"node": 1, "count": settings.count, "headrace": __version__, "host": "away", **changed}


def joined(settings: NodeSettings, **changed: Any) -> Link:
    return join((settings.host, settings.port), settings.key, request_of(settings, **changed))


# Joining


def test_a_node_joins_and_leaves() -> None:
    with pool_of(3) as (pool, settings):
        assert pool.missing == [1, 2]
        link = joined(settings, node=2)
        eventually(lambda: pool.missing == [1])
        link.close()
        eventually(lambda: pool.missing == [1, 2])


def test_a_node_with_another_key_gets_an_error() -> None:
    with pool_of(2) as (pool, settings):
        with pytest.raises(FailedPrecondition, match="has another key: give all nodes the same --handing-key-file"):
            joined(replace(settings, key=b"another key of many"))
        assert pool.missing == [1]


@pytest.mark.parametrize(
    "sent",
    [b"GET / HTTP/1.1\r\n\r\n" * 20, b"", b"HRnode01" + bytes(16 + 64) + b"\xff\xff\xff\xff\x09"],
    ids=["HTTP", "nothing", "a wrong proof"],
)
def test_a_stranger_is_sent_away(sent: bytes) -> None:
    with pool_of(2) as (pool, settings), socket.create_connection((settings.host, settings.port), 30) as stranger:
        stranger.sendall(sent)
        with suppress(OSError):  # it may have been sent away already, before it has said everything
            stranger.shutdown(socket.SHUT_WR)
        stranger.settimeout(30)
        received = b""
        with suppress(ConnectionResetError):  # what was not read resets the connection
            while data := stranger.recv(4096):
                received += data
        assert len(received) in (0, 16 + 64)  # never more than a proof of its own
        assert pool.missing == [1]
        joined(settings).close()


@given(sent=some.binary(max_size=300), begins=some.booleans())
@hypothesis_settings(deadline=None, max_examples=50)
def test_no_bytes_join_without_the_key(sent: bytes, begins: bool) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall((b"HRnode01" if begins else b"") + sent)
        theirs.shutdown(socket.SHUT_WR)
        with pytest.raises(ConnectionError):
            welcome(ours, b"a key of many bytes")


@pytest.mark.parametrize(
    "changed", [{"node": "one"}, {"node": None}, {"count": []}, {"headrace": {}}, {"node": 2**70}, {"id": None}]
)
def test_a_node_that_says_nonsense_is_refused(changed: dict[str, Any]) -> None:
    with pool_of(2) as (pool, settings):
        with pytest.raises((Unavailable, FailedPrecondition)):
            joined(settings, **changed)
        assert pool.missing == [1]
        with joined_ignoring(settings) as link:
            pool.require(30)
            link.send(Kind.STEP, b"not JSON")
            eventually(lambda: pool.missing == [1])


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"headrace": "0.0.1"}, r"node 1 \(away\) runs Headrace 0\.0\.1, and node 0 "),
        ({"count": 4}, "was started with --nnodes 4, and node 0 with 2"),
        ({"node": 2}, "there is no node 2: --node-rank is from 1 to 1"),
        ({"node": 0}, "there is no node 0"),
    ],
)
def test_a_node_that_does_not_fit_is_refused(changed: dict[str, Any], text: str) -> None:
    with pool_of(2) as (pool, settings):
        with pytest.raises(FailedPrecondition, match=text):
            joined(settings, **changed)
        assert pool.missing == [1]


def test_a_missing_node_is_named_in_time_and_why_it_was_refused() -> None:
    with pool_of(3) as (pool, settings):
        with pytest.raises(
            Unavailable, match="nodes 1, 2 of 3 have not joined within 0 seconds: start `headrace serve"
        ):
            pool.require(0.1)
        with joined_ignoring(settings, node=1):
            with pytest.raises(Unavailable, match="node 2 of 3 has not joined"):
                pool.require(0.1)
            with pytest.raises(FailedPrecondition):
                joined(settings, node=2, headrace="0.0.1")
            with pytest.raises(Unavailable, match=r"node 2 \(away\) runs Headrace 0\.0\.1"):
                pool.require(0.1)


@contextmanager
def joined_ignoring(settings: NodeSettings, **changed: Any) -> Iterator[Link]:
    """A node that never does what it is told."""
    link = joined(settings, **changed)
    try:
        yield link
    finally:
        link.close()


def test_waiters_for_a_node_get_an_error_when_the_server_stops() -> None:
    with pool_of(2) as (pool, _):
        threading.Timer(0.1, pool.stop_waiting).start()
        with pytest.raises(Unavailable, match="the server is stopping"):
            pool.require(600)


def test_a_node_that_starts_no_process_is_named() -> None:
    with pool_of(2) as (pool, settings), joined_ignoring(settings):
        pool.require(30)
        process = pool.start(1, {"model": "tiny", "ranks": 1, "on_cpu": True})
        with pytest.raises(Unavailable, match=r"node 1 \(away\) has not started a rank within 0 seconds"):
            pool.await_started([process], 0.2)


def test_a_node_that_leaves_while_it_starts_a_process_is_named() -> None:
    with pool_of(2) as (pool, settings), joined_ignoring(settings) as link:
        pool.require(30)
        process = pool.start(1, {"model": "tiny", "ranks": 1, "on_cpu": True})
        link.close()
        with pytest.raises(Unavailable, match=r"node 1 \(away\) has left"):
            pool.await_started([process], 30)


def test_a_second_server_with_the_same_rank_ends_the_first() -> None:
    with pool_of(2) as (pool, settings):
        worker = NodeWorker(replace(settings, rank=1), no_models)
        ended: list[HeadraceError] = []

        def run() -> None:
            try:
                worker.run()
            except HeadraceError as error:
                ended.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        pool.require(30)
        with joined_ignoring(settings):
            thread.join(30)
        assert "another server has joined as node 1" in ended[0].message


def test_a_port_that_is_taken_is_named() -> None:
    with pool_of(2) as (_, settings), pytest.raises(FailedPrecondition, match="choose another --master-port"):
        NodePool(settings)


def no_models(name: str) -> Path:
    raise NotFound(f"there is no model '{name}' here")


def test_a_node_gives_up_when_node_0_does_not_come() -> None:
    worker = NodeWorker(replace(nodes_of(2), rank=1, join_seconds=0.5), no_models)
    with pytest.raises(
        Unavailable, match=r"cannot be reached: .*; tried for 0 seconds: start the server with --node-rank 0"
    ):
        worker.run()
    assert not worker.is_ready


def test_a_node_of_which_no_rank_is_asked_is_ready_when_it_has_joined() -> None:
    with pool_of(2) as (pool, settings), working(settings, no_models) as worker:
        pool.require(30)
        eventually(lambda: worker.is_ready)


def test_a_rank_that_is_not_in_its_group_makes_a_node_unready() -> None:
    with pool_of(2) as (pool, settings), working(settings, no_models) as worker:
        pool.require(30)
        eventually(lambda: worker.is_ready)
        with mock.patch.dict(worker._processes, {"starting": mock.Mock()}):
            assert not worker.is_ready
            with mock.patch.object(worker, "_kept", {"starting"}):
                assert worker.is_ready


def test_a_node_without_the_model_says_so() -> None:
    with pool_of(2) as (pool, settings), working(settings, no_models):
        pool.require(30)
        process = pool.start(1, {"model": "tiny", "ranks": 1, "on_cpu": True})
        with pytest.raises(NotFound, match="node 1: there is no model 'tiny' here"):
            pool.await_started([process], 30)


# A group over two nodes


class ThreadProcess(FakeProcess):
    """A process of a worker node: a thread that takes over the connection it is given, as `rank.main` does."""

    pid = 4711
    _adopted: Link | None = None

    def _main(self) -> None:
        spare = Link(self._theirs)
        link = spare
        try:
            spare.expect_socket()
            kind, payload = spare.receive()
            assert kind is Kind.ADOPT
            link = self._adopted = spare.take_link(payload)
            link.send_json(Kind.HELLO, self._hello)
            kind, payload = link.receive()
            assert kind is Kind.SETUP
            self._rank = rank.Rank(link, read_json(payload))
            self._rank.serve()
        except (LinkClosed, LinkTimeout):
            pass
        self.signal = self.signal or "exit code 1"
        link.close()

    def kill(self) -> None:
        super().kill()
        if self._adopted is not None:
            self._adopted.shut_down()

    def ending(self, wait_seconds: float = 0.0) -> str | None:
        self._thread.join(wait_seconds)
        return None if self._thread.is_alive() else self.signal


class ThreadSource:
    """In place of `LocalRanks` of a worker node."""

    def __init__(self, *_arguments: Any) -> None:
        self.taken: list[ThreadProcess] = []
        self.hello: dict[str, Any] = {"versions": rank.versions()}

    def take_local(self, count: int) -> list[ThreadProcess]:
        self.taken = [ThreadProcess(self.hello) for _ in range(count)]
        return self.taken

    def prepare(self, count: int) -> None:
        """Threads need no spares."""

    def close(self) -> None:
        """There are no spares."""


@contextmanager
def working(settings: NodeSettings, find_folder: Callable[[str], Path]) -> Iterator[NodeWorker]:
    """Node 1, in a thread."""
    worker = NodeWorker(replace(settings, rank=1), find_folder)
    thread = threading.Thread(target=worker.run)
    thread.start()
    try:
        yield worker
    finally:
        worker.stop()
        thread.join(30)
        assert not thread.is_alive()


@contextmanager
def two_nodes(folder: Path) -> Iterator[tuple[NodePool, NodeWorker, ThreadSource]]:
    """Node 0's pool, and node 1, which has the model at `folder`."""
    source = ThreadSource()
    groups: dict[int, FakeGroup] = {}

    def connect(port: int, number: int, degree: int, *_more: Any, **_named: Any) -> FakeCommunicator:
        return FakeCommunicator(groups.setdefault(port, FakeGroup(degree)), number)

    ports = iter(range(1000))

    def serve(_host: str, **_named: Any) -> tuple[int, int]:
        return (port := next(ports)), port

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(node_worker, "LocalRanks", return_value=source))
        for module in (group, rank):
            stack.enter_context(mock.patch.object(module, "communicator_of", connect))
        stack.enter_context(mock.patch.object(group, "serve_tcp_store", serve))
        stack.enter_context(mock.patch.object(rank, "tcp_store", lambda _host, port, **_named: port))
        pool, settings = stack.enter_context(pool_of(2))
        worker = stack.enter_context(working(settings, lambda _name: folder))
        yield pool, worker, source


def model_folders(place: Path) -> tuple[Path, Path]:
    """The version's folder on node 0, and the model's on node 1: the same weights at another path."""
    llm_models.tiny_llama(place / "there" / "tiny" / "1")
    return llm_models.tiny_llama(place / "here" / "tiny" / "1"), place / "there" / "tiny"


def test_two_nodes_answer_as_one_process(tmp_path: Path) -> None:
    here, there = model_folders(tmp_path)

    async def compare() -> None:
        async with served(here, page_size="4") as one:
            expected = [(await one.ask(Generation(prompt=prompt, sampling=GREEDY))).text for prompt in PROMPTS]
        with two_nodes(there) as (pool, worker, source):
            async with served(here, nodes=pool, tensor_parallel="2", page_size="4") as two:
                answers = [(await two.ask(Generation(prompt=prompt, sampling=GREEDY))).text for prompt in PROMPTS]
                assert answers == expected
                assert source.taken[0]._rank._settings.model_path == there / "1"  # type: ignore[union-attr]
                await asyncio.to_thread(eventually, lambda: worker.is_ready)
                assert worker._kept
            await asyncio.to_thread(eventually, lambda: not worker._kept)
            assert worker.is_ready  # for the next model

    asyncio.run(compare())


def test_a_rank_that_ends_on_another_node_is_named_and_replaced(tmp_path: Path) -> None:
    here, there = model_folders(tmp_path)

    async def lose() -> None:
        with two_nodes(there) as (pool, worker, source):
            async with served(here, nodes=pool, tensor_parallel="2") as tiny:
                expected = (await tiny.ask(Generation(prompt="the", sampling=GREEDY))).text
                running = tiny.begin(Generation(prompt="the", sampling=LONG, stream=True))
                await asyncio.wait_for(running.came.wait(), 60)
                source.taken[0].kill()
                await asyncio.wait_for(running.ended.wait(), 60)
                assert isinstance(running.error, Unavailable)
                name = socket.gethostname()
                assert f"rank 1 (process 4711 on node 1 ({name})) has ended (signal 9: killed)" in str(running.error)
                assert (await tiny.ask(Generation(prompt="the", sampling=GREEDY))).text == expected
                await asyncio.to_thread(eventually, lambda: worker.is_ready)

    asyncio.run(lose())


def test_a_node_that_leaves_is_named_and_joins_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = model_folders(tmp_path)
    monkeypatch.setattr(node_pool, "REJOIN_SECONDS", 0.2)

    async def lose() -> None:
        with two_nodes(there) as (pool, worker, source):
            async with served(here, nodes=pool, tensor_parallel="2") as tiny:
                running = tiny.begin(Generation(prompt="the", sampling=LONG, stream=True))
                await asyncio.wait_for(running.came.wait(), 60)
                with mock.patch.object(node_worker, "join", side_effect=Unavailable("the network is down")):
                    worker._link.shut_down()  # type: ignore[union-attr]
                    await asyncio.wait_for(running.ended.wait(), 60)
                    assert "has left" in str(running.error)
                    assert not worker.is_ready
                    with pytest.raises(Unavailable, match="node 1 of 2 has not joined within 0 seconds"):
                        await tiny.ask(Generation(prompt="the", sampling=GREEDY))
                while True:
                    try:
                        await tiny.ask(Generation(prompt="the", sampling=GREEDY))
                    except Unavailable:
                        continue
                    break
                await asyncio.to_thread(eventually, lambda: worker.is_ready)

    asyncio.run(asyncio.wait_for(lose(), 90))


def test_a_node_that_drains_computes_what_is_in_flight(tmp_path: Path) -> None:
    here, there = model_folders(tmp_path)

    async def drain() -> None:
        with two_nodes(there) as (pool, worker, _):
            async with served(here, nodes=pool, tensor_parallel="2") as tiny:
                running = tiny.begin(Generation(prompt="the", sampling=replace(LONG, max_tokens=60), stream=True))
                await asyncio.wait_for(running.came.wait(), 60)
                worker.drain()
                await asyncio.wait_for(running.ended.wait(), 60)
                assert running.error is None
                assert not worker._stopped.is_set()
            await asyncio.to_thread(eventually, worker._stopped.is_set)

    asyncio.run(drain())


def test_a_node_without_ranks_has_nothing_to_drain() -> None:
    with pool_of(2) as (pool, settings), working(settings, no_models) as worker:
        pool.require(30)
        worker.drain()
        eventually(lambda: pool.missing == [1])


def opened(here: Path, pool: NodePool, **parameters: str) -> None:
    async def go() -> None:
        async with served(here, nodes=pool, **{"tensor_parallel": "2", **parameters}):
            pass

    asyncio.run(asyncio.wait_for(go(), 60))


def test_a_node_reads_its_own_folder_also_if_node_0_names_its_own_by_a_relative_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    process = RemoteProcess(None)  # type: ignore[arg-type]  # the node is not asked
    process.started({"process": 7, "folder": "/srv/models/tiny"})
    for folder in (Path("models/tiny"), tmp_path / "models" / "tiny"):
        assert process.path_of(folder, tmp_path / "models" / "tiny" / "1") == "/srv/models/tiny/1"
    assert process.path_of(Path("models/tiny"), Path("/adapters/red")) == "/adapters/red"


def test_other_weights_on_a_node_are_refused(tmp_path: Path) -> None:
    llm_models.tiny_llama(tmp_path / "there" / "tiny" / "1", seed=2)
    here = llm_models.tiny_llama(tmp_path / "here" / "tiny" / "1", seed=1)
    text = r"rank 1 of model 'tiny' on node 1 \(.*\) has other weights than rank 0: copy the same model to all nodes"
    with two_nodes(tmp_path / "there" / "tiny") as (pool, _, _), pytest.raises(FailedPrecondition, match=text):
        opened(here, pool)


def test_other_libraries_on_a_node_are_refused(tmp_path: Path) -> None:
    here, there = model_folders(tmp_path)
    with two_nodes(there) as (pool, _, source):
        source.hello = {"versions": {**rank.versions(), "torch": "1.0"}}
        with pytest.raises(
            FailedPrecondition, match=r"on node 1 \(.*\) runs torch 1\.0, .*: install the same versions"
        ):
            opened(here, pool)


def test_a_node_that_never_comes_is_named(tmp_path: Path) -> None:
    here, _ = model_folders(tmp_path)
    with pool_of(2) as (pool, _), pytest.raises(Unavailable, match="node 1 of 2 has not joined within 1 seconds"):
        opened(here, pool, rank_timeout_seconds="1")


def test_all_connections_to_a_host_are_probed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        accepted, _ = listener.accept()
        with near, accepted, socket.socket() as unconnected, pool_of(2):
            descriptors = len(list(Path("/proc/self/fd").iterdir()))
            assert keep_alive_to({"10.1.2.3"}) == 0
            assert not near.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            assert keep_alive_to({"127.0.0.1"}) >= 2
            for sock in (near, accepted):
                assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
                assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 20_000
            assert not unconnected.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            assert len(list(Path("/proc/self/fd").iterdir())) == descriptors


def test_nodes_share_the_ranks_evenly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    four = LlmSettings(tmp_path, tensor_parallel=4)
    with pytest.raises(FailedPrecondition, match="tensor_parallel is 4, which 3 nodes cannot share evenly"):
        rank_devices(four, Placement("tiny_0_cpu"), 3)
    monkeypatch.setattr(group, "gpu_count", lambda: 2)
    devices = [str(device) for device in rank_devices(four, Placement("tiny_0_model", "model"), 2)]
    assert devices == ["cuda:0", "cuda:1", "cuda:0", "cuda:1"]
    with pytest.raises(FailedPrecondition, match="PyTorch sees 2 GPUs on node 0 of 2"):
        rank_devices(replace(four, tensor_parallel=8), Placement("tiny_0_model", "model"), 2)


def test_a_rank_whose_node_has_too_few_gpus_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = llm_models.tiny_llama(tmp_path / "tiny" / "1")
    monkeypatch.setattr(rank, "gpu_count", lambda: 1)
    settings = rank.settings_as_json(LlmSettings(folder, tensor_parallel=4))
    setup = {"rank": 3, "name": "tiny", "settings": settings, "device": "cuda:1", "local_ranks": 2, "step_seconds": 10}
    ours, theirs = socket.socketpair()
    with ours, theirs:
        rank.Rank(Link(ours), setup).serve()
        kind, payload = Link(theirs).receive(30)
        assert kind is Kind.ERROR
        assert "PyTorch sees 1 GPUs on its node, and it needs the one with number 1" in read_json(payload)["message"]
