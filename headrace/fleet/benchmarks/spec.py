# SPDX-License-Identifier: Apache-2.0
"""Read and validate the spec of a BenchmarkJob: storage of results and prompts, and what `headrace bench` supports."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from headrace.core.errors import InvalidArgument
from headrace.fleet.benchmarks.scenarios import TASKS, parse_scenario
from headrace.fleet.documents import Problem, namespace_of
from headrace.platforms.kubernetes_client.objects import Document, get_list, get_mapping, get_str

OUTPUT, DATASET = "output", "dataset"

_WRITABLE = ("pvc", "local", "s3", "gs", "az")
_READABLE = (*_WRITABLE, "hf", "http", "https")
_VARIABLES: Mapping[tuple[str, str], str] = {
    ("s3", "region"): "AWS_REGION",
    ("s3", "endpoint"): "AWS_ENDPOINT_URL",
    ("gs", "endpoint"): "GOOGLE_BASE_URL",
    ("az", "account"): "AZURE_STORAGE_ACCOUNT_NAME",
    ("az", "endpoint"): "AZURE_STORAGE_ENDPOINT",
}
"""Environment variables of the clouds' own tools, by scheme and storage parameter."""


@dataclass(frozen=True)
class StorageLocation:
    """A storage location as a container sees it."""

    argument: str = ""
    """The command's argument."""
    volumes: tuple[Document, ...] = ()
    mounts: tuple[Document, ...] = ()
    env: tuple[Document, ...] = ()
    env_from: tuple[Document, ...] = ()
    problems: tuple[Problem, ...] = field(default=())


def storage_location(storage: Document, spec_field: str, namespace: str) -> StorageLocation:
    """Return the storage location of a field of the spec. `spec_field`: `outputLocation` or `dataset`."""
    uri = get_str(storage, "storageUri")
    if not uri:
        return StorageLocation()
    scheme, _, rest = uri.partition("://")
    name, allowed = (OUTPUT, _WRITABLE) if spec_field == "outputLocation" else (DATASET, _READABLE)
    if scheme not in allowed:
        message = f"{scheme[:40]}:// cannot be {'written' if name == OUTPUT else 'read'} by `headrace bench`"
        fix = f"write one of {', '.join(f'{option}://' for option in allowed)}"
        return StorageLocation(problems=(Problem(f"spec.{spec_field}.storageUri", message, fix),))
    if scheme == "pvc":
        return _claim_location(rest, name, spec_field, namespace)
    if scheme == "local":
        path = get_str(storage, "path") or f"/{rest.lstrip('/')}"
        volume = {"name": name, "hostPath": {"path": path, "type": "DirectoryOrCreate" if name == OUTPUT else ""}}
        return _mounted_location(name, volume, "")
    parameters = get_mapping(storage, "parameters")
    env = [
        {"name": variable, "value": parameters[parameter]}
        for (of, parameter), variable in _VARIABLES.items()
        if of == scheme and isinstance(parameters.get(parameter), str)
    ]
    secret = get_str(storage, "key")
    env_from: list[Document] = [{"secretRef": {"name": secret}}] if secret and scheme != "hf" else []
    if secret and scheme == "hf":
        env.append(hub_token(secret, get_str(parameters, "secretKey") or "token"))
    return StorageLocation(uri, env=tuple(env), env_from=tuple(env_from))


def hub_token(secret: str, key: str = "token") -> dict[str, Any]:
    """Return the environment variable with the token of the Hugging Face Hub."""
    return {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}}


def _claim_location(rest: str, name: str, spec_field: str, namespace: str) -> StorageLocation:
    claim, _, path = rest.partition("/")
    claim_namespace, colon, short = claim.partition(":")
    if colon and claim_namespace != namespace:
        message = f"the claim is in namespace {claim_namespace[:63]}, but pods mount only claims of their own namespace"
        fix = f"write pvc://CLAIM/PATH with a claim in {namespace}"
        return StorageLocation(problems=(Problem(f"spec.{spec_field}.storageUri", message, fix),))
    inside = path.strip("/")
    if ".." in inside.split("/"):
        return StorageLocation(
            problems=(Problem(f"spec.{spec_field}.storageUri", "the path has `..` in it", "write it without"),)
        )
    volume = {"name": name, "persistentVolumeClaim": {"claimName": short or claim}}
    return _mounted_location(name, volume, inside)


def _mounted_location(name: str, volume: Document, inside: str) -> StorageLocation:
    root = f"/{name}"
    mount = {"name": name, "mountPath": root, **({"readOnly": True} if name == DATASET else {})}
    return StorageLocation(f"{root}/{inside}".rstrip("/"), volumes=(volume,), mounts=(mount,))


def unsupported(benchmark: Document) -> Iterator[Problem]:
    """Yield what `headrace bench` does not support in a valid BenchmarkJob."""
    spec, namespace = get_mapping(benchmark, "spec"), namespace_of(benchmark)
    for spec_field in ("outputLocation", "dataset"):
        yield from storage_location(get_mapping(spec, spec_field), spec_field, namespace).problems
    yield from _scenario_problems(spec)
    value = get_str(spec, "endpoint", "endpoint", "apiFormat")
    if value not in ("", "openai"):
        fix = "write openai, and an address that speaks it"
        yield Problem("spec.endpoint.endpoint.apiFormat", f"`headrace bench` does not speak {value[:40]}", fix)
    if any(part in ("..", ".") for part in get_str(spec, "resultFolderName").split("/")):
        yield Problem("spec.resultFolderName", "leaves the output location", "write a plain name")


def _scenario_problems(spec: Document) -> Iterator[Problem]:
    if get_str(spec, "task") not in TASKS:
        return  # the schema reports it
    for number, traffic_scenario in enumerate(get_list(spec, "trafficScenarios")):
        try:
            parse_scenario(str(traffic_scenario), get_str(spec, "task"))
        except InvalidArgument as error:
            message, _, fix = error.message.partition(": ")
            yield Problem(f"spec.trafficScenarios[{number}]", message, fix)
