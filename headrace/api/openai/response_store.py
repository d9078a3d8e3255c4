# SPDX-License-Identifier: Apache-2.0
"""Stored responses of `/v1/responses`: an SQLite file, bounded in age and size, that several processes may share.

Every statement runs in one thread of its own, in the order of the calls, so the event loop never waits for the disk. The
folder and the file are made when the first response is stored. A record survives a killed process. A response that is
computed in the background names its runner: a file that the computing process keeps locked, so that a response whose process
was killed is known to have failed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import orjson

from headrace.api.openai.settings import OpenAiSettings
from headrace.core.clock import Clock, SystemClock
from headrace.core.errors import FailedPrecondition, TooLarge, Unavailable
from headrace.core.files import FileLock

log = logging.getLogger("headrace.api")

T = TypeVar("T")
Document = dict[str, Any]

UNFINISHED = ("queued", "in_progress")
"""The statuses of a response that is still computed."""

_FILE = "responses.sqlite3"
_SCHEMA_VERSION = 1
_SCHEMA = (
    """CREATE TABLE responses (id TEXT PRIMARY KEY, owner TEXT NOT NULL, previous TEXT NOT NULL, status TEXT NOT NULL,
        runner TEXT NOT NULL, used REAL NOT NULL, document BLOB NOT NULL, input BLOB NOT NULL)""",
    "CREATE INDEX responses_used ON responses (used)",
    f"PRAGMA user_version = {_SCHEMA_VERSION}",
)
_BUSY_SECONDS = 10.0
_REMOVED_AT_ONCE = 16
_MOST_TURNS = 4096
_STOPPED = {
    "code": "server_error",
    "message": "the server stopped before the response was complete: create it again",
}


class StoredResponse(NamedTuple):
    """One record."""

    document: Document
    """The response as its client gets it."""
    input: list[Document]
    """The input items of its request, without those of earlier responses."""

    @property
    def is_unfinished(self) -> bool:
        """Whether it is still computed."""
        return self.document["status"] in UNFINISHED


class ResponseStore:
    """The responses of all clients of a server; each is visible to its owner only."""

    def __init__(self, folder: Path, most_bytes: int, most_age_seconds: float, clock: Clock | None = None) -> None:
        """`most_bytes`: size of the file; the responses that were not used for the longest time are removed above it."""
        self._folder = folder
        self._most_bytes = most_bytes
        self._most_age_seconds = most_age_seconds
        self._clock = clock or SystemClock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="headrace-responses")
        self._connection: sqlite3.Connection | None = None
        self._runner: FileLock | None = None
        self._last_failure = ""

    async def add(self, owner: str, response: StoredResponse, *, runs_here: bool = False) -> None:
        """Store a response. `runs_here`: this process still computes it. Raises HeadraceError if it cannot be stored."""
        document = response.document
        content = orjson.dumps(document), orjson.dumps(response.input)
        if sum(map(len, content)) > self._most_bytes:
            raise TooLarge("the response is larger than all stored responses may be: --openai-stored-responses-bytes")

        def insert(connection: sqlite3.Connection) -> None:
            self._remove_old(connection)
            connection.execute(
                "INSERT INTO responses VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    document["id"],
                    owner,
                    document["previous_response_id"] or "",
                    document["status"],
                    self._lock_runner() if runs_here else "",
                    self._clock.wall(),
                    *content,
                ),
            )

        await asyncio.get_running_loop().run_in_executor(self._thread, self._transaction, insert)

    async def update(self, document: Document) -> bool:
        """Replace the document of an unfinished response; return whether there was one."""
        content = orjson.dumps(document)

        def change(connection: sqlite3.Connection) -> bool:
            changed = connection.execute(
                "UPDATE responses SET document = ?, status = ? WHERE id = ? AND status IN (?, ?)",
                (content, document["status"], document["id"], *UNFINISHED),
            )
            return changed.rowcount > 0

        return await self._run(change, False)

    async def find(self, owner: str, id: str) -> StoredResponse | None:
        """Return a response; None if there is none, or if it is another owner's."""
        return await self._run(lambda connection: self._find(connection, owner, id), None)

    async def conversation(self, owner: str, id: str) -> list[StoredResponse]:
        """Return a response and those before it, oldest first; empty if one of them is missing.

        They count as used now, so that a conversation that goes on is not removed.
        """

        def collect(connection: sqlite3.Connection) -> list[StoredResponse]:
            turns: list[StoredResponse] = []
            next_id: str | None = id
            while next_id:
                turn = self._find(connection, owner, next_id)
                if turn is None or len(turns) == _MOST_TURNS:
                    return []
                turns.append(turn)
                next_id = turn.document["previous_response_id"]
            now = self._clock.wall()
            used = [(now, turn.document["id"]) for turn in turns]
            connection.executemany("UPDATE responses SET used = ? WHERE id = ?", used)
            return turns[::-1]

        return await self._run(collect, [])

    async def remove(self, owner: str, id: str) -> bool:
        """Remove a response; return whether there was one."""

        def delete(connection: sqlite3.Connection) -> bool:
            return connection.execute("DELETE FROM responses WHERE id = ? AND owner = ?", (id, owner)).rowcount > 0

        return await self._run(delete, False)

    def close(self) -> None:
        """Finish what was begun, and close the file."""
        self._thread.submit(self._close).result()
        self._thread.shutdown()

    # In the thread.

    async def _run(self, work: Callable[[sqlite3.Connection], T], nothing: T) -> T:
        """Run a transaction; return `nothing` if no response was ever stored."""

        def run() -> T:
            exists = self._connection is not None or (self._folder / _FILE).exists()
            return self._transaction(work) if exists else nothing

        return await asyncio.get_running_loop().run_in_executor(self._thread, run)

    def _transaction(self, work: Callable[[sqlite3.Connection], T]) -> T:
        try:
            connection = self._connection = self._connection or self._open()
            connection.execute("BEGIN IMMEDIATE")
            try:
                result = work(connection)
                connection.execute("COMMIT")
            except BaseException:
                connection.rollback()
                raise
        except (sqlite3.Error, OSError) as error:
            if str(error) != self._last_failure:  # not once a request
                self._last_failure = str(error)
                log.error("cannot store responses in %s: %s", self._folder, error)
            raise Unavailable(
                "stored responses cannot be read or written now: the server's log has the reason"
            ) from None
        return result

    def _open(self) -> sqlite3.Connection:
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        path = self._folder / _FILE
        # Created first: SQLite would make it and its companion files readable by others.
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        connection = sqlite3.connect(path, timeout=_BUSY_SECONDS, isolation_level=None)
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            # A commit is in the kernel's hands, so it survives a killed process; a power failure may take the last ones.
            connection.execute("PRAGMA synchronous = NORMAL")
            connection.execute("BEGIN IMMEDIATE")
            (version,) = connection.execute("PRAGMA user_version").fetchone()
            if not version:
                for statement in _SCHEMA:
                    connection.execute(statement)
            connection.execute("COMMIT")
            if version > _SCHEMA_VERSION:
                raise FailedPrecondition(f"{path} is from a newer version of Headrace: give another --openai-state-dir")
        except BaseException:
            connection.close()
            raise
        return connection

    def _find(self, connection: sqlite3.Connection, owner: str, id: str) -> StoredResponse | None:
        row = connection.execute(
            "SELECT document, input, status, runner FROM responses WHERE id = ? AND owner = ? AND used >= ?",
            (id, owner, self._clock.wall() - self._most_age_seconds),
        ).fetchone()
        if row is None:
            return None
        document, given, status, runner = orjson.loads(row[0]), orjson.loads(row[1]), row[2], row[3]
        if status in UNFINISHED and not self._is_running(runner):
            document = {**document, "status": "failed", "error": _STOPPED}
            connection.execute(
                "UPDATE responses SET document = ?, status = 'failed' WHERE id = ?", (orjson.dumps(document), id)
            )
        return StoredResponse(document, given)

    def _remove_old(self, connection: sqlite3.Connection) -> None:
        connection.execute("DELETE FROM responses WHERE used < ?", (self._clock.wall() - self._most_age_seconds,))
        oldest = "DELETE FROM responses WHERE id IN (SELECT id FROM responses ORDER BY used LIMIT ?)"
        while _used_bytes(connection) > self._most_bytes:
            if not connection.execute(oldest, (_REMOVED_AT_ONCE,)).rowcount:
                return

    def _lock_runner(self) -> str:
        """Return the name of this process's runner, whose lock it holds as long as it lives."""
        if self._runner is None:
            runner = FileLock(self._folder / f"runner-{secrets.token_hex(8)}.lock")
            runner.acquire()
            self._runner = runner
            for path in self._folder.glob("runner-*.lock"):
                self._is_running(path.name)  # removes it if its process was killed
        return self._runner.path.name

    def _is_running(self, name: str) -> bool:
        if self._runner is not None and name == self._runner.path.name:
            return True
        lock = FileLock(self._folder / name)
        if not lock.try_acquire():
            return True
        lock.path.unlink(missing_ok=True)  # its process has ended
        lock.release()
        return False

    def _close(self) -> None:
        if self._connection is not None:
            with contextlib.suppress(sqlite3.Error):
                self._connection.close()
            self._connection = None
        if self._runner is not None:
            self._runner.path.unlink(missing_ok=True)
            self._runner.release()
            self._runner = None


def open_store(settings: OpenAiSettings) -> ResponseStore | None:
    """Return the store that the settings name; None if no responses are kept. Nothing is created yet."""
    if settings.state_folder is None or not settings.stored_responses_bytes:
        return None
    return ResponseStore(settings.state_folder, settings.stored_responses_bytes, settings.stored_responses_seconds)


def _used_bytes(connection: sqlite3.Connection) -> int:
    """Return the size of the file without its free pages."""
    numbers = [
        int(connection.execute(f"PRAGMA {name}").fetchone()[0])
        for name in ("page_count", "freelist_count", "page_size")
    ]
    return (numbers[0] - numbers[1]) * numbers[2]
