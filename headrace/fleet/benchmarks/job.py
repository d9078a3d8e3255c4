# SPDX-License-Identifier: Apache-2.0
"""Plan the Job that runs `headrace bench` for a BenchmarkJob, or say why there is none."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from headrace.fleet import admission
from headrace.fleet.benchmarks.scenarios import DEFAULTS
from headrace.fleet.benchmarks.spec import StorageLocation, hub_token, storage_location
from headrace.fleet.documents import ClusterFacts, FleetSettings, Problem, namespace_of
from headrace.fleet.names import BENCHMARK_LABEL, trunc63
from headrace.platforms.kubernetes_client.objects import (
    Document,
    get_int,
    get_list,
    get_mapping,
    get_str,
    kind_of,
    name_of,
)

DIGEST = "ome.io/benchmark-digest"
"""Annotation of a Job: digest of the spec it was made for. A changed spec gets a new Job."""
CONTAINER = "benchmark"
HUB_KEY = "HUGGINGFACE_API_KEY"
"""The key that OME reads from the Secret of `huggingFaceSecretReference`."""
DEFAULT_CONCURRENCY = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_GRACE_SECONDS = 900
"""Time for pulling the image, loading the data set, the last answers and the upload."""
_MOST_SECONDS = 7 * 24 * 3600
_OVERRIDES = ("nodeSelector", "tolerations", "affinity")


@dataclass(frozen=True)
class BenchmarkPlan:
    """The Job of a BenchmarkJob, or why there is none."""

    job: Document | None = None
    problems: tuple[Problem, ...] = ()
    """Problems that the user has to fix."""
    waits: str = ""
    """What it waits for, for messages; "" for nothing."""
    missing: bool = False
    """The service it waits for does not exist: report an event."""


def plan_benchmark(benchmark: Document, service: Document | None, facts: ClusterFacts) -> BenchmarkPlan:
    """Plan the Job of a BenchmarkJob. `service` is the one it names, if it exists."""
    spec, namespace = get_mapping(benchmark, "spec"), namespace_of(benchmark)
    output = storage_location(get_mapping(spec, "outputLocation"), "outputLocation", namespace)
    dataset = storage_location(get_mapping(spec, "dataset"), "dataset", namespace)
    problems = admission.validate(benchmark, facts)
    if problems:
        return BenchmarkPlan(problems=tuple(problems))
    url, model, waits = _target(spec, namespace, service)
    if waits:
        # The service may be applied with the next file of the same `kubectl apply`.
        return BenchmarkPlan(waits=waits, missing=service is None)
    return BenchmarkPlan(
        job=_job(benchmark, command(benchmark, url, model, output, dataset), output, dataset, facts.settings)
    )


def service_of(benchmark: Document) -> tuple[str, str] | None:
    """Return the namespace and name of the benchmarked InferenceService, if the endpoint is one."""
    reference = get_mapping(benchmark, "spec", "endpoint", "inferenceService")
    name = get_str(reference, "name")
    return (get_str(reference, "namespace") or namespace_of(benchmark), name) if name else None


def digest_of(benchmark: Document) -> str:
    """Return a digest of the spec."""
    spec = json.dumps(get_mapping(benchmark, "spec"), sort_keys=True, default=str)
    return hashlib.sha256(spec.encode()).hexdigest()[:16]


def iterations(spec: Document) -> int:
    """Return the number of load runs: scenarios times concurrencies."""
    scenarios = get_list(spec, "trafficScenarios") or DEFAULTS.get(get_str(spec, "task"), ("",))
    return len(scenarios) * len(_concurrency(spec))


def command(benchmark: Document, url: str, model: str, output: StorageLocation, dataset: StorageLocation) -> list[str]:
    """Return the arguments for `headrace`. `model` "": the only model of the server."""
    spec = get_mapping(benchmark, "spec")
    seconds = 60 * (get_int(spec, "maxTimePerIteration") or 1)
    args = [
        "bench",
        *([model] if model else []),
        "--protocol",
        "openai",
        "--url",
        url,
        "--task",
        get_str(spec, "task"),
    ]
    for traffic_scenario in get_list(spec, "trafficScenarios"):
        args += ["--scenario", str(traffic_scenario)]
    args += ["--concurrency", ",".join(map(str, _concurrency(spec)))]
    args += ["--duration", str(seconds), "--max-requests", str(get_int(spec, "maxRequestsPerIteration") or 1)]
    args += ["--timeout", str(max(seconds, 60))]
    parameters = get_mapping(spec, "additionalRequestParams")
    if parameters:
        args += ["--params", json.dumps(_decode_values(parameters), sort_keys=True)]
    if dataset.argument:
        args += ["--dataset", dataset.argument]
    for name, value in get_mapping(spec, "serviceMetadata").items():
        args += ["--about", f"{name}={value}"]
    args += ["--output", f"{output.argument.rstrip('/')}/{_folder(benchmark)}"]
    return args


def results_uri(benchmark: Document) -> str:
    """Return the URI of the results, as the user writes it."""
    return f"{get_str(benchmark, 'spec', 'outputLocation', 'storageUri').rstrip('/')}/{_folder(benchmark)}"


def _folder(benchmark: Document) -> str:
    return get_str(benchmark, "spec", "resultFolderName").strip("/") or name_of(benchmark)


def _concurrency(spec: Document) -> list[int]:
    given = [number for number in get_list(spec, "numConcurrency") if isinstance(number, int)]
    return given or list(DEFAULT_CONCURRENCY)


def _decode_values(parameters: Document) -> dict[str, Any]:
    """Decode the values: OME allows only strings, so "0.5" means a number and "true" a boolean."""

    def meant(value: Any) -> Any:
        try:
            return json.loads(value) if isinstance(value, str) else value
        except ValueError:
            return value

    return {name: meant(value) for name, value in parameters.items()}


def _target(spec: Document, namespace: str, service: Document | None) -> tuple[str, str, str]:
    """Return the URL and the model, or what the benchmark waits for."""
    endpoint = get_mapping(spec, "endpoint", "endpoint")
    if endpoint:
        return get_str(endpoint, "url").rstrip("/"), get_str(endpoint, "modelName"), ""
    reference = get_mapping(spec, "endpoint", "inferenceService")
    shown = f"{get_str(reference, 'namespace') or namespace}/{get_str(reference, 'name')}"
    if service is None:
        return "", "", f"there is no InferenceService {shown}; apply it, or name another in spec.endpoint"
    ready: Document = next(
        (condition for condition in get_list(service, "status", "conditions") if get_str(condition, "type") == "Ready"),
        {},
    )
    url = get_str(service, "status", "address", "url") or get_str(service, "status", "url")
    if get_str(ready, "status") != "True" or not url:
        reason = get_str(ready, "message") or get_str(ready, "reason") or "it has no status yet"
        return "", "", f"InferenceService {shown} is not ready: {reason}"
    return url.rstrip("/"), "", ""


def _job(
    benchmark: Document, args: list[str], output: StorageLocation, dataset: StorageLocation, settings: FleetSettings
) -> Document:
    spec, name, override = (
        get_mapping(benchmark, "spec"),
        name_of(benchmark),
        get_mapping(benchmark, "spec", "podOverride"),
    )
    labels = {BENCHMARK_LABEL: trunc63(name)}
    minutes = (get_int(spec, "maxTimePerIteration") or 1) * iterations(spec)
    secret = get_str(spec, "huggingFaceSecretReference", "name")
    env = [*output.env, *dataset.env, *([hub_token(secret, HUB_KEY)] if secret else []), *get_list(override, "env")]
    container: dict[str, Any] = {
        "name": CONTAINER,
        "image": get_str(override, "image") or settings.image,
        # Escaped: the kubelet expands $(NAME).
        "args": [word.replace("$(", "$$(") for word in args],
        "env": list({get_str(variable, "name"): variable for variable in env}.values()),
        "envFrom": _unique([*output.env_from, *dataset.env_from, *get_list(override, "envFrom")]),
        "resources": get_mapping(override, "resources") or {"requests": {"cpu": "1", "memory": "1Gi"}},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        # The end of the log becomes the reason in the pod's status, which is copied into the BenchmarkJob's.
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [
            {"name": "tmp", "mountPath": "/tmp"},  # noqa: S108  its own volume
            *output.mounts,
            *dataset.mounts,
            *get_list(override, "volumeMounts"),
        ],
    }
    pod: dict[str, Any] = {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        # Without a group, a claim belongs to root; the image uses this group id.
        "securityContext": {"runAsNonRoot": True, "fsGroup": 10001, "seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [{key: value for key, value in container.items() if value}],
        "volumes": [
            {"name": "tmp", "emptyDir": {}},
            *output.volumes,
            *dataset.volumes,
            *get_list(override, "volumes"),
        ],
        **{field: override[field] for field in _OVERRIDES if override.get(field)},
    }
    owner = {
        "apiVersion": get_str(benchmark, "apiVersion"),
        "kind": kind_of(benchmark),
        "name": name,
        "uid": get_str(benchmark, "metadata", "uid"),
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
            # Results of a retry would be mixed with those of the first try.
            "backoffLimit": 0,
            "activeDeadlineSeconds": min(minutes * 60 + _GRACE_SECONDS, _MOST_SECONDS),
            "template": {"metadata": {"labels": labels}, "spec": pod},
        },
    }


def _unique(sources: list[Any]) -> list[Any]:
    return [source for number, source in enumerate(sources) if source not in sources[:number]]
