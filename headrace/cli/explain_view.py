# SPDX-License-Identifier: Apache-2.0
"""`headrace explain` for people: what was chosen and why, where every field of the pods comes from, what is wrong."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from headrace.cli.tables import heading, line, open_console, table
from headrace.core.telemetry.logs import one_line
from headrace.fleet.explaining import Explanation, Told
from headrace.fleet.merging import Component
from headrace.fleet.merging.origins import flat
from headrace.fleet.merging.tables import POD
from headrace.fleet.words import Document, items, kind_of, name_of, namespace_of, part, text

_STYLES = {"runtime": "cyan", "service": "green", "accelerator": "magenta", "default": "dim"}
_REJECTED = 50
"""More reasons than that nobody reads; JSON has them all."""


def show(found: Sequence[Explanation], errors: Sequence[Told]) -> None:
    """Print the services, one after the other."""
    console = open_console()
    for number, each in enumerate(found):
        if number:
            console.print()
        _show_service(console, each)
    _show_told(console, errors, [])


def _show_service(console: Console, found: Explanation) -> None:
    service = found.service
    console.print(heading(f"InferenceService {namespace_of(service)}/{name_of(service)}"))
    model = part(service, "spec", "model")
    if model:
        weights = ", ".join(str(each) for each in items(model, "fineTunedWeights"))
        console.print(line(f"Model: {text(model, 'name')}" + (f", with {weights}" if weights else "")))
    _show_runtime(console, found)
    _show_components(console, found)
    for each in found.components.values():
        _show_pods(console, each)
    _show_objects(console, found.objects)
    _show_told(console, found.errors, found.warnings)
    for note in found.notes:
        console.print(line(f"note: {note}"), soft_wrap=True)


def _show_runtime(console: Console, found: Explanation) -> None:
    chosen = found.selection
    if chosen is None:
        return
    console.print("\n", heading("Runtime"), sep="")
    name = name_of(chosen.runtime) if chosen.runtime is not None else "none"
    console.print(Text.assemble((one_line(name), "bold"), f": {one_line(chosen.reason)}"), soft_wrap=True)
    if chosen.rejected:
        console.print()
        console.print(table(["NOT CHOSEN", "BECAUSE"], chosen.rejected[:_REJECTED]))
        if len(chosen.rejected) > _REJECTED:
            console.print(line(f"and {len(chosen.rejected) - _REJECTED} more; -o json has them all"))


def _show_components(console: Console, found: Explanation) -> None:
    if not found.components:
        return
    console.print("\n", heading("Components"), sep="")
    rows = []
    for name, each in found.components.items():
        least, most = each.extension.min_replicas, each.extension.max_replicas
        replicas = str(least) if most <= least else f"{least} to {most}"
        rows.append([name, each.mode, replicas, each.accelerator or "-", each.rule])
    console.print(table(["COMPONENT", "MODE", "REPLICAS", "ACCELERATOR", "RULE"], rows))
    for name, each in found.components.items():
        if each.accelerator:
            console.print(line(f"Accelerator of {name}: {each.accelerator}: {each.accelerator_reason}"))


def _show_pods(console: Console, component: Component) -> None:
    pods = {"leader": component.leader, "worker": component.worker}
    if component.leader is None and component.worker is None:
        pods = {"pod": component.pod}
    for role, pod in pods.items():
        if pod is None:
            continue
        what = "Pod" if role == "pod" else role.capitalize()
        of = f" ({component.worker_size} of them)" if role == "worker" else ""
        console.print("\n", heading(f"{what} of {component.name}{of}"), sep="")
        console.print(table(["FIELD", "VALUE", "FROM"], pod_rows(role, pod, component)))


def pod_rows(role: str, pod: Document, component: Component) -> list[list[Any]]:
    """Every field of a pod, its value, and who said it."""
    rows = []
    for path, value in flat(pod, POD).items():
        origin = component.origins.get(f"{role}.{path}", "default")
        rows.append([path, value_text(value), Text(one_line(origin), _STYLES.get(origin, ""))])
    return rows


def value_text(value: Any) -> str:
    """A value as people write it: texts bare, the rest as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _show_objects(console: Console, objects: Iterable[Document]) -> None:
    rows = [[kind_of(each), text(each, "apiVersion"), name_of(each)] for each in objects]
    console.print("\n", heading("Objects"), sep="")
    if rows:
        console.print(table(["KIND", "VERSION", "NAME"], rows))
    else:
        console.print(line("none would be made"))


def _show_told(console: Console, errors: Sequence[Told], warnings: Sequence[Told]) -> None:
    if errors or warnings:
        console.print()
    # The terminal wraps; a problem stays one line for whoever copies it, or jumps to its place.
    for each in warnings:
        console.print(Text(f"warning: {one_line(str(each))}", "yellow"), soft_wrap=True)
    for each in errors:
        console.print(Text(f"error: {one_line(str(each))}", "red"), soft_wrap=True)
