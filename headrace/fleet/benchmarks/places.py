# SPDX-License-Identifier: Apache-2.0
"""Where results go and prompts come from, as a pod sees it: a path in a volume, or an address and how to get in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from headrace.fleet.words import Document, Problem, part, text

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
"""What a parameter of a storage is to the clouds' own tools."""


@dataclass(frozen=True)
class Place:
    """A storage, for a container."""

    argument: str = ""
    """For the command."""
    volumes: tuple[Document, ...] = ()
    mounts: tuple[Document, ...] = ()
    env: tuple[Document, ...] = ()
    env_from: tuple[Document, ...] = ()
    problems: tuple[Problem, ...] = field(default=())


def place_of(storage: Document, where: str, namespace: str) -> Place:
    """The storage of a field of the spec; `where` is that field and the name of the volume."""
    uri = text(storage, "storageUri")
    if not uri:
        return Place()
    scheme, _, rest = uri.partition("://")
    name, allowed = (OUTPUT, _WRITABLE) if where == "outputLocation" else (DATASET, _READABLE)
    if scheme not in allowed:
        said = f"{scheme[:40]}:// cannot be {'written' if name == OUTPUT else 'read'} by `headrace bench`"
        fix = f"write one of {', '.join(f'{each}://' for each in allowed)}"
        return Place(problems=(Problem(f"spec.{where}.storageUri", said, fix),))
    if scheme == "pvc":
        return _claimed(rest, name, where, namespace)
    if scheme == "local":
        path = text(storage, "path") or f"/{rest.lstrip('/')}"
        volume = {"name": name, "hostPath": {"path": path, "type": "DirectoryOrCreate" if name == OUTPUT else ""}}
        return _mounted(name, volume, "")
    given = part(storage, "parameters")
    env = [
        {"name": variable, "value": given[parameter]}
        for (of, parameter), variable in _VARIABLES.items()
        if of == scheme and isinstance(given.get(parameter), str)
    ]
    secret = text(storage, "key")
    env_from: list[Document] = [{"secretRef": {"name": secret}}] if secret and scheme != "hf" else []
    if secret and scheme == "hf":
        env.append(hub_token(secret, text(given, "secretKey") or "token"))
    return Place(uri, env=tuple(env), env_from=tuple(env_from))


def hub_token(secret: str, key: str = "token") -> dict[str, Any]:
    """The variable that the Hugging Face Hub's token is in."""
    return {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}}


def _claimed(rest: str, name: str, where: str, namespace: str) -> Place:
    claim, _, path = rest.partition("/")
    of, colon, short = claim.partition(":")
    if colon and of != namespace:
        said = f"the claim is in namespace {of[:63]}, and pods mount claims of their own alone"
        fix = f"write pvc://CLAIM/PATH with a claim in {namespace}"
        return Place(problems=(Problem(f"spec.{where}.storageUri", said, fix),))
    inside = path.strip("/")
    if ".." in inside.split("/"):
        return Place(problems=(Problem(f"spec.{where}.storageUri", "the path has `..` in it", "write it without"),))
    volume = {"name": name, "persistentVolumeClaim": {"claimName": short or claim}}
    return _mounted(name, volume, inside)


def _mounted(name: str, volume: Document, inside: str) -> Place:
    root = f"/{name}"
    mount = {"name": name, "mountPath": root, **({"readOnly": True} if name == DATASET else {})}
    return Place(f"{root}/{inside}".rstrip("/"), volumes=(volume,), mounts=(mount,))
