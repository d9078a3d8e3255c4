# SPDX-License-Identifier: Apache-2.0
"""Which of a training job's files is the model (facts 3.5): by the chosen method, among names with epochs in them.

Called by `services`. `choose` is a function of names; `find_local` and `find_stored` list them, and block.
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
from headrace.models.storage.locations import ObjectPlace
from headrace.models.storage.objects import ObjectLimits, ObjectSource

log = logging.getLogger("headrace.jobs")

METHODS = ("best_model", "latest_model", "from_epoch_number")
MOST_FILES = 100_000
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
_OURS = (
    "config.pbtxt",
    "config.json",
    "config.yaml",
    "saved_model.pb",
    "model.txt",
    "model.json",
    "init_net.pb",
    "model.py",
)
_FOLDERS = frozenset({"cosmos-rl", "cosmos-predict2.5", "tao-dataservices", "vila"})
"""Architectures whose checkpoint is a folder of safetensors."""
_EPOCH_AT_END = re.compile(r"_(\d+)$")


@dataclass(frozen=True, slots=True)
class Choice:
    """What was said of which checkpoint is wanted."""

    arch: str = ""
    method: str = "best_model"
    epoch: int = 0
    vila_modes: str = ""
    """`{vision_mode}_{llm_mode}`, of vila."""

    @classmethod
    def of(cls, arch: str, job_id: str, experiment: Mapping[str, Any], specs: Mapping[str, Any]) -> Choice:
        """From an experiment's details and a training job's specs."""
        method = str(experiment.get("checkpoint_choose_method") or "best_model")
        if method not in METHODS:
            raise InvalidArgument(f"checkpoint_choose_method is not known: use one of {', '.join(METHODS)}")
        numbers = experiment.get("checkpoint_epoch_number")
        epoch = numbers.get(f"{method}_{job_id}", 0) if isinstance(numbers, Mapping) else 0
        if not isinstance(epoch, int) or isinstance(epoch, bool) or not 0 <= epoch < 10**9:
            raise InvalidArgument("checkpoint_epoch_number: an epoch is a whole number of 0 or more")
        modes = [str(specs.get(name) or "") for name in ("vision_mode", "llm_mode")]
        return cls(arch.lower(), method, epoch, "_".join(modes) if all(modes) else "")


def choose(names: Sequence[str], choice: Choice) -> str | None:
    """The file or folder among names like "train/model_epoch_012.pth"; "" for all of it, None if none is a model."""
    names = [name for name in names if "lightning_logs" not in name.split("/")]
    folders = sorted({name.rpartition("/")[0] for name in names if name.endswith(".safetensors")})
    modes = choice.vila_modes
    if choice.arch == "vila" and modes and any(name.startswith(f"{modes}/") for name in names):
        return modes
    if choice.arch in _FOLDERS and folders:
        return _merged(_pick(folders, choice), names)
    trained = [name for name in names if name.endswith(_TRAINED)]
    if trained:
        return _pick(trained, choice)
    return _exported(names, choice)


def find_local(path: Path, choice: Choice) -> str:
    """The model at a path of this machine."""
    if path.is_file():
        return str(path)
    if not path.is_dir():
        raise NotFound(f"there is no checkpoint at {path}: it does not exist, or may not be read")
    names: list[str] = []
    for folder, below, files in os.walk(path):
        below.sort()
        names += [os.path.relpath(os.path.join(folder, file), path) for file in files]
        if len(names) > MOST_FILES:
            raise InvalidArgument(f"{path} has more than {MOST_FILES} files; name the checkpoint itself")
    chosen = choose(names, choice)
    if chosen is None:
        raise NotFound(f"there is no checkpoint in {path}: none of its {len(names)} files is a model that is known")
    return str(path / chosen) if chosen else str(path)


def find_stored(place: ObjectPlace, cloud_type: str, credentials: CloudCredentials, choice: Choice) -> str:
    """The model below a key of a bucket, as a URL with the workspace's own scheme."""
    limits = ObjectLimits(max_files=MOST_FILES, idle_seconds=20.0, retry_seconds=5.0)
    listing = ObjectSource(place, credentials, limits).look()
    scheme = "gs" if cloud_type == "gcp" else cloud_type
    root = f"{scheme}://{place.bucket}/{place.key}"
    if listing.is_file:
        return root
    chosen = choose([entry.name for entry in listing.objects], choice)
    if chosen is None:
        raise NotFound(f"there is no checkpoint at {place}: none of its objects is a model that is known")
    return f"{root.rstrip('/')}/{chosen}" if chosen else root


def _pick(names: Sequence[str], choice: Choice) -> str:
    if choice.method != "latest_model":
        # %03d is what TAO writes; more or fewer zeros mean the same.
        wanted = re.compile(rf"_0*{choice.epoch}(_step_\d+)?$")
        fitting = [name for name in names if any(wanted.search(part) for part in _parts(name))]
        if fitting:
            return max(fitting, key=_number)
        if len(names) > 1:
            log.warning("no checkpoint of epoch %03d; the latest is taken", choice.epoch)
    return max(names, key=lambda name: (_number(name), name))


def _parts(name: str) -> list[str]:
    """The names on the way, without extensions."""
    return [re.sub(r"(\.(pth|tlt|hdf5|onnx|pt|safetensors))+$", "", part) for part in name.split("/")]


def _number(name: str) -> int:
    """The integer after the last `_`, of the last part that has one; -1 for none."""
    for part in reversed(_parts(name)):
        found = _EPOCH_AT_END.search(part)
        if found:
            return int(found[1])
    return -1


def _merged(folder: str, names: Sequence[str]) -> str:
    above, _, last = folder.rpartition("/")
    beside = f"{above}/merged" if above else "merged"
    if last == "safetensors" and any(name.startswith(f"{beside}/") for name in names):
        return beside
    return folder


def _exported(names: Sequence[str], choice: Choice) -> str | None:
    """Models that TAO does not train and we serve: their folder, since labels and the like lie beside them."""
    if any("/" not in name and (name in _OURS or name.endswith(_EXPORTED)) for name in names):
        top = [name for name in names if "/" not in name and name.endswith(_EXPORTED)]
        several = len(top) > 1 and all(_number(name) >= 0 for name in top) and "config.json" not in names
        return _pick(top, choice) if several else ""
    folders = sorted({n.rpartition("/")[0] for n in names if n.rpartition("/")[2] in _OURS or n.endswith(_EXPORTED)})
    if not folders:
        return None
    # A folder within another's (a model's own version 1/) belongs to that.
    tops = [each for each in folders if not any(each.startswith(f"{other}/") for other in folders)]
    chosen = _pick(tops, choice)
    # 1/model.onnx below the root: the root is a model in a repository.
    return "" if len(tops) == 1 and chosen.isdigit() else _merged(chosen, names)
