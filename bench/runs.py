# SPDX-License-Identifier: Apache-2.0
"""The order of measurements: each round starts every server once, one at a time.

Only one server is up at any moment, so nobody's idle threads cost somebody else; the order turns around every
round, so that a machine which slowly changes its speed does not favour the same server each time.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from bench.errors import BenchError
from bench.idle import IdleSample, measure_idle
from bench.loading import LoadingSample, measure_loading
from bench.measure import Sample, measure
from bench.memory import MemorySample, measure_memory
from bench.overload import OverloadSample, measure_overload
from bench.running import RunningServer, running, self_description
from bench.server import Server
from bench.servers import SERVERS
from bench.start import StartSample, measure_start
from bench.workloads import IDLE, IDLE_MEMORY, LOADINGS, OVERLOAD, START, WORKLOADS


@dataclass
class Results:
    """Everything that was seen."""

    samples: list[Sample] = field(default_factory=list)
    idle: list[IdleSample] = field(default_factory=list)
    loadings: list[LoadingSample] = field(default_factory=list)
    starts: list[StartSample] = field(default_factory=list)
    memory: list[MemorySample] = field(default_factory=list)
    overloads: list[OverloadSample] = field(default_factory=list)
    # "server workload" (or only "server", when it did not start) and why.
    refused: dict[str, str] = field(default_factory=dict)
    # What servers that speak v2 say about themselves: name, version.
    self_descriptions: dict[str, dict[str, str]] = field(default_factory=dict)


@dataclass(frozen=True)
class Plan:
    """What the command line asked for."""

    servers: tuple[str, ...]
    workloads: tuple[str, ...]
    rounds: int
    seconds: int
    keep_going: bool
    is_full: bool

    def workloads_of(self, server: Server) -> list[str]:
        return [name for name in server.workloads if name in self.workloads]

    def chosen(self) -> list[Server]:
        """The servers that have anything to do, and can be started here."""
        return [server for server in self._wanted() if server.is_available]

    def not_installed(self) -> list[Server]:
        """The servers that had something to do, did this machine have them."""
        return [server for server in self._wanted() if not server.is_available]

    def _wanted(self) -> list[Server]:
        return [SERVERS[name] for name in self.servers if self.workloads_of(SERVERS[name])]

    def measurements(self) -> int:
        return self.rounds * sum(len(self.workloads_of(server)) for server in self.chosen())


@dataclass
class Run:
    """A plan being carried out; tell() hears what is being done, tick() is called after each measurement."""

    plan: Plan
    tell: Callable[[str], None]
    tick: Callable[[], None]
    results: Results = field(default_factory=Results)

    def all_rounds(self) -> Results:
        for round_number in range(1, self.plan.rounds + 1):
            order = self.plan.chosen()
            for server in order if round_number % 2 else reversed(order):
                self._one_server(server, round_number)
        return self.results

    def _one_server(self, server: Server, round_number: int) -> None:
        label = f"round {round_number}/{self.plan.rounds} {server.name}"
        self.tell(f"{label}: starting")
        try:
            if START in self.plan.workloads_of(server):
                # Has no server that runs already, nor anything else to do.
                self.results.starts.append(measure_start(server, round_number))
                self.tick()
                return
            with running(server) as target:
                if described := self_description(target):
                    self.results.self_descriptions[server.name] = described
                for name in self.plan.workloads_of(server):
                    self.tell(f"{label}: {name}")
                    self._one_workload(target, name, round_number)
                    self.tick()
        except BenchError as error:
            self._refuse(server.name, error)

    def _one_workload(self, target: RunningServer, name: str, round_number: int) -> None:
        try:
            if name == IDLE:
                self.results.idle.append(measure_idle(target, round_number, self.plan.seconds))
            elif name == IDLE_MEMORY:
                self.results.memory.append(measure_memory(target, round_number))
            elif name == OVERLOAD:
                self.results.overloads.append(measure_overload(target, round_number, self.plan.seconds))
            elif name in LOADINGS:
                self.results.loadings.append(measure_loading(target, LOADINGS[name], round_number))
            else:
                self.results.samples.append(measure(target, WORKLOADS[name], round_number, self.plan.seconds))
        except BenchError as error:
            self._refuse(f"{target.server.name} {name}", error)

    def _refuse(self, subject: str, error: BenchError) -> None:
        if not self.plan.keep_going:
            raise BenchError(f"{subject}: {error}") from error
        self.results.refused[subject] = str(error)
