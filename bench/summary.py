# SPDX-License-Identifier: Apache-2.0
"""Called by __main__.py: turns samples into one figure per server and workload, and judges the targets."""

from dataclasses import dataclass
from statistics import median

from bench.measure import Sample


@dataclass(frozen=True)
class Target:
    """Headrace's server CPU per request must be at most this share of the peer's."""

    workload: str
    peer: str
    at_most: float


TARGETS = (
    Target("json16", "triton-python", 0.30),
    Target("json16", "fastapi", 0.20),
    Target("binary16", "triton-python", 0.30),
    Target("binary16", "fastapi", 0.20),
    Target("grpc16", "triton-python", 0.25),
    Target("grpc16", "grpc-aio", 0.15),
    Target("binary600k", "triton-python", 0.40),
    Target("grpc600k", "triton-python", 0.60),
)
TWO_PROCESSES_AT_LEAST = 1.5
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
class Verdict:
    """One target, what was measured for it, and whether it was met."""

    workload: str
    against: str
    ours: float | None
    theirs: float | None
    ratio: float | None
    target: str
    result: str


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


def verdicts_of(figures: list[Figure]) -> list[Verdict]:
    """Every target, those that could not be judged included."""
    known = {(figure.server, figure.workload): figure for figure in figures}
    return [_cpu_verdict(target, known) for target in TARGETS] + [_processes_verdict(known)]


def _cpu_verdict(target: Target, known: dict[tuple[str, str], Figure]) -> Verdict:
    ours = known.get(("headrace", target.workload))
    theirs = known.get((target.peer, target.workload))
    ratio = ours.server_cpu_ms_per_1000 / theirs.server_cpu_ms_per_1000 if ours and theirs else None
    return Verdict(
        workload=target.workload,
        against=target.peer,
        ours=ours.server_cpu_ms_per_1000 if ours else None,
        theirs=theirs.server_cpu_ms_per_1000 if theirs else None,
        ratio=ratio,
        target=f"<= {target.at_most:.2f}",
        result=_result(ratio is not None and ratio <= target.at_most, ours, theirs),
    )


def _processes_verdict(known: dict[tuple[str, str], Figure]) -> Verdict:
    one, two = known.get(("headrace", "processes")), known.get(("headrace-2", "processes"))
    ratio = two.requests_per_second / one.requests_per_second if one and two else None
    return Verdict(
        workload="processes (requests/s)",
        against="1 process",
        ours=two.requests_per_second if two else None,
        theirs=one.requests_per_second if one else None,
        ratio=ratio,
        target=f">= {TWO_PROCESSES_AT_LEAST:.2f}",
        result=_result(ratio is not None and ratio >= TWO_PROCESSES_AT_LEAST, one, two),
    )


def two_processes_at_most(figures: list[Figure], cores: int) -> float | None:
    """What a free second process would give, the load generator needing its share of the same cores."""
    for figure in figures:
        if (figure.server, figure.workload) == ("headrace", "processes"):
            server, client = figure.server_cpu_ms_per_1000, figure.client_cpu_ms_per_1000
            # One process fills one core; all cores together serve a request per server + client CPU time.
            return min(2.0, cores * server / (server + client))
    return None


def _result(met: bool, *measured: Figure | None) -> str:
    known = [figure for figure in measured if figure is not None]
    if len(known) < len(measured):
        return "not measured"
    # A server that drops requests may not win by it.
    if any(figure.errors for figure in known):
        return "MISSED (errors)"
    result = "pass" if met else "MISSED"
    return f"{result} (disturbed)" if any(figure.is_disturbed for figure in known) else result
