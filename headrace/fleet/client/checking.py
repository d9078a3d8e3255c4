# SPDX-License-Identifier: Apache-2.0
"""Files before they are applied: everything that is wrong with any of them, with its place, and the order to send them in.

Pure. The same admission that the operator has, with what is in the fleet and what is about to be; nothing is sent while
anything is wrong, so that a half of a file never runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from headrace.fleet import admission, schema
from headrace.fleet.documents import Read, Source
from headrace.fleet.explaining import Told
from headrace.fleet.names import GROUP
from headrace.fleet.planning import plan
from headrace.fleet.schema.kinds import find_kind
from headrace.fleet.words import (
    OF_THE_CLUSTER,
    ClusterFacts,
    Document,
    Problem,
    cluster_facts,
    kind_of,
    name_of,
    namespace_of,
    part,
    text,
)

_FIRST, _SERVICE, _LAST = 0, 2, 3
_FACTS = OF_THE_CLUSTER | {"BaseModel", "ServingRuntime"}
_OF_THE_SERVER = ("managedFields", "resourceVersion", "uid", "creationTimestamp", "generation", "selfLink")


@dataclass(frozen=True)
class Checked:
    """What files say."""

    sources: list[Source]
    """What to send, in this order: what services need comes before them."""
    errors: list[Told]
    warnings: list[Told]


def gathered(read: Read, default: str, namespace: str = "") -> Checked:
    """The documents with their namespaces, and what can be told of them without a fleet.

    namespace: that the user named; a document that names another is an error. default: where those go that name none.
    """
    errors = [Told(each) for each in read.problems]
    sources: list[Source] = []
    seen: dict[tuple[str, str, str, str], Source] = {}
    for each in read.sources:
        wrong = [*_head(each.document), *_other_space(each.document, namespace)]
        errors += [Told(problem, each.place(problem)) for problem in wrong]
        if wrong:
            continue
        source = replace(each, document=_cleaned(each.document, namespace or default))
        first = seen.setdefault(_key(source.document), source)
        if first is not source:
            problem = Problem("metadata.name", f"is also in {first.path}:{first.line}", "keep one of the two")
            errors.append(Told(problem, source.place(problem)))
            continue
        sources.append(source)
    if not read.sources and not errors:
        errors.append(Told(Problem("", "there is no document in what was given", "give files with resources in them")))
    return Checked(sorted(sources, key=lambda each: _rank(each.document)), errors, [])


def checked(found: Checked, facts: ClusterFacts | None) -> Checked:
    """The same, held against what is in the fleet. None: nobody may tell, so that only the tables are asked."""
    errors, warnings = list(found.errors), list(found.warnings)
    around = with_documents(facts, (each.document for each in found.sources)) if facts is not None else None
    for each in found.sources:
        if not _is_ours(each.document):
            continue
        wrong, doubts = _asked(each.document, around)
        errors += [Told(problem, each.place(problem)) for problem in wrong]
        warnings += [Told(problem, each.place(problem)) for problem in doubts]
    return replace(found, errors=errors, warnings=warnings)


def with_documents(facts: ClusterFacts, documents: Iterable[Document]) -> ClusterFacts:
    """The facts once these documents are applied."""
    there = [*facts.runtimes, *facts.models, *facts.weights, *facts.accelerators]
    merged = {_key(each): each for each in [*there, *documents]}
    return replace(cluster_facts(merged.values(), facts.settings), capabilities=facts.capabilities)


def needs_facts(sources: Sequence[Source]) -> bool:
    """Whether other documents count for what is wrong with these."""
    return any(_is_ours(each.document) for each in sources)


def _asked(document: Document, facts: ClusterFacts | None) -> tuple[list[Problem], list[Problem]]:
    if facts is None:
        return schema.check(document), schema.doubts(document)
    wrong, doubts = admission.problems(document, facts), schema.doubts(document)
    if not wrong and kind_of(document) == "InferenceService":
        # What the cluster lacks today it may have tomorrow, and the operator looks again then.
        doubts = [*doubts, *plan(document, facts).problems]
    return wrong, doubts


def _head(document: Document) -> list[Problem]:
    """What every document needs to be sent at all."""
    if _is_ours(document) and find_kind(kind_of(document)) is None:
        return [each for each in schema.check(document) if each.field in ("kind", "apiVersion")]
    found = []
    for name, value in (("apiVersion", text(document, "apiVersion")), ("kind", kind_of(document))):
        if not value:
            found.append(Problem(name, "is missing", f"add {name}: it says what the document is"))
    if not found and not name_of(document):
        found.append(Problem("metadata.name", "is missing", "give it a name: what is applied twice must be the same"))
    return found


def _other_space(document: Document, namespace: str) -> list[Problem]:
    said = text(document, "metadata", "namespace")
    if not namespace or not said or said == namespace or kind_of(document) in OF_THE_CLUSTER:
        return []
    return [Problem("metadata.namespace", f"is {said}, and -n says {namespace}", "leave one of them out")]


def _cleaned(document: Document, namespace: str) -> Document:
    """Without what only the server writes, so that what `get -o yaml` printed can be applied; with a namespace."""
    metadata: dict[str, Any] = {
        name: value for name, value in part(document, "metadata").items() if name not in _OF_THE_SERVER
    }
    kind = find_kind(kind_of(document)) if _is_ours(document) else None
    if kind is not None and kind.namespaced:
        metadata.setdefault("namespace", namespace)
    made = {**document, "metadata": metadata}
    if kind is not None:
        made.pop("status", None)
    return made


def _rank(document: Document) -> int:
    """Foreign objects first, as namespaces and claims are; then what services need, services, and what asks them."""
    if not _is_ours(document):
        return _FIRST
    if kind_of(document) in _FACTS:
        return _FIRST + 1
    return _SERVICE if kind_of(document) == "InferenceService" else _LAST


def _is_ours(document: Document) -> bool:
    return text(document, "apiVersion").partition("/")[0] == GROUP


def _key(document: Document) -> tuple[str, str, str, str]:
    return text(document, "apiVersion"), kind_of(document), namespace_of(document), name_of(document)
