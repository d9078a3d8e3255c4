# SPDX-License-Identifier: Apache-2.0
"""Output of `headrace describe`."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from rich.console import Console
from rich.text import Text

from headrace.cli.fleet_view import ordered, state_text
from headrace.cli.tables import heading, line, open_console, table
from headrace.fleet.client.describe import Description, event_json, pod_json
from headrace.fleet.client.rollouts import rollouts_of
from headrace.fleet.client.tables import age, cells, columns_of, components_of, summary
from headrace.fleet.documents import namespace_of
from headrace.fleet.names import SERVICE
from headrace.fleet.status.conditions import get_mappings
from headrace.fleet.yaml_documents import write
from headrace.platforms.kubernetes_client.objects import Document, get_int, get_mapping, get_str, kind_of, name_of

_REJECTED = 8


def show(descriptions: Sequence[Description]) -> None:
    """Print the descriptions of some documents."""
    console = open_console()
    now = datetime.now(UTC)
    for number, description in enumerate(descriptions):
        if number:
            console.print()
        if kind_of(description.document) == SERVICE:
            _show_service(console, description, now)
        else:
            _show_other(console, description, now)
        for reason in description.unseen:
            console.print(line(f"not shown: {reason}", "yellow"), soft_wrap=True)


def _show_service(console: Console, description: Description, now: datetime) -> None:
    service, status = description.document, summary(description.document)
    console.print(heading(f"{kind_of(service)} {namespace_of(service)}/{name_of(service)}"))
    rows: list[tuple[str, str | Text]] = [
        ("ready", state_text(status.ready)),
        ("why not", status.reason),
        ("url", status.url),
        ("address", status.address),
        ("mode", status.mode),
        ("age", age(status.created, now)),
    ]
    _pairs(console, rows)
    _show_conditions(console, service, now)
    _show_components(console, service)
    _show_pods(console, description.pods, now)
    _show_model(console, description)
    _show_runtime(console, description)
    _show_events(console, description.events, now)
    _section(console, "Next")
    for step in description.steps:
        console.print(line(f"- {step}"), soft_wrap=True)


def _show_other(console: Console, description: Description, now: datetime) -> None:
    document = description.document
    space = get_str(document, "metadata", "namespace")
    console.print(heading(f"{kind_of(document)} {f'{space}/' if space else ''}{name_of(document)}"))
    columns = columns_of([kind_of(document)], wide=True)
    values = cells(document, columns, now)
    _pairs(console, [(column.name.lower(), cell) for column, cell in zip(columns, values, strict=True) if cell != "-"])
    for name in ("spec", "status"):
        if get_mapping(document, name):
            _section(console, name.capitalize())
            for text in write([ordered(get_mapping(document, name))]).splitlines():
                console.print(line(text), soft_wrap=True)
    _show_nodes(console, description)
    if description.users:
        _section(console, "Used by")
        rows = [
            (namespace_of(service), name_of(service), state_text(summary(service).ready))
            for service in description.users
        ]
        console.print(table(("NAMESPACE", "SERVICE", "READY"), rows))
    _show_events(console, description.events, now)


def _show_conditions(console: Console, service: Document, now: datetime) -> None:
    conditions = get_mappings(service, "status", "conditions")
    if not conditions:
        return
    _section(console, "Conditions")
    rows = [
        (
            get_str(condition, "type"),
            state_text(get_str(condition, "status")),
            get_str(condition, "reason") or "-",
            age(get_str(condition, "lastTransitionTime"), now),
            " ".join(get_str(condition, "message").split()) or "-",
        )
        for condition in conditions
    ]
    console.print(table(("CONDITION", "STATUS", "REASON", "SINCE", "MESSAGE"), rows))


def _show_components(console: Console, service: Document) -> None:
    components, rollouts = (
        components_of(service),
        {rollout.component: rollout for rollout in rollouts_of(service)},
    )
    if not components:
        return
    _section(console, "Components")
    rows = [
        (
            name,
            get_str(component, "mode") or "-",
            f"{get_int(component, 'readyReplicas') or 0}/{get_int(component, 'replicas') or 0}",
            get_str(component, "selectedAccelerator", "acceleratorClass") or "-",
            rollouts[name].state,
            get_str(component, "url") or "-",
        )
        for name, component in components.items()
    ]
    console.print(table(("COMPONENT", "MODE", "READY", "ACCELERATOR", "ROLLOUT", "URL"), rows))
    shares = [
        (name, share.revision or "-", f"{share.percent}%", "newest" if share.latest else "before")
        for name, rollout in rollouts.items()
        for share in rollout.shares
    ]
    if shares:
        _section(console, "Traffic")
        console.print(table(("COMPONENT", "REVISION", "SHARE", ""), shares))


def _show_pods(console: Console, pods: Sequence[Document], now: datetime) -> None:
    if not pods:
        return
    _section(console, "Pods")
    rows = []
    for pod in map(pod_json, pods):
        reason = ": ".join(dict.fromkeys(text for text in (pod["reason"], pod["message"]) if text)) or "-"
        state = state_text(pod["state"])
        rows.append((pod["name"], pod["component"], state, pod["restarts"], pod["node"] or "-",
                     age(pod["created"], now), reason))  # fmt: skip
    console.print(table(("POD", "COMPONENT", "STATE", "RESTARTS", "NODE", "AGE", "WHY"), rows))


def _show_model(console: Console, description: Description) -> None:
    model_status = get_mapping(description.document, "status", "modelStatus")
    if not model_status and description.model is None:
        return
    _section(console, "Model")
    states, failure = get_mapping(model_status, "modelRevisionStates"), get_mapping(model_status, "lastFailureInfo")
    copies = get_mapping(model_status, "modelCopies")
    name = name_of(description.model) if description.model is not None else summary(description.document).model
    rows: list[tuple[str, str | Text]] = [
        ("name", f"{name} ({kind_of(description.model)})" if description.model is not None else name),
        ("path", get_str(description.model, "spec", "storage", "path")),
        ("answers now", get_str(states, "activeModelState")),
        ("asked for", get_str(states, "targetModelState")),
        ("transition", get_str(model_status, "transitionStatus")),
        (
            "copies",
            f"{get_int(copies, 'failedCopies') or 0} failed of {get_int(copies, 'totalCopies')}" if copies else "",
        ),
        ("last failure", ": ".join(filter(None, (get_str(failure, "reason"), get_str(failure, "message"))))),
    ]
    _pairs(console, rows)
    _show_nodes(console, description)


def _show_nodes(console: Console, description: Description) -> None:
    if not description.progress:
        return
    _section(console, "Nodes with the model")
    rows = []
    for progress in description.progress:
        total = progress.total_bytes
        share = f"{100 * progress.done_bytes // total}% of {total / 1e9:.1f} GB" if total else "-"
        rows.append((progress.node, state_text(progress.state), progress.phase or "-", share))
    console.print(table(("NODE", "STATE", "PHASE", "DOWNLOADED"), rows))
    for progress in description.progress:
        if progress.reason:
            console.print(line(f"{progress.node}: {progress.reason}"), soft_wrap=True)


def _show_runtime(console: Console, description: Description) -> None:
    runtime, selection = get_mapping(description.document, "status", "runtime"), description.selection
    if not runtime and selection is None:
        return
    _section(console, "Runtime")
    if runtime:
        text = f"{get_str(runtime, 'name')} ({get_str(runtime, 'kind')}): {get_str(runtime, 'reason')}"
        console.print(line(text), soft_wrap=True)
    elif selection is not None:
        name = name_of(selection.runtime) if selection.runtime is not None else "none"
        console.print(line(f"{name}: {selection.reason}"), soft_wrap=True)
    if selection is not None and selection.rejected:
        console.print(
            table(("NOT CHOSEN", "BECAUSE"), [tuple(rejected) for rejected in selection.rejected[:_REJECTED]])
        )
        if len(selection.rejected) > _REJECTED:
            console.print(line(f"and {len(selection.rejected) - _REJECTED} more; --json has them all"))


def _show_events(console: Console, events: Sequence[Document], now: datetime) -> None:
    if not events:
        return
    _section(console, "Events")
    rows = [
        (age(event["time"], now), state_text(event["type"]), event["reason"], event["object"], event["message"])
        for event in map(event_json, events)
    ]
    console.print(table(("AGO", "TYPE", "REASON", "OBJECT", "MESSAGE"), rows))


def _section(console: Console, name: str) -> None:
    console.print("\n", heading(name), sep="")


def _pairs(console: Console, rows: Sequence[tuple[str, str | Text]]) -> None:
    for name, value in rows:
        if value:
            label = line(f"{name + ':':<14}")
            console.print(label.append_text(line(value) if isinstance(value, str) else value), soft_wrap=True)
