# SPDX-License-Identifier: Apache-2.0
"""Records as TAO's API writes them. No record holds a secret, so nothing has to be left out here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, cast

import orjson

from headrace.jobs.records import Event, Experiment, Job, JobPage, Workspace

_at = datetime.fromtimestamp
_KNOWN_JOBS = 20_000
_KNOWN_LISTS = 2


def now_text() -> str:
    """This moment."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def encode(document: Any) -> bytes:
    """JSON. Times are told to the microsecond in UTC, with a Z."""
    return orjson.dumps(document, option=orjson.OPT_UTC_Z)


def workspace(record: Workspace) -> dict[str, Any]:
    """Never with its keys."""
    return {
        "id": record.id,
        "user_id": record.user_id,
        "created_on": _at(record.created_on, UTC),
        "last_modified": _at(record.last_modified, UTC),
        "name": record.name,
        "shared": record.shared,
        "version": record.version,
        "cloud_type": record.cloud_type,
    }


def experiment(record: Experiment) -> dict[str, Any]:
    """With what else was said of it."""
    return {
        **record.details,
        "id": record.id,
        "user_id": record.user_id,
        "created_on": _at(record.created_on, UTC),
        "last_modified": _at(record.last_modified, UTC),
        "name": record.name,
        "description": record.description,
        "network_arch": record.network_arch,
        "workspace": record.workspace or None,
        "type": "experiment",
    }


def job(record: Job) -> dict[str, Any]:
    """One job, as a list has it."""
    return {
        "id": record.id,
        "parent_id": record.parent_id or None,
        "created_on": _at(record.created_on, UTC),
        "last_modified": _at(record.last_modified, UTC),
        "action": record.action,
        "status": record.status,
        "specs": orjson.Fragment(record.specs_json),
        "name": record.name,
        "description": record.description,
        "num_gpu": record.num_gpu,
        "experiment_id": record.experiment_id,
        "network_arch": record.network_arch,
        "user_id": record.user_id,
        "kind": "experiment",
        "job_details": {"message": record.reason},
    }


def whole_job(record: Job) -> dict[str, Any]:
    """One job with all that is known of it."""
    details = record.details
    backend = details.pop("backend_details", None)
    return {
        **job(record),
        "org_name": record.org,
        "workflow_status": record.status,
        "platform_id": None,
        "backend_details": backend or {},
        "job_details": {**details, "message": record.reason},
    }


def event(record: Event) -> dict[str, Any]:
    """One change of a job."""
    return {"time": _at(record.time, UTC), "status": record.status, "reason": record.reason, "by": record.by}


def page(name: str, items: Sequence[dict[str, Any]], skip: int, size: int | None, total: int) -> dict[str, Any]:
    """Part of a list and where it is in the whole."""
    step = size or total or 1
    pages = {
        "total_records": total,
        "total_pages": -(-total // step),
        "page_size": step,
        "page_index": skip // step,
    }
    return {name: items, "pagination_info": pages}


@dataclass(frozen=True, slots=True)
class Written:
    """JSON that is written already, in pieces."""

    pieces: list[bytes] = field(repr=False)


class JobTexts:
    """Lists of jobs. A record is written once: a list of ten thousand is asked for again and again.

    The store gives the same records out as long as they have not changed, and the same list as long as none of it has.
    """

    def __init__(self) -> None:
        self._known: dict[int, bytes] = {}
        self._records: list[Job] = []
        """Whose texts are known. Kept, so that no other can get the address of one."""
        self._lists: list[tuple[JobPage, Written]] = []
        """The last whole ones."""

    def page(self, found: JobPage, skip: int, size: int | None) -> Written:
        """Part of a list and where it is in the whole."""
        if skip or size is not None:
            return self._page(found, skip, size)
        for known, written in self._lists:
            if known is found:
                return written
        written = self._page(found, skip, size)
        self._lists = [(found, written), *self._lists][:_KNOWN_LISTS]
        return written

    def _page(self, found: JobPage, skip: int, size: int | None) -> Written:
        if len(self._known) > _KNOWN_JOBS:
            self._known.clear()
            self._records.clear()
        texts = list(map(self._known.get, map(id, found.jobs)))
        if None in texts:
            texts = [text or self.write(record) for text, record in zip(texts, found.jobs, strict=True)]
        rest = encode({"pagination_info": page("jobs", [], skip, size, found.total)["pagination_info"]})
        # Megabytes, maybe, which are put together once and copied no more.
        return Written([b'{"jobs":[', b",".join(cast("list[bytes]", texts)), b"]," + rest[1:]])

    def write(self, record: Job) -> bytes:
        """One, to be remembered."""
        text = self._known[id(record)] = encode(job(record))
        self._records.append(record)
        return text
