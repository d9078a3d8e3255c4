# SPDX-License-Identifier: Apache-2.0
"""Answer an AdmissionReview: default or validate the document in it. Pure: a dry run gets the same answer."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from headrace.core.errors import InvalidArgument
from headrace.fleet import schema
from headrace.fleet.admission import validate, with_defaults
from headrace.fleet.admission.defaults import WARNING
from headrace.fleet.documents import ClusterFacts, Problem, namespace_of
from headrace.fleet.names import COMPONENTS, DEPLOYMENT_MODE, DEPRECATION_WARNING, GROUP, LAST_APPLIED, SERVICE
from headrace.fleet.selection import select
from headrace.platforms.kubernetes_client.objects import (
    Document,
    annotations_of,
    get_mapping,
    get_str,
    kind_of,
    name_of,
)

REVIEW_VERSION = "admission.k8s.io/v1"
_MAX_WARNING, _MAX_WARNINGS = 250, 12
"""The API server cuts longer warnings, and all beyond 4096 characters together."""


@dataclass(frozen=True)
class ClusterSnapshot:
    """The cached state of the cluster."""

    facts: ClusterFacts
    complete: bool
    """Whether the cache is synced: what is not in the facts does not exist."""


@dataclass(frozen=True)
class Decision:
    """The answer to an admission request."""

    refusals: tuple[Problem, ...] = ()
    warnings: tuple[str, ...] = ()
    patch: list[dict[str, Any]] = field(default_factory=list)


Operation = Callable[[Document, ClusterSnapshot], Decision]


def review(
    body: bytes | bytearray | memoryview, operation: Operation, snapshot: ClusterSnapshot
) -> tuple[Document, Decision]:
    """Answer an AdmissionReview. Raises InvalidArgument for an invalid one."""
    try:
        admission_review = msgspec.json.decode(body)
    except (ValueError, RecursionError):  # invalid JSON or invalid UTF-8
        raise InvalidArgument("the body is not JSON; send an AdmissionReview") from None
    request = get_mapping(admission_review, "request")
    uid = get_str(request, "uid")
    if get_str(admission_review, "apiVersion") != REVIEW_VERSION or not uid:
        raise InvalidArgument(f"send an AdmissionReview of {REVIEW_VERSION} with a request and its uid")
    try:
        decision = operation(request, snapshot)
    except RecursionError:
        raise InvalidArgument("the document is nested too deeply") from None
    response: dict[str, Any] = {"uid": uid, "allowed": not decision.refusals}
    if decision.refusals:
        response["status"] = _status(request, decision.refusals)
    if decision.warnings:
        response["warnings"] = [_short(warning) for warning in dict.fromkeys(decision.warnings)][:_MAX_WARNINGS]
    if decision.patch and not decision.refusals:
        response |= {"patchType": "JSONPatch", "patch": base64.b64encode(msgspec.json.encode(decision.patch)).decode()}
    return {"apiVersion": REVIEW_VERSION, "kind": "AdmissionReview", "response": response}, decision


def mutate(request: Document, snapshot: ClusterSnapshot) -> Decision:
    """Write the defaults into the document; not before the cache is synced, nor into a document that is being deleted."""
    document, before = _documents(request)
    if document is None:
        return Decision()
    warnings = _warnings(document)
    if not snapshot.complete:
        return Decision(warnings=warnings)
    placed = _with_namespace(document, request)
    if before is not None and kind_of(document) == SERVICE:
        placed = drop_derived(placed, _with_namespace(before, request), snapshot.facts)
    filled = with_defaults(placed, snapshot.facts)
    migrated = DEPRECATION_WARNING in annotations_of(filled) and "predictor" in get_mapping(document, "spec")
    warnings = ((WARNING,) if migrated else ()) + warnings
    return Decision(warnings=warnings, patch=json_patch(_with_namespace(document, request), filled))


def validate_document(request: Document, snapshot: ClusterSnapshot) -> Decision:
    """Decide whether the document is accepted, with warnings."""
    document, before = _documents(request)
    if document is None:
        return Decision()
    placed, lenient = _with_namespace(document, request), _lenient(snapshot.facts)
    problems = validate(placed, lenient)
    known_problems = (
        set(validate(_with_namespace(before, request), lenient)) if problems and before is not None else set()
    )
    refusals = tuple(problem for problem in problems if problem not in known_problems)
    warned: list[Problem] = [problem for problem in problems if problem in known_problems]
    if snapshot.complete:
        warned += [problem for problem in validate(placed, snapshot.facts) if problem not in problems]
    if snapshot.complete and not problems and not warned and kind_of(placed) == SERVICE:
        warned += _selection_problems(placed, snapshot.facts)
    # The mutating webhook has already warned about a service, before its defaults were filled in.
    warnings = () if kind_of(placed) == SERVICE else _warnings(document)
    return Decision(refusals, (*(str(problem) for problem in warned), *warnings))


def _documents(request: Document) -> tuple[Document | None, Document | None]:
    """Return the document and its old version; no document for a deletion, or for edits of one that is being deleted."""
    document = get_mapping(request, "object")
    if not document or get_str(request, "operation") not in ("CREATE", "UPDATE"):
        return None, None
    if get_str(document, "metadata", "deletionTimestamp"):
        return None, None
    return document, get_mapping(request, "oldObject") or None


def _with_namespace(document: Document, request: Document) -> Document:
    """Return the document with the namespace of the request, which it need not contain."""
    namespace, metadata = get_str(request, "namespace"), document.get("metadata")
    if not namespace or not isinstance(metadata, dict) or metadata.get("namespace"):
        return document
    return {**document, "metadata": {**metadata, "namespace": namespace}}


def _warnings(document: Document) -> tuple[str, ...]:
    return tuple(str(doubt) for doubt in schema.warnings(document))


def _selection_problems(service: Document, facts: ClusterFacts) -> Iterable[Problem]:
    problem = select(with_defaults(service, facts), facts).problem
    return [] if problem is None else [problem]


def _status(request: Document, refusals: tuple[Problem, ...]) -> Document:
    """Return the Status with all problems: as causes, and as one message."""
    document = get_mapping(request, "object")
    kind = kind_of(document)
    place = "/".join(part for part in (namespace_of(_with_namespace(document, request)), name_of(document)) if part)
    lines = [str(refusal) for refusal in refusals]
    causes = [
        {
            "reason": "FieldValueInvalid",
            "field": refusal.field,
            "message": str(Problem("", refusal.message, refusal.fix)),
        }
        for refusal in refusals
    ]
    return {
        "code": 422,
        "reason": "Invalid",
        "message": f"{kind} {place}: " + (lines[0] if len(lines) == 1 else "".join(f"\n- {line}" for line in lines)),
        "details": {"name": name_of(document), "group": GROUP, "kind": kind, "causes": causes},
    }


def _short(value: str) -> str:
    shown = "".join(c if c.isprintable() else "?" for c in value)
    return shown if len(shown) <= _MAX_WARNING else shown[: _MAX_WARNING - 3] + "..."


class _LenientFacts(ClusterFacts):
    """Facts in which every referenced document exists."""

    def model(self, namespace: str, name: str, kind: str | None = None) -> Document | None:
        return super().model(namespace, name, kind) or {"kind": kind or "ClusterBaseModel", "metadata": {"name": name}}

    def runtime(self, namespace: str, name: str, kind: str | None = None) -> Document | None:
        return super().runtime(namespace, name, kind) or {"metadata": {"name": name}}

    def weight(self, name: str) -> Document | None:
        return super().weight(name) or {"metadata": {"name": name}}

    def accelerator(self, name: str) -> Document | None:
        return super().accelerator(name) or {"metadata": {"name": name}}


def _lenient(facts: ClusterFacts) -> ClusterFacts:
    return facts.derived(_make_lenient)


def _make_lenient(facts: ClusterFacts) -> ClusterFacts:
    return _LenientFacts(
        facts.runtimes, facts.models, facts.weights, facts.accelerators, facts.capabilities, facts.settings
    )


_Path = tuple[str, ...]
_DERIVED: tuple[_Path, ...] = (
    ("metadata", "annotations", DEPLOYMENT_MODE),
    *(("spec", name, field) for name in COMPONENTS for field in ("minReplicas", "maxReplicas")),
)
_MIGRATED: tuple[_Path, ...] = (("spec", "engine"), ("spec", "model"), ("spec", "runtime"))


def drop_derived(service: Document, before: Document, facts: ClusterFacts) -> Document:
    """Remove defaults of the old version from an edited service, so that they are derived again."""
    applied = _last_applied(service)
    if "predictor" in get_mapping(service, "spec") and DEPRECATION_WARNING in annotations_of(before):
        # A predictor was migrated to these fields before; with them it would not be migrated again.
        derived = [path for path in _MIGRATED if _same(service, before, path) and _value(applied, path) is None]
        for path in derived:
            service = _without(service, path)
    derived = [
        path
        for path in _DERIVED
        if _same(service, before, path)
        and _value(applied, path) is None
        and _value(with_defaults(_without(before, path), facts), path) == _value(before, path)
    ]
    for path in derived:
        service = _without(service, path)
    return service


def _same(service: Document, before: Document, path: _Path) -> bool:
    return _value(service, path) is not None and _value(service, path) == _value(before, path)


def _last_applied(service: Document) -> Document:
    """Return the document that `kubectl apply` was given, if any: its fields are intended, whatever their value."""
    try:
        applied = msgspec.json.decode(annotations_of(service).get(LAST_APPLIED, "{}"))
    except (ValueError, RecursionError):
        return {}
    return applied if isinstance(applied, dict) else {}


def _value(document: Document, path: _Path) -> Any:
    return get_mapping(document, *path[:-1]).get(path[-1])


def _without(document: Document, path: _Path) -> Document:
    name, rest = path[0], path[1:]
    if name not in document:
        return document
    if not rest:
        return {other: value for other, value in document.items() if other != name}
    below = document[name]
    return {**document, name: _without(below, rest)} if isinstance(below, Mapping) else document


def json_patch(before: Document, after: Document) -> list[dict[str, Any]]:
    """Return the JSON Patch (RFC 6902) from one document to the other. Lists are replaced as a whole."""
    return list(_changes("", before, after))


def _changes(path: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for name in before:
        if name not in after:
            yield {"op": "remove", "path": f"{path}/{_escaped(name)}"}
    for name, value in after.items():
        place = f"{path}/{_escaped(name)}"
        if name not in before:
            yield {"op": "add", "path": place, "value": value}
            continue
        old = before[name]
        if isinstance(old, Mapping) and isinstance(value, Mapping):
            yield from _changes(place, old, value)
        elif old is not value and msgspec.json.encode(old) != msgspec.json.encode(value):  # 1 is not true
            yield {"op": "replace", "path": place, "value": value}


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")
