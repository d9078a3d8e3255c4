# SPDX-License-Identifier: Apache-2.0
"""Validate a document: its schema, its own rules, and its references to other documents.

Called by the validating webhook, by planning and by `headrace explain`. `selection` decides whether a runtime can serve a
model; `planning` decides what a deployment mode needs of the cluster.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from headrace.fleet import schema
from headrace.fleet.admission.defaults import with_defaults
from headrace.fleet.admission.runtime_rules import runtime_problems
from headrace.fleet.admission.service_rules import service_problems
from headrace.fleet.benchmarks.spec import unsupported
from headrace.fleet.documents import ClusterFacts, Problem
from headrace.platforms.kubernetes_client.objects import Document, get_mapping, get_str, kind_of


def validate(document: Document, facts: ClusterFacts) -> list[Problem]:
    """Return all problems: first of the schema, then of the rules, without duplicates."""
    problems = schema.validate(document)
    rules = _RULES.get(kind_of(document))
    if rules is not None:
        reported = {problem.field for problem in problems}
        # A rule about a field that already has a problem, such as a wrong type, would be noise.
        broken_rules = rules(with_defaults(document, facts), facts)
        problems += [problem for problem in broken_rules if problem.field not in reported]
    return list(dict.fromkeys(problems))


SCHEMES = ("hf", "s3", "gs", "az", "oci", "pvc", "local", "http", "https", "vendor", "github")

_URI_FORMS = {
    "hf": (r"[^/@\s]+(/[^/@\s]+)?(@\S+)?", "hf://org/name or hf://org/name@revision"),
    "pvc": (r"([a-z0-9][-a-z0-9]*:)?[a-z0-9][-a-z0-9.]*/\S+", "pvc://claim/path or pvc://namespace:claim/path"),
    "local": (r"/\S*", "local:///path"),
    "oci": (r"\S+/\S+", "oci://n/NAMESPACE/b/BUCKET/o/PREFIX or oci://bucket/prefix"),
    "s3": (r"[^/\s]+(/.*)?", "s3://bucket/prefix"),
    "gs": (r"[^/\s]+(/.*)?", "gs://bucket/prefix"),
}


def storage_problems(document: Document, _: ClusterFacts) -> list[Problem]:
    """Return the problems of the storage of a model or of weights."""
    return list(_storage_uri("spec.storage", get_mapping(document, "spec", "storage")))


def benchmark_problems(job: Document, _: ClusterFacts) -> list[Problem]:
    """Return the problems of a BenchmarkJob."""
    spec = get_mapping(job, "spec")
    endpoint = get_mapping(spec, "endpoint")
    endpoints = [name for name in ("inferenceService", "endpoint") if get_mapping(endpoint, name)]
    problems = []
    if len(endpoints) != 1:
        message = "names both a service and an address" if endpoints else "names neither a service nor an address"
        problems.append(
            Problem("spec.endpoint", message, "write one of endpoint.inferenceService and endpoint.endpoint")
        )
    if "outputLocation" in spec and not get_str(spec, "outputLocation", "storageUri"):
        fix = "write pvc://claim/path, s3://bucket/prefix or the like"
        problems.append(Problem("spec.outputLocation.storageUri", "is missing, so results would be lost", fix))
    problems += _storage_uri("spec.outputLocation", get_mapping(spec, "outputLocation"))
    problems += _storage_uri("spec.dataset", get_mapping(spec, "dataset"))
    reported = {problem.field for problem in problems}
    return [*problems, *(problem for problem in unsupported(job) if problem.field not in reported)]


def _storage_uri(place: str, storage: Document) -> Iterator[Problem]:
    uri = get_str(storage, "storageUri")
    scheme, separator, rest = uri.partition("://")
    if not separator:
        return
    if scheme not in SCHEMES:
        fix = f"write one of {', '.join(f'{known}://' for known in SCHEMES)}"
        yield Problem(f"{place}.storageUri", f"{scheme[:40]}:// is not a supported storage", fix)
    elif scheme in _URI_FORMS and not (scheme == "local" and get_str(storage, "path")):
        pattern, form = _URI_FORMS[scheme]
        if re.fullmatch(pattern, rest) is None:
            yield Problem(f"{place}.storageUri", f"{uri[:60]!a} is not of the form that {scheme} has", f"write {form}")


_RULES: dict[str, Callable[[Document, ClusterFacts], list[Problem]]] = {
    "InferenceService": service_problems,
    "ServingRuntime": runtime_problems,
    "ClusterServingRuntime": runtime_problems,
    "BaseModel": storage_problems,
    "ClusterBaseModel": storage_problems,
    "FineTunedWeight": storage_problems,
    "BenchmarkJob": benchmark_problems,
}
