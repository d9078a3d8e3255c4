# SPDX-License-Identifier: Apache-2.0
"""The `headrace batch` process of a batch job: its specs, command line, progress file and exit.

Users name files in specs, so a batch only reads and writes folders that the operator allowed, or its organisation's own
folder. A gateway that adopted a batch does not learn its exit code; the summary, which `headrace batch --json` writes as the
last line of its log, says the same.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace.core.errors import HeadraceError, InvalidArgument, PermissionDenied
from headrace.jobs.records import Job
from headrace.jobs.settings import JobSettings
from headrace.jobs.validation import check_text
from headrace.models.storage.credentials import CloudCredentials
from headrace.models.storage.locations import HubLocation, LocalLocation, ObjectLocation, parse_location
from headrace.platforms.contract import FILE, SECRET, LaunchSpec, PlatformStatus

_NUMBERS: Mapping[str, tuple[int, int]] = {
    "limit": (0, 10**12),
    "max_failures": (0, 10**12),
    "batch_size": (1, 65_536),
    "in_flight": (1, 4096),
}
_FLAGS = ("ordered", "retry_failed")
_OBJECTS = ("parameters", "specs")
_NAMES = ("model_path", "hf_model", "input", "output", "task", "shard", *_NUMBERS, *_FLAGS, *_OBJECTS)
_SHARD = re.compile(r"([1-9][0-9]{0,5})/([1-9][0-9]{0,5})", re.ASCII)
_TASKS = ("language", "vision_language", "classifier", "detector", "embedding", "tensors")
_LINES = (".jsonl", ".ndjson")
_PARQUET = (".parquet", ".pq")
_MAX_GRACE_SECONDS = 10.0

_FINISHED_CODES = (0, 3, None)
_REJECTED_CODE = 2
_FAILED_CODES = (1, None)
_SIGNAL_CODES = (130, 137, 143)
"""Exit codes of `headrace batch` for SIGINT and SIGTERM, and of a shell for SIGKILL."""
_ERROR_PREFIX = "error: "
_REASON_LINES = 8
_MAX_REASON_CHARS = 800
_MAX_FILE_BYTES = 64 * 1024 * 1024


def check_specs(specs: Mapping[str, Any]) -> None:
    """Check all specs except paths. InvalidArgument names the field."""
    for name in specs:
        if name not in _NAMES:
            raise InvalidArgument(f"specs.{str(name)[:64]!a} is unknown: use {', '.join(_NAMES)}")
    for name, (low, high) in _NUMBERS.items():
        value = specs.get(name)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high):
            raise InvalidArgument(f"specs.{name} must be an integer from {low} to {high}")
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
        match = _SHARD.fullmatch(shard)
        if match is None or int(match[1]) > int(match[2]):
            raise InvalidArgument("specs.shard must be written I/N with I from 1 to N, such as 2/4")
    if specs.get("task") and specs["task"] not in _TASKS:
        raise InvalidArgument(f"specs.task must be one of {', '.join(_TASKS)}")


class BatchPaths:
    """The paths that an organisation's batches may read and write. Blocks."""

    def __init__(self, settings: JobSettings, org: str, metadata: Mapping[str, Any]) -> None:
        self._own = settings.files_folder(org)
        self._folders = (*settings.checkpoint_folders, self._own)
        self._credentials = CloudCredentials.from_metadata(metadata)

    def input(self, text: str) -> str:
        """Return the input: an existing local path, or a URL."""
        location = self._parse("input", text)
        if isinstance(location, HubLocation):
            raise InvalidArgument("specs.input is a model on the Hugging Face Hub: use a folder or a manifest")
        if not isinstance(location, LocalLocation):
            return text
        real = self._check_local("input", location.path)
        if not real.exists():
            raise InvalidArgument(f"specs.input: {text[:200]!a} does not exist")
        return str(real)

    def output(self, text: str) -> str:
        """Return the output: a local file or the URL of an object."""
        location = self._parse("output", text)
        if isinstance(location, LocalLocation):
            name = location.path.name
        elif isinstance(location, ObjectLocation):
            name = location.key.rpartition("/")[2]
        else:
            raise InvalidArgument("specs.output must be a file, or an object of s3://, gs:// or az://")
        if Path(name).suffix.lower() not in (*_LINES, *_PARQUET):
            raise InvalidArgument("specs.output must end in .jsonl or .parquet")
        if not isinstance(location, LocalLocation):
            return text
        real = self._check_local("output", location.path)
        if real.is_dir():
            raise InvalidArgument("specs.output is a folder: use a file in it")
        if real.suffix.lower() in _PARQUET and real.exists() and not _progress_file(real).exists():
            # For JSON Lines, the batch itself checks whose file it is.
            raise InvalidArgument("specs.output exists and was not written by a batch: use another file")
        return str(real)

    def _parse(self, field: str, text: str) -> Any:
        try:
            location = parse_location(text)
            if isinstance(location, ObjectLocation):
                self._credentials.keys_of(location.cloud, location.bucket)
        except HeadraceError as error:
            raise InvalidArgument(f"specs.{field}: {error.message}") from None
        return location

    def _check_local(self, field: str, path: Path) -> Path:
        try:
            real = (self._own / path).resolve()  # an absolute path stays unchanged
            allowed = any(real.is_relative_to(folder.resolve()) for folder in self._folders)
        except (OSError, ValueError, RuntimeError):
            raise InvalidArgument(f"specs.{field}: the path cannot be read") from None
        if not allowed:
            raise PermissionDenied(
                f"specs.{field}: this local path is not allowed: use a folder that the operator allows, or a path relative "
                "to the organisation's own folder"
            )
        return real


def batch_launch_spec(
    job: Job, settings: JobSettings, metadata: Mapping[str, Any], variables: Mapping[str, str]
) -> LaunchSpec:
    """Return what a driver starts. Values from users, except numbers, are secret arguments."""
    specs, details = job.specs, job.details
    secrets = {"model": details["model_path"], "input": details["input"], "output": details["output"]}
    args = [*settings.batch_args, *(SECRET % name for name in secrets)]
    for name in _OBJECTS:
        if specs.get(name):
            secrets[name] = json.dumps(specs[name])
            args += [f"--{name}", SECRET % name]
    for name in (*_NUMBERS, "task", "shard"):
        if specs.get(name) not in (None, ""):
            args += [f"--{name.replace('_', '-')}", str(specs[name])]
    args += [f"--{name.replace('_', '-')}" for name in _FLAGS if specs.get(name)]
    args += ["--network-arch", job.network_arch, "--credentials", FILE % "credentials"]
    args += ["--cache-dir", str(settings.batch_cache(job.org))]
    args += ["--grace-seconds", f"{min(_MAX_GRACE_SECONDS, settings.grace_seconds / 2):g}", "--json"]
    return LaunchSpec(
        job.id,
        settings.batch_target,
        tuple(args),
        environment=dict(variables),
        secrets=secrets,
        files={"credentials": metadata},
        gpus=max(0, job.num_gpu),
        labels={"org": job.org, "experiment": job.experiment_id, "job": job.id},
    )


def progress_path(job: Job, settings: JobSettings) -> Path:
    """Return the progress file of a batch, where `batch.progress` writes it."""
    match = _SHARD.fullmatch(job.specs.get("shard") or "")
    shard = f"{match[1]}-of-{match[2]}" if match else "1-of-1"
    location = parse_location(str(job.details["output"]).replace("{shard}", shard))
    if isinstance(location, LocalLocation):
        return _progress_file(location.path)
    digest = hashlib.sha256(str(location).encode()).hexdigest()[:16]
    return settings.batch_cache(job.org) / "batch" / digest / "results.jsonl.job.json"


def _progress_file(output: Path) -> Path:
    results = f"{output.name}.records.jsonl" if output.suffix.lower() in _PARQUET else output.name
    return output.with_name(f"{results}.job.json")


@dataclass(frozen=True, slots=True)
class BatchExit:
    """How a batch process ended."""

    status: str
    """Done or Error; "" if it was interrupted and can continue."""
    reason: str
    details: Mapping[str, Any] = field(default_factory=dict)


def classify_exit(platform_status: PlatformStatus, log: str) -> BatchExit:
    """Classify a process that has ended."""
    code, summary = platform_status.exit_code, find_summary(log)
    if summary is not None and summary["state"] == "finished" and code in _FINISHED_CODES:
        return BatchExit("Done", summary_text(summary), {"summary": summary, "progress": progress_of(summary)})
    if summary is not None and summary["state"] == "failed" and code in _FAILED_CODES:
        return BatchExit(
            "Error",
            str(summary.get("reason"))[:_MAX_REASON_CHARS],
            {"summary": summary, "progress": progress_of(summary)},
        )
    if code is None or code < 0 or code in _SIGNAL_CODES:
        return BatchExit("", platform_status.reason or "the process is gone")
    errors = [line for line in log.splitlines() if line.startswith(_ERROR_PREFIX)]
    if code == _REJECTED_CODE and errors:
        return BatchExit("Error", errors[-1].removeprefix(_ERROR_PREFIX)[:_MAX_REASON_CHARS], {"exit_code": code})
    last_lines = " | ".join(log.splitlines()[-_REASON_LINES:])[-_MAX_REASON_CHARS:]
    reason = platform_status.reason or f"the process ended with code {code}"
    return BatchExit("Error", f"{reason}. The log ends: {last_lines}" if last_lines else reason, {"exit_code": code})


def find_summary(log: str) -> dict[str, Any] | None:
    """Return the last summary in a log; None if there is none."""
    for line in reversed(log.splitlines()):
        if line.startswith('{"state"'):
            try:
                summary = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(summary, dict) and {"total", "succeeded", "failed", "output"} <= summary.keys():
                return summary
    return None


def summary_text(summary: Mapping[str, Any]) -> str:
    """Return a summary as one sentence."""
    counts = f"{summary['total']} items: {summary['succeeded']} done, {summary['failed']} failed"
    return f"{counts}; results: {summary['output']}"[:_MAX_REASON_CHARS]


def progress_of(summary: Mapping[str, Any]) -> dict[str, Any]:
    """Return the progress from a summary."""
    done = summary["succeeded"] + summary["failed"]
    return {"done": done, "failed": summary["failed"], "total": summary["total"]}


def read_progress(path: Path, *, states: tuple[str, ...] = ("running",)) -> dict[str, Any] | None:
    """Read {done, failed, total} from a progress file; None if there is none yet. Blocks."""
    try:
        if path.stat().st_size > _MAX_FILE_BYTES:
            return None
        content = json.loads(path.read_bytes())
        # Any other state belongs to an earlier job with the same output.
        if content["state"] not in states:
            return None
        return {"done": int(content["finished"]), "failed": int(content["failed"]), "total": int(content["total"])}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
