# SPDX-License-Identifier: Apache-2.0
"""One database, asked from the loop: every transaction is a function that runs in a thread.

Used by the other modules of `store`. SQLite is written by one thread and read by a few, in WAL mode, where readers and the
writer do not wait for each other; PostgreSQL by several threads. What goes wrong in a database is told in words of ours.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from headrace.core.errors import FailedPrecondition, InvalidArgument, Unavailable

try:
    from sqlalchemy import Connection, Engine, create_engine, event, exc
    from sqlalchemy.engine import make_url
except ImportError:  # pragma: no cover
    raise FailedPrecondition("jobs need SQLAlchemy; install it with `pip install headrace[jobs]`") from None

from headrace.jobs.store.steps import migrate

log = logging.getLogger("headrace.jobs")

T = TypeVar("T")
_BUSY_MS = 30_000
_READERS = 4
_POSTGRESQL_THREADS = 8


class Database:
    """`open` it, `read` and `write`, `close` it."""

    def __init__(self, reading: Engine, writing: Engine, readers: int, writers: int) -> None:
        self._reading, self._writing = reading, writing
        self._read_threads = ThreadPoolExecutor(readers, thread_name_prefix="headrace-sql-read")
        self._write_threads = ThreadPoolExecutor(writers, thread_name_prefix="headrace-sql-write")

    @classmethod
    async def open(cls, url: str) -> Database:
        """Connect, and bring the tables up to date."""
        try:
            made = _sqlite(url) if url.startswith("sqlite") else _postgresql(url)
        except (exc.ArgumentError, ValueError):
            # The text of a URL may hold a password.
            raise InvalidArgument("the database's URL cannot be read: use postgresql://user@host/name") from None
        except ImportError:
            raise FailedPrecondition(
                "PostgreSQL needs psycopg; install it with `pip install headrace[postgresql]`"
            ) from None
        try:
            await made.write(migrate)
        except BaseException:
            await made.close()
            raise
        return made

    async def read(self, work: Callable[[Connection], T]) -> T:
        """Run `work` in a transaction that changes nothing."""
        return await self._run(self._read_threads, self._reading, work)

    async def write(self, work: Callable[[Connection], T]) -> T:
        """Run `work` in a transaction: all of it happens, or nothing."""
        return await self._run(self._write_threads, self._writing, work)

    async def close(self) -> None:
        """Let what runs finish, and disconnect."""

        def end() -> None:
            for threads in (self._read_threads, self._write_threads):
                threads.shutdown(wait=True)
            for engine in {self._reading, self._writing}:
                engine.dispose()

        await asyncio.to_thread(end)

    async def _run(self, threads: ThreadPoolExecutor, engine: Engine, work: Callable[[Connection], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(threads, _transaction, engine, work)


def _transaction(engine: Engine, work: Callable[[Connection], T]) -> T:
    try:
        with engine.begin() as connection:
            return work(connection)
    except exc.IntegrityError:
        raise
    except exc.DBAPIError as error:
        # Only the driver's words: SQLAlchemy's hold the statement's values.
        log.error("the database failed: %s: %s", type(error.orig).__name__, error.orig)
        raise Unavailable("the database does not answer as it should; try again later") from None
    except exc.TimeoutError:
        raise Unavailable("the database has no connection left; try again later") from None


def _sqlite(url: str) -> Database:
    path = make_url(url).database
    if not path or path == ":memory:":
        raise ValueError("a file is needed")
    Path(path).parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    # Before SQLite makes it, and with it its companions, readable by others.
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    reading, writing = create_engine(url, pool_size=_READERS), create_engine(url, pool_size=1, max_overflow=0)
    for engine, begin in ((reading, "BEGIN"), (writing, "BEGIN IMMEDIATE")):
        _prepare(engine, begin)
    return Database(reading, writing, _READERS, 1)


def _prepare(engine: Engine, begin: str) -> None:
    def connected(connection: Any, _record: Any) -> None:
        connection.isolation_level = None  # we say BEGIN ourselves: the module would say it too late
        cursor = connection.cursor()
        for pragma in (f"busy_timeout={_BUSY_MS}", "journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON"):
            cursor.execute(f"PRAGMA {pragma}")
        cursor.close()

    event.listen(engine, "connect", connected)
    event.listen(engine, "begin", lambda connection: connection.exec_driver_sql(begin))


def _postgresql(url: str) -> Database:
    parsed = make_url(url)
    if parsed.get_backend_name() not in ("postgresql", "postgres"):
        raise InvalidArgument("a database is sqlite:///FILE or postgresql://user@host/name; others are not supported")
    engine = create_engine(
        parsed.set(drivername="postgresql+psycopg"),
        pool_size=_POSTGRESQL_THREADS,
        pool_pre_ping=True,
        connect_args={"connect_timeout": 10},
    )
    return Database(engine, engine, _POSTGRESQL_THREADS // 2, _POSTGRESQL_THREADS // 2)
