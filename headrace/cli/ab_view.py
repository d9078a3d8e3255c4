# SPDX-License-Identifier: Apache-2.0
"""What `headrace ab` prints for people: where the traffic goes, what the versions did, and their latencies as bars."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from rich.text import Text

from headrace.cli.tables import heading, line, open_console, table

_STATE_STYLES = {"serving": "green", "missing": "yellow", "rolled_back": "red"}
_MOST_BINS = 24
_BAR = 20
_EIGHTHS = " ▏▎▍▌▋▊▉█"


def show_splits(splits: Sequence[dict[str, Any]]) -> None:
    """Every split, a line for each version."""
    console = open_console()
    if not splits:
        console.print(line("no model has a split: each request without a version goes to the newest", "dim"))
        return
    console.print(
        table(
            ("MODEL", "VERSION", "WEIGHT", "NOW", "STATE", "STICKY BY"),
            [
                (
                    state["model"] if not place else "",
                    _version(version),
                    _percent(version["weight"]),
                    _percent(version["effective_weight"]),
                    _state(version["state"]),
                    _sticky(state["split"]) if not place else "",
                )
                for state in splits
                for place, version in enumerate(state["versions"])
            ],
            right=("WEIGHT", "NOW"),
        )
    )


def show_state(state: dict[str, Any]) -> None:
    """One split."""
    console = open_console()
    console.print(heading(f"{state['model']}, since {state['since']}"))
    console.print(
        table(
            ("VERSION", "WEIGHT", "NOW", "STATE", "REASON"),
            [
                (
                    _version(version) + (" (baseline)" if version["version"] == state["baseline"] else ""),
                    _percent(version["weight"]),
                    _percent(version["effective_weight"]),
                    _state(version["state"]),
                    version["reason"],
                )
                for version in state["versions"]
            ],
            right=("WEIGHT", "NOW"),
        )
    )
    for shadow in state["shadows"]:
        copied = f"a copy of {_percent(shadow['share'])} of the requests goes to version {_version(shadow)}"
        console.print(line(copied + (" (missing)" if shadow["state"] == "missing" else "")))
    sticky = _sticky(state["split"])
    if sticky:
        console.print(line(f"one version for each {sticky}"))


def show_report(report: dict[str, Any]) -> None:
    """What the versions did."""
    console = open_console()
    show_state(report)
    console.print()
    served = [*report["versions"], *report["shadows"]]
    latencies = ("p50", "p90", "p99", "max")
    columns = ("REQUESTS", "ERRORS", "RATE", "REFUSED", "DIVERTED", *(f"{name} ms" for name in latencies))
    console.print(
        table(
            ("VERSION", *columns),
            [
                (
                    _version(one) + (" (shadow)" if "share" in one else ""),
                    one["requests"],
                    one["errors"],
                    _percent(one["error_rate"]),
                    one["refused"],
                    one["diverted"],
                    *(_number(one["latency_ms"][name]) for name in latencies),
                )
                for one in served
            ],
            right=columns,
        )
    )
    _show_shadows(report)
    _show_comparisons(report)
    shown = [one for one in served if one["histogram"]]
    if shown:
        console.print()
        console.print(heading("Latencies"))
        console.print(bars(shown))
    if report["events"]:
        console.print()
        console.print(heading("Events"))
        for event in report["events"]:
            console.print(line(f"{event['at']}  version {event['version']} {event['what']}: {event['reason']}"))


def _show_shadows(report: dict[str, Any]) -> None:
    if not report["shadows"]:
        return
    console = open_console()
    console.print()
    console.print(heading("Agreement with the answers that were returned"))
    columns = ("COMPARED", "AGREE", "SAME CHOICE", "MEDIAN DIFFERENCE", "LARGEST", "FAILED", "DROPPED")
    console.print(
        table(
            ("SHADOW", *columns),
            [
                (
                    _version(shadow),
                    shadow["compared"],
                    _percent(shadow["agreement"]),
                    _percent(shadow["argmax_agreement"]),
                    _number(shadow["difference"]["p50"]),
                    _number(shadow["difference"]["max"]),
                    shadow["errors"] + shadow["refused"] + shadow["cancelled"],
                    shadow["dropped"],
                )
                for shadow in report["shadows"]
            ],
            right=columns,
        )
    )


def _show_comparisons(report: dict[str, Any]) -> None:
    if not report["comparisons"]:
        return
    console = open_console()
    console.print()
    console.print(heading(f"Compared with version {report['baseline']}"))
    rows = [
        (each["version"], what, each[what]["test"] or "-", _p_value(each[what]["p"]), each[what]["verdict"])
        for each in report["comparisons"]
        for what in ("errors", "latency")
    ]
    console.print(table(("VERSION", "OF", "TEST", "p", "VERDICT"), rows, right=("p",)))


def bars(versions: Sequence[dict[str, Any]]) -> Text:
    """Latencies of several versions side by side, by bins that grow."""
    bounds = sorted({bound for one in versions for bound, _ in one["histogram"]})
    together = -(-len(bounds) // _MOST_BINS)
    bins = [bounds[place : place + together] for place in range(0, len(bounds), together)]
    counts = [dict(one["histogram"]) for one in versions]
    made = Text(f"{'up to ms':>10}  " + "".join(f"{_version(one)[: _BAR + 6]:<{_BAR + 8}}" for one in versions) + "\n")
    shares = [
        [sum(of_one.get(bound, 0) for bound in each) / (sum(of_one.values()) or 1) for each in bins]
        for of_one in counts
    ]
    largest = max((share for of_one in shares for share in of_one), default=0) or 1
    for place, each in enumerate(bins):
        made.append(f"{_number(each[-1]):>10}  ")
        for of_one in shares:
            percent = f" {of_one[place]:.0%}" if of_one[place] >= 0.005 else ""
            made.append(f"{_bar(of_one[place] / largest)}{percent}".ljust(_BAR + 8))
        made.append("\n")
    return made


def _bar(share: float) -> str:
    eighths = round(share * _BAR * 8)
    if not (sys.stdout.encoding or "").lower().startswith("utf"):
        return "#" * round(share * _BAR)
    return (_EIGHTHS[-1] * (eighths // 8) + _EIGHTHS[eighths % 8]).rstrip()


def _version(one: dict[str, Any]) -> str:
    other = one["label"] if one["version"] == one["number"] else one["number"]
    return f"{one['version']} ({other})" if other else str(one["version"])


def _sticky(split: dict[str, Any]) -> str:
    return ", ".join(f"{what} {name}" for what, name in split.get("sticky", {}).items())


def _state(state: str) -> Text:
    return Text(state.replace("_", " "), _STATE_STYLES.get(state, "dim"))


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share * 100:.4g}%"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _p_value(p: float | None) -> str:
    return "-" if p is None else f"{p:.3f}" if p >= 0.001 else "<0.001"
