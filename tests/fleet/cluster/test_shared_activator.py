# SPDX-License-Identifier: Apache-2.0
"""The shared activator with a whole service around it, in virtual time: operator, front router, engine, kube-proxy.

The operator, the activator and the front router are the real ones, on real sockets. The API server and the nodes are those
of `memory_cluster`: pods take seconds to start and to stop, and kube-proxy learns of endpoints a second late.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from memory_cluster import MemoryCluster, Nodes, Stop, random_address
from plan_cases import facts, service

from headrace.cli.router_settings import router_settings
from headrace.fleet.planning.shared_activator import ACTIVATION, activation_of
from headrace.fleet.router.proxy import RouterProxy
from headrace.net.http.exchange import Exchange
from headrace.net.http.heads import OK_PLAIN
from headrace.net.http.routes import Routes
from headrace.net.negotiation import NegotiatingProtocol
from headrace.net.server import HttpServer
from headrace.net.site import Site
from headrace.net.sockets import Address
from headrace.programs.activator import ActivatedServices, ActivatorSettings, activate
from headrace.programs.operator import Controller, OperatorSettings
from headrace.programs.router import build_router_site
from headrace.programs.router_scalers import KubernetesScaler
from support.virtual_time import run_virtual
from support.waiting import eventually_async

IDLE_SECONDS = 30
ENGINE_PORT = 9000
FRONT_PORT = 8080


class ServiceNetwork:
    """What a Service's address does: a listener while it has endpoints, and none while it has not."""

    def __init__(self, nodes: Nodes, name: str, address: str, port: int) -> None:
        self._nodes, self._name, self._address, self._port = nodes, name, address, port
        self._pipes: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        server: asyncio.Server | None = None
        try:
            while True:
                endpoints = self._nodes.endpoints(self._name)
                if endpoints and server is None:
                    server = await asyncio.start_server(self._connect, self._address, self._port)
                elif not endpoints and server is not None:
                    server.close()
                    server = None
                await asyncio.sleep(0.05)
        finally:
            if server is not None:
                server.close()
            for pipe in self._pipes:
                pipe.cancel()
            await asyncio.gather(*self._pipes, return_exceptions=True)

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there, back = await asyncio.open_connection(*self._nodes.endpoints(self._name)[0])
        except (OSError, IndexError):
            writer.close()
            return
        for source, sink in ((reader, back), (there, writer)):
            task = asyncio.ensure_future(_pipe(source, sink))
            self._pipes.add(task)
            task.add_done_callback(self._pipes.discard)


async def _pipe(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await source.read(65536):
            sink.write(data)
    sink.close()


class Client:
    """Asks the Service again and again, over one connection as long as it lives or over one for each request."""

    def __init__(self, nodes: Nodes, keeps: bool) -> None:
        self._nodes, self._keeps = nodes, keeps
        self._connection: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._turn = 0
        self.places: list[tuple[str, int]] = []
        """Where each request went."""
        self.failures: list[str] = []

    async def ask(self) -> float:
        """Send one request; return the seconds until its answer. A failure is noted."""
        since = asyncio.get_running_loop().time()
        try:
            await self._ask()
        except (OSError, asyncio.IncompleteReadError, AssertionError, IndexError) as error:
            self.failures.append(f"{since:.2f}: {error!r}")
            self.close()
        return asyncio.get_running_loop().time() - since

    async def _ask(self) -> None:
        if self._connection is not None and self._connection[0].at_eof():
            self.close()  # closed while it was idle, as any client notices
        if self._connection is None:
            endpoints = self._nodes.endpoints("chat")
            self._turn += 1
            place = endpoints[self._turn % len(endpoints)]
            self._connection = await asyncio.open_connection(*place)
            self._place = place
        self.places.append(self._place)
        reader, writer = self._connection
        last = "" if self._keeps else "Connection: close\r\n"
        writer.write(f"POST /work HTTP/1.1\r\nHost: chat\r\nContent-Length: 2\r\n{last}\r\nhi".encode())
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        assert head.startswith(b"http/1.1 200"), head
        length = int(head.partition(b"content-length:")[2].partition(b"\r\n")[0])
        assert await reader.readexactly(length) == b"done"
        if not self._keeps or b"connection: close" in head:
            self.close()

    def close(self) -> None:
        if self._connection is not None:
            self._connection[1].close()
            self._connection = None


class Fleet:
    """One service in a cluster with the operator and the activator."""

    def __init__(self, folder: Path, load_seconds: float) -> None:
        self.cluster = MemoryCluster()
        self.folder = folder
        self.engine_host = random_address()
        self.activator_host = random_address()
        self.work_seconds = 0.0
        self.served = 0
        self.nodes = Nodes(
            self.cluster,
            {"chat-engine": self._engine, "chat-front": self._front},
            start_seconds={"chat-engine": load_seconds},
        )
        self.stop = asyncio.Event()
        self._tasks: list[asyncio.Task[Any]] = []
        self._clients: list[Client] = []

    async def start(self) -> None:
        known = facts()
        for document in (*known.runtimes, *known.models):
            self.cluster.set(dict(document))
        self.controller = Controller(self.cluster, OperatorSettings(elect=False))
        network = ServiceNetwork(self.nodes, "chat-engine", self.engine_host, ENGINE_PORT)
        settings = ActivatorSettings(host=self.activator_host, host_of=lambda *_: self.engine_host, grace_seconds=60)
        self._tasks = [
            asyncio.ensure_future(work)
            for work in (
                self.controller.run(),
                self.nodes.run(),
                network.run(),
                activate(self.cluster, settings, self.stop),
            )
        ]
        self.set_activator()

    def set_activator(self, ready: bool = True) -> None:
        """Say whether the activator's pod is ready."""
        condition = {"type": "Ready", "status": "True" if ready else "False"}
        labels = {"app.kubernetes.io/name": "headrace-activator"}
        metadata = {"name": "activator-1", "namespace": "headrace-system", "labels": labels}
        status = {"podIP": self.activator_host, "conditions": [condition]}
        self.cluster.set({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "status": status})

    def apply(self) -> None:
        """Apply the service."""
        document = service(
            {"engine": {"minReplicas": 0, "maxReplicas": 1}},
            ome_io__deploymentMode="RawDeployment",
            ome_io__scale_to_zero_idle_seconds=str(IDLE_SECONDS),
        )
        self.cluster.set({"apiVersion": "ome.io/v1beta1", **document})

    def client(self, keeps: bool) -> Client:
        """Return a client, which is closed with the fleet."""
        self._clients.append(Client(self.nodes, keeps))
        return self._clients[-1]

    @property
    def ready(self) -> str:
        """Status of the service's Ready condition."""
        conditions = self.cluster.of_kind("InferenceService")[0].get("status", {}).get("conditions", [])
        return next((item["status"] for item in conditions if item["type"] == "Ready"), "")

    @property
    def own_pods(self) -> int:
        return self.nodes.running("chat-engine") + self.nodes.running("chat-front")

    async def close(self) -> None:
        for client in self._clients:
            client.close()
        self.stop.set()
        await self.nodes.close()
        await self._tasks[-1]
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _engine(self, address: str) -> Stop:
        async def work(exchange: Exchange) -> None:
            await asyncio.sleep(self.work_seconds)
            self.served += 1
            exchange.respond(OK_PLAIN, b"done")

        def start(exchange: Exchange) -> None:
            task = asyncio.ensure_future(work(exchange))
            exchange.memo = task  # type: ignore[attr-defined]

        routes = Routes()
        routes.add("POST", "/work", start)
        site = Site(routes)
        server = HttpServer(site, Address(address, ENGINE_PORT), partial(NegotiatingProtocol, site))
        await server.start()
        return _stopping(server, 60)

    async def _front(self, address: str) -> Stop:
        config_map = self.cluster.get_now("ConfigMap", "chat-front")
        assert config_map is not None
        config = json.loads(config_map["data"]["router.yaml"])
        config |= {"host": address, "backends": [f"http://{self.engine_host}:{ENGINE_PORT}"]}
        path = self.folder / "router.yaml"
        path.write_text(json.dumps(config))
        settings = router_settings({}, str(path))
        proxy = RouterProxy(settings.router, KubernetesScaler(self.cluster))
        server = HttpServer(
            (site := build_router_site(proxy, None, settings)), settings.address, partial(NegotiatingProtocol, site)
        )
        await proxy.start()
        await server.start()
        return _stopping(server, 60, proxy)


def _stopping(server: HttpServer, seconds: float, proxy: RouterProxy | None = None) -> Callable[[], Awaitable[None]]:
    async def stop() -> None:
        if proxy is not None:
            proxy.drain(seconds)
        await server.drain(seconds)
        if proxy is not None:
            await proxy.close()

    return stop


@asynccontextmanager
async def running(folder: Path, load_seconds: float = 8.0) -> AsyncIterator[Fleet]:
    fleet = Fleet(folder, load_seconds)
    await fleet.start()
    try:
        fleet.apply()
        await eventually_async(lambda: fleet.ready == "True", within=load_seconds + 60)
        yield fleet
    finally:
        await fleet.close()


async def asleep(fleet: Fleet) -> None:
    await eventually_async(lambda: fleet.own_pods == 0, within=10 * IDLE_SECONDS)


def test_a_service_at_zero_has_no_pods_and_a_request_waits_for_its_pod_alone(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as fleet:
            await asleep(fleet)
            assert fleet.ready == "True", "it serves, and a request is answered"
            client = fleet.client(keeps=False)
            for _ in range(3):
                since = asyncio.get_running_loop().time()
                seconds = await client.ask()
                (engine,) = fleet.nodes.pods["chat-engine"]
                own = engine.ready_at - since + fleet.nodes.proxy_seconds
                assert own <= seconds <= own + 0.3, (own, seconds)
                assert client.places[-1][0] == fleet.activator_host
                await asleep(fleet)
            assert client.failures == []

    run_virtual(scenario())


def test_no_request_is_lost_while_it_wakes_and_falls_asleep(tmp_path: Path) -> None:
    """With and without keep-alive, with pauses that are just about as long as the idle time."""

    async def scenario() -> None:
        async with running(tmp_path) as fleet:
            fleet.work_seconds = 0.2
            clients = [fleet.client(keeps=keeps) for keeps in (True, True, False, False)]
            await asleep(fleet)
            asked = 0
            for pause in (1.0, 29.5, 30.2, 33.0, 34.9, 36.0, 41.0, 55.0):
                for _ in range(30):
                    await asyncio.gather(*(client.ask() for client in clients))
                    asked += len(clients)
                    await asyncio.sleep(0.4)
                await asyncio.sleep(pause)
            assert [failure for client in clients for failure in client.failures] == []
            assert fleet.served == asked
            # Requests went both ways.
            hosts = {place[0] for client in clients for place in client.places}
            assert fleet.activator_host in hosts and len(hosts) > 1

    run_virtual(scenario(), real_seconds=120)


def test_clients_that_keep_their_connection_move_to_the_front(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as fleet:
            await asleep(fleet)
            client = fleet.client(keeps=True)
            # More than the idle time: the front would scale to zero if it saw none of them.
            for _ in range(4 * IDLE_SECONDS):
                await client.ask()
                await asyncio.sleep(1.0)
            assert client.failures == []
            assert client.places[0][0] == fleet.activator_host
            moved = [place[0] != fleet.activator_host for place in client.places]
            assert all(moved[20:]) and fleet.nodes.running("chat-engine") == 1

    run_virtual(scenario())


def test_a_slow_start_is_waited_for_however_short_the_idle_time_is(tmp_path: Path) -> None:
    """The front sees no request while the activator holds one, and must not scale to zero for that."""

    async def scenario() -> None:
        async with running(tmp_path, load_seconds=8 * IDLE_SECONDS) as fleet:
            await asleep(fleet)
            client = fleet.client(keeps=False)
            assert await client.ask() <= 8 * IDLE_SECONDS + fleet.nodes.proxy_seconds + 0.3
            assert client.failures == [] and client.places[0][0] == fleet.activator_host

    run_virtual(scenario())


def test_without_the_activator_the_front_comes_back(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as fleet:
            await asleep(fleet)
            fleet.set_activator(ready=False)
            await eventually_async(lambda: fleet.nodes.running("chat-front") == 1)
            assert fleet.cluster.of_kind("EndpointSlice") == []
            fleet.set_activator(ready=True)
            await asleep(fleet)

    run_virtual(scenario())


def test_the_activator_follows_the_fronts(tmp_path: Path) -> None:
    """A changed port is opened, a service that is gone is closed, and a port that is taken does not stop the others."""
    front = {"apiVersion": "apps/v1", "kind": "Deployment", "spec": {"replicas": 0}}

    def deployment(name: str, port: int, targets: bool = True) -> dict[str, Any]:
        target = {"apiVersion": "apps/v1", "kind": "Deployment", "name": f"{name}-engine"}
        activation = {
            "port": port,
            "backends": [{"service": f"{name}-engine", "port": 9000, "weight": 100}],
            "targets": [target] if targets else [],
        }
        metadata = {"name": f"{name}-front", "namespace": "default", "labels": {"ome.io/inferenceservice": name}}
        return {**front, "metadata": {**metadata, "annotations": {ACTIVATION: json.dumps(activation)}}}

    async def scenario() -> None:
        cluster, host = MemoryCluster(), random_address()
        cluster.set(deployment("a", 20000))
        cluster.set(deployment("b", 20000))
        cluster.set(deployment("odd", 20002, targets=False))
        services = ActivatedServices(cluster, ActivatorSettings(host=host))
        task = asyncio.ensure_future(services.run())

        async def opens(port: int) -> bool:
            try:
                _, writer = await asyncio.open_connection(host, port)
            except OSError:
                return False
            writer.close()
            return True

        try:
            await asyncio.wait_for(services.ready.wait(), 60)
            assert await opens(20000) and not await opens(20002)
            assert activation_of(cluster.get_now("Deployment", "b-front")) is not None
            cluster.set(deployment("b", 20001))
            await eventually_async(partial(opens, 20001))
            cluster.remove("Deployment", "a-front")

            async def closed() -> bool:
                return not await opens(20000)

            await eventually_async(closed)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await services.close(0)

    run_virtual(scenario())
