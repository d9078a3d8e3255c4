# SPDX-License-Identifier: Apache-2.0
"""The volumes of a container: emptyDirs and ConfigMaps below the pod's folder, host paths where they are.

Blocking; called before each start of a container.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Callable, Mapping
from pathlib import Path

from headrace.core.files import write_atomically
from headrace.fleet.local.container_command import ContainerStartError
from headrace.fleet.local.container_runtime import VolumeMount
from headrace.fleet.selection.model_match import parse_quantity
from headrace.platforms.kubernetes_client.objects import Document, get_list, get_mapping, get_str

_NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
"""A valid name of a volume; it is safe as the name of a folder."""
_SHARED_MEMORY = ("/dev/shm",)  # noqa: S108  the machine's own is used


def volume_mounts(
    pod: Document,
    container: Document,
    folder: Path,
    find: Callable[[str, str], Document | None],
    models: Mapping[str, str],
    *,
    other_users: bool = False,
) -> list[VolumeMount]:
    """Return the mounts of a container; creates what is missing. Raises ContainerStartError.

    folder: of the pod, whose containers share its volumes. models: local folders of models, by mount path. other_users:
    whether the image runs as another user, who must be able to read the pod's volumes.
    """
    volumes = {get_str(volume, "name"): volume for volume in get_list(pod, "spec", "volumes")}
    mounts: list[VolumeMount] = []
    for mount in get_list(container, "volumeMounts"):
        mount_path, volume = get_str(mount, "mountPath"), volumes.get(get_str(mount, "name"))
        if not mount_path or volume is None or mount_path.rstrip("/") in _SHARED_MEMORY:
            continue
        model = models.get(mount_path) or models.get(get_str(volume, "hostPath", "path"))
        # A model is used from its local folder, whatever volume it would come from.
        host_path = (
            Path(model) if model else _with_sub_path(mount, volume, _volume_path(volume, mount_path, folder, find))
        )
        if other_users and not model and host_path.is_relative_to(folder):
            _set_permissions(folder / "volumes" / get_str(volume, "name"), writable="emptyDir" in volume)
        mounts.append(VolumeMount(mount_path, str(host_path), mount.get("readOnly") is True or bool(model)))
    return mounts


def shared_memory(pod: Document, container: Document) -> int | None:
    """Return the size of /dev/shm, if a volume mounted there sets one."""
    volumes = {get_str(volume, "name"): volume for volume in get_list(pod, "spec", "volumes")}
    for mount in get_list(container, "volumeMounts"):
        if get_str(mount, "mountPath").rstrip("/") in _SHARED_MEMORY:
            size = parse_quantity(get_mapping(volumes.get(get_str(mount, "name"), {}), "emptyDir").get("sizeLimit"))
            return int(size) if size else None
    return None


def _set_permissions(folder: Path, *, writable: bool) -> None:
    """Set the permissions that a kubelet sets; the fleet's folder around it stays private to its owner."""
    folder.chmod(0o777 if writable else 0o755)
    if not writable:
        for path in folder.rglob("*"):
            path.chmod(0o755 if path.is_dir() else 0o644)


def _with_sub_path(mount: Document, volume: Document, folder: Path) -> Path:
    """Return the folder with the mount's subPath; created in an emptyDir."""
    sub = get_str(mount, "subPath")
    if not sub:
        return folder
    if ".." in Path(sub).parts or Path(sub).is_absolute():
        raise ContainerStartError("CreateContainerConfigError", f"subPath {sub} leaves its volume")
    if "emptyDir" in volume:
        (folder / sub).mkdir(parents=True, exist_ok=True)
    return folder / sub


def _volume_path(
    volume: Document, mount_path: str, pod_folder: Path, find: Callable[[str, str], Document | None]
) -> Path:
    if not _NAME.fullmatch(get_str(volume, "name")):
        message = (
            f"the volume name {get_str(volume, 'name')[:64]!a} is not valid: use lower-case letters, digits and '-'"
        )
        raise ContainerStartError("CreateContainerConfigError", message)
    folder = pod_folder / "volumes" / get_str(volume, "name")
    if "emptyDir" in volume or "ephemeral" in volume:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        return folder
    if get_mapping(volume, "hostPath"):
        return _host_path(Path(get_str(volume, "hostPath", "path")), get_str(volume, "hostPath", "type"))
    for kind, source in (("ConfigMap", get_mapping(volume, "configMap")), ("Secret", get_mapping(volume, "secret"))):
        if source:
            return _write_volume(kind, source, folder, find)
    claim = get_str(volume, "persistentVolumeClaim", "claimName")
    if claim and Path(mount_path).exists():
        return Path(mount_path)  # the machine has a folder at the mount path
    what = f"claim {claim}" if claim else "a volume of a kind that the local fleet does not support"
    raise ContainerStartError(
        "CreateContainerConfigError", f"{mount_path} is {what}: put its files at {mount_path} of this machine"
    )


def _host_path(path: Path, kind: str) -> Path:
    if kind == "DirectoryOrCreate":
        path.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        raise ContainerStartError("CreateContainerConfigError", f"{path} is not on this machine: put the files there")
    return path


def _write_volume(kind: str, source: Document, folder: Path, find: Callable[[str, str], Document | None]) -> Path:
    name = get_str(source, "name") or get_str(source, "secretName")
    document = find(kind, name)
    if document is None and source.get("optional") is not True:
        raise ContainerStartError("CreateContainerConfigError", f"{kind} {name} does not exist: apply it")
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    paths = {get_str(item, "key"): get_str(item, "path") for item in get_list(source, "items")}
    kept: set[Path] = set()
    for key, content in _contents(document).items():
        target = (folder / (paths.get(key, "") if paths else key)).resolve()
        if target == folder.resolve() or not target.is_relative_to(folder.resolve()):
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(target, content, durable=False)
        kept.add(target)
    for path in folder.rglob("*"):
        if not path.is_dir() and path.resolve() not in kept:  # of a key that was removed
            path.unlink()
    return folder


def _contents(document: Document | None) -> dict[str, bytes]:
    contents = {
        name: value.encode()
        for field in ("data", "stringData")
        for name, value in get_mapping(document, field).items()
        if isinstance(value, str)
    }
    for name, value in get_mapping(document, "binaryData").items():
        try:
            contents[name] = base64.b64decode(value, validate=True)
        except (binascii.Error, TypeError, ValueError):
            continue
    return contents
