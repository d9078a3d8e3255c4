# SPDX-License-Identifier: Apache-2.0
"""A fleet of a simulated machine: the real daemon, its real routers and its real client, in one process and in virtual time.

async def test_something(fleet: SimulatedFleet) -> None:
    await fleet.apply(service("birds"))
    url = await fleet.ready("birds")
    assert (await fleet.ask(url)).text.startswith("birds ")

Real: everything of `headrace.fleet.local` but the process runtime, `headrace router`, HTTP on both sides. Fake: containers
(`FakeDriver`), processes (`SimulatedSystem`), the network (`memory_network`). What programs do is in `simulated_programs`.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
import time
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch
from urllib.parse import urlsplit

from local_site import document, runtime
from memory_network import MemoryLoop, MemoryNetwork, RealTimeLoop, settle
from simulated_programs import Bench, Program, SimulatedProcess, idle, metered, router, serve, stub, task

from headrace.core.files import read_json, write_json
from headrace.fleet.client.contract import kind_named
from headrace.fleet.client.describe import Description, describe
from headrace.fleet.local import controller
from headrace.fleet.local.api_client import LocalFleet
from headrace.fleet.local.container_command import ContainerStartError
from headrace.fleet.local.container_runtime import LOG, RECORD, ContainerSpec, ExitStatus
from headrace.fleet.local.scheduler import Scheduler
from headrace.fleet.local.settings import LocalSettings
from headrace.fleet.local.system import ResourceUsage, System, UsageReader
from headrace.net.server import drain_servers
from headrace.net.sockets import Address
from headrace.platforms import process_stubs
from headrace.platforms.kubernetes_client.objects import Document, get_list, get_str
from headrace.platforms.log_files import last_lines
from headrace.platforms.node_resources import PortAllocator
from headrace.platforms.processes import Command
from headrace.programs.fleet_daemon import Daemon
from support.virtual_time import LoopClock, run_virtual
from support.waiting import eventually_async

SERVICE = kind_named("InferenceService")
_BOOT = "simulated"
_SCRIPTS: Mapping[str, Program] = {"stub_server.py": stub, "metered_server.py": metered}
_OURS: Mapping[str, Program] = {"router": router, "serve": serve}
_PROGRAMS: Mapping[str, Program] = {"task": task, "idle": idle}
_daemons = itertools.count(1)
_shipped_runtimes = cache(controller.shipped_runtimes)
"""Read once: that takes longer than most tests."""


class SimulatedMachine:
    """The processes of the machine, which daemons come and go over."""

    def __init__(self, loop: MemoryNetwork) -> None:
        self.loop = loop
        self.processes: dict[int, SimulatedProcess] = {}
        self.bench = Bench()

    def spawn(self, program: Program, process: SimulatedProcess, record: Callable[[Mapping[str, Any]], None]) -> None:
        """Start it. It does nothing before `record` has kept who it is."""
        record({"pid": process.pid, "boot": _BOOT})
        self.processes[process.pid] = process
        process.start(program)

    def found(self, record: Mapping[str, Any] | None) -> SimulatedProcess | None:
        """The process of a record, if it lives."""
        process = self.processes.get(int((record or {}).get("pid", 0)))
        return process if process is not None and process.is_alive else None


class ProcessHandle:
    """See `processes.Process`: a process as the daemon has it that started it (`own`), or one that found it."""

    def __init__(self, process: SimulatedProcess, *, own: bool) -> None:
        self._process = process
        self._own = own
        self.pid = process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.is_alive

    async def wait(self) -> int | None:
        how = await self._process.wait()
        return how.code if self._own else None

    async def stop(self, grace_seconds: float) -> None:
        await self._process.stop(grace_seconds)

    async def kill(self) -> None:
        self._process.kill()

    def detach(self) -> None:
        """It runs on."""


class SimulatedUsage(UsageReader):
    """What simulated processes use."""

    def __init__(self, machine: SimulatedMachine) -> None:
        super().__init__()
        self._machine = machine

    def read(self, now: float, sessions: Any) -> dict[int, ResourceUsage]:
        results = {session: self._machine.processes[session] for session in sessions}
        return {pid: ResourceUsage({(pid, 1): item.ticks}, item.memory, 1) for pid, item in results.items()}


class SimulatedSystem(System):
    """See `system.System`."""

    def __init__(self, machine: SimulatedMachine) -> None:
        super().__init__(machine.loop.clock)
        self._machine = machine

    def spawn(self, command: Command, log: Path, record: Callable[[Mapping[str, Any]], None]) -> Any:
        words = [*command.argv]
        if words[3:5] == [process_stubs.__file__, "wait"]:
            program: Program = self._machine.bench
            words = words[5:]
        else:
            program, words = router, words[words.index("router") :]
        process = SimulatedProcess(self._machine.loop, words, command.environment, log)
        self._machine.spawn(program, process, record)
        if program is self._machine.bench:
            self._machine.bench.started.append(process)
        return ProcessHandle(process, own=True)

    def find_process(self, record: Mapping[str, Any] | None) -> Any:
        process = self._machine.found(record)
        return ProcessHandle(process, own=False) if process is not None else None

    def listen(self, address: Address) -> Any:
        return self._machine.loop.listen(address.port)

    def usage(self) -> UsageReader:
        return SimulatedUsage(self._machine)


class FakeDriver:
    """Implements `ContainerRuntime`: containers are simulated processes."""

    runs_images = False

    def __init__(self, machine: SimulatedMachine) -> None:
        self._machine = machine
        self.started: list[ContainerSpec] = []
        self.refuses: Exception | None = None
        """What a start raises."""
        self.low_priority: set[int] = set()
        """Processes that come after others until they are ready."""

    async def open(self, pods: Collection[str]) -> None:
        """Nothing is left of earlier pods."""

    def adopt(self, folder: Path) -> FakeRunning | None:
        process = self._machine.found(read_json(folder / RECORD))
        return FakeRunning(self, process, folder, own=False) if process is not None else None

    async def start(self, spec: ContainerSpec) -> FakeRunning:
        if self.refuses is not None:
            raise self.refuses
        program = _program_of(spec)
        variables = spec.command.environment
        process = SimulatedProcess(self._machine.loop, spec.command.args, variables, spec.folder / LOG, spec.limits)
        self.started.append(spec)
        if spec.low_priority:
            self.low_priority.add(process.pid)
        self._machine.spawn(
            program, process, lambda record: write_json(spec.folder / RECORD, dict(record), durable=False)
        )
        return FakeRunning(self, process, spec.folder, own=True)

    async def close(self) -> None:
        """What runs goes on."""


class FakeRunning:
    """Implements `RunningContainer`."""

    def __init__(self, driver: FakeDriver, process: SimulatedProcess, folder: Path, *, own: bool) -> None:
        self._driver = driver
        self._process = process
        self._folder = folder
        self._own = own

    @property
    def label(self) -> str:
        return f"process {self._process.pid}"

    @property
    def session(self) -> int | None:
        return self._process.pid

    async def wait(self) -> ExitStatus:
        how = await self._process.wait()
        return how if self._own or how.reason else ExitStatus(None)

    async def stop(self, grace_seconds: float) -> None:
        await self._process.stop(grace_seconds)

    async def remove(self) -> None:
        self._process.kill()

    async def exec(self, args: Sequence[str], variables: Mapping[str, str], seconds: float) -> bool:
        assert list(args[:2]) == ["test", "-e"], f"no simulated command: {args}"
        return Path(args[2]).exists()

    async def logs(self, tail: int, max_bytes: int) -> str:
        return last_lines(self._folder / LOG, tail, max_bytes)

    def mark_ready(self) -> None:
        self._driver.low_priority.discard(self._process.pid)

    def detach(self) -> None:
        """It runs on."""


def _program_of(spec: ContainerSpec) -> Program:
    words = spec.command.args
    if spec.command.is_headrace and words[0] in _OURS:
        return _OURS[words[0]]
    for word in words[:2]:
        name = Path(word).name
        if name in _SCRIPTS:
            return _SCRIPTS[name]
    if words[0] not in _PROGRAMS:
        raise ContainerStartError("ErrImageNeverPull", f"{words[0]} is not on this machine: install it")
    return _PROGRAMS[words[0]]


@dataclass(frozen=True)
class Answer:
    """Of an HTTP server."""

    status: int
    text: str

    @property
    def by(self) -> str:
        """The first word: who answered."""
        return self.text.split()[0]

    @property
    def pid(self) -> int:
        return int(self.text.split()[1])


class SimulatedFleet:
    """A daemon, its machine, and its user. Use it inside of `run`."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.root = folder / "state"
        model = folder / "model"
        model.mkdir(parents=True)
        storage = {"storageUri": f"local://{model}", "path": "/mnt/models/stub"}
        self.model = document("ClusterBaseModel", "stub", {"modelFormat": {"name": "stub"}, "storage": storage})
        self.settings = LocalSettings(self.root, 20_000, pod_ports=(21_000, 21_999), **settings)
        self.fleet = LocalFleet(self.root)
        self.daemon: Daemon | None = None
        self.machine: SimulatedMachine
        self.driver: FakeDriver
        self._owner: object = ""

    def run(self, scenario: Coroutine[Any, Any, None]) -> None:
        """Play a scenario to its end, and stop everything. The fleet is up, and has a model and a runtime."""
        clock = LoopClock()
        # Routers tell times to the daemon, and have no clock of their own.
        with _quick(), patch.object(time, "time", clock.wall):
            run_virtual(self._play(scenario), clock, real_seconds=200.0, loop=MemoryLoop)

    @contextmanager
    def in_real_time(self) -> Iterator[SimulatedFleet]:
        """Run it in a thread, for programs that come through its UNIX socket."""
        started, ends = threading.Event(), asyncio.Event()
        loops: list[asyncio.AbstractEventLoop] = []

        async def run_until_stopped() -> None:
            loops.append(asyncio.get_running_loop())
            started.set()
            await ends.wait()

        def run() -> None:
            try:
                with asyncio.Runner(loop_factory=RealTimeLoop) as runner:
                    runner.run(self._play(run_until_stopped()))
            finally:
                started.set()

        with _quick(), ThreadPoolExecutor(1, "simulated-fleet") as thread:
            running = thread.submit(run)
            try:
                started.wait()
                yield self
            finally:
                if loops:
                    loops[0].call_soon_threadsafe(ends.set)
                running.result()

    async def _play(self, scenario: Coroutine[Any, Any, None]) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, MemoryNetwork)
        self.machine = SimulatedMachine(loop)
        self.driver = FakeDriver(self.machine)
        try:
            await self.up()
            await self.apply(self.model, runtime())
            await scenario
        finally:
            scenario.close()
            await self.stop()
            for process in self.machine.processes.values():
                process.kill()
            await settle()

    # The daemon

    async def up(self) -> None:
        """Start a daemon, as `headrace up` does."""
        self._owner = f"daemon {next(_daemons)}"
        await self.machine.loop.start_task(self._owner, self._start())

    async def _start(self) -> None:
        settings, root = self.settings, self.root
        ports = PortAllocator(root / "ports" / "pods", settings.host, *settings.pod_ports)
        machine = Scheduler(ports, environ={}, devices=root / "no-devices", cores=64, memory=256 << 30)
        self.daemon = Daemon(settings, machine, self.driver, SimulatedSystem(self.machine))
        await self.daemon.start()

    async def stop(self) -> None:
        """End the daemon as SIGTERM does: what runs goes on."""
        if self.daemon is not None:
            daemon, self.daemon = self.daemon, None
            daemon.controller.watches.close()
            await self.machine.loop.start_task(self._owner, _stop(daemon))
            self.machine.loop.drop_timers(self._owner)

    async def kill(self) -> None:
        """End the daemon as `kill -9` does."""
        assert self.daemon is not None
        daemon, self.daemon = self.daemon, None
        loop = self.machine.loop
        loop.kill(self._owner)
        await settle()
        assert not loop.tasks_of(self._owner)
        loop.drop_timers(self._owner)
        # The kernel closes its files.
        assert daemon.server._listener is not None
        daemon._lock.release()
        daemon.server._listener._socket.close()

    # Its user

    async def apply(self, *documents: Document) -> None:
        for definition in documents:
            await self.fleet.apply(definition)

    async def get(self, name: str) -> Document:
        result = await self.fleet.get(SERVICE, "default", name)
        assert result is not None
        return result

    async def pods(self, name: str) -> Sequence[Document]:
        return await self.fleet.pods(document("InferenceService", name, {}))

    async def events(self, *about: Document) -> list[Document]:
        return list(await self.fleet.events(about))

    async def described(self, name: str) -> Description:
        return await describe(self.fleet, await self.get(name))

    async def scale(self, name: str, replicas: int) -> Document:
        return await self.fleet.scale("default", name, "engine", replicas)

    async def delete(self, name: str) -> None:
        """Delete a service, and wait until it is gone."""
        await self.fleet.delete(document("InferenceService", name, {}))
        await self.until(lambda: self._is_deleted(name))

    async def _is_deleted(self, name: str) -> bool:
        return await self.fleet.get(SERVICE, "default", name) is None

    async def until(self, check: Callable[[], Any], within: float = 600.0) -> Any:
        """What a check returns, once that is true. In virtual seconds; the longer it takes, the less often it is looked."""
        return await eventually_async(check, within=within, longest_pause=0.5)

    async def condition(self, name: str, kind: str = "Ready") -> Document:
        reported = get_list(await self.get(name), "status", "conditions")
        return next((item for item in reported if item["type"] == kind), {})

    async def wait_for_message(self, name: str, words: str, kind: str = "Ready") -> Document:
        """The condition, once its message has these words."""

        async def found() -> Document:
            condition = await self.condition(name, kind)
            return condition if words in get_str(condition, "message") else {}

        created: Document = await self.until(found)
        return created

    async def ready(self, name: str, replicas: int = 1, engines: int | None = None) -> str:
        """The URL, once it is ready with so many pods and no others; `engines` of them are no routers."""

        async def phase() -> str:
            result = await self.get(name)
            engine = result.get("status", {}).get("components", {}).get("engine", {})
            whole = (engine.get("readyReplicas"), engine.get("replicas")) == (engines or replicas,) * 2
            generation = result.get("status", {}).get("observedGeneration") == result["metadata"]["generation"]
            conditions = {
                condition["type"]: condition["status"] for condition in get_list(result, "status", "conditions")
            }
            there = conditions.get("Ready") == conditions.get("LatestDeploymentReady") == "True"
            pods = [pod for pod in await self.pods(name) if "deletionTimestamp" not in pod["metadata"]]
            up = len(pods) == replicas and all(is_ready(pod) for pod in pods)
            return get_str(result, "status", "url") if whole and generation and there and up else ""

        url: str = await self.until(phase)
        return url

    async def url(self, name: str) -> str:
        """Where it is, once its router is there."""

        async def look() -> str:
            return get_str(await self.get(name), "status", "url")

        url: str = await self.until(look)
        return url

    async def ask(self, url: str, path: str = "/name") -> Answer:
        """One request. Raises OSError."""
        reader, writer = await asyncio.open_connection("127.0.0.1", urlsplit(url).port)
        try:
            writer.write(f"GET {path} HTTP/1.1\r\nHost: fleet\r\nConnection: close\r\n\r\n".encode())
            answer = (await reader.read()).decode()
        finally:
            writer.close()
        if not answer:
            raise ConnectionResetError("no answer")
        head, _, body = answer.partition("\r\n\r\n")
        if "transfer-encoding: chunked" in head.lower():
            body = _unchunked(body)
        return Answer(int(head.split()[1]), body)

    # Its machine

    def processes(self, name: str, container: str = "*") -> set[SimulatedProcess]:
        """Those of the pods of a service that are there."""
        results = set()
        for path in self.root.glob("pods/*/pod.json"):
            if (read_json(path) or {}).get("service") == ["default", name]:
                for item in path.parent.glob(f"containers/{container}/process.json"):
                    process = self.machine.found(read_json(item))
                    if process is not None:
                        results.add(process)
        return results

    def process(self, name: str, container: str = "*") -> SimulatedProcess:
        """The only one."""
        (found,) = self.processes(name, container)
        return found

    def router(self, name: str) -> SimulatedProcess:
        """The process of a Service's router."""
        result = self.machine.found(read_json(self.root / "routers" / "default" / name / "process.json"))
        assert result is not None
        return result

    def has_router(self, name: str) -> bool:
        return self.machine.found(read_json(self.root / "routers" / "default" / name / "process.json")) is not None

    @property
    def living(self) -> set[SimulatedProcess]:
        return {process for process in self.machine.processes.values() if process.is_alive}

    def left_on_disk(self) -> list[str]:
        """What is kept of services: pods, routers, claimed ports, objects, documents."""
        places = ("pods/*", "routers/*/*", "ports/*/[0-9]*", "objects/*/*", "documents/InferenceService/*/*")
        return sorted(str(path.relative_to(self.root)) for place in places for path in self.root.glob(place))


@contextmanager
def _quick() -> Iterator[None]:
    """Without what costs real time and is not tested here: disks that lose their power, other processes of the machine."""
    with (
        patch.object(os, "fsync", lambda _: None),
        patch.object(os, "sched_yield", lambda: None),
        patch.object(controller, "shipped_runtimes", _shipped_runtimes),
    ):
        yield


async def _stop(daemon: Daemon) -> None:
    await drain_servers([daemon.server], 1.0)
    await daemon.close()


def is_ready(pod: Document) -> bool:
    received = {condition["type"]: condition["status"] for condition in get_list(pod, "status", "conditions")}
    return received.get("Ready") == "True"


def _unchunked(body: str) -> str:
    made, rest = "", body
    while rest:
        size, _, rest = rest.partition("\r\n")
        length = int(size or "0", 16)
        if not length:
            break
        made, rest = made + rest[:length], rest[length + 2 :]
    return made


class Traffic:
    """Clients that ask one after the other until it is left; all answers and failures are kept. Use `async with`."""

    def __init__(
        self, fleet: SimulatedFleet, url: str, clients: int = 2, path: str = "/name", pause: float = 0.02
    ) -> None:
        self._fleet = fleet
        self._url = url
        self._path = path
        self._pause = pause
        self._clients = clients
        self._tasks: list[asyncio.Task[None]] = []
        self._over = False
        self.answers: list[Answer] = []
        self.failures: list[str] = []

    async def __aenter__(self) -> Traffic:
        self._tasks = [asyncio.ensure_future(self._ask()) for _ in range(self._clients)]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._over = True
        await asyncio.gather(*self._tasks)

    async def more(self, answers: int = 20) -> None:
        """Wait for so many more."""
        wanted = len(self.answers) + answers
        await self._fleet.until(lambda: len(self.answers) >= wanted)

    async def _ask(self) -> None:
        while not self._over:
            try:
                answer = await self._fleet.ask(self._url, self._path)
            except OSError as error:
                self.failures.append(repr(error))
            else:
                if answer.status == 200:
                    self.answers.append(answer)
                else:
                    self.failures.append(f"{answer.status} {answer.text}")
            await asyncio.sleep(self._pause)
