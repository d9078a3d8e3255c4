# SPDX-License-Identifier: Apache-2.0
"""What would become of a service, and why, without a cluster: for `headrace explain`.

Documents come from files, with their lines; the runtimes that we ship are always there, unless a file has one of the same
name. Says all that admission, selection, merging and planning know, and decides nothing of its own.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import PurePath
from typing import Any

from headrace.fleet import admission, schema
from headrace.fleet.documents import Read, Source, parse
from headrace.fleet.merging import Component, components
from headrace.fleet.names import API_VERSION, GROUP, LONGEST_LABEL
from headrace.fleet.planning import Plan, plan
from headrace.fleet.selection import Selection, select
from headrace.fleet.words import (
    ClusterFacts,
    Document,
    FleetSettings,
    Problem,
    cluster_facts,
    items,
    kind_of,
    name_of,
    namespace_of,
    part,
    text,
)

Key = tuple[str, str, str]
"""Kind, namespace and name of a document."""

SERVICE = "InferenceService"
_PARTS = frozenset({"engine", "decoder", "router", "model", "runtime"})


@dataclass(frozen=True)
class Told:
    """A problem and where it was written."""

    problem: Problem
    place: str = ""
    """`isvc.yaml:12`; "" where the problem names the place itself."""

    def __str__(self) -> str:
        return f"{self.place}: {self.problem}" if self.place else str(self.problem)


@dataclass(frozen=True)
class Question:
    """Services to explain, and what is there beside them."""

    services: list[Source]
    facts: ClusterFacts
    beside: Mapping[Key, list[Told]]
    """What is wrong with the runtimes, models and the like that came from files."""
    refused: Mapping[Key, list[Told]]
    """That of it without which nothing can be made of them: fields that are missing, or have the wrong type."""
    errors: list[Told]
    """Of files that cannot be read, or have no service."""


@dataclass(frozen=True)
class Explanation:
    """All there is to say about one service."""

    service: Document
    selection: Selection | None
    components: Mapping[str, Component]
    objects: Sequence[Document]
    errors: Sequence[Told]
    warnings: Sequence[Told]
    notes: Sequence[str] = ()

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        chosen = self.selection
        return {
            "runtime": {
                "name": name_of(chosen.runtime) if chosen is not None and chosen.runtime is not None else None,
                "reason": chosen.reason if chosen is not None else "",
                "rejected": [
                    {"name": each.name, "reason": each.reason} for each in (chosen.rejected if chosen else ())
                ],
            },
            "components": {name: {"mode": each.mode, "rule": each.rule} for name, each in self.components.items()},
            "objects": list(self.objects),
            "errors": errors_json(self.errors),
        }


def errors_json(errors: Iterable[Told]) -> list[dict[str, str]]:
    """Errors for programs."""
    return [{"field": each.problem.field, "message": each.problem.message, "fix": each.problem.fix} for each in errors]


def question(
    asked: Read,
    around: Read,
    *,
    settings: FleetSettings | None = None,
    lacking: Collection[str] = (),
    shipped: Sequence[Document] | None = None,
) -> Question:
    """What the files ask. Services are those of `asked`; what else is there counts, and so does what is in `around`."""
    services = [_completed(each) for each in asked.sources if _is_service(each.document)]
    others = [each for each in (*around.sources, *asked.sources) if _is_other(each.document)]
    others = list({_key(each.document): each for each in others}.values())
    own = {_key(each.document) for each in others}
    ours = [each for each in (shipped_runtimes() if shipped is None else shipped) if _key(each) not in own]
    facts = cluster_facts([*(each.document for each in others), *ours], settings)
    facts = replace(facts, capabilities=facts.capabilities - frozenset(lacking))
    errors = [Told(each) for each in (*asked.problems, *around.problems)]
    if not services and not errors:
        said = "there is no InferenceService in what was given"
        errors = [Told(Problem("", said, "give a file with a document whose kind is InferenceService"))]
        errors += [told for each in asked.sources if _is_other(each.document) for told in _strange(each)]
    refused = {_key(each.document): _told(each, schema.check(each.document)) for each in others}
    beside = {
        _key(each.document): [
            *_told(each, admission.problems(each.document, facts)),
            *_told(each, schema.doubts(each.document)),
        ]
        for each in others
    }
    return Question(services, facts, beside, refused, errors)


def shipped_runtimes() -> list[Document]:
    """The runtimes that come with Headrace."""
    folder = resources.files("headrace.fleet").joinpath("runtimes")
    files = sorted((each for each in folder.iterdir() if each.name.endswith(".yaml")), key=lambda each: each.name)
    return [found for each in files for found in parse(each.read_text("utf-8"), each.name).documents]


def explain(source: Source, asked: Question) -> Explanation:
    """One service of a question."""
    made = plan(source.document, asked.facts)
    selection, merged = made.selection, made.components
    if made.problems and not schema.check(source.document):
        # Whatever else is wrong with it, which runtime it would have had helps to put it right.
        selection, merged = _as_far_as_it_goes(source.document, made, asked.facts)
    used = {_key(each) for each in _used(made.service, selection, asked.facts)}
    errors = [Told(each, source.place(each)) for each in made.problems]
    warnings = [Told(each, source.place(each)) for each in (*_assumed(source), *schema.doubts(source.document))]
    for key, found in asked.beside.items():
        refused = asked.refused[key] if key in used else []
        errors += refused
        warnings += [each for each in found if each not in refused]
    return Explanation(made.service, selection, merged, made.objects, errors, warnings, made.notes)


def _told(source: Source, problems: Iterable[Problem]) -> list[Told]:
    """Problems of a document that is not the service: their fields say whose they are."""
    whose = f"{kind_of(source.document)} {name_of(source.document)}"
    return [Told(replace(each, field=f"{whose}: {each.field}"), source.place(each)) for each in problems]


def _as_far_as_it_goes(
    service: Document, made: Plan, facts: ClusterFacts
) -> tuple[Selection | None, Mapping[str, Component]]:
    admitted = admission.defaulted(service, facts)
    selection = made.selection or select(admitted, facts)
    if made.components or selection.problem is not None:
        return selection, made.components
    model = facts.model(namespace_of(admitted), text(admitted, "spec", "model", "name"))
    names = [each for each in items(admitted, "spec", "model", "fineTunedWeights") if isinstance(each, str)]
    weights = [each for each in map(facts.weight, names) if each is not None]
    return selection, components(admitted, selection.runtime, model, weights, facts)


def _used(service: Document, selection: Selection | None, facts: ClusterFacts) -> list[Document]:
    """The documents that a service is made of."""
    model = part(service, "spec", "model")
    names = [each for each in items(model, "fineTunedWeights") if isinstance(each, str)]
    found = [
        facts.model(namespace_of(service), text(model, "name"), text(model, "kind")),
        selection.runtime if selection is not None else None,
        *map(facts.weight, names),
    ]
    return [each for each in found if each is not None]


def _is_service(document: Document) -> bool:
    """Also what somebody cut out of one: a spec with components, and no kind."""
    if kind_of(document) == SERVICE:
        return True
    return "kind" not in document and bool(_PARTS & part(document, "spec").keys())


def _is_other(document: Document) -> bool:
    """Whether it is of our group and no service. A folder may hold objects of any kind; they are none of our business."""
    return text(document, "apiVersion").startswith(f"{GROUP}/") and not _is_service(document)


def _strange(source: Source) -> list[Told]:
    """What is wrong with a document's kind: a service that is spelt otherwise is none."""
    return [Told(each, source.place(each)) for each in schema.check(source.document) if each.field == "kind"]


def _completed(source: Source) -> Source:
    """With a name, where it has none: people explain what they have not finished writing."""
    document = source.document
    metadata = {} if document.get("metadata") is None else document["metadata"]
    if "kind" not in document:
        document = {"apiVersion": API_VERSION, "kind": SERVICE, **document}
    if isinstance(metadata, Mapping) and not metadata.get("name"):
        document = {**document, "metadata": {**metadata, "name": _assumed_name(source)}}
    return replace(source, document=document)


def _assumed_name(source: Source) -> str:
    stem = re.sub("[^a-z0-9]+", "-", PurePath(source.path).stem.lower())[:LONGEST_LABEL].strip("-")
    return stem if re.fullmatch("[a-z][-a-z0-9]*", stem) else "service"


def _assumed(source: Source) -> list[Problem]:
    """What `_completed` added, by the lines: what was written has some."""
    found = []
    if source.lines and ("kind",) not in source.lines:
        found.append(Problem("kind", "is missing, and was taken for InferenceService", f"add kind: {SERVICE}"))
    if source.lines and ("metadata", "name") not in source.lines:
        said = f"is missing, and {name_of(source.document)} was taken for it"
        found.append(Problem("metadata.name", said, "give the service a name: an API server will ask for it"))
    return found


def _key(document: Document) -> Key:
    return kind_of(document), namespace_of(document), name_of(document)
