# SPDX-License-Identifier: Apache-2.0
"""Where results go: what the output's text means, and how a finished file gets there. Called by `app`.

JSON Lines on this machine are written in place. Everything else is written as JSON Lines first, so that it can go on after a
kill, and becomes a Parquet file or an object of a store when all is done.
"""

from __future__ import annotations

import hashlib
import logging
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.core.dtypes import DType
from headrace.core.errors import FailedPrecondition, HeadraceError, InvalidArgument, PermissionDenied, Unavailable
from headrace.jobs.batch.settings import BatchSettings, Shard
from headrace.models.storage.locations import LocalPlace, ObjectPlace, parse_location
from headrace.models.storage.object_stores import open_store

log = logging.getLogger("headrace.batch")

SHARD = "{shard}"
_LINES = (".jsonl", ".ndjson")
_PARQUET = (".parquet", ".pq")
Outputs = Mapping[str, DType | None] | None
_IDLE_SECONDS, _RETRY_SECONDS = 60.0, 30.0


@dataclass(frozen=True, slots=True)
class Target:
    """An output."""

    place: LocalPlace | ObjectPlace
    results: Path
    """Where the lines are written."""
    parquet: bool

    @property
    def delivers(self) -> bool:
        """Whether something remains to be done when all lines are there."""
        return self.parquet or isinstance(self.place, ObjectPlace)

    def __str__(self) -> str:
        return str(self.place)


def target_of(settings: BatchSettings) -> Target:
    """Read the output's text. Raises what is wrong before anything is computed."""
    place = parse_location(_with_shard(settings.output, settings.shard))
    if isinstance(place, LocalPlace):
        path = place.path.absolute()
        place = LocalPlace(path / "results.jsonl" if path.is_dir() or settings.output.endswith("/") else path)
        name = place.path.name
    elif isinstance(place, ObjectPlace):
        if not place.key:
            raise InvalidArgument(f"the output {place} is a whole bucket: name an object, such as {place}results.jsonl")
        name = place.key.rpartition("/")[2]
    else:
        raise InvalidArgument(
            f"the output {place} cannot be written to: name a file, or an object of s3://, gs:// or az://"
        )
    suffix = Path(name).suffix.lower()
    if suffix not in (*_LINES, *_PARQUET):
        raise InvalidArgument(f"the output {name} is of no known format: let its name end in .jsonl or .parquet")
    parquet = suffix in _PARQUET
    if parquet:
        from headrace.jobs.batch.parquet import pyarrow_for

        pyarrow_for(f"the output {name}")
    if isinstance(place, ObjectPlace):
        _store(place, settings)  # bad credentials are told now
        digest = hashlib.sha256(str(place).encode()).hexdigest()[:16]
        return Target(place, settings.folder / "batch" / digest / "results.jsonl", parquet)
    results = place.path.with_name(f"{name}.records.jsonl") if parquet else place.path
    return Target(place, results, parquet)


def deliver(target: Target, settings: BatchSettings, outputs: Outputs = None) -> None:
    """Bring finished results where they belong. `outputs`: what a model of tensors gives. Blocks."""
    if isinstance(target.place, LocalPlace):
        if target.parquet:
            _to_parquet(target.results, target.place.path, outputs)
        return
    with tempfile.TemporaryDirectory(dir=target.results.parent, prefix=".delivering-") as folder:
        content = target.results
        if target.parquet:
            content = Path(folder, "results.parquet")
            _to_parquet(target.results, content, outputs)
        _upload(content, target.place, settings)


def _to_parquet(results: Path, path: Path, outputs: Outputs) -> None:
    from headrace.jobs.batch.parquet_results import write_parquet

    try:
        write_parquet(results, path, outputs)
    except OSError as error:
        raise FailedPrecondition(
            f"{path} cannot be written: {error.strerror}; the results are kept: make room and run the same again"
        ) from None


def _store(place: ObjectPlace, settings: BatchSettings) -> Any:
    keys = None if settings.credentials is None else settings.credentials.keys_of(place.cloud, place.bucket)
    try:
        return open_store(place, keys, _IDLE_SECONDS, _RETRY_SECONDS)
    except ImportError:
        raise FailedPrecondition(f"{place} needs obstore; install it with `pip install headrace[cloud]`") from None
    except Exception as error:
        # Its texts may hold addresses and keys.
        log.warning("%s: %s", place, type(error).__name__)
        raise FailedPrecondition(
            f"{place} cannot be reached with these credentials: check them and the region"
        ) from None


def _upload(content: Path, place: ObjectPlace, settings: BatchSettings) -> None:
    store = _store(place, settings)
    from obstore import exceptions

    try:
        store.put(place.key, content)
    except HeadraceError:
        raise
    except (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError):
        raise PermissionDenied(
            f"{place} may not be written with these credentials; the results are kept: run the same again with others"
        ) from None
    except Exception as error:
        log.warning("%s: %s", place, type(error).__name__)
        raise Unavailable(
            f"{place} could not be written: the store did not answer as expected; the results are kept: run the same again"
        ) from None


def _with_shard(text: str, shard: Shard) -> str:
    return text.replace(SHARD, f"{shard.number}-of-{shard.count}")
