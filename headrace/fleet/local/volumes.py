# SPDX-License-Identifier: Apache-2.0
"""The folders that a container finds: empty ones and those of ConfigMaps below the pod's own, the machine's where they are.

Called by `starting` before each start, and blocking.
"""

from __future__ import annotations

import base64
import binascii
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path

from headrace.fleet.local.commands import CannotRun
from headrace.fleet.local.driving import Mounted
from headrace.fleet.selection.measures import quantity
from headrace.fleet.words import Document, items, part, text

_NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
"""What a cluster would take; it cannot leave a folder."""
_LEFT = ("/dev/shm",)  # noqa: S108  the machine's own does as well


def mounted(
    pod: Document,
    container: Document,
    folder: Path,
    find: Callable[[str, str], Document | None],
    models: Mapping[str, str],
    *,
    other_users: bool = False,
) -> list[Mounted]:
    """Folders in a container and where they lie here. Raises CannotRun.

    folder: of the pod, whose containers share its volumes. models: paths that models have here. other_users: those of an
    image, who have to get at what is the pod's own.
    """
    volumes = {text(each, "name"): each for each in items(pod, "spec", "volumes")}
    made: list[Mounted] = []
    for each in items(container, "volumeMounts"):
        inside, volume = text(each, "mountPath"), volumes.get(text(each, "name"))
        if not inside or volume is None or inside.rstrip("/") in _LEFT:
            continue
        known = models.get(inside) or models.get(text(volume, "hostPath", "path"))
        # A model is there as a whole, whatever volume it would come from.
        here = Path(known) if known else _below(each, volume, _place(volume, inside, folder, find))
        if other_users and not known and here.is_relative_to(folder):
            _open_up(folder / "volumes" / text(volume, "name"), writable="emptyDir" in volume)
        made.append(Mounted(inside, str(here), each.get("readOnly") is True or bool(known)))
    return made


def shared_memory(pod: Document, container: Document) -> int | None:
    """Bytes of /dev/shm, where a volume of that place says how many."""
    volumes = {text(each, "name"): each for each in items(pod, "spec", "volumes")}
    for each in items(container, "volumeMounts"):
        if text(each, "mountPath").rstrip("/") in _LEFT:
            said = quantity(part(volumes.get(text(each, "name"), {}), "emptyDir").get("sizeLimit"))
            return int(said) if said else None
    return None


def _open_up(folder: Path, *, writable: bool) -> None:
    """Rights as a kubelet gives them: the folder of the fleet around it is its owner's alone."""
    folder.chmod(0o777 if writable else 0o755)
    if not writable:
        for each in folder.rglob("*"):
            each.chmod(0o755 if each.is_dir() else 0o644)


def _below(mount: Document, volume: Document, here: Path) -> Path:
    """With the mount's subPath. Made where the volume is the pod's own."""
    sub = text(mount, "subPath")
    if not sub:
        return here
    if ".." in Path(sub).parts or Path(sub).is_absolute():
        raise CannotRun("CreateContainerConfigError", f"subPath {sub} leaves its volume")
    if "emptyDir" in volume:
        (here / sub).mkdir(parents=True, exist_ok=True)
    return here / sub


def _place(volume: Document, inside: str, pod: Path, find: Callable[[str, str], Document | None]) -> Path:
    if not _NAME.fullmatch(text(volume, "name")):
        said = f"a volume is called {text(volume, 'name')[:64]!a}: take lower-case letters, digits and '-'"
        raise CannotRun("CreateContainerConfigError", said)
    folder = pod / "volumes" / text(volume, "name")
    if "emptyDir" in volume or "ephemeral" in volume:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        return folder
    if part(volume, "hostPath"):
        return _of_machine(Path(text(volume, "hostPath", "path")), text(volume, "hostPath", "type"))
    for kind, source in (("ConfigMap", part(volume, "configMap")), ("Secret", part(volume, "secret"))):
        if source:
            return _written(kind, source, folder, find)
    claim = text(volume, "persistentVolumeClaim", "claimName")
    if claim and Path(inside).exists():
        return Path(inside)  # the machine has what the claim stands for
    what = f"claim {claim}" if claim else "a volume of a kind that one machine does not have"
    raise CannotRun("CreateContainerConfigError", f"{inside} is {what}: put its files at {inside} of this machine")


def _of_machine(path: Path, kind: str) -> Path:
    if kind == "DirectoryOrCreate":
        path.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        raise CannotRun("CreateContainerConfigError", f"{path} is not on this machine: put the files there")
    return path


def _written(kind: str, source: Document, folder: Path, find: Callable[[str, str], Document | None]) -> Path:
    name = text(source, "name") or text(source, "secretName")
    found = find(kind, name)
    if found is None and source.get("optional") is not True:
        raise CannotRun("CreateContainerConfigError", f"{kind} {name} is not here: apply it")
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    asked = {text(each, "key"): text(each, "path") for each in items(source, "items")}
    kept: set[Path] = set()
    for key, content in _contents(found).items():
        target = (folder / (asked.get(key, "") if asked else key)).resolve()
        if target == folder.resolve() or not target.is_relative_to(folder.resolve()):
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        fresh = target.with_name(f".{target.name}.new")
        descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        fresh.replace(target)
        kept.add(target)
    for each in folder.rglob("*"):
        if not each.is_dir() and each.resolve() not in kept:  # of a key that is not there any more
            each.unlink()
    return folder


def _contents(document: Document | None) -> dict[str, bytes]:
    made = {
        name: value.encode()
        for place in ("data", "stringData")
        for name, value in part(document, place).items()
        if isinstance(value, str)
    }
    for name, value in part(document, "binaryData").items():
        try:
            made[name] = base64.b64decode(value, validate=True)
        except (binascii.Error, TypeError, ValueError):
            continue
    return made
