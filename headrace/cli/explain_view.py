# SPDX-License-Identifier: Apache-2.0
"""Output of `headrace explain`: the chosen runtime and why, the source of every pod field, and errors."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from headrace.cli.tables import heading, line, open_console, table
from headrace.core.telemetry.logs import one_line
from headrace.fleet.documents import namespace_of
from headrace.fleet.explain import Explanation, LocatedProblem
from headrace.fleet.merging import Component
from headrace.fleet.merging.latency_targets import describe_targets
from headrace.fleet.merging.strategic_merge import POD, flatten
from headrace.platforms.kubernetes_client.objects import Document, get_list, get_mapping, get_str, kind_of, name_of

_STYLES = {"runtime": "cyan", "service": "green", "accelerator": "magenta", "default": "dim"}
_REJECTED = 50
"""JSON has them all."""


def show(explanations: Sequence[Explanation], errors: Sequence[LocatedProblem]) -> None:
    """Print the explanation of each service."""
    console = open_console()
    for number, explanation in enumerate(explanations):
        if number:
            console.print()
        _show_service(console, explanation)
    _show_problems(console, errors, [])


def _show_service(console: Console, explanation: Explanation) -> None:
    service = explanation.service
    console.print(heading(f"InferenceService {namespace_of(service)}/{name_of(service)}"))
    model = get_mapping(service, "spec", "model")
    if model:
        weights = ", ".join(str(weight) for weight in get_list(model, "fineTunedWeights"))
        console.print(line(f"Model: {get_str(model, 'name')}" + (f", with {weights}" if weights else "")))
    _show_runtime(console, explanation)
    _show_components(console, explanation)
    for component in explanation.components.values():
        _show_pods(console, component)
    _show_objects(console, explanation.objects)
    _show_problems(console, explanation.errors, explanation.warnings)
    for note in explanation.notes:
        console.print(line(f"note: {note}"), soft_wrap=True)


def _show_runtime(console: Console, explanation: Explanation) -> None:
    selection = explanation.selection
    if selection is None:
        return
    console.print("\n", heading("Runtime"), sep="")
    name = name_of(selection.runtime) if selection.runtime is not None else "none"
    console.print(Text.assemble((one_line(name), "bold"), f": {one_line(selection.reason)}"), soft_wrap=True)
    if selection.rejected:
        console.print()
        console.print(table(["NOT CHOSEN", "BECAUSE"], selection.rejected[:_REJECTED]))
        if len(selection.rejected) > _REJECTED:
            console.print(line(f"and {len(selection.rejected) - _REJECTED} more; -o json has them all"))


def _show_components(console: Console, explanation: Explanation) -> None:
    if not explanation.components:
        return
    console.print("\n", heading("Components"), sep="")
    rows = []
    for name, component in explanation.components.items():
        minimum, maximum = component.extension.min_replicas, component.extension.max_replicas
        replicas = str(minimum) if maximum <= minimum else f"{minimum} to {maximum}"
        rows.append([name, component.mode, replicas, component.accelerator or "-", component.rule])
    console.print(table(["COMPONENT", "MODE", "REPLICAS", "ACCELERATOR", "RULE"], rows))
    for name, component in explanation.components.items():
        if component.accelerator:
            console.print(line(f"Accelerator of {name}: {component.accelerator}: {component.accelerator_reason}"))
        targets = describe_targets(component.extension.slo)
        if targets:
            console.print(line(f"{name} scales by latency: {targets}"))


def _show_pods(console: Console, component: Component) -> None:
    pods = {"leader": component.leader, "worker": component.worker}
    if component.leader is None and component.worker is None:
        pods = {"pod": component.pod}
    for role, pod in pods.items():
        if pod is None:
            continue
        title = "Pod" if role == "pod" else role.capitalize()
        count_text = f" ({component.worker_size} of them)" if role == "worker" else ""
        console.print("\n", heading(f"{title} of {component.name}{count_text}"), sep="")
        console.print(table(["FIELD", "VALUE", "FROM"], pod_rows(role, pod, component)))


def pod_rows(role: str, pod: Document, component: Component) -> list[list[Any]]:
    """Return every field of a pod, with its value and its source."""
    rows = []
    for path, value in flatten(pod, POD).items():
        origin = component.origins.get(f"{role}.{path}", "default")
        rows.append([path, value_text(value), Text(one_line(origin), _STYLES.get(origin, ""))])
    return rows


def value_text(value: Any) -> str:
    """Return a value as text: strings bare, the rest as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _show_objects(console: Console, objects: Iterable[Document]) -> None:
    rows = [[kind_of(document), get_str(document, "apiVersion"), name_of(document)] for document in objects]
    console.print("\n", heading("Objects"), sep="")
    if rows:
        console.print(table(["KIND", "VERSION", "NAME"], rows))
    else:
        console.print(line("no objects"))


def _show_problems(console: Console, errors: Sequence[LocatedProblem], warnings: Sequence[LocatedProblem]) -> None:
    if errors or warnings:
        console.print()
    # One line per problem, so that it can be copied; the terminal wraps it.
    for problem in warnings:
        console.print(Text(f"warning: {one_line(str(problem))}", "yellow"), soft_wrap=True)
    for problem in errors:
        console.print(Text(f"error: {one_line(str(problem))}", "red"), soft_wrap=True)
