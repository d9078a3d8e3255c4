# SPDX-License-Identifier: Apache-2.0
"""Explain how a service would be planned, without a cluster: for `headrace explain`.

Documents come from files, with their lines; the runtimes that come with Headrace are always there, unless a file has one of
the same name. All decisions are planned by admission, selection, merging and planning.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import PurePath
from typing import Any

from headrace.fleet import admission, schema
from headrace.fleet.documents import ClusterFacts, FleetSettings, Problem, cluster_facts, kind_key, namespace_of
from headrace.fleet.merging import Component, merge_components
from headrace.fleet.names import API_VERSION, GROUP, LONGEST_LABEL, SERVICE
from headrace.fleet.planning import Plan, plan
from headrace.fleet.selection import Selection, select
from headrace.fleet.yaml_documents import ParsedFiles, Source, parse
from headrace.platforms.kubernetes_client.objects import Document, get_list, get_mapping, get_str, kind_of, name_of

Key = tuple[str, str, str]
"""Kind, namespace and name of a document."""

_PARTS = frozenset({"engine", "decoder", "router", "model", "runtime"})


@dataclass(frozen=True)
class LocatedProblem:
    """A problem and its location in a file."""

    problem: Problem
    place: str = ""
    """`isvc.yaml:12`; "" if the problem itself names the location."""

    def __str__(self) -> str:
        return f"{self.place}: {self.problem}" if self.place else str(self.problem)


@dataclass(frozen=True)
class ExplainInput:
    """Services to explain, and the other documents."""

    services: list[Source]
    facts: ClusterFacts
    document_problems: Mapping[Key, list[LocatedProblem]]
    """Problems and warnings of runtimes, models and other documents from files."""
    schema_problems: Mapping[Key, list[LocatedProblem]]
    """Schema problems of the same documents: missing fields and wrong types."""
    errors: list[LocatedProblem]
    """Problems of files that cannot be read or have no service."""


@dataclass(frozen=True)
class Explanation:
    """The plan of one service and its problems."""

    service: Document
    selection: Selection | None
    components: Mapping[str, Component]
    objects: Sequence[Document]
    errors: Sequence[LocatedProblem]
    warnings: Sequence[LocatedProblem]
    notes: Sequence[str] = ()

    def as_json(self) -> dict[str, Any]:
        """Return the explanation as JSON."""
        selection = self.selection
        return {
            "runtime": {
                "name": name_of(selection.runtime) if selection is not None and selection.runtime is not None else None,
                "reason": selection.reason if selection is not None else "",
                "rejected": [
                    {"name": rejection.name, "reason": rejection.reason}
                    for rejection in (selection.rejected if selection else ())
                ],
            },
            "components": {name: {"mode": item.mode, "rule": item.rule} for name, item in self.components.items()},
            "objects": list(self.objects),
            "errors": errors_json(self.errors),
        }


def errors_json(errors: Iterable[LocatedProblem]) -> list[dict[str, str]]:
    """Return problems as JSON."""
    return [
        {"field": error.problem.field, "message": error.problem.message, "fix": error.problem.fix} for error in errors
    ]


def prepare(
    asked: ParsedFiles,
    around: ParsedFiles,
    *,
    settings: FleetSettings | None = None,
    lacking: Collection[str] = (),
    shipped: Sequence[Document] | None = None,
) -> ExplainInput:
    """Collect the services of `asked`, and the other documents of `asked` and `around`."""
    services = [_complete(source) for source in asked.sources if _is_service(source.document)]
    others = [source for source in (*around.sources, *asked.sources) if _is_other_kind(source.document)]
    others = list({kind_key(other.document): other for other in others}.values())
    file_keys = {kind_key(other.document) for other in others}
    ours = [
        shipped_runtime
        for shipped_runtime in (shipped_runtimes() if shipped is None else shipped)
        if kind_key(shipped_runtime) not in file_keys
    ]
    facts = cluster_facts([*(other.document for other in others), *ours], settings)
    facts = replace(facts, capabilities=facts.capabilities - frozenset(lacking))
    errors = [LocatedProblem(problem) for problem in (*asked.problems, *around.problems)]
    if not services and not errors:
        message = "the files have no InferenceService"
        errors = [LocatedProblem(Problem("", message, "give a file with a document whose kind is InferenceService"))]
        errors += [
            problem for source in asked.sources if _is_other_kind(source.document) for problem in _kind_problems(source)
        ]
    schema_problems = {kind_key(other.document): _located(other, schema.validate(other.document)) for other in others}
    document_problems = {
        kind_key(other.document): [
            *_located(other, admission.validate(other.document, facts)),
            *_located(other, schema.warnings(other.document)),
        ]
        for other in others
    }
    return ExplainInput(services, facts, document_problems, schema_problems, errors)


def shipped_runtimes() -> list[Document]:
    """Return the runtimes that come with Headrace."""
    folder = resources.files("headrace.fleet").joinpath("runtimes")
    files = sorted((path for path in folder.iterdir() if path.name.endswith(".yaml")), key=lambda path: path.name)
    return [runtime for file in files for runtime in parse(file.read_text("utf-8"), file.name).documents]


def explain(source: Source, asked: ExplainInput) -> Explanation:
    """Explain one service."""
    planned = plan(source.document, asked.facts)
    selection, merged = planned.selection, planned.components
    if planned.problems and not schema.validate(source.document):
        # The runtime that it would get helps to fix the problems.
        selection, merged = _partial_result(source.document, planned, asked.facts)
    used = {kind_key(document) for document in _used_documents(planned.service, selection, asked.facts)}
    errors = [LocatedProblem(problem, source.place(problem)) for problem in planned.problems]
    warnings = [
        LocatedProblem(doubt, source.place(doubt))
        for doubt in (*_assumption_problems(source), *schema.warnings(source.document))
    ]
    for key, problems in asked.document_problems.items():
        schema_problems = asked.schema_problems[key] if key in used else []
        errors += schema_problems
        warnings += [problem for problem in problems if problem not in schema_problems]
    return Explanation(planned.service, selection, merged, planned.objects, errors, warnings, planned.notes)


def _located(source: Source, problems: Iterable[Problem]) -> list[LocatedProblem]:
    """Return the problems of a document other than the service, with its kind and name in their field."""
    owner = f"{kind_of(source.document)} {name_of(source.document)}"
    return [
        LocatedProblem(replace(problem, field=f"{owner}: {problem.field}"), source.place(problem))
        for problem in problems
    ]


def _partial_result(
    service: Document, planned: Plan, facts: ClusterFacts
) -> tuple[Selection | None, Mapping[str, Component]]:
    admitted = admission.with_defaults(service, facts)
    selection = planned.selection or select(admitted, facts)
    if planned.components or selection.problem is not None:
        return selection, planned.components
    model = facts.model(namespace_of(admitted), get_str(admitted, "spec", "model", "name"))
    names = [weight for weight in get_list(admitted, "spec", "model", "fineTunedWeights") if isinstance(weight, str)]
    weights = [weight for weight in map(facts.weight, names) if weight is not None]
    return selection, merge_components(admitted, selection.runtime, model, weights, facts)


def _used_documents(service: Document, selection: Selection | None, facts: ClusterFacts) -> list[Document]:
    """Return the documents that a service uses."""
    model = get_mapping(service, "spec", "model")
    names = [weight for weight in get_list(model, "fineTunedWeights") if isinstance(weight, str)]
    documents = [
        facts.model(namespace_of(service), get_str(model, "name"), get_str(model, "kind")),
        selection.runtime if selection is not None else None,
        *map(facts.weight, names),
    ]
    return [document for document in documents if document is not None]


def _is_service(document: Document) -> bool:
    """Whether a document is a service, or a part of one: a spec with components and no kind."""
    if kind_of(document) == SERVICE:
        return True
    return "kind" not in document and bool(_PARTS & get_mapping(document, "spec").keys())


def _is_other_kind(document: Document) -> bool:
    """Whether a document is another of our custom resources. A folder may hold objects of any kind."""
    return get_str(document, "apiVersion").startswith(f"{GROUP}/") and not _is_service(document)


def _kind_problems(source: Source) -> list[LocatedProblem]:
    """Return the problems of a document's kind, such as a misspelt InferenceService."""
    return [
        LocatedProblem(problem, source.place(problem))
        for problem in schema.validate(source.document)
        if problem.field == "kind"
    ]


def _complete(source: Source) -> Source:
    """Return the source with a kind and a name, if they are missing: the file may be unfinished."""
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


def _assumption_problems(source: Source) -> list[Problem]:
    """Return warnings about what `_complete` added. Only fields of the file have a line."""
    problems = []
    if source.lines and ("kind",) not in source.lines:
        problems.append(Problem("kind", "is missing; InferenceService is assumed", f"add kind: {SERVICE}"))
    if source.lines and ("metadata", "name") not in source.lines:
        message = f"is missing; {name_of(source.document)} is assumed"
        problems.append(Problem("metadata.name", message, "give the service a name: an API server requires it"))
    return problems
