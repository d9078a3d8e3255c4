# SPDX-License-Identifier: Apache-2.0
"""Choose the checkpoint of a training job: by the experiment's method, among file names with epochs.

`choose` works on names only; `find_local` and `find_stored` list files and block.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.core.errors import InvalidArgument, NotFound
from headrace.models.storage.credentials import CloudCredentials
from headrace.models.storage.locations import ObjectLocation
from headrace.models.storage.object_stores import ObjectLimits, ObjectSource

log = logging.getLogger("headrace.jobs")

METHODS = ("best_model", "latest_model", "from_epoch_number")
MAX_FILES = 100_000
_TRAINED = (".pth", ".tlt", ".hdf5")
_EXPORTED = (
    ".onnx",
    ".pt",
    ".pts",
    ".torchscript",
    ".pb",
    ".plan",
    ".engine",
    ".xml",
    ".ubj",
    ".skops",
    ".safetensors",
)
_MODEL_FILES = (
    "config.pbtxt",
    "config.json",
    "config.yaml",
    "saved_model.pb",
    "model.txt",
    "model.json",
    "init_net.pb",
    "model.py",
)
_FOLDER_ARCHITECTURES = frozenset({"cosmos-rl", "cosmos-predict2.5", "tao-dataservices", "vila"})
"""Architectures whose checkpoint is a folder of safetensors files."""
_EPOCH_AT_END = re.compile(r"_(\d+)$")


@dataclass(frozen=True, slots=True)
class CheckpointChoice:
    """Which checkpoint to choose."""

    arch: str = ""
    method: str = "best_model"
    epoch: int = 0
    vila_modes: str = ""
    """`{vision_mode}_{llm_mode}`, for vila."""

    @classmethod
    def of(cls, arch: str, job_id: str, experiment: Mapping[str, Any], specs: Mapping[str, Any]) -> CheckpointChoice:
        """Read the choice from an experiment's details and a training job's specs."""
        method = str(experiment.get("checkpoint_choose_method") or "best_model")
        if method not in METHODS:
            raise InvalidArgument(f"unknown checkpoint_choose_method: use one of {', '.join(METHODS)}")
        numbers = experiment.get("checkpoint_epoch_number")
        epoch = numbers.get(f"{method}_{job_id}", 0) if isinstance(numbers, Mapping) else 0
        if not isinstance(epoch, int) or isinstance(epoch, bool) or not 0 <= epoch < 10**9:
            raise InvalidArgument("checkpoint_epoch_number: an epoch must be an integer of 0 or more")
        modes = [str(specs.get(name) or "") for name in ("vision_mode", "llm_mode")]
        return cls(arch.lower(), method, epoch, "_".join(modes) if all(modes) else "")


def choose(names: Sequence[str], choice: CheckpointChoice) -> str | None:
    """Choose among names like "train/model_epoch_012.pth"; "" means the whole folder, None that none is a model."""
    names = [name for name in names if "lightning_logs" not in name.split("/")]
    folders = sorted({name.rpartition("/")[0] for name in names if name.endswith(".safetensors")})
    modes = choice.vila_modes
    if choice.arch == "vila" and modes and any(name.startswith(f"{modes}/") for name in names):
        return modes
    if choice.arch in _FOLDER_ARCHITECTURES and folders:
        return _prefer_merged(_pick(folders, choice), names)
    trained = [name for name in names if name.endswith(_TRAINED)]
    if trained:
        return _pick(trained, choice)
    return _exported(names, choice)


def find_local(path: Path, choice: CheckpointChoice) -> str:
    """Return the path of the model in a local folder."""
    if path.is_file():
        return str(path)
    if not path.is_dir():
        raise NotFound(f"no checkpoint at {path}: it does not exist or is not readable")
    names: list[str] = []
    for folder, subfolders, files in os.walk(path):
        subfolders.sort()
        names += [os.path.relpath(os.path.join(folder, file), path) for file in files]
        if len(names) > MAX_FILES:
            raise InvalidArgument(f"{path} has more than {MAX_FILES} files; name the checkpoint itself")
    checkpoint = choose(names, choice)
    if checkpoint is None:
        raise NotFound(f"no checkpoint in {path}: none of its {len(names)} files is a known model")
    return str(path / checkpoint) if checkpoint else str(path)


def find_stored(
    location: ObjectLocation, cloud_type: str, credentials: CloudCredentials, choice: CheckpointChoice
) -> str:
    """Return the URL of the model below a key of a bucket, with the workspace's scheme."""
    limits = ObjectLimits(max_files=MAX_FILES, idle_seconds=20.0, retry_seconds=5.0)
    listing = ObjectSource(location, credentials, limits).read_listing()
    scheme = "gs" if cloud_type == "gcp" else cloud_type
    root = f"{scheme}://{location.bucket}/{location.key}"
    if listing.is_file:
        return root
    checkpoint = choose([entry.name for entry in listing.objects], choice)
    if checkpoint is None:
        raise NotFound(f"no checkpoint at {location}: none of its objects is a known model")
    return f"{root.rstrip('/')}/{checkpoint}" if checkpoint else root


def _pick(names: Sequence[str], choice: CheckpointChoice) -> str:
    if choice.method != "latest_model":
        # TAO writes %03d; accept any number of leading zeros.
        pattern = re.compile(rf"_0*{choice.epoch}(_step_\d+)?$")
        matching = [name for name in names if any(pattern.search(part) for part in _stems(name))]
        if matching:
            return max(matching, key=_epoch)
        if len(names) > 1:
            log.warning("No checkpoint of epoch %03d; using the latest.", choice.epoch)
    return max(names, key=lambda name: (_epoch(name), name))


def _stems(name: str) -> list[str]:
    """Return the parts of a path, without extensions."""
    return [re.sub(r"(\.(pth|tlt|hdf5|onnx|pt|safetensors))+$", "", part) for part in name.split("/")]


def _epoch(name: str) -> int:
    """Return the number after the last `_`, from the last part that has one; -1 for none."""
    for part in reversed(_stems(name)):
        match = _EPOCH_AT_END.search(part)
        if match:
            return int(match[1])
    return -1


def _prefer_merged(folder: str, names: Sequence[str]) -> str:
    parent, _, last = folder.rpartition("/")
    merged = f"{parent}/merged" if parent else "merged"
    if last == "safetensors" and any(name.startswith(f"{merged}/") for name in names):
        return merged
    return folder


def _exported(names: Sequence[str], choice: CheckpointChoice) -> str | None:
    """Choose a model format that TAO does not train: its folder, because labels and configuration are beside the model."""
    if any("/" not in name and (name in _MODEL_FILES or name.endswith(_EXPORTED)) for name in names):
        top = [name for name in names if "/" not in name and name.endswith(_EXPORTED)]
        by_epoch = len(top) > 1 and all(_epoch(name) >= 0 for name in top) and "config.json" not in names
        return _pick(top, choice) if by_epoch else ""
    folders = sorted(
        {n.rpartition("/")[0] for n in names if n.rpartition("/")[2] in _MODEL_FILES or n.endswith(_EXPORTED)}
    )
    if not folders:
        return None
    # A nested folder (a model's version 1/) belongs to the outer one.
    top_folders = [folder for folder in folders if not any(folder.startswith(f"{other}/") for other in folders)]
    chosen = _pick(top_folders, choice)
    # 1/model.onnx: the root is a model of a repository.
    return "" if len(top_folders) == 1 and chosen.isdigit() else _prefer_merged(chosen, names)
