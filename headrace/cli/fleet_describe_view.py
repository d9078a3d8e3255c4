# SPDX-License-Identifier: Apache-2.0
"""`headrace describe` for people."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from rich.console import Console
from rich.text import Text

from headrace.cli.fleet_view import ordered, state_text
from headrace.cli.tables import heading, line, open_console, table
from headrace.fleet.client.describing import Description, event_json, pod_json
from headrace.fleet.client.kinds import SERVICE
from headrace.fleet.client.rollouts import rollouts_of
from headrace.fleet.client.rows import cells, columns_of
from headrace.fleet.client.summaries import age, components_of, summary
from headrace.fleet.documents import write
from headrace.fleet.status.observed import records
from headrace.fleet.words import Document, kind_of, name_of, namespace_of, part, text, whole

_REJECTED = 8


def show(found: Sequence[Description]) -> None:
    """Print what is known of some documents."""
    console = open_console()
    now = datetime.now(UTC)
    for number, each in enumerate(found):
        if number:
            console.print()
        if kind_of(each.document) == SERVICE:
            _show_service(console, each, now)
        else:
            _show_other(console, each, now)
        for said in each.unseen:
            console.print(line(f"not shown: {said}", "yellow"), soft_wrap=True)


def _show_service(console: Console, found: Description, now: datetime) -> None:
    service, told = found.document, summary(found.document)
    console.print(heading(f"{kind_of(service)} {namespace_of(service)}/{name_of(service)}"))
    rows: list[tuple[str, str | Text]] = [
        ("ready", state_text(told.ready)),
        ("why not", told.reason),
        ("url", told.url),
        ("address", told.address),
        ("mode", told.mode),
        ("age", age(told.created, now)),
    ]
    _pairs(console, rows)
    _show_conditions(console, service, now)
    _show_components(console, service)
    _show_pods(console, found.pods, now)
    _show_model(console, found)
    _show_runtime(console, found)
    _show_events(console, found.events, now)
    _section(console, "Next")
    for each in found.steps:
        console.print(line(f"- {each}"), soft_wrap=True)


def _show_other(console: Console, found: Description, now: datetime) -> None:
    document = found.document
    space = text(document, "metadata", "namespace")
    console.print(heading(f"{kind_of(document)} {f'{space}/' if space else ''}{name_of(document)}"))
    columns = columns_of([kind_of(document)], wide=True)
    told = cells(document, columns, now)
    _pairs(console, [(each.name.lower(), cell) for each, cell in zip(columns, told, strict=True) if cell != "-"])
    for name in ("spec", "status"):
        if part(document, name):
            _section(console, name.capitalize())
            for each in write([ordered(part(document, name))]).splitlines():
                console.print(line(each), soft_wrap=True)
    _show_nodes(console, found)
    if found.users:
        _section(console, "Used by")
        rows = [(namespace_of(each), name_of(each), state_text(summary(each).ready)) for each in found.users]
        console.print(table(("NAMESPACE", "SERVICE", "READY"), rows))
    _show_events(console, found.events, now)


def _show_conditions(console: Console, service: Document, now: datetime) -> None:
    found = records(service, "status", "conditions")
    if not found:
        return
    _section(console, "Conditions")
    rows = [
        (
            text(each, "type"),
            state_text(text(each, "status")),
            text(each, "reason") or "-",
            age(text(each, "lastTransitionTime"), now),
            " ".join(text(each, "message").split()) or "-",
        )
        for each in found
    ]
    console.print(table(("CONDITION", "STATUS", "REASON", "SINCE", "MESSAGE"), rows))


def _show_components(console: Console, service: Document) -> None:
    components, moves = components_of(service), {each.component: each for each in rollouts_of(service)}
    if not components:
        return
    _section(console, "Components")
    rows = [
        (
            name,
            text(each, "mode") or "-",
            f"{whole(each, 'readyReplicas') or 0}/{whole(each, 'replicas') or 0}",
            text(each, "selectedAccelerator", "acceleratorClass") or "-",
            moves[name].state,
            text(each, "url") or "-",
        )
        for name, each in components.items()
    ]
    console.print(table(("COMPONENT", "MODE", "READY", "ACCELERATOR", "ROLLOUT", "URL"), rows))
    shares = [
        (name, share.revision or "-", f"{share.percent}%", "newest" if share.latest else "before")
        for name, each in moves.items()
        for share in each.shares
    ]
    if shares:
        _section(console, "Traffic")
        console.print(table(("COMPONENT", "REVISION", "SHARE", ""), shares))


def _show_pods(console: Console, pods: Sequence[Document], now: datetime) -> None:
    if not pods:
        return
    _section(console, "Pods")
    rows = []
    for each in map(pod_json, pods):
        why = ": ".join(dict.fromkeys(word for word in (each["reason"], each["message"]) if word)) or "-"
        state = state_text(each["state"])
        rows.append((each["name"], each["component"], state, each["restarts"], each["node"] or "-",
                     age(each["created"], now), why))  # fmt: skip
    console.print(table(("POD", "COMPONENT", "STATE", "RESTARTS", "NODE", "AGE", "WHY"), rows))


def _show_model(console: Console, found: Description) -> None:
    told = part(found.document, "status", "modelStatus")
    if not told and found.model is None:
        return
    _section(console, "Model")
    states, failure = part(told, "modelRevisionStates"), part(told, "lastFailureInfo")
    copies = part(told, "modelCopies")
    name = name_of(found.model) if found.model is not None else summary(found.document).model
    rows: list[tuple[str, str | Text]] = [
        ("name", f"{name} ({kind_of(found.model)})" if found.model is not None else name),
        ("path", text(found.model, "spec", "storage", "path")),
        ("answers now", text(states, "activeModelState")),
        ("asked for", text(states, "targetModelState")),
        ("transition", text(told, "transitionStatus")),
        ("copies", f"{whole(copies, 'failedCopies') or 0} failed of {whole(copies, 'totalCopies')}" if copies else ""),
        ("last failure", ": ".join(each for each in (text(failure, "reason"), text(failure, "message")) if each)),
    ]
    _pairs(console, rows)
    _show_nodes(console, found)


def _show_nodes(console: Console, found: Description) -> None:
    if not found.progress:
        return
    _section(console, "Nodes with the model")
    rows = []
    for each in found.progress:
        total = each.total_bytes
        share = f"{100 * each.done_bytes // total}% of {total / 1e9:.1f} GB" if total else "-"
        rows.append((each.node, state_text(each.state), each.phase or "-", share))
    console.print(table(("NODE", "STATE", "PHASE", "BROUGHT"), rows))


def _show_runtime(console: Console, found: Description) -> None:
    told, chosen = part(found.document, "status", "runtime"), found.selection
    if not told and chosen is None:
        return
    _section(console, "Runtime")
    if told:
        said = f"{text(told, 'name')} ({text(told, 'kind')}): {text(told, 'reason')}"
        console.print(line(said), soft_wrap=True)
    elif chosen is not None:
        name = name_of(chosen.runtime) if chosen.runtime is not None else "none"
        console.print(line(f"{name}: {chosen.reason}"), soft_wrap=True)
    if chosen is not None and chosen.rejected:
        console.print(table(("NOT CHOSEN", "BECAUSE"), [tuple(each) for each in chosen.rejected[:_REJECTED]]))
        if len(chosen.rejected) > _REJECTED:
            console.print(line(f"and {len(chosen.rejected) - _REJECTED} more; --json has them all"))


def _show_events(console: Console, events: Sequence[Document], now: datetime) -> None:
    if not events:
        return
    _section(console, "Events")
    rows = [
        (age(each["time"], now), state_text(each["type"]), each["reason"], each["object"], each["message"])
        for each in map(event_json, events)
    ]
    console.print(table(("AGO", "TYPE", "REASON", "OBJECT", "MESSAGE"), rows))


def _section(console: Console, name: str) -> None:
    console.print("\n", heading(name), sep="")


def _pairs(console: Console, rows: Sequence[tuple[str, str | Text]]) -> None:
    for name, value in rows:
        if value:
            told = line(f"{name + ':':<14}")
            console.print(told.append_text(line(value) if isinstance(value, str) else value), soft_wrap=True)
