# SPDX-License-Identifier: Apache-2.0
"""A replica on Ray without Ray: requests reach the server, come back as they are, and are told when the server has ended."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import Response

from headrace.core.errors import DeadlineExceeded, FailedPrecondition, Unavailable
from headrace.fleet.ray_serve.forwarding import Forwarder, ForwardRequest, target_of, without_hop_by_hop
from headrace.fleet.ray_serve.replica import ReplicaServer
from headrace.fleet.ray_serve.replica_spec import GroupMember, ReplicaSpec, WorkerSpec
from headrace.fleet.ray_serve.workers import Workers, WorkerServer, launch_workers
from support.async_tests import async_test
from support.virtual_time import LoopClock, run_virtual

Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
SPEC = ReplicaSpec(
    name="digits",
    namespace="default",
    pod={},
    model=None,
    min_replicas=1,
    max_replicas=1,
    target_requests=1,
    max_requests=1,
    idle_seconds=None,
    cpus=1.0,
    gpus=0,
    memory=0,
    request_seconds=0.0,
    grace_seconds=1.0,
    health_seconds=1.0,
)


@asynccontextmanager
async def listening(answer: Answer) -> AsyncIterator[int]:
    """The port of a server that answers each connection so."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await answer(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async with await asyncio.start_server(handle, "127.0.0.1", 0) as server:
        yield server.sockets[0].getsockname()[1]


@asynccontextmanager
async def forwarding(answer: Answer, request_seconds: float = 0.0) -> AsyncIterator[Forwarder]:
    async with listening(answer) as port:
        forwarder = Forwarder(port, request_seconds)
        try:
            yield forwarder
        finally:
            await forwarder.close()


def get(target: str = "/", **headers: str) -> ForwardRequest:
    return ForwardRequest("GET", target, list(headers.items()), None)


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer with the request itself."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = next((int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")), 0)
    body = await reader.readexactly(length)
    content = head + body
    writer.write(
        b"HTTP/1.1 201 Created\r\nX-Part: a\r\nX-Part: b\r\nDate: now\r\nConnection: close, X-Gone\r\nX-Gone: 1\r\n"
    )
    writer.write(b"Content-Length: %d\r\n\r\n%b" % (len(content), content))
    await writer.drain()


@async_test
async def test_a_request_arrives_as_it_was_sent_but_for_the_connection() -> None:
    async def body() -> AsyncIterator[bytes]:
        yield b"one "
        yield b"two"

    headers = [("Host", "example.com"), ("Content-Length", "7"), ("X-A", "1"), ("X-A", "2"), ("Keep-Alive", "5")]
    async with forwarding(echo) as forwarder:
        response = await forwarder.send(ForwardRequest("POST", "/a%2Fb%7E?x=%20&y", headers, body()))
        content = b"".join([chunk async for chunk in response.body])
    assert response.status == 201
    assert [value for name, value in response.headers if name == "X-Part"] == ["a", "b"]
    assert not {name.lower() for name, _ in response.headers} & {"date", "connection", "x-gone"}
    head, _, received = content.partition(b"\r\n\r\n")
    assert head.startswith(b"POST /a%2Fb%7E?x=%20&y HTTP/1.1\r\n") and received == b"one two"
    assert b"Host: example.com" in head and head.count(b"X-A:") == 2
    assert b"Keep-Alive" not in head and b"User-Agent" not in head and b"Accept-Encoding" not in head


@async_test
async def test_pieces_of_a_stream_arrive_before_its_end() -> None:
    go_on = asyncio.Event()

    async def stream(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nfirst\r\n")
        await go_on.wait()
        writer.write(b"4\r\nlast\r\n0\r\n\r\n")
        await writer.drain()

    async with forwarding(stream) as forwarder:
        response = await forwarder.send(get())
        assert await anext(response.body) == b"first"
        go_on.set()
        assert [chunk async for chunk in response.body] == [b"last"]
    assert all(name.lower() != "transfer-encoding" for name, _ in response.headers)


@async_test
async def test_a_client_that_reads_nothing_stops_the_server_from_writing() -> None:
    written = 0
    blocked = asyncio.Event()

    async def pour(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal written
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000000\r\n\r\n")
        for _ in range(1000):
            writer.write(bytes(1_000_000))
            written += 1_000_000
            if writer.transport.get_write_buffer_size():
                for _ in range(1000):  # turns of the loop, in which the other side reads what it wants
                    await asyncio.sleep(0)
                if writer.transport.get_write_buffer_size():
                    blocked.set()
                    return

    async with forwarding(pour) as forwarder:
        response = await forwarder.send(get())
        await asyncio.wait_for(blocked.wait(), 60)
        response.body.close()
    assert written < 100_000_000


@async_test
async def test_a_client_that_leaves_closes_the_connection_to_the_server() -> None:
    closed = asyncio.Event()

    async def endless(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nfirst\r\n")
        await reader.read()
        closed.set()

    async with forwarding(endless) as forwarder:
        response = await forwarder.send(get())
        await anext(response.body)
        response.body.close()
        await asyncio.wait_for(closed.wait(), 60)


async def cut(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """End in the middle of a body, as a server that is killed."""
    await reader.readuntil(b"\r\n\r\n")
    writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nfirst\r\n")
    await writer.drain()


async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """End before the head of the response."""
    await reader.readuntil(b"\r\n\r\n")


async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read()


@async_test
async def test_a_server_that_ends_before_the_response_is_reported() -> None:
    async with forwarding(silent) as forwarder:
        with pytest.raises(Unavailable, match="has ended"):
            await forwarder.send(get())


@async_test
async def test_a_response_that_is_cut_is_not_taken_for_a_complete_one() -> None:
    async with forwarding(cut) as forwarder:
        response = await forwarder.send(get())
        assert await anext(response.body) == b"first"
        with pytest.raises(Unavailable, match="has ended"):
            await anext(response.body)
        response.body.close()


@async_test
async def test_a_request_may_take_as_long_as_the_service_says() -> None:
    async with forwarding(hang, request_seconds=0.05) as forwarder:
        with pytest.raises(DeadlineExceeded, match=r"0\.05 seconds, the timeoutSeconds"):
            await forwarder.send(get())


@pytest.mark.parametrize(
    ("scope", "target"),
    [
        ({"raw_path": b"/digits/v2/a%2Fb", "path": "/digits/v2/a/b", "root_path": "/digits"}, "/v2/a%2Fb"),
        ({"raw_path": b"/digits", "path": "/digits", "root_path": "/digits", "query_string": b"a=1"}, "/?a=1"),
        ({"raw_path": b"/digits2/v2", "path": "/digits2/v2", "root_path": "/digits"}, "/digits2/v2"),
        ({"path": "/digits/a b", "root_path": "/digits"}, "/a%20b"),
        ({"path": "/v2", "root_path": ""}, "/v2"),
    ],
)
def test_the_prefix_of_the_service_is_not_part_of_the_path(scope: dict[str, Any], target: str) -> None:
    assert target_of(scope) == target


def test_fields_of_the_connection_stay_on_it() -> None:
    fields = [("Connection", "close, X-Own"), ("X-Own", "1"), ("TE", "trailers"), ("Accept", "*/*")]
    assert without_hop_by_hop(fields) == [("Accept", "*/*")]


# The replica


@dataclass
class FakeServer:
    """In place of a `ServerProcess`: a process whose end the test decides."""

    port: int = 1
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    stopped: bool = False
    fails: bool = False
    is_silent: bool = False
    """Never ready."""
    ports: dict[int, int] = field(default_factory=lambda: {8080: 31000, 29500: 31001})

    async def wait(self) -> int | None:
        await self.ended.wait()
        return -9

    async def wait_ready(self) -> None:
        if self.is_silent:
            await asyncio.Event().wait()
        if self.fails:
            raise FailedPrecondition("it did not become ready")

    async def check(self) -> None:
        if self.ended.is_set():
            raise Unavailable("it has ended")

    def end_message(self, code: int | None) -> str:
        return f"it has ended: {code}"

    async def stop(self, grace_seconds: float) -> None:
        self.stopped = True


async def start(server: FakeServer, exits: list[int] | None = None, **changes: Any) -> ReplicaServer:
    async def launch(spec: ReplicaSpec, member: GroupMember | None) -> Any:
        assert member is None
        return server

    content = replace(SPEC, **changes).as_json()
    return await ReplicaServer.start(content, launch, (exits if exits is not None else []).append)


@dataclass
class FakeWorkers:
    """In place of the actors of a group. Implements `Workers`."""

    server: FakeServer
    ending: asyncio.Event = field(default_factory=asyncio.Event)
    stopped_after_leader: bool = False

    async def ended(self) -> str:
        await self.ending.wait()
        return "worker 1: it has ended"

    async def stop(self) -> None:
        self.stopped_after_leader = self.server.stopped


async def start_group(workers: FakeWorkers, exits: list[int], error: str = "") -> tuple[ReplicaServer, GroupMember]:
    """A replica with a leader and a worker, and the place of the leader."""
    members: list[GroupMember] = []

    async def launch(spec: ReplicaSpec, member: GroupMember | None) -> Any:
        assert member is not None
        members.append(member)
        return workers.server

    async def launch_others(spec: ReplicaSpec, member: GroupMember, ports: Mapping[int, int]) -> Workers:
        assert (member, ports) == (members[0], workers.server.ports)
        if error:
            raise FailedPrecondition(error)
        return workers

    content = replace(SPEC, worker=WorkerSpec(1, {}, 1.0, 0, 0)).as_json()
    replica = await ReplicaServer.start(content, launch, exits.append, launch_others, lambda: "10.0.0.7")
    return replica, members[0]


def request(path: str = "/digits/v2", method: str = "GET", **headers: str) -> Request:
    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "root_path": "/digits",
        "query_string": b"",
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
    }
    return Request(scope, receive)


async def received(response: Response) -> tuple[int, bytes]:
    """What the client gets."""
    parts: list[Any] = []

    async def receive() -> dict[str, Any]:
        return await asyncio.get_running_loop().create_future()

    async def send(message: Any) -> None:
        parts.append(message)

    await response({"type": "http", "asgi": {"spec_version": "2.4"}}, receive, send)
    return parts[0]["status"], b"".join(part.get("body", b"") for part in parts)


@async_test
async def test_a_replica_forwards_to_its_server() -> None:
    async with listening(echo) as port:
        replica = await start(FakeServer(port))
        status, content = await received(await replica.answer(request("/digits/v2/models")))
        await replica.stop()
    assert status == 201 and content.startswith(b"GET /v2/models HTTP/1.1")


@async_test
async def test_a_request_to_a_server_that_has_ended_gets_an_error() -> None:
    async with listening(silent) as port:
        replica = await start(FakeServer(port))
        response = await replica.answer(request())
        await replica.stop()
    status, content = await received(response)
    assert status == 503 and "has ended" in json.loads(content)["error"]
    assert response.headers["retry-after"] == "1"


@async_test
async def test_a_request_that_takes_too_long_gets_an_error() -> None:
    async with listening(hang) as port:
        replica = await start(FakeServer(port), request_seconds=0.05)
        status, content = await received(await replica.answer(request()))
        await replica.stop()
    assert status == 504 and "timeoutSeconds" in json.loads(content)["error"]


def test_the_replica_ends_with_its_server() -> None:
    async def scenario() -> list[int]:
        server, exits = FakeServer(), list[int]()
        replica = await start(server, exits)
        await replica.check()
        server.ended.set()
        with pytest.raises(Unavailable, match="has ended"):
            await replica.check()
        await replica.watched()
        await replica.stop()
        return exits

    assert run_virtual(scenario(), LoopClock()) == [1]


@async_test
async def test_a_replica_that_is_stopped_stops_its_server_and_lives_on() -> None:
    server, exits = FakeServer(), list[int]()
    replica = await start(server, exits)
    await replica.stop()
    server.ended.set()
    await asyncio.sleep(0)
    assert server.stopped and exits == []


@async_test
async def test_a_server_that_does_not_become_ready_is_stopped() -> None:
    server = FakeServer(fails=True)
    with pytest.raises(FailedPrecondition, match="did not become ready"):
        await start(server)
    assert server.stopped


@async_test
async def test_a_service_of_another_version_is_refused() -> None:
    with pytest.raises(FailedPrecondition, match=r"deployed by Headrace 0\.0\.1.*install the same on all nodes"):
        await start(FakeServer(), version="0.0.1")


# Groups


def test_a_group_ends_with_any_of_its_servers() -> None:
    async def scenario(of_worker: bool) -> list[int]:
        workers, exits = FakeWorkers(FakeServer()), list[int]()
        replica, _ = await start_group(workers, exits)
        (workers.ending if of_worker else workers.server.ended).set()
        await replica.watched()
        await replica.stop()
        return exits

    for of_worker in (False, True):
        assert run_virtual(scenario(of_worker), LoopClock()) == [1]


@async_test
async def test_a_group_is_stopped_leader_first() -> None:
    workers, exits = FakeWorkers(FakeServer()), list[int]()
    replica, _ = await start_group(workers, exits)
    await replica.stop()
    assert workers.stopped_after_leader and exits == []


@async_test
async def test_a_worker_that_cannot_start_stops_the_leader_and_is_named() -> None:
    workers = FakeWorkers(FakeServer())
    with pytest.raises(FailedPrecondition, match="worker 1 of digits: model tiny is not on node gpu02"):
        await start_group(workers, [], error="worker 1 of digits: model tiny is not on node gpu02")
    assert workers.server.stopped


@async_test
async def test_a_worker_that_ends_before_the_group_is_ready_stops_all() -> None:
    workers = FakeWorkers(FakeServer(is_silent=True))
    workers.ending.set()
    with pytest.raises(FailedPrecondition, match="worker 1: it has ended; it ended before the group was ready"):
        await start_group(workers, [])
    assert workers.stopped_after_leader


@async_test
async def test_a_worker_gets_the_place_that_leader_worker_set_would_give_it() -> None:
    workers, seen = FakeWorkers(FakeServer()), list[GroupMember]()
    replica, leader = await start_group(workers, [])
    await replica.stop()

    async def launch(spec: ReplicaSpec, member: GroupMember) -> Any:
        seen.append(member)
        return FakeServer()

    content = json.loads(json.dumps(replace(SPEC, worker=WorkerSpec(1, {"spec": {}}, 1.0, 0, 0)).as_json()))
    member = json.loads(json.dumps(leader.worker(1, {29500: 31001}).as_json()))
    worker = WorkerServer(launch)
    assert await worker.start(content, member) == ""
    (place,) = seen
    assert place.leader_ports == {29500: 31001} and len(place.key) == 64
    assert place.environment() == {
        "LWS_LEADER_ADDRESS": "10.0.0.7",
        "LWS_GROUP_SIZE": "2",
        "LWS_WORKER_INDEX": "1",
        "HEADRACE_HANDING_KEY": leader.key,
    }
    assert leader.key not in repr(place)
    assert "deployed by Headrace 0.0.1" in await worker.start({**content, "version": "0.0.1"}, member)


# Actors


class FakeActor:
    """In place of an actor of Ray: its methods are those of an object in this process."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self.lost: Exception | None = None

    def __getattr__(self, name: str) -> Any:
        async def call(*arguments: Any) -> Any:
            if self.lost is not None:
                raise self.lost
            return await getattr(self._worker, name)(*arguments)

        return SimpleNamespace(remote=call)


@pytest.fixture
def fake_ray(monkeypatch: pytest.MonkeyPatch) -> Any:
    """In place of the package `ray`."""
    fake: Any = ModuleType("ray")
    fake.actors, fake.killed, fake.places = [], [], []
    fake.exceptions = SimpleNamespace(RayError=type("RayError", (Exception,), {}))
    servers = [FakeServer(), FakeServer()]

    async def launch(spec: ReplicaSpec, member: GroupMember) -> Any:
        if spec.name == "refused":
            raise FailedPrecondition(f"no model on node {member.index}")
        return servers[member.index - 1]

    def create() -> FakeActor:
        fake.actors.append(FakeActor(WorkerServer(launch)))
        return fake.actors[-1]

    def options(**given: Any) -> Any:
        fake.places.append(given)
        return SimpleNamespace(remote=create)

    fake.remote = lambda kind: SimpleNamespace(options=options)
    fake.kill = lambda actor: fake.killed.append(actor)
    fake.servers = servers
    util, strategies = ModuleType("ray.util"), ModuleType("ray.util.scheduling_strategies")
    util.get_current_placement_group = lambda: "the group"  # type: ignore[attr-defined]
    strategies.PlacementGroupSchedulingStrategy = SimpleNamespace  # type: ignore[attr-defined]
    for name, module in (("ray", fake), ("ray.util", util), ("ray.util.scheduling_strategies", strategies)):
        monkeypatch.setitem(sys.modules, name, module)
    return fake


GROUP = replace(SPEC, worker=WorkerSpec(2, {}, 3.0, 1, 512))
LEADER = GroupMember(3, 0, "10.0.0.7", "secret")


@async_test
async def test_workers_are_actors_in_the_other_bundles(fake_ray: Any) -> None:
    workers = await launch_workers(GROUP, LEADER, {29500: 31001})
    assert [place.pop("scheduling_strategy").placement_group_bundle_index for place in fake_ray.places] == [1, 2]
    assert fake_ray.places == [{"num_cpus": 3.0, "num_gpus": 1, "memory": 512}] * 2
    ended = asyncio.ensure_future(workers.ended())
    await asyncio.sleep(0)
    fake_ray.servers[1].ended.set()
    assert await ended == "worker 2: it has ended: -9"
    await workers.stop()
    assert fake_ray.killed == fake_ray.actors and all(server.stopped for server in fake_ray.servers)


@async_test
async def test_a_lost_actor_is_a_worker_that_has_ended(fake_ray: Any) -> None:
    workers = await launch_workers(GROUP, LEADER, {})
    fake_ray.actors[0].lost = fake_ray.exceptions.RayError("its node has failed")
    assert await workers.ended() == "worker 1: its process or its node has ended"
    await workers.stop()
    assert fake_ray.killed == fake_ray.actors


@async_test
async def test_workers_that_cannot_start_are_named_and_killed(fake_ray: Any) -> None:
    with pytest.raises(FailedPrecondition, match="worker 1 of refused: no model on node 1"):
        await launch_workers(replace(GROUP, name="refused"), LEADER, {})
    assert fake_ray.killed == fake_ray.actors
