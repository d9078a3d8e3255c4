# SPDX-License-Identifier: Apache-2.0
"""Verdicts: compare the figures of a run with the targets."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from bench.formats import FORESTS, FORMATS
from bench.overload import TIMEOUT_BUDGET_MS
from bench.summary import Figure, IdleFigure, LoadingFigure, MemoryFigure, OverloadFigure, StartFigure, Summary
from bench.workloads import CROWDS

Figures = dict[tuple[str, str], Figure]
AnyFigure = Figure | IdleFigure | LoadingFigure | StartFigure | MemoryFigure | OverloadFigure
Measured = TypeVar("Measured", StartFigure, MemoryFigure, OverloadFigure)


@dataclass(frozen=True)
class Target:
    """Headrace's server CPU per request must be at most this share of the peer's."""

    workload: str
    peer: str
    at_most: float
    ours: str = "headrace"


TARGETS = (
    Target("json16", "triton-native", 0.50),
    Target("binary16", "triton-native", 0.40),
    Target("grpc16", "triton-native", 0.40),
    Target("binary600k", "triton-native", 0.60),
    Target("grpc600k", "triton-native", 0.70),
    Target("json16", "triton-python", 0.30),
    Target("json16", "fastapi", 0.20),
    Target("binary16", "triton-python", 0.30),
    Target("binary16", "fastapi", 0.20),
    Target("grpc16", "triton-python", 0.25),
    Target("grpc16", "grpc-aio", 0.15),
    Target("binary600k", "triton-python", 0.40),
    Target("grpc600k", "triton-python", 0.60),
    Target("predict", "fastapi-seed", 0.25, ours="headrace-predict"),
)
CROWD_PEERS = ("triton-native", "triton-python")
TWO_PROCESSES_AT_LEAST = 1.5
MLP_WORKLOADS = ("mlp", "mlp-grpc")
MLP_PEERS = ("triton-python-onnx", "triton-python-onnx-100us")
MLP_TIMES_AT_LEAST = 3.0
OVERHEAD_WORKLOADS = ("overhead-binary", "overhead-grpc")
OVERHEAD_MICROSECONDS_AT_MOST = 8.0
IDLE_PERCENT_AT_MOST = 1.0
SERVED_AT_LEAST = 0.97
TWO_INSTANCES_AT_LEAST = 1.7
LOADING_AT_MOST = 1.2
START_SECONDS_BELOW = 1.5
IDLE_MEGABYTES_BELOW = 120.0
ROUTER_MICROSECONDS_AT_MOST = 40.0
ROUTER_TIMES_PUMP_AT_MOST = 40.0 / 19.0
"""The same on any machine: 40 us where a bare proxy takes 18 to 20."""
GOODPUT_AT_LEAST = 0.90
ACCEPTED_TIMES_BUDGET = 2
REJECTED_MILLISECONDS_BELOW = 5.0


@dataclass(frozen=True)
class Verdict:
    """One target, what was measured for it, and whether it was met."""

    workload: str
    against: str
    ours: float | None
    theirs: float | None
    # What the target is about: a ratio of the two, or, where the unit says so, a difference or ours alone.
    compared: float | None
    target: str
    result: str
    unit: str = ""

    @property
    def compared_text(self) -> str:
        return "-" if self.compared is None else f"{self.compared:.2f}{self.unit}"


def verdicts_of(summary: Summary) -> list[Verdict]:
    """Every target, those that could not be judged included."""
    known = {(figure.server, figure.workload): figure for figure in summary.figures}
    loaded = {figure.server: figure for figure in summary.loadings}
    return [
        *(_cpu_verdict(target, known) for target in TARGETS),
        *(_wait_verdict(name, peer, known) for peer in CROWD_PEERS for crowd in CROWDS.values() for name in crowd),
        _rates_verdict("processes", ("headrace-2", "headrace"), "1 process", TWO_PROCESSES_AT_LEAST, known),
        *(verdict for name in MLP_WORKLOADS for verdict in _mlp_verdicts(name, known)),
        *(_overhead_verdict(name, known) for name in OVERHEAD_WORKLOADS),
        *(verdict for name in FORMATS for verdict in _format_verdicts(name, known, loaded)),
        *(_loading_verdict(name, loaded) for name in FORESTS),
        _idle_verdict(summary.idle),
        _below("start (s)", "example repository", summary.start, _start_seconds, START_SECONDS_BELOW, " s"),
        _below("idle-memory (RSS MB)", "nothing loaded", summary.memory, _resident, IDLE_MEGABYTES_BELOW, " MB"),
        _router_verdict(known),
        _router_beside_pump(known),
        *_overload_verdicts(summary.overload),
    ]


def _cpu_verdict(target: Target, known: Figures) -> Verdict:
    ours, theirs = known.get((target.ours, target.workload)), known.get((target.peer, target.workload))
    ratio = _ratio(ours, theirs, _cpu)
    return Verdict(
        workload=target.workload,
        against=target.peer,
        ours=_cpu(ours) if ours else None,
        theirs=_cpu(theirs) if theirs else None,
        compared=ratio,
        target=f"<= {target.at_most:.2f}",
        result=_result(ratio is not None and ratio <= target.at_most, ours, theirs),
    )


def _wait_verdict(workload: str, peer: str, known: Figures) -> Verdict:
    ours, theirs = known.get(("headrace", workload)), known.get((peer, workload))
    ratio = _ratio(ours, theirs, _p99)
    return Verdict(
        workload=f"{workload} (p99 ms)",
        against=peer,
        ours=_p99(ours) if ours else None,
        theirs=_p99(theirs) if theirs else None,
        compared=ratio,
        target="<= 1.00",
        result=_result(ratio is not None and ratio <= 1, ours, theirs),
    )


def _rates_verdict(workload: str, servers: tuple[str, str], against: str, at_least: float, known: Figures) -> Verdict:
    ours, theirs = (known.get((server, workload)) for server in servers)
    ratio = _ratio(ours, theirs, _rate)
    return Verdict(
        workload=f"{workload} (requests/s)",
        against=against,
        ours=_rate(ours) if ours else None,
        theirs=_rate(theirs) if theirs else None,
        compared=ratio,
        target=f">= {at_least:.2f}",
        result=_result(ratio is not None and ratio >= at_least, ours, theirs),
    )


def _format_verdicts(name: str, known: Figures, loaded: dict[str, LoadingFigure]) -> list[Verdict]:
    served, called = f"headrace-{name}", f"own-call-{name}"
    single, double = f"headrace-{name}-x1", f"headrace-{name}-x2"
    return [
        _rates_verdict(f"resnet50-{name}", (served, called), called, SERVED_AT_LEAST, known),
        _rates_verdict(f"two-instances-{name}", (double, single), "1 instance", TWO_INSTANCES_AT_LEAST, known),
        _loading_verdict(name, loaded),
    ]


def _loading_verdict(name: str, loaded: dict[str, LoadingFigure]) -> Verdict:
    ours, theirs = loaded.get(f"headrace-{name}-load"), loaded.get(f"own-load-{name}")
    ratio = ours.seconds / theirs.seconds if ours and theirs else None
    return Verdict(
        workload=f"load-100mb-{name} (s)",
        against=f"own-load-{name}",
        ours=ours.seconds if ours else None,
        theirs=theirs.seconds if theirs else None,
        compared=ratio,
        target=f"<= {LOADING_AT_MOST:.2f}",
        result=_result(ratio is not None and ratio <= LOADING_AT_MOST, ours, theirs),
    )


def _mlp_verdicts(workload: str, known: Figures) -> list[Verdict]:
    ours = known.get(("headrace-1core", workload))
    peers = [figure for peer in MLP_PEERS if (figure := known.get((peer, workload)))]
    # Of the two ways to run Triton, the one that serves more.
    theirs = max(peers, key=_rate, default=None)
    against = theirs.server if theirs else MLP_PEERS[0]
    rates, waits = _ratio(ours, theirs, _rate), _ratio(ours, theirs, _p99)
    return [
        Verdict(
            workload=f"{workload} (requests/s)",
            against=against,
            ours=_rate(ours) if ours else None,
            theirs=_rate(theirs) if theirs else None,
            compared=rates,
            target=f">= {MLP_TIMES_AT_LEAST:.2f}",
            result=_result(rates is not None and rates >= MLP_TIMES_AT_LEAST, ours, theirs),
        ),
        Verdict(
            workload=f"{workload} (p99 ms)",
            against=against,
            ours=_p99(ours) if ours else None,
            theirs=_p99(theirs) if theirs else None,
            compared=waits,
            target="< 1.00",
            result=_result(waits is not None and waits < 1, ours, theirs),
        ),
    ]


def _overhead_verdict(workload: str, known: Figures) -> Verdict:
    ours, bare = known.get(("headrace-1core", workload)), known.get(("headrace-handler", workload))
    # Milliseconds per 1,000 requests are microseconds per request.
    difference = _cpu(ours) - _cpu(bare) if ours and bare else None
    return Verdict(
        workload=f"{workload} (CPU us/request)",
        against="headrace-handler",
        ours=_cpu(ours) if ours else None,
        theirs=_cpu(bare) if bare else None,
        compared=difference,
        target=f"<= {OVERHEAD_MICROSECONDS_AT_MOST:.0f} us more",
        result=_result(difference is not None and difference <= OVERHEAD_MICROSECONDS_AT_MOST, ours, bare),
        unit=" us",
    )


def _idle_verdict(idle: IdleFigure | None) -> Verdict:
    percent = idle.percent_of_core if idle else None
    return Verdict(
        workload="idle (% of a core)",
        against=f"{idle.models} idle models" if idle else "idle models",
        ours=percent,
        theirs=None,
        compared=percent,
        target=f"<= {IDLE_PERCENT_AT_MOST:.2f} %",
        result=_result(percent is not None and percent <= IDLE_PERCENT_AT_MOST, idle),
        unit=" %",
    )


def _below(
    workload: str, against: str, figure: Measured | None, of: Callable[[Measured], float], limit: float, unit: str
) -> Verdict:
    """A figure that is judged by itself."""
    value = of(figure) if figure else None
    return Verdict(
        workload=workload,
        against=against,
        ours=value,
        theirs=None,
        compared=value,
        target=f"< {limit:g}{unit}",
        result=_result(value is not None and value < limit, figure),
        unit=unit,
    )


def _router_verdict(known: Figures) -> Verdict:
    ours = known.get(("headrace-router", "router"))
    proxies = [figure for name in ("nginx", "haproxy") if (figure := known.get((name, "router")))]
    # They have no part in the target.
    least = min(proxies, key=_cpu, default=None)
    microseconds = _cpu(ours) if ours else None
    return Verdict(
        workload="router (CPU us/request)",
        against=least.server if least else "nginx, haproxy",
        ours=microseconds,
        theirs=_cpu(least) if least else None,
        compared=microseconds,
        target=f"<= {ROUTER_MICROSECONDS_AT_MOST:.0f} us",
        result=_result(microseconds is not None and microseconds <= ROUTER_MICROSECONDS_AT_MOST, ours),
        unit=" us",
    )


def _router_beside_pump(known: Figures) -> Verdict:
    ours, pump = known.get(("headrace-router", "router")), known.get(("bare-pump", "router"))
    times = _ratio(ours, pump, _cpu)
    return Verdict(
        workload="router (CPU)",
        against="bare-pump",
        ours=_cpu(ours) if ours else None,
        theirs=_cpu(pump) if pump else None,
        compared=times,
        target=f"<= {ROUTER_TIMES_PUMP_AT_MOST:.1f}",
        result=_result(times is not None and times <= ROUTER_TIMES_PUMP_AT_MOST, ours, pump),
    )


def _overload_verdicts(figure: OverloadFigure | None) -> list[Verdict]:
    share = figure.share_of_peak if figure else None
    goodput = Verdict(
        workload="overload (answers/s)",
        against="peak",
        ours=figure.goodput if figure else None,
        theirs=figure.peak if figure else None,
        compared=share,
        target=f">= {GOODPUT_AT_LEAST:.2f}",
        result=_result(share is not None and share >= GOODPUT_AT_LEAST, figure),
    )
    longest = ACCEPTED_TIMES_BUDGET * TIMEOUT_BUDGET_MS
    return [
        goodput,
        _below("overload (p99 ms, accepted)", "timeout budget", figure, _accepted_p99, longest, " ms"),
        _below("overload (median ms, rejected)", "-", figure, _rejected_median, REJECTED_MILLISECONDS_BELOW, " ms"),
    ]


def _start_seconds(figure: StartFigure) -> float:
    return figure.seconds


def _resident(figure: MemoryFigure) -> float:
    # And not PSS: this process shares numpy's and Python's own pages with bench.
    return figure.rss_mb


def _accepted_p99(figure: OverloadFigure) -> float:
    return figure.accepted_p99_ms


def _rejected_median(figure: OverloadFigure) -> float:
    return figure.rejected_p50_ms


def _cpu(figure: Figure) -> float:
    return figure.server_cpu_ms_per_1000


def _rate(figure: Figure) -> float:
    return figure.requests_per_second


def _p99(figure: Figure) -> float:
    return figure.p99_ms


def _ratio(ours: Figure | None, theirs: Figure | None, of: Callable[[Figure], float]) -> float | None:
    return of(ours) / of(theirs) if ours and theirs else None


def _result(met: bool, *measured: AnyFigure | None) -> str:
    known = [figure for figure in measured if figure is not None]
    if len(known) < len(measured):
        return "not measured"
    # A server that drops requests may not win by it.
    if any(_failures(figure) for figure in known):
        return "MISSED (errors)"
    result = "pass" if met else "MISSED"
    return f"{result} (disturbed)" if any(figure.is_disturbed for figure in known) else result


def _failures(figure: AnyFigure) -> int:
    if isinstance(figure, OverloadFigure):
        # Without a rejection there was no overload, or nothing held it back.
        return figure.failed or not figure.rejected
    return figure.errors if isinstance(figure, Figure) else 0
