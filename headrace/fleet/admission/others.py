# SPDX-License-Identifier: Apache-2.0
"""Rules of models, weights and benchmark jobs."""

from __future__ import annotations

import re
from collections.abc import Iterator

from headrace.fleet.benchmarks.checking import undoable
from headrace.fleet.words import ClusterFacts, Document, Problem, part, text

SCHEMES = ("hf", "s3", "gs", "az", "oci", "pvc", "local", "http", "https", "vendor", "github")

_FORMS = {
    "hf": (r"[^/@\s]+(/[^/@\s]+)?(@\S+)?", "hf://org/name or hf://org/name@revision"),
    "pvc": (r"([a-z0-9][-a-z0-9]*:)?[a-z0-9][-a-z0-9.]*/\S+", "pvc://claim/path or pvc://namespace:claim/path"),
    "local": (r"/\S*", "local:///path"),
    "oci": (r"\S+/\S+", "oci://n/NAMESPACE/b/BUCKET/o/PREFIX or oci://bucket/prefix"),
    "s3": (r"[^/\s]+(/.*)?", "s3://bucket/prefix"),
    "gs": (r"[^/\s]+(/.*)?", "gs://bucket/prefix"),
}


def storage_problems(document: Document, _: ClusterFacts) -> list[Problem]:
    """What is wrong with where the files of a model or of weights lie."""
    return list(_storage("spec.storage", part(document, "spec", "storage")))


def benchmark_problems(job: Document, _: ClusterFacts) -> list[Problem]:
    """What is wrong with a benchmark job."""
    spec = part(job, "spec")
    endpoint = part(spec, "endpoint")
    given = [name for name in ("inferenceService", "endpoint") if part(endpoint, name)]
    found = []
    if len(given) != 1:
        said = "names both a service and an address" if given else "names neither a service nor an address"
        found.append(Problem("spec.endpoint", said, "write one of endpoint.inferenceService and endpoint.endpoint"))
    if "outputLocation" in spec and not text(spec, "outputLocation", "storageUri"):
        fix = "write pvc://claim/path, s3://bucket/prefix or the like"
        found.append(Problem("spec.outputLocation.storageUri", "is missing, so results would be lost", fix))
    found += _storage("spec.outputLocation", part(spec, "outputLocation"))
    found += _storage("spec.dataset", part(spec, "dataset"))
    told = {each.field for each in found}
    return [*found, *(each for each in undoable(job) if each.field not in told)]


def _storage(place: str, storage: Document) -> Iterator[Problem]:
    uri = text(storage, "storageUri")
    scheme, found, rest = uri.partition("://")
    if not found:
        return
    if scheme not in SCHEMES:
        fix = f"write one of {', '.join(f'{each}://' for each in SCHEMES)}"
        yield Problem(f"{place}.storageUri", f"{scheme[:40]}:// is not a storage that can be read", fix)
    elif scheme in _FORMS and not (scheme == "local" and text(storage, "path")):
        pattern, form = _FORMS[scheme]
        if re.fullmatch(pattern, rest) is None:
            yield Problem(f"{place}.storageUri", f"{uri[:60]!a} is not of the form that {scheme} has", f"write {form}")
