# SPDX-License-Identifier: Apache-2.0
"""The tables and plots of `headrace ab`, and its client of a server's admin API."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.text import Text

from headrace.cli.client import ServerClient
from headrace.cli.tables import heading, line, open_console, table
from headrace.core.errors import InvalidArgument
from headrace.core.extras import MissingExtra

_SECONDS = 30.0


class AdminClient(ServerClient):
    """A client of one server's admin API."""

    def delete(self, path: str) -> Any:
        """Delete the resource at a path and return the response's JSON."""
        return self._request("DELETE", path, None, _SECONDS)


def draw(report: dict[str, Any], path: str) -> None:
    """Write a PNG with the latency distribution of each version: cumulative above, histogram below."""
    if Path(path).suffix.lower() != ".png":
        raise InvalidArgument(f"--plot {path}: the name must end in .png")
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingExtra("--plot", "plot", "leave --plot out for bars in the terminal") from None
    figure = Figure(figsize=(8, 7), layout="constrained")
    cumulative, histogram = figure.subplots(2, 1, sharex=True)
    for version in (*report["versions"], *report["shadows"]):
        bounds = [bound for bound, _ in version["histogram"]]
        counts = [count for _, count in version["histogram"]]
        total = sum(counts)
        if not total:
            continue
        shares = [count / total for count in counts]
        name = f"{version['version']}{' (shadow)' if 'share' in version else ''}, {total} requests"
        cumulative.step(bounds, [sum(shares[: index + 1]) for index in range(len(shares))], where="post", label=name)
        histogram.step(bounds, shares, where="pre", label=name)
    cumulative.set_title(f"{report['model']}: latency by version")
    cumulative.set_ylabel("share of requests up to")
    histogram.set_ylabel("share of requests")
    histogram.set_xlabel("milliseconds")
    histogram.set_xscale("log")
    if cumulative.get_legend_handles_labels()[0]:
        cumulative.legend()
    try:
        figure.savefig(path)
    except OSError as error:
        raise InvalidArgument(f"--plot {path}: {error.strerror or 'cannot be written'}") from None


_STATE_STYLES = {"serving": "green", "missing": "yellow", "rolled_back": "red"}
_MOST_BINS = 24
_BAR = 20
_EIGHTHS = " ▏▎▍▌▋▊▉█"


def show_splits(splits: Sequence[dict[str, Any]]) -> None:
    """Print every split, one line per version."""
    console = open_console()
    if not splits:
        console.print(line("no model has a split: requests without a version go to the newest", "dim"))
        return
    console.print(
        table(
            ("MODEL", "VERSION", "WEIGHT", "NOW", "STATE", "STICKY BY"),
            [
                (
                    state["model"] if not index else "",
                    _version(version),
                    _percent(version["weight"]),
                    _percent(version["effective_weight"]),
                    _state(version["state"]),
                    _sticky(state["split"]) if not index else "",
                )
                for state in splits
                for index, version in enumerate(state["versions"])
            ],
            right=("WEIGHT", "NOW"),
        )
    )


def show_state(state: dict[str, Any]) -> None:
    """Print one split."""
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
        copied = f"{_percent(shadow['share'])} of the requests are mirrored to version {_version(shadow)}"
        console.print(line(copied + (" (missing)" if shadow["state"] == "missing" else "")))
    sticky = _sticky(state["split"])
    if sticky:
        console.print(line(f"one version per {sticky}"))


def show_report(report: dict[str, Any]) -> None:
    """Print the results of the versions."""
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
                    _version(version) + (" (shadow)" if "share" in version else ""),
                    version["requests"],
                    version["errors"],
                    _percent(version["error_rate"]),
                    version["refused"],
                    version["diverted"],
                    *(_number(version["latency_ms"][name]) for name in latencies),
                )
                for version in served
            ],
            right=columns,
        )
    )
    _show_shadows(report)
    _show_comparisons(report)
    shown = [version for version in served if version["histogram"]]
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
    console.print(heading("Agreement with the returned responses"))
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
        (
            comparison["version"],
            metric,
            comparison[metric]["test"] or "-",
            _p_value(comparison[metric]["p"]),
            comparison[metric]["verdict"],
        )
        for comparison in report["comparisons"]
        for metric in ("errors", "latency")
    ]
    console.print(table(("VERSION", "OF", "TEST", "p", "VERDICT"), rows, right=("p",)))


def bars(versions: Sequence[dict[str, Any]]) -> Text:
    """Return the latencies of several versions side by side, in growing bins."""
    bounds = sorted({bound for version in versions for bound, _ in version["histogram"]})
    per_bin = -(-len(bounds) // _MOST_BINS)
    bins = [bounds[index : index + per_bin] for index in range(0, len(bounds), per_bin)]
    counts = [dict(version["histogram"]) for version in versions]
    text = Text(
        f"{'up to ms':>10}  " + "".join(f"{_version(version)[: _BAR + 6]:<{_BAR + 8}}" for version in versions) + "\n"
    )
    shares = [
        [sum(version_counts.get(bound, 0) for bound in bin_) / (sum(version_counts.values()) or 1) for bin_ in bins]
        for version_counts in counts
    ]
    largest = max((share for version_shares in shares for share in version_shares), default=0) or 1
    for index, bin_ in enumerate(bins):
        text.append(f"{_number(bin_[-1]):>10}  ")
        for version_shares in shares:
            percent = f" {version_shares[index]:.0%}" if version_shares[index] >= 0.005 else ""
            text.append(f"{_bar(version_shares[index] / largest)}{percent}".ljust(_BAR + 8))
        text.append("\n")
    return text


def _bar(share: float) -> str:
    eighths = round(share * _BAR * 8)
    if not (sys.stdout.encoding or "").lower().startswith("utf"):
        return "#" * round(share * _BAR)
    return (_EIGHTHS[-1] * (eighths // 8) + _EIGHTHS[eighths % 8]).rstrip()


def _version(version: dict[str, Any]) -> str:
    alias = version["label"] if version["version"] == version["number"] else version["number"]
    return f"{version['version']} ({alias})" if alias else str(version["version"])


def _sticky(split: dict[str, Any]) -> str:
    return ", ".join(f"{kind} {name}" for kind, name in split.get("sticky", {}).items())


def _state(state: str) -> Text:
    return Text(state.replace("_", " "), _STATE_STYLES.get(state, "dim"))


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share * 100:.4g}%"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _p_value(p: float | None) -> str:
    return "-" if p is None else f"{p:.3f}" if p >= 0.001 else "<0.001"
