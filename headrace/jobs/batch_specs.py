# SPDX-License-Identifier: Apache-2.0
"""What a batch was asked to do: its specs checked, as the command line of `headrace batch`, and where its progress lies.

Called by `batches`. Users name files here, so nothing of this machine is read or written but what lies in a folder that the
operator has opened, or in their organisation's own.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.core.errors import HeadraceError, InvalidArgument, PermissionDenied
from headrace.jobs.checks import check_text
from headrace.jobs.records import Job
from headrace.jobs.settings import JobSettings
from headrace.models.storage.credentials import CloudCredentials
from headrace.models.storage.locations import HubPlace, LocalPlace, ObjectPlace, parse_location
from headrace.platforms.contract import FILE, SECRET, LaunchSpec

_NUMBERS: Mapping[str, tuple[int, int]] = {
    "limit": (0, 10**12),
    "max_failures": (0, 10**12),
    "batch_size": (1, 65_536),
    "in_flight": (1, 4096),
}
_FLAGS = ("ordered", "retry_failed")
_OBJECTS = ("parameters", "specs")
_KNOWN = ("model_path", "hf_model", "input", "output", "task", "shard", *_NUMBERS, *_FLAGS, *_OBJECTS)
_SHARD = re.compile(r"([1-9][0-9]{0,5})/([1-9][0-9]{0,5})", re.ASCII)
_TASKS = ("language", "vision_language", "classifier", "detector", "embedding", "tensors")
_LINES = (".jsonl", ".ndjson")
_PARQUET = (".parquet", ".pq")
_MOST_GRACE = 10.0


def check_fields(specs: Mapping[str, Any]) -> None:
    """All but the places. Raises InvalidArgument that names the field."""
    for name in specs:
        if name not in _KNOWN:
            raise InvalidArgument(f"specs.{str(name)[:64]!a} is not known: use {', '.join(_KNOWN)}")
    for name, (least, most) in _NUMBERS.items():
        value = specs.get(name)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most):
            raise InvalidArgument(f"specs.{name} must be a whole number from {least} to {most}")
    for name in _FLAGS:
        if not isinstance(specs.get(name), bool | None):
            raise InvalidArgument(f"specs.{name} must be true or false")
    for name in _OBJECTS:
        if not isinstance(specs.get(name), Mapping | None):
            raise InvalidArgument(f"specs.{name} must be an object")
    for name in ("model_path", "hf_model", "input", "output", "task", "shard"):
        check_text(specs.get(name), f"specs.{name}")
    for name in ("input", "output"):
        if not specs.get(name):
            raise InvalidArgument(f"specs.{name} is required: a path or a URL")
    shard = specs.get("shard")
    if shard:
        found = _SHARD.fullmatch(shard)
        if found is None or int(found[1]) > int(found[2]):
            raise InvalidArgument("specs.shard must be written I/N with I from 1 to N, such as 2/4")
    if specs.get("task") and specs["task"] not in _TASKS:
        raise InvalidArgument(f"specs.task must be one of {', '.join(_TASKS)}")


class Places:
    """Where an organisation's batches may read and write. Looks at the disk, so it blocks."""

    def __init__(self, settings: JobSettings, org: str, metadata: Mapping[str, Any]) -> None:
        self._own = settings.files_folder(org)
        self._folders = (*settings.checkpoint_folders, self._own)
        self._credentials = CloudCredentials.from_metadata(metadata)

    def input(self, text: str) -> str:
        """A folder or a manifest that is there, or one elsewhere."""
        place = self._place("input", text)
        if isinstance(place, HubPlace):
            raise InvalidArgument("specs.input is a model of the Hugging Face Hub: name a folder or a manifest")
        if not isinstance(place, LocalPlace):
            return text
        real = self._below("input", place.path)
        if not real.exists():
            raise InvalidArgument(f"specs.input: there is nothing at {text[:200]!a}")
        return str(real)

    def output(self, text: str) -> str:
        """A file or an object that may be written."""
        place = self._place("output", text)
        if isinstance(place, LocalPlace):
            name = place.path.name
        elif isinstance(place, ObjectPlace):
            name = place.key.rpartition("/")[2]
        else:
            raise InvalidArgument("specs.output must be a file, or an object of s3://, gs:// or az://")
        if Path(name).suffix.lower() not in (*_LINES, *_PARQUET):
            raise InvalidArgument("specs.output must name a file that ends in .jsonl or .parquet")
        if not isinstance(place, LocalPlace):
            return text
        real = self._below("output", place.path)
        if real.is_dir():
            raise InvalidArgument("specs.output is a folder: name a file in it")
        if real.suffix.lower() in _PARQUET and real.exists() and not _beside(real).exists():
            # Of JSON Lines the batch itself sees that they are somebody else's.
            raise InvalidArgument("specs.output exists and is not of a batch: name another file")
        return str(real)

    def _place(self, field: str, text: str) -> Any:
        try:
            place = parse_location(text)
            if isinstance(place, ObjectPlace):
                self._credentials.keys_of(place.cloud, place.bucket)
        except HeadraceError as error:
            raise InvalidArgument(f"specs.{field}: {error.message}") from None
        return place

    def _below(self, field: str, path: Path) -> Path:
        try:
            real = (self._own / path).resolve()  # an absolute path stays what it is
            allowed = any(real.is_relative_to(each.resolve()) for each in self._folders)
        except (OSError, ValueError, RuntimeError):
            raise InvalidArgument(f"specs.{field}: the path cannot be read") from None
        if not allowed:
            raise PermissionDenied(
                f"specs.{field}: files of this machine lie in a folder that the operator has opened for them, or in the "
                "organisation's own, where relative paths begin"
            )
        return real


def batch_launch(
    job: Job, settings: JobSettings, metadata: Mapping[str, Any], variables: Mapping[str, str]
) -> LaunchSpec:
    """What a driver starts: whatever users gave is among the secret words, but numbers."""
    specs, details = job.specs, job.details
    secrets = {"model": details["model_path"], "input": details["input"], "output": details["output"]}
    words = [*settings.batch_words, *(SECRET % name for name in secrets)]
    for name in _OBJECTS:
        if specs.get(name):
            secrets[name] = json.dumps(specs[name])
            words += [f"--{name}", SECRET % name]
    for name in (*_NUMBERS, "task", "shard"):
        if specs.get(name) not in (None, ""):
            words += [f"--{name.replace('_', '-')}", str(specs[name])]
    words += [f"--{name.replace('_', '-')}" for name in _FLAGS if specs.get(name)]
    words += ["--network-arch", job.network_arch, "--credentials", FILE % "credentials"]
    words += ["--cache-dir", str(settings.batch_cache(job.org))]
    words += ["--grace-seconds", f"{min(_MOST_GRACE, settings.grace_seconds / 2):g}", "--json"]
    return LaunchSpec(
        job.id,
        settings.batch_target,
        tuple(words),
        environment=dict(variables),
        secrets=secrets,
        files={"credentials": metadata},
        gpus=max(0, job.num_gpu),
        labels={"org": job.org, "experiment": job.experiment_id, "job": job.id},
    )


def progress_path(job: Job, settings: JobSettings) -> Path:
    """The file in which `headrace batch` writes how far it is: `batch.job_file` of what `batch.delivering` writes to."""
    found = _SHARD.fullmatch(job.specs.get("shard") or "")
    shard = f"{found[1]}-of-{found[2]}" if found else "1-of-1"
    place = parse_location(str(job.details["output"]).replace("{shard}", shard))
    if isinstance(place, LocalPlace):
        return _beside(place.path)
    digest = hashlib.sha256(str(place).encode()).hexdigest()[:16]
    return settings.batch_cache(job.org) / "batch" / digest / "results.jsonl.job.json"


def _beside(output: Path) -> Path:
    results = f"{output.name}.records.jsonl" if output.suffix.lower() in _PARQUET else output.name
    return output.with_name(f"{results}.job.json")
