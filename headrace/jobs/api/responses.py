# SPDX-License-Identifier: Apache-2.0
"""Responses of the job API: records as TAO's JSON, and errors as `{"error_desc", "error_code"}`.

Records hold no secrets, so nothing is redacted here.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from math import ceil
from typing import Any, cast

import orjson

from headrace.core.errors import INTERNAL_TEXT, Code, HeadraceError
from headrace.core.names import REQUEST_ID_FIELD, request_id
from headrace.jobs.records import Event, Experiment, Job, JobPage, Workspace
from headrace.net.http.exchange import Exchange
from headrace.net.http.heads import CONTENT_TYPE, HTTP_STATUS, JSON, Field, ResponseHead

_at = datetime.fromtimestamp
_MAX_CACHED_JOBS = 20_000
_MAX_CACHED_LISTS = 2

log = logging.getLogger("headrace.api")
ERROR_CODE, FORBIDDEN_CODE = 1, 2
"""TAO's values of `error_code`."""
_MAX_CHARS = 1000
_HEADS = {
    status: ResponseHead(status, [(CONTENT_TYPE, JSON)])
    for status in (200, 201, 202, 404, 405, 503, *HTTP_STATUS.values())
}


def now_text() -> str:
    """Return the current time as ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def encode_json(document: Any) -> bytes:
    """Encode JSON; times are in UTC with microseconds and a Z."""
    return orjson.dumps(document, option=orjson.OPT_UTC_Z)


def workspace(record: Workspace) -> dict[str, Any]:
    """Return a workspace as JSON, without its credentials."""
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
    """Return an experiment as JSON, with its details."""
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
    """Return a job as it appears in a list."""
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


def job_with_details(record: Job) -> dict[str, Any]:
    """Return a job with all its details."""
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
    """Return a change of a job."""
    return {"time": _at(record.time, UTC), "status": record.status, "reason": record.reason, "by": record.by}


def page(name: str, items: Sequence[dict[str, Any]], skip: int, size: int | None, total: int) -> dict[str, Any]:
    """Return a page of a list with its pagination info."""
    step = size or total or 1
    pages = {
        "total_records": total,
        "total_pages": -(-total // step),
        "page_size": step,
        "page_index": skip // step,
    }
    return {name: items, "pagination_info": pages}


@dataclass(frozen=True, slots=True)
class EncodedJson:
    """Encoded JSON, in pieces."""

    pieces: list[bytes] = field(repr=False)


class JobListEncoder:
    """Encodes lists of jobs, and caches encoded records and lists: a list of ten thousand jobs is polled repeatedly.

    The store returns the same objects for unchanged records and unchanged lists.
    """

    def __init__(self) -> None:
        self._encoded: dict[int, bytes] = {}
        self._records: list[Job] = []
        """The cached records; referenced, so that `id()` of each stays unique."""
        self._lists: list[tuple[JobPage, EncodedJson]] = []
        """The last complete lists."""

    def page(self, jobs: JobPage, skip: int, size: int | None) -> EncodedJson:
        """Return a page of a list with its pagination info."""
        if skip or size is not None:
            return self._page(jobs, skip, size)
        for cached, encoded in self._lists:
            if cached is jobs:
                return encoded
        encoded = self._page(jobs, skip, size)
        self._lists = [(jobs, encoded), *self._lists][:_MAX_CACHED_LISTS]
        return encoded

    def _page(self, jobs: JobPage, skip: int, size: int | None) -> EncodedJson:
        if len(self._encoded) > _MAX_CACHED_JOBS:
            self._encoded.clear()
            self._records.clear()
        texts = list(map(self._encoded.get, map(id, jobs.jobs)))
        if None in texts:
            texts = [text or self.encode(record) for text, record in zip(texts, jobs.jobs, strict=True)]
        pagination = encode_json({"pagination_info": page("jobs", [], skip, size, jobs.total)["pagination_info"]})
        # Possibly megabytes: joined once and not copied again.
        return EncodedJson([b'{"jobs":[', b",".join(cast("list[bytes]", texts)), b"]," + pagination[1:]])

    def encode(self, record: Job) -> bytes:
        """Encode a record and cache it."""
        text = self._encoded[id(record)] = encode_json(job(record))
        self._records.append(record)
        return text


def error_json(message: str, code: int = ERROR_CODE) -> bytes:
    """Return the body of an error response."""
    # A message may quote a client's invalid text, which must not fail here.
    text = message[:_MAX_CHARS].encode(errors="replace").decode()
    return orjson.dumps({"error_desc": text, "error_code": code})


def fail(exchange: Exchange, error: BaseException) -> None:
    """Respond with an error, or abort a response that has started. Log unexpected errors."""
    extra: list[Field] = []
    if isinstance(error, HeadraceError):
        status, text = HTTP_STATUS[error.code], error.message
        if error.retry_after_seconds is not None:
            extra.append((b"retry-after", b"%d" % max(1, ceil(error.retry_after_seconds))))
    else:
        error_id = request_id(exchange.head.get(REQUEST_ID_FIELD.encode()))
        details = {"request_id": error_id, "path": exchange.head.path.decode("latin-1"), "peer": exchange.peer}
        log.error("Request failed.", exc_info=error, extra=details)
        status, text = 500, INTERNAL_TEXT
        extra.append((REQUEST_ID_FIELD.encode(), error_id.encode()))
    if exchange.started:
        exchange.abort()
        return
    if status == 401:
        extra.append((b"www-authenticate", b"Bearer"))
    code = FORBIDDEN_CODE if isinstance(error, HeadraceError) and error.code is Code.PERMISSION_DENIED else ERROR_CODE
    exchange.respond(json_head(status), error_json(text, code), extra)


def json_head(status: int) -> ResponseHead:
    """Return the head of a JSON response."""
    return _HEADS.get(status) or ResponseHead(status, [(CONTENT_TYPE, JSON)])
