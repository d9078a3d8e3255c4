# SPDX-License-Identifier: Apache-2.0
"""Answers to the API server: an AdmissionReview in, one out. Pure: the same for a dry run as for any other.

Called by `serving`. What is wrong is `admission`'s to say; which of it is refused, and which is only warned of, is said in
this room's docstring.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from headrace.core.errors import InvalidArgument
from headrace.fleet import schema
from headrace.fleet.admission import defaulted, problems
from headrace.fleet.admission.migrating import WARNING
from headrace.fleet.cluster.webhooks.defaults import loosened
from headrace.fleet.cluster.webhooks.patching import patch
from headrace.fleet.names import DEPRECATION_WARNING, GROUP
from headrace.fleet.selection import select
from headrace.fleet.words import (
    ClusterFacts,
    Document,
    Problem,
    annotations_of,
    kind_of,
    name_of,
    namespace_of,
    part,
    text,
)

REVIEW_VERSION = "admission.k8s.io/v1"
_LONGEST_WARNING, _MOST_WARNINGS = 250, 12
"""Longer ones are cut by the API server, and so are those beyond four thousand characters together."""


@dataclass(frozen=True)
class Sight:
    """What is known of the cluster."""

    facts: ClusterFacts
    complete: bool
    """Whether all of it was seen: what is not in the facts is then not there."""


@dataclass(frozen=True)
class Verdict:
    """What the API server is told."""

    refusals: tuple[Problem, ...] = ()
    warnings: tuple[str, ...] = ()
    patch: list[dict[str, Any]] = field(default_factory=list)


Deed = Callable[[Document, Sight], Verdict]


def reviewed(body: bytes | bytearray | memoryview, deed: Deed, sight: Sight) -> tuple[Document, Verdict]:
    """The answer to a review. Raises InvalidArgument for what is none."""
    try:
        asked = msgspec.json.decode(body)
    except (ValueError, RecursionError):  # of msgspec, or of bytes that are no text
        raise InvalidArgument("the body is no JSON; send an AdmissionReview") from None
    request = part(asked, "request")
    uid = text(request, "uid")
    if text(asked, "apiVersion") != REVIEW_VERSION or not uid:
        raise InvalidArgument(f"send an AdmissionReview of {REVIEW_VERSION} with a request and its uid")
    try:
        verdict = deed(request, sight)
    except RecursionError:  # a document may be deeper than what looks at it can go
        raise InvalidArgument("the document is nested too deeply") from None
    response: dict[str, Any] = {"uid": uid, "allowed": not verdict.refusals}
    if verdict.refusals:
        response["status"] = _status(request, verdict.refusals)
    if verdict.warnings:
        response["warnings"] = [_short(each) for each in dict.fromkeys(verdict.warnings)][:_MOST_WARNINGS]
    if verdict.patch and not verdict.refusals:
        response |= {"patchType": "JSONPatch", "patch": base64.b64encode(msgspec.json.encode(verdict.patch)).decode()}
    return {"apiVersion": REVIEW_VERSION, "kind": "AdmissionReview", "response": response}, verdict


def mutated(request: Document, sight: Sight) -> Verdict:
    """Defaults, written into the document. None before the cluster's settings are known, or into what is on its way out."""
    document, before = _documents(request)
    if document is None:
        return Verdict()
    doubts = _doubts(document)
    if not sight.complete:
        return Verdict(warnings=doubts)
    placed = _placed(document, request)
    if before is not None and kind_of(document) == "InferenceService":
        placed = loosened(placed, _placed(before, request), sight.facts)
    filled = defaulted(placed, sight.facts)
    migrated = DEPRECATION_WARNING in annotations_of(filled) and "predictor" in part(document, "spec")
    warnings = ((WARNING,) if migrated else ()) + doubts
    return Verdict(warnings=warnings, patch=patch(_placed(document, request), filled))


def validated(request: Document, sight: Sight) -> Verdict:
    """Whether the document may stay, and what is doubtful about it."""
    document, before = _documents(request)
    if document is None:
        return Verdict()
    placed, trusting = _placed(document, request), _trusting(sight.facts)
    found = problems(placed, trusting)
    known = set(problems(_placed(before, request), trusting)) if found and before is not None else set()
    refusals = tuple(each for each in found if each not in known)
    warned: list[Problem] = [each for each in found if each in known]
    if sight.complete:
        warned += [each for each in problems(placed, sight.facts) if each not in found]
    if sight.complete and not found and not warned and kind_of(placed) == "InferenceService":
        warned += _unserved(placed, sight.facts)
    # Of a service they were told before its defaults were in, which would hide what was meant.
    doubts = () if kind_of(placed) == "InferenceService" else _doubts(document)
    return Verdict(refusals, (*(str(each) for each in warned), *doubts))


def _documents(request: Document) -> tuple[Document | None, Document | None]:
    """The document to look at and the one before it. None to look at: a deletion, or the last edits before its end."""
    document = part(request, "object")
    if not document or text(request, "operation") not in ("CREATE", "UPDATE"):
        return None, None
    if text(document, "metadata", "deletionTimestamp"):
        return None, None
    return document, part(request, "oldObject") or None


def _placed(document: Document, request: Document) -> Document:
    """With its namespace, which a document need not say itself."""
    namespace, metadata = text(request, "namespace"), document.get("metadata")
    if not namespace or not isinstance(metadata, dict) or metadata.get("namespace"):
        return document
    return {**document, "metadata": {**metadata, "namespace": namespace}}


def _doubts(document: Document) -> tuple[str, ...]:
    return tuple(str(each) for each in schema.doubts(document))


def _unserved(service: Document, facts: ClusterFacts) -> Iterable[Problem]:
    found = select(defaulted(service, facts), facts).problem
    return [] if found is None else [found]


def _status(request: Document, refusals: tuple[Problem, ...]) -> Document:
    """All that is wrong, as kubectl shows it line by line, and in one text for everybody else."""
    document = part(request, "object")
    kind = kind_of(document)
    place = "/".join(each for each in (namespace_of(_placed(document, request)), name_of(document)) if each)
    lines = [str(each) for each in refusals]
    causes = [
        {"reason": "FieldValueInvalid", "field": each.field, "message": str(Problem("", each.message, each.fix))}
        for each in refusals
    ]
    return {
        "code": 422,
        "reason": "Invalid",
        "message": f"{kind} {place}: " + (lines[0] if len(lines) == 1 else "".join(f"\n- {each}" for each in lines)),
        "details": {"name": name_of(document), "group": GROUP, "kind": kind, "causes": causes},
    }


def _short(said: str) -> str:
    shown = "".join(c if c.isprintable() else "?" for c in said)
    return shown if len(shown) <= _LONGEST_WARNING else shown[: _LONGEST_WARNING - 3] + "..."


class _Trusting(ClusterFacts):
    """Facts to which everything that is named and not known is there."""

    def model(self, namespace: str, name: str, kind: str | None = None) -> Document | None:
        return super().model(namespace, name, kind) or {"kind": kind or "ClusterBaseModel", "metadata": {"name": name}}

    def runtime(self, namespace: str, name: str, kind: str | None = None) -> Document | None:
        return super().runtime(namespace, name, kind) or {"metadata": {"name": name}}

    def weight(self, name: str) -> Document | None:
        return super().weight(name) or {"metadata": {"name": name}}

    def accelerator(self, name: str) -> Document | None:
        return super().accelerator(name) or {"metadata": {"name": name}}


def _trusting(facts: ClusterFacts) -> ClusterFacts:
    return facts.derived(_make_trusting)


def _make_trusting(facts: ClusterFacts) -> ClusterFacts:
    return _Trusting(
        facts.runtimes, facts.models, facts.weights, facts.accelerators, facts.capabilities, facts.settings
    )
