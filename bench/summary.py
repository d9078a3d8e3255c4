# SPDX-License-Identifier: Apache-2.0
"""Summarise samples: one figure per server and workload."""

from dataclasses import dataclass
from statistics import median

from bench.idle import IdleSample
from bench.loading import LoadingSample
from bench.measure import Sample
from bench.memory import MemorySample
from bench.overload import OverloadSample
from bench.runs import Results
from bench.start import StartSample

# Others' CPU, in cores, from which on a figure is no longer to be trusted: it slows server and client alike.
DISTURBED_CORES = 0.15


@dataclass(frozen=True)
class Figure:
    """The medians over the rounds; errors are added up, and the CPU's lowest and highest round are kept."""

    server: str
    workload: str
    rounds: int
    requests_per_second: float
    p50_ms: float
    p99_ms: float
    server_cpu_ms_per_1000: float
    lowest_cpu_ms_per_1000: float
    highest_cpu_ms_per_1000: float
    client_cpu_ms_per_1000: float
    pss_mb: float
    rss_mb: float
    processes: int
    errors: int
    other_cores: float

    @property
    def is_disturbed(self) -> bool:
        return self.other_cores > DISTURBED_CORES


@dataclass(frozen=True)
class IdleFigure:
    """The medians over the rounds of a server that had nothing to do."""

    server: str
    models: int
    rounds: int
    percent_of_core: float
    pss_mb: float
    processes: int
    other_cores: float

    @property
    def is_disturbed(self) -> bool:
        return self.other_cores > DISTURBED_CORES


@dataclass(frozen=True)
class LoadingFigure:
    """Medians of the rounds' medians: a load with the first answer, and without; and the quickest and slowest of all."""

    server: str
    workload: str
    loads: int
    seconds: float
    load_seconds: float
    cpu_seconds: float
    lowest_seconds: float
    highest_seconds: float
    other_cores: float

    @property
    def is_disturbed(self) -> bool:
        return self.other_cores > DISTURBED_CORES


@dataclass(frozen=True)
class StartFigure:
    """Medians of the rounds' medians: from the start of the process to its first answer, and until all models are ready."""

    server: str
    starts: int
    seconds: float
    ready_seconds: float
    lowest_seconds: float
    highest_seconds: float
    cpu_seconds: float
    other_cores: float

    @property
    def is_disturbed(self) -> bool:
        return self.other_cores > DISTURBED_CORES


@dataclass(frozen=True)
class MemoryFigure:
    """The medians over the rounds of a server that has loaded nothing."""

    server: str
    rounds: int
    rss_mb: float
    pss_mb: float
    processes: int
    # Others' CPU takes no memory from it.
    is_disturbed: bool = False


@dataclass(frozen=True)
class OverloadFigure:
    """The medians over the rounds of a server that was asked for more than it can do; failures are added up."""

    server: str
    rounds: int
    peak: float
    offered: float
    goodput: float
    # Of each round's goodput by its own peak.
    share_of_peak: float
    accepted_p50_ms: float
    accepted_p99_ms: float
    rejected: int
    rejected_p50_ms: float
    rejected_p99_ms: float
    failed: int
    late_p99_ms: float
    other_cores: float

    @property
    def is_disturbed(self) -> bool:
        return self.other_cores > DISTURBED_CORES


@dataclass(frozen=True)
class Summary:
    """All figures of a run; None and empty where nothing was measured."""

    figures: list[Figure]
    loadings: list[LoadingFigure]
    idle: IdleFigure | None
    start: StartFigure | None
    memory: MemoryFigure | None
    overload: OverloadFigure | None


def summary_of(results: Results) -> Summary:
    """Everything that was seen, in figures."""
    return Summary(
        figures=figures_of(results.samples),
        loadings=loading_figures_of(results.loadings),
        idle=idle_figure_of(results.idle),
        start=start_figure_of(results.starts),
        memory=memory_figure_of(results.memory),
        overload=overload_figure_of(results.overloads),
    )


def figures_of(samples: list[Sample]) -> list[Figure]:
    """One figure per server and workload, in the order in which they were first measured."""
    groups: dict[tuple[str, str], list[Sample]] = {}
    for sample in sorted(samples, key=lambda sample: sample.round):
        groups.setdefault((sample.server, sample.workload), []).append(sample)
    return [_figure(group) for group in groups.values()]


def _figure(group: list[Sample]) -> Figure:
    costs = [sample.server_cpu_ms_per_1000 for sample in group]
    return Figure(
        server=group[0].server,
        workload=group[0].workload,
        rounds=len(group),
        requests_per_second=median(sample.requests_per_second for sample in group),
        p50_ms=median(sample.p50_ms for sample in group),
        p99_ms=median(sample.p99_ms for sample in group),
        server_cpu_ms_per_1000=median(costs),
        lowest_cpu_ms_per_1000=min(costs),
        highest_cpu_ms_per_1000=max(costs),
        client_cpu_ms_per_1000=median(sample.client_cpu_ms_per_1000 for sample in group),
        pss_mb=median(sample.pss_mb for sample in group),
        rss_mb=median(sample.rss_mb for sample in group),
        processes=group[-1].processes,
        errors=sum(sample.errors for sample in group),
        other_cores=median(sample.other_cores for sample in group),
    )


def idle_figure_of(samples: list[IdleSample]) -> IdleFigure | None:
    """The one idle server there is, if it was measured."""
    if not samples:
        return None
    return IdleFigure(
        server=samples[0].server,
        models=samples[0].models,
        rounds=len(samples),
        percent_of_core=median(sample.percent_of_core for sample in samples),
        pss_mb=median(sample.pss_mb for sample in samples),
        processes=samples[-1].processes,
        other_cores=median(sample.other_cores for sample in samples),
    )


def start_figure_of(samples: list[StartSample]) -> StartFigure | None:
    """The one server whose start is measured, if it was."""
    if not samples:
        return None
    start_seconds = [seconds for sample in samples for seconds in sample.each_seconds]
    return StartFigure(
        server=samples[0].server,
        starts=len(start_seconds),
        seconds=median(sample.median_seconds for sample in samples),
        ready_seconds=median(sample.median_ready_seconds for sample in samples),
        lowest_seconds=min(start_seconds),
        highest_seconds=max(start_seconds),
        cpu_seconds=median(sample.cpu_seconds for sample in samples),
        other_cores=median(sample.other_cores for sample in samples),
    )


def memory_figure_of(samples: list[MemorySample]) -> MemoryFigure | None:
    """The one server whose bare memory is measured, if it was."""
    if not samples:
        return None
    return MemoryFigure(
        server=samples[0].server,
        rounds=len(samples),
        rss_mb=median(sample.rss_mb for sample in samples),
        pss_mb=median(sample.pss_mb for sample in samples),
        processes=samples[-1].processes,
    )


def overload_figure_of(samples: list[OverloadSample]) -> OverloadFigure | None:
    """The one server that is overloaded, if it was."""
    if not samples:
        return None
    return OverloadFigure(
        server=samples[0].server,
        rounds=len(samples),
        peak=median(sample.peak for sample in samples),
        offered=median(sample.offered for sample in samples),
        goodput=median(sample.goodput for sample in samples),
        share_of_peak=median(sample.goodput / sample.peak for sample in samples),
        accepted_p50_ms=median(sample.accepted_p50_ms for sample in samples),
        accepted_p99_ms=median(sample.accepted_p99_ms for sample in samples),
        rejected=sum(sample.rejected for sample in samples),
        rejected_p50_ms=median(sample.rejected_p50_ms for sample in samples),
        rejected_p99_ms=median(sample.rejected_p99_ms for sample in samples),
        failed=sum(sample.failed for sample in samples),
        late_p99_ms=median(sample.late_p99_ms for sample in samples),
        other_cores=median(sample.other_cores for sample in samples),
    )


def loading_figures_of(samples: list[LoadingSample]) -> list[LoadingFigure]:
    """One figure per server and workload, in the order in which they were first measured."""
    groups: dict[tuple[str, str], list[LoadingSample]] = {}
    for sample in sorted(samples, key=lambda sample: sample.round):
        groups.setdefault((sample.server, sample.workload), []).append(sample)
    return [_loading_figure(group) for group in groups.values()]


def _loading_figure(group: list[LoadingSample]) -> LoadingFigure:
    load_seconds = [seconds for sample in group for seconds in sample.each_seconds]
    return LoadingFigure(
        server=group[0].server,
        workload=group[0].workload,
        loads=len(load_seconds),
        seconds=median(sample.median_seconds for sample in group),
        load_seconds=median(sample.median_load_seconds for sample in group),
        cpu_seconds=median(sample.cpu_seconds for sample in group),
        lowest_seconds=min(load_seconds),
        highest_seconds=max(load_seconds),
        other_cores=median(sample.other_cores for sample in group),
    )


def two_processes_at_most(figures: list[Figure], cores: int) -> float | None:
    """What a free second process would give, the load generator needing its share of the same cores."""
    for figure in figures:
        if (figure.server, figure.workload) == ("headrace", "processes"):
            server, client = figure.server_cpu_ms_per_1000, figure.client_cpu_ms_per_1000
            # One process fills one core; all cores together serve a request per server + client CPU time.
            return min(2.0, cores * server / (server + client))
    return None
