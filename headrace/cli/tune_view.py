# SPDX-License-Identifier: Apache-2.0
"""How `headrace tune` shows its trials and the winner: tables, bars, JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.text import Text

from headrace.cli.tables import heading, line, open_console, table
from headrace.cli.tune_config import Change
from headrace.programs.loadtest.measured import BUSY_SHARE
from headrace.programs.loadtest.plots import bar, milliseconds
from headrace.programs.loadtest.search import Found, Trial
from headrace.programs.loadtest.settings import Setting

_WIDTH = 40


def trial_line(trial: Trial, share: float) -> str:
    """One trial, as it happens."""
    if trial.measured is None:
        return f"{trial.setting}: refused: {trial.why}"
    numbers = f"{trial.throughput:.1f} requests/s, p{share:g} {milliseconds(trial.latency_ms)} ms"
    return f"{trial.setting}; {trial.concurrency} client(s): {numbers}{'' if trial.ok else f' ({trial.why})'}"


def show_found(model: str, start: Setting, found: Found, change: Change, share: float) -> None:
    """Every trial, the best of each setting as bars, and the winner."""
    console = open_console()
    console.print(heading(f"Trials of {model}"))
    columns = ["BATCH", "DELAY US", "INSTANCES", "CLIENTS", "REQUESTS/S", f"P{share:g} MS", "MEAN BATCH", ""]
    console.print(table(columns, [_row(trial, found) for trial in found.trials], right=columns[:-1]))
    console.print()
    for text in _bars(found.trials):
        console.print(Text(text), no_wrap=True, overflow="crop")
    console.print()
    winner = found.winner
    for note in found.notes:
        console.print(line(note, "yellow" if winner is None else ""))
    if winner is None:
        return
    at = f"p{share:g} {milliseconds(winner.latency_ms)} ms with {winner.concurrency} client(s)"
    console.print(line(f"best: {winner.setting}: {found.throughput:.1f} requests/s, {at}", "bold green"))
    if found.start is None:
        console.print(line(f"the present setting ({start}) does not keep the target"))
    elif winner.setting != start:
        gain = found.throughput / found.start.throughput - 1
        console.print(line(f"the present setting ({start}) gives {found.start.throughput:.1f} requests/s: {gain:+.0%}"))
    if winner.measured is not None and winner.measured.cpu.thread > BUSY_SHARE:
        console.print(
            line("note: the load generator was busy all the time: the model may be able to do more", "yellow")
        )
    if not change:
        console.print(line("the present setting is the best: nothing to change"))
        return
    if change.max_batch_size is not None and change.max_batch_size < start.max_batch_size:
        console.print(line(f"note: requests with more than {change.max_batch_size} rows would be refused", "yellow"))
    console.print(line("for the model's config.pbtxt:"))
    for text in change.text().splitlines():
        console.print(Text(f"  {text}"))


def found_document(model: str, start: Setting, found: Found, change: Change) -> dict[str, Any]:
    """As JSON has it."""
    return {
        "model": model,
        "start": _setting(start),
        "best": None if found.winner is None else _trial(found.winner) | {"mean_requests_per_second": found.throughput},
        "change": change.text(),
        "notes": list(found.notes),
        "trials": [_trial(trial) for trial in found.trials],
    }


def _row(trial: Trial, found: Found) -> list[object]:
    setting = trial.setting
    delay = "-" if setting.delay_microseconds is None else setting.delay_microseconds
    won = found.winner is not None and found.winner.setting == setting
    said = Text(trial.why, "red") if trial.why else Text("*" if won else "", "green")
    numbers: list[object] = ["-", "-", "-", "-"]
    if trial.measured is not None:
        view = trial.measured.server
        batch = f"{view.mean_batch:.1f}" if view is not None else "-"
        numbers = [trial.concurrency, f"{trial.throughput:.1f}", milliseconds(trial.latency_ms), batch]
    return [setting.max_batch_size, delay, setting.instances, *numbers, said]


def _bars(trials: Sequence[Trial]) -> list[str]:
    """The most throughput of each setting within the target."""
    best: dict[Setting, float] = {}
    for trial in trials:
        if trial.ok:
            best[trial.setting] = max(best.get(trial.setting, 0.0), trial.throughput)
    most = max(best.values(), default=0.0) or 1.0
    names = [str(setting) for setting in best]
    width = max(map(len, names), default=0)
    return [
        f"{name:<{width}}  {value:>10.1f}  {bar(value / most, _WIDTH)}"
        for name, value in zip(names, best.values(), strict=True)
    ]


def _setting(setting: Setting) -> dict[str, int | None]:
    return {
        "max_batch_size": setting.max_batch_size,
        "max_queue_delay_microseconds": setting.delay_microseconds,
        "instances": setting.instances,
    }


def _trial(trial: Trial) -> dict[str, Any]:
    measured = trial.measured.document() if trial.measured is not None else None
    return _setting(trial.setting) | {
        "concurrency": trial.concurrency,
        "ok": trial.ok,
        "why": trial.why,
        "measured": measured,
    }
