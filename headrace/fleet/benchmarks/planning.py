# SPDX-License-Identifier: Apache-2.0
"""From a BenchmarkJob and the service it names to a Job that runs `headrace bench`, or to why there is none."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from headrace.fleet import admission
from headrace.fleet.benchmarks.places import Place, hub_token, place_of
from headrace.fleet.benchmarks.scenarios import DEFAULTS
from headrace.fleet.names import BENCHMARK_LABEL, trunc63
from headrace.fleet.words import (
    ClusterFacts,
    Document,
    FleetSettings,
    Problem,
    items,
    kind_of,
    name_of,
    namespace_of,
    part,
    text,
    whole,
)

DIGEST = "ome.io/benchmark-digest"
"""Annotation of a Job: what it was asked. Another one is made when that changes."""
CONTAINER = "benchmark"
HUB_KEY = "HUGGINGFACE_API_KEY"
"""What OME reads of the Secret that `huggingFaceSecretReference` names."""
DEFAULT_CONCURRENCY = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_GRACE_SECONDS = 900
"""For pulling the image, the data set, the last answers and the upload."""
_MOST_SECONDS = 7 * 24 * 3600
_OVERRIDES = ("nodeSelector", "tolerations", "affinity")


@dataclass(frozen=True)
class Benchmark:
    """What is to be done: a Job, nothing yet, or nothing ever."""

    job: Document | None = None
    problems: tuple[Problem, ...] = ()
    """To be put right by the user."""
    waits: str = ""
    """For what, in words; "" for nothing."""
    missing: bool = False
    """What it waits for is not there at all, and somebody should know."""


def plan_benchmark(benchmark: Document, service: Document | None, facts: ClusterFacts) -> Benchmark:
    """The Job of a BenchmarkJob. `service` is the one it names, if there is one."""
    spec, namespace = part(benchmark, "spec"), namespace_of(benchmark)
    output = place_of(part(spec, "outputLocation"), "outputLocation", namespace)
    dataset = place_of(part(spec, "dataset"), "dataset", namespace)
    problems = admission.problems(benchmark, facts)
    if problems:
        return Benchmark(problems=tuple(problems))
    url, model, waits = _asked(spec, namespace, service)
    if waits:
        # It may come with the next file of the same `kubectl apply`.
        return Benchmark(waits=waits, missing=service is None)
    return Benchmark(
        job=_job(benchmark, command(benchmark, url, model, output, dataset), output, dataset, facts.settings)
    )


def service_of(benchmark: Document) -> tuple[str, str] | None:
    """Namespace and name of the service that is measured, if it is one of ours."""
    named = part(benchmark, "spec", "endpoint", "inferenceService")
    name = text(named, "name")
    return (text(named, "namespace") or namespace_of(benchmark), name) if name else None


def digest_of(benchmark: Document) -> str:
    """Of what the user asks for."""
    told = json.dumps(part(benchmark, "spec"), sort_keys=True, default=str)
    return hashlib.sha256(told.encode()).hexdigest()[:16]


def iterations(spec: Document) -> int:
    """How often load is put on."""
    scenarios = items(spec, "trafficScenarios") or DEFAULTS.get(text(spec, "task"), ("",))
    return len(scenarios) * len(_concurrency(spec))


def command(benchmark: Document, url: str, model: str, output: Place, dataset: Place) -> list[str]:
    """The words for `headrace`. `model` "": the only one that the server has."""
    spec = part(benchmark, "spec")
    seconds = 60 * (whole(spec, "maxTimePerIteration") or 1)
    words = ["bench", *([model] if model else []), "--protocol", "openai", "--url", url, "--task", text(spec, "task")]
    for each in items(spec, "trafficScenarios"):
        words += ["--scenario", str(each)]
    words += ["--concurrency", ",".join(map(str, _concurrency(spec)))]
    words += ["--duration", str(seconds), "--max-requests", str(whole(spec, "maxRequestsPerIteration") or 1)]
    words += ["--timeout", str(max(seconds, 60))]
    parameters = part(spec, "additionalRequestParams")
    if parameters:
        words += ["--params", json.dumps(_typed(parameters), sort_keys=True)]
    if dataset.argument:
        words += ["--dataset", dataset.argument]
    for name, value in part(spec, "serviceMetadata").items():
        words += ["--about", f"{name}={value}"]
    words += ["--output", f"{output.argument.rstrip('/')}/{_folder(benchmark)}"]
    return words


def where_of(benchmark: Document) -> str:
    """Where results go, as the user writes it."""
    return f"{text(benchmark, 'spec', 'outputLocation', 'storageUri').rstrip('/')}/{_folder(benchmark)}"


def _folder(benchmark: Document) -> str:
    return text(benchmark, "spec", "resultFolderName").strip("/") or name_of(benchmark)


def _concurrency(spec: Document) -> list[int]:
    return [each for each in items(spec, "numConcurrency") if isinstance(each, int)] or list(DEFAULT_CONCURRENCY)


def _typed(parameters: Document) -> dict[str, Any]:
    """OME has texts alone here: "0.5" means a number, and "true" a truth."""

    def meant(value: Any) -> Any:
        try:
            return json.loads(value) if isinstance(value, str) else value
        except ValueError:
            return value

    return {name: meant(value) for name, value in parameters.items()}


def _asked(spec: Document, namespace: str, service: Document | None) -> tuple[str, str, str]:
    """Address and model; or what is waited for."""
    given = part(spec, "endpoint", "endpoint")
    if given:
        return text(given, "url").rstrip("/"), text(given, "modelName"), ""
    named = part(spec, "endpoint", "inferenceService")
    shown = f"{text(named, 'namespace') or namespace}/{text(named, 'name')}"
    if service is None:
        return "", "", f"there is no InferenceService {shown}; apply it, or name another in spec.endpoint"
    ready: Document = next(
        (each for each in items(service, "status", "conditions") if text(each, "type") == "Ready"), {}
    )
    url = text(service, "status", "address", "url") or text(service, "status", "url")
    if text(ready, "status") != "True" or not url:
        why = text(ready, "message") or text(ready, "reason") or "nothing is known of it yet"
        return "", "", f"InferenceService {shown} is not ready: {why}"
    return url.rstrip("/"), "", ""


def _job(benchmark: Document, words: list[str], output: Place, dataset: Place, settings: FleetSettings) -> Document:
    spec, name, override = part(benchmark, "spec"), name_of(benchmark), part(benchmark, "spec", "podOverride")
    labels = {BENCHMARK_LABEL: trunc63(name)}
    minutes = (whole(spec, "maxTimePerIteration") or 1) * iterations(spec)
    secret = text(spec, "huggingFaceSecretReference", "name")
    env = [*output.env, *dataset.env, *([hub_token(secret, HUB_KEY)] if secret else []), *items(override, "env")]
    container: dict[str, Any] = {
        "name": CONTAINER,
        "image": text(override, "image") or settings.image,
        # A kubelet would put variables in place of $(NAME).
        "args": [each.replace("$(", "$$(") for each in words],
        "env": list({text(each, "name"): each for each in env}.values()),
        "envFrom": _once([*output.env_from, *dataset.env_from, *items(override, "envFrom")]),
        "resources": part(override, "resources") or {"requests": {"cpu": "1", "memory": "1Gi"}},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        # So that the reason is in the status of the pod, and with that in ours.
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [
            {"name": "tmp", "mountPath": "/tmp"},  # noqa: S108  a volume of its own
            *output.mounts,
            *dataset.mounts,
            *items(override, "volumeMounts"),
        ],
    }
    pod: dict[str, Any] = {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        # A claim is root's until it is a group's; the image has this number.
        "securityContext": {"runAsNonRoot": True, "fsGroup": 10001, "seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [{key: value for key, value in container.items() if value}],
        "volumes": [
            {"name": "tmp", "emptyDir": {}},
            *output.volumes,
            *dataset.volumes,
            *items(override, "volumes"),
        ],
        **{each: override[each] for each in _OVERRIDES if override.get(each)},
    }
    owner = {
        "apiVersion": text(benchmark, "apiVersion"),
        "kind": kind_of(benchmark),
        "name": name,
        "uid": text(benchmark, "metadata", "uid"),
        "controller": True,
        "blockOwnerDeletion": True,
    }
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {
            "name": trunc63(name),
            "namespace": namespace_of(benchmark),
            "labels": labels,
            "annotations": {DIGEST: digest_of(benchmark)},
            "ownerReferences": [owner],
        },
        "spec": {
            # Numbers of a second try would be mixed with those of the first.
            "backoffLimit": 0,
            "activeDeadlineSeconds": min(minutes * 60 + _GRACE_SECONDS, _MOST_SECONDS),
            "template": {"metadata": {"labels": labels}, "spec": pod},
        },
    }


def _once(sources: list[Any]) -> list[Any]:
    return [each for number, each in enumerate(sources) if each not in sources[:number]]
