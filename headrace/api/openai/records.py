# SPDX-License-Identifier: Apache-2.0
"""Records that several processes share: a folder with one JSON file for each. For `file_store` and `batch_store`.

A record is written whole or not at all. What was read is kept in memory until its file changes.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import secrets
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from headrace.api.openai.errors import BadRequest, fail
from headrace.core.errors import FailedPrecondition, HeadraceError
from headrace.core.files import FileLock, read_json, write_json
from headrace.net.http.exchange import Exchange
from headrace.net.http.heads import OK_JSON

log = logging.getLogger("headrace.api")

Record = dict[str, Any]

_SUFFIX = ".json"
_LOCK = ".lock"
_LOCK_SECONDS = 30.0
_ID_BYTES = 16
_Stamp = tuple[int, int, int]


class RecordFolder:
    """The records of one kind. Used from any thread."""

    def __init__(self, folder: Path, id_prefix: str) -> None:
        self._folder = folder
        self._id_prefix = id_prefix
        self._id = re.compile(f"{re.escape(id_prefix)}[0-9a-f]{{{2 * _ID_BYTES}}}")
        self._known: dict[str, tuple[_Stamp, Record]] = {}

    def new_id(self) -> str:
        """Return the id of a new record."""
        return self._id_prefix + secrets.token_hex(_ID_BYTES)

    def lock(self) -> FileLock:
        """Return a lock for a change of several records, or of one that depends on its content."""
        return FileLock(self._folder / _LOCK)

    def get(self, id: str, *, fresh: bool = False) -> Record | None:
        """Return a record, which must not be changed; None if there is none.

        `fresh`: read it from the disk, for a change: two writes in the same tick of the disk's clock may look like none.
        """
        if not self._id.fullmatch(id):  # it comes from a client, and becomes a path
            return None
        if fresh:
            self._known.pop(id, None)
        path = self._path(id)
        try:
            status = os.stat(path)
        except OSError:
            self._known.pop(id, None)
            return None
        stamp = (status.st_mtime_ns, status.st_size, status.st_ino)
        known = self._known.get(id)
        if known is None or known[0] != stamp:
            record = read_json(path)
            if record is None:
                return None
            self._known[id] = known = (stamp, record)
        return known[1]

    def all(self) -> list[Record]:
        """Return all records, oldest first."""
        try:
            names = [entry.name.removesuffix(_SUFFIX) for entry in os.scandir(self._folder)]
        except FileNotFoundError:
            return []
        records = [record for name in names if (record := self.get(name)) is not None]
        return sorted(records, key=lambda record: (record["created"], record["id"]))

    def put(self, record: Record, *, durable: bool = True) -> None:
        """Write a record under its `id`."""
        try:
            write_json(self._path(record["id"]), record, durable=durable)
        except FailedPrecondition as error:
            log.error("cannot keep a record of OpenAI's protocol: %s", error.message)
            raise cannot_keep() from None

    def remove(self, id: str) -> None:
        """Remove a record."""
        self._path(id).unlink(missing_ok=True)
        self._known.pop(id, None)

    def _path(self, id: str) -> Path:
        return self._folder / f"{id}{_SUFFIX}"


def locked(folder: RecordFolder, change: Callable[[], Any]) -> Any:
    """Make a change while no other process makes one."""
    lock = folder.lock()
    try:
        lock.acquire(_LOCK_SECONDS)
    except OSError as error:  # a TimeoutError, too
        log.error("cannot lock %s: %s", lock.path, error)
        raise cannot_keep() from None
    try:
        return change()
    finally:
        lock.release()


def cannot_keep() -> HeadraceError:
    """Return the error for a folder that cannot be written."""
    return FailedPrecondition(
        "the server cannot write to its state folder: ask its operator, whose log has the details"
    )


def belongs_to(record: Record, caller: str) -> bool:
    """Return whether a caller may see a record. "": the server has no keys, and every caller sees every record."""
    return not caller or record["owner"] == caller


class Page(NamedTuple):
    """Which records a list request wants."""

    after: str
    limit: int
    newest_first: bool


def parse_page(query: dict[str, str], *, limit: int, most: int) -> Page:
    """Parse `after`, `limit` and `order`."""
    text = query.get("limit", str(limit))
    if not text.isascii() or not text.isdecimal() or not 1 <= int(text[:9]) <= most:
        raise BadRequest("limit", f"must be an integer from 1 to {most}")
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise BadRequest("order", "must be 'asc' or 'desc'")
    return Page(query.get("after", ""), int(text), order == "desc")


def page_of(records: Sequence[Record], page: Page, to_json: Callable[[Record], Record]) -> Record:
    """Return a page of records, which are oldest first, as OpenAI's list."""
    ordered = list(reversed(records)) if page.newest_first else list(records)
    start = 0
    if page.after:
        ids = [record["id"] for record in ordered]
        if page.after not in ids:
            raise BadRequest("after", f"{page.after[:64]!a} is not in this list: give the last id of the page before")
        start = ids.index(page.after) + 1
    data = [to_json(record) for record in ordered[start : start + page.limit]]
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": start + page.limit < len(ordered),
    }


class Answers:
    """Answers requests whose work is with files: in a thread, so that other requests do not wait for the disk."""

    def __init__(self) -> None:
        # A task without a reference may be collected while it runs.
        self._tasks: set[asyncio.Task[None]] = set()

    def in_thread(
        self, exchange: Exchange, work: Callable[[], Record], afterwards: Callable[[], None] = lambda: None
    ) -> None:
        """Answer with the JSON that `work` returns; `afterwards` is called in the event loop before that."""

        async def answer() -> None:
            document = await asyncio.to_thread(work)
            afterwards()
            exchange.respond(OK_JSON, orjson.dumps(document))

        self.spawn(exchange, answer())

    def spawn(self, exchange: Exchange, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine that answers; its error is the answer otherwise."""

        async def run() -> None:
            try:
                await work
            except Exception as error:
                if not exchange.closed:
                    fail(exchange, error)

        task = asyncio.get_running_loop().create_task(run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
