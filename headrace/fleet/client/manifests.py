# SPDX-License-Identifier: Apache-2.0
"""Validate manifest files before they are applied, and order their documents.

The rules are those of the operator, with the documents of the fleet and of the files. Nothing is sent while there are
problems, so that no file is applied partially.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from headrace.fleet import admission, schema
from headrace.fleet.documents import CLUSTER_SCOPED_KINDS, ClusterFacts, Problem, cluster_facts, namespace_of
from headrace.fleet.explain import LocatedProblem
from headrace.fleet.names import GROUP, SERVICE
from headrace.fleet.planning import plan
from headrace.fleet.schema.kinds import find_kind
from headrace.fleet.yaml_documents import ParsedFiles, Source
from headrace.platforms.kubernetes_client.objects import Document, get_mapping, get_str, kind_of, name_of

_FIRST, _SERVICE, _LAST = 0, 2, 3
_FACTS = CLUSTER_SCOPED_KINDS | {"BaseModel", "ServingRuntime"}
_SERVER_FIELDS = ("managedFields", "resourceVersion", "uid", "creationTimestamp", "generation", "selfLink")


@dataclass(frozen=True)
class ManifestSet:
    """The documents of manifest files, and their problems."""

    sources: list[Source]
    """Documents in the order to apply them: what services need comes before them."""
    errors: list[LocatedProblem]
    warnings: list[LocatedProblem]


def collect(read: ParsedFiles, default: str, namespace: str = "") -> ManifestSet:
    """Collect the documents of files, with their namespaces and the problems found without a fleet.

    namespace: the one the user named; a document with another is an error. default: for documents without one.
    """
    errors = [LocatedProblem(problem) for problem in read.problems]
    sources: list[Source] = []
    seen: dict[tuple[str, str, str, str], Source] = {}
    for original in read.sources:
        problems = [*_header_problems(original.document), *_namespace_problems(original.document, namespace)]
        errors += [LocatedProblem(problem, original.place(problem)) for problem in problems]
        if problems:
            continue
        source = replace(original, document=_normalized(original.document, namespace or default))
        first = seen.setdefault(_key(source.document), source)
        if first is not source:
            problem = Problem("metadata.name", f"is also in {first.path}:{first.line}", "keep one of the two")
            errors.append(LocatedProblem(problem, source.place(problem)))
            continue
        sources.append(source)
    if not read.sources and not errors:
        errors.append(LocatedProblem(Problem("", "the files have no document", "give files with resources in them")))
    return ManifestSet(sorted(sources, key=lambda source: _rank(source.document)), errors, [])


def validate(manifests: ManifestSet, facts: ClusterFacts | None) -> ManifestSet:
    """Validate the documents with those of the fleet. facts None: not readable; validate only the schemas."""
    errors, warnings = list(manifests.errors), list(manifests.warnings)
    around = with_documents(facts, (source.document for source in manifests.sources)) if facts is not None else None
    for source in manifests.sources:
        if not _is_ours(source.document):
            continue
        problems, doubtful = _problems(source.document, around)
        errors += [LocatedProblem(problem, source.place(problem)) for problem in problems]
        warnings += [LocatedProblem(problem, source.place(problem)) for problem in doubtful]
    return replace(manifests, errors=errors, warnings=warnings)


def with_documents(facts: ClusterFacts, documents: Iterable[Document]) -> ClusterFacts:
    """Return the facts as they are once these documents are applied."""
    existing = [*facts.runtimes, *facts.models, *facts.weights, *facts.accelerators]
    merged = {_key(document): document for document in [*existing, *documents]}
    return replace(cluster_facts(merged.values(), facts.settings), capabilities=facts.capabilities)


def needs_facts(sources: Sequence[Source]) -> bool:
    """Whether the validation of these documents needs facts."""
    return any(_is_ours(source.document) for source in sources)


def _problems(document: Document, facts: ClusterFacts | None) -> tuple[list[Problem], list[Problem]]:
    if facts is None:
        return schema.validate(document), schema.warnings(document)
    problems, warnings = admission.validate(document, facts), schema.warnings(document)
    if not problems and kind_of(document) == SERVICE:
        # Only warnings: what the cluster lacks may be installed later, and the operator replans then.
        warnings = [*warnings, *plan(document, facts).problems]
    return problems, warnings


def _header_problems(document: Document) -> list[Problem]:
    """Return the problems with apiVersion, kind and name."""
    if _is_ours(document) and find_kind(kind_of(document)) is None:
        return [problem for problem in schema.validate(document) if problem.field in ("kind", "apiVersion")]
    problems = []
    for name, value in (("apiVersion", get_str(document, "apiVersion")), ("kind", kind_of(document))):
        if not value:
            problems.append(Problem(name, "is missing", f"add {name}"))
    if not problems and not name_of(document):
        problems.append(Problem("metadata.name", "is missing", "give it a name"))
    return problems


def _namespace_problems(document: Document, namespace: str) -> list[Problem]:
    value = get_str(document, "metadata", "namespace")
    if not namespace or not value or value == namespace or kind_of(document) in CLUSTER_SCOPED_KINDS:
        return []
    return [Problem("metadata.namespace", f"is {value}, and -n says {namespace}", "leave one of them out")]


def _normalized(document: Document, namespace: str) -> Document:
    """Remove fields that only the server writes, so that the output of `get -o yaml` can be applied; add the namespace."""
    metadata: dict[str, Any] = {
        name: value for name, value in get_mapping(document, "metadata").items() if name not in _SERVER_FIELDS
    }
    kind = find_kind(kind_of(document)) if _is_ours(document) else None
    if kind is not None and kind.namespaced:
        metadata.setdefault("namespace", namespace)
    normalized = {**document, "metadata": metadata}
    if kind is not None:
        normalized.pop("status", None)
    return normalized


def _rank(document: Document) -> int:
    """Order: other objects such as namespaces and claims, what services need, services, benchmarks."""
    if not _is_ours(document):
        return _FIRST
    if kind_of(document) in _FACTS:
        return _FIRST + 1
    return _SERVICE if kind_of(document) == SERVICE else _LAST


def _is_ours(document: Document) -> bool:
    return get_str(document, "apiVersion").partition("/")[0] == GROUP


def _key(document: Document) -> tuple[str, str, str, str]:
    return get_str(document, "apiVersion"), kind_of(document), namespace_of(document), name_of(document)
