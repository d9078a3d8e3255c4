# SPDX-License-Identifier: Apache-2.0
"""The database: connections, transactions in threads, tables and schema migrations.

SQLite runs in WAL mode with one writer thread and a few readers, which do not block each other; PostgreSQL uses several
threads. A statement must work on both.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Connection,
    Double,
    Engine,
    MetaData,
    Table,
    Text,
    create_engine,
    event,
    exc,
    text,
)
from sqlalchemy.engine import make_url

from headrace.core.errors import FailedPrecondition, InvalidArgument, Unavailable
from headrace.core.extras import MissingExtra
from headrace.core.fault_points import fault_point

log = logging.getLogger("headrace.jobs")

T = TypeVar("T")
_BUSY_MS = 30_000
_READERS = 4
_POSTGRESQL_THREADS = 8

metadata = MetaData()
_LOCK = 7_237_104_391  # any number, the same for every gateway
# Never change a published migration: add another one. Statements must work on SQLite and PostgreSQL.
MIGRATIONS: tuple[tuple[str, ...], ...] = (
    (
        "CREATE TABLE organisations (name TEXT PRIMARY KEY, created_on DOUBLE PRECISION NOT NULL)",
        """CREATE TABLE users (id TEXT PRIMARY KEY, name TEXT NOT NULL UNIQUE, email TEXT NOT NULL,
            created DOUBLE PRECISION NOT NULL, tokens_after DOUBLE PRECISION NOT NULL, version BIGINT NOT NULL)""",
        """CREATE TABLE user_roles (user_id TEXT NOT NULL REFERENCES users (id), org TEXT NOT NULL, role TEXT NOT NULL,
            PRIMARY KEY (user_id, org))""",
        """CREATE TABLE user_keys (id TEXT PRIMARY KEY, user_id TEXT NOT NULL REFERENCES users (id),
            lookup TEXT NOT NULL UNIQUE, hash TEXT NOT NULL, created DOUBLE PRECISION NOT NULL, expires DOUBLE PRECISION,
            position BIGINT NOT NULL)""",
        "CREATE INDEX user_keys_user ON user_keys (user_id)",
        "CREATE TABLE revoked_tokens (jti TEXT PRIMARY KEY, expires DOUBLE PRECISION NOT NULL)",
        "CREATE TABLE counters (name TEXT PRIMARY KEY, value BIGINT NOT NULL)",
        "INSERT INTO counters (name, value) VALUES ('access', 0)",
        """CREATE TABLE workspaces (id TEXT PRIMARY KEY, org TEXT NOT NULL, user_id TEXT NOT NULL, name TEXT NOT NULL,
            shared BOOLEAN NOT NULL, version TEXT NOT NULL, cloud_type TEXT NOT NULL, bucket TEXT NOT NULL,
            created_on DOUBLE PRECISION NOT NULL, last_modified DOUBLE PRECISION NOT NULL,
            secret TEXT NOT NULL, fingerprint TEXT NOT NULL, UNIQUE (org, fingerprint))""",
        """CREATE TABLE experiments (id TEXT PRIMARY KEY, org TEXT NOT NULL, user_id TEXT NOT NULL, name TEXT NOT NULL,
            description TEXT NOT NULL, network_arch TEXT NOT NULL, workspace TEXT NOT NULL, details TEXT NOT NULL,
            created_on DOUBLE PRECISION NOT NULL, last_modified DOUBLE PRECISION NOT NULL, secret TEXT NOT NULL)""",
        "CREATE INDEX experiments_org ON experiments (org, created_on)",
        "CREATE INDEX experiments_workspace ON experiments (workspace)",
        """CREATE TABLE jobs (id TEXT PRIMARY KEY, org TEXT NOT NULL, experiment_id TEXT NOT NULL, user_id TEXT NOT NULL,
            parent_id TEXT NOT NULL, action TEXT NOT NULL, status TEXT NOT NULL, reason TEXT NOT NULL, name TEXT NOT NULL,
            description TEXT NOT NULL, network_arch TEXT NOT NULL, num_gpu BIGINT NOT NULL, checkpoint TEXT NOT NULL,
            specs TEXT NOT NULL, details TEXT NOT NULL, place TEXT NOT NULL, created_on DOUBLE PRECISION NOT NULL,
            last_modified DOUBLE PRECISION NOT NULL, stopped_on DOUBLE PRECISION, version BIGINT NOT NULL)""",
        "CREATE INDEX jobs_org ON jobs (org, created_on, id)",
        "CREATE INDEX jobs_experiment ON jobs (experiment_id, created_on, id)",
        "CREATE INDEX jobs_place ON jobs (place, status)",
        """CREATE TABLE events (job_id TEXT NOT NULL REFERENCES jobs (id), number BIGINT NOT NULL,
            time DOUBLE PRECISION NOT NULL, status TEXT NOT NULL, reason TEXT NOT NULL, by_whom TEXT NOT NULL,
            PRIMARY KEY (job_id, number))""",
        "CREATE TABLE job_logs (job_id TEXT PRIMARY KEY REFERENCES jobs (id), log TEXT NOT NULL)",
        "CREATE TABLE leases (job_id TEXT PRIMARY KEY, owner TEXT NOT NULL, expires DOUBLE PRECISION NOT NULL)",
    ),
    (  # A list and its changes are read from an index only.
        "DROP INDEX jobs_org",
        "CREATE INDEX jobs_org ON jobs (org, created_on, id, version)",
        "DROP INDEX jobs_experiment",
        "CREATE INDEX jobs_experiment ON jobs (experiment_id, created_on, id, version, org)",
        "CREATE INDEX jobs_newest ON jobs (created_on)",
    ),
)


class Database:
    """A connection pool with reader and writer threads."""

    def __init__(self, reading: Engine, writing: Engine, readers: int, writers: int) -> None:
        self._reading, self._writing = reading, writing
        self._read_threads = ThreadPoolExecutor(readers, thread_name_prefix="headrace-sql-read")
        self._write_threads = ThreadPoolExecutor(writers, thread_name_prefix="headrace-sql-write")

    @classmethod
    async def open(cls, url: str) -> Database:
        """Connect and migrate the schema."""
        try:
            database = _sqlite(url) if url.startswith("sqlite") else _postgresql(url)
        except (exc.ArgumentError, ValueError):
            # The URL may contain a password.
            raise InvalidArgument("the database URL is invalid: use postgresql://user@host/name") from None
        except ImportError:
            raise MissingExtra("PostgreSQL", "postgresql") from None
        try:
            await database.write(migrate)
        except BaseException:
            await database.close()
            raise
        return database

    async def read(self, work: Callable[[Connection], T]) -> T:
        """Run `work` in a read-only transaction."""
        return await self._run(self._read_threads, self._reading, work)

    async def write(self, work: Callable[[Connection], T]) -> T:
        """Run `work` in a transaction."""

        def work_with_faults(connection: Connection) -> T:
            result = work(connection)
            fault_point("jobs.database.commit")
            return result

        result = await self._run(self._write_threads, self._writing, work_with_faults)
        fault_point("jobs.database.committed")
        return result

    async def close(self) -> None:
        """Finish running transactions and disconnect."""

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
        # Only the driver's message: SQLAlchemy's contains the values of the statement.
        log.error("Database error: %s: %s", type(error.orig).__name__, error.orig)
        raise Unavailable("the database failed; try again later") from None
    except exc.TimeoutError:
        raise Unavailable("no database connection is free; try again later") from None


def _sqlite(url: str) -> Database:
    path = make_url(url).database
    if not path or path == ":memory:":
        raise ValueError("a file is needed")
    Path(path).parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    # Create it first: SQLite would make it and its companion files readable by others.
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    reading, writing = create_engine(url, pool_size=_READERS), create_engine(url, pool_size=1, max_overflow=0)
    for engine, begin in ((reading, "BEGIN"), (writing, "BEGIN IMMEDIATE")):
        _prepare(engine, begin)
    return Database(reading, writing, _READERS, 1)


def _prepare(engine: Engine, begin: str) -> None:
    def connected(connection: Any, _record: Any) -> None:
        connection.isolation_level = None  # we issue BEGIN ourselves: the module would do it too late
        cursor = connection.cursor()
        for pragma in (f"busy_timeout={_BUSY_MS}", "journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON"):
            cursor.execute(f"PRAGMA {pragma}")
        cursor.close()

    event.listen(engine, "connect", connected)
    event.listen(engine, "begin", lambda connection: connection.exec_driver_sql(begin))


def _postgresql(url: str) -> Database:
    parsed = make_url(url)
    if parsed.get_backend_name() not in ("postgresql", "postgres"):
        raise InvalidArgument("unsupported database: use sqlite:///FILE or postgresql://user@host/name")
    engine = create_engine(
        parsed.set(drivername="postgresql+psycopg"),
        pool_size=_POSTGRESQL_THREADS,
        pool_pre_ping=True,
        connect_args={"connect_timeout": 10},
    )
    return Database(engine, engine, _POSTGRESQL_THREADS // 2, _POSTGRESQL_THREADS // 2)


def _texts(*names: str) -> list[Column[str]]:
    return [Column(name, Text, nullable=False) for name in names]


def _times(*names: str) -> list[Column[float]]:
    return [Column(name, Double) for name in names]


# The tables as statements name them; `MIGRATIONS` creates them.
organisations = Table("organisations", metadata, *_texts("name"), *_times("created_on"))
users = Table(
    "users", metadata, *_texts("id", "name", "email"), *_times("created", "tokens_after"), Column("version", BigInteger)
)
user_roles = Table("user_roles", metadata, *_texts("user_id", "org", "role"))
user_keys = Table(
    "user_keys",
    metadata,
    *_texts("id", "user_id", "lookup", "hash"),
    *_times("created", "expires"),
    Column("position", BigInteger),
)
revoked_tokens = Table("revoked_tokens", metadata, *_texts("jti"), *_times("expires"))
counters = Table("counters", metadata, *_texts("name"), Column("value", BigInteger))
workspaces = Table(
    "workspaces",
    metadata,
    *_texts("id", "org", "user_id", "name"),
    Column("shared", Boolean),
    *_texts("version", "cloud_type", "bucket"),
    *_times("created_on", "last_modified"),
    *_texts("secret", "fingerprint"),
)
experiments = Table(
    "experiments",
    metadata,
    *_texts("id", "org", "user_id", "name", "description", "network_arch", "workspace", "details"),
    *_times("created_on", "last_modified"),
    *_texts("secret"),
)
jobs = Table(
    "jobs",
    metadata,
    *_texts("id", "org", "experiment_id", "user_id", "parent_id", "action", "status", "reason", "name", "description"),
    *_texts("network_arch"),
    Column("num_gpu", BigInteger),
    *_texts("checkpoint", "specs", "details", "place"),
    *_times("created_on", "last_modified", "stopped_on"),
    Column("version", BigInteger),
)
events = Table(
    "events",
    metadata,
    *_texts("job_id"),
    Column("number", BigInteger),
    *_times("time"),
    *_texts("status", "reason", "by_whom"),
)
job_logs = Table("job_logs", metadata, *_texts("job_id", "log"))
leases = Table("leases", metadata, *_texts("job_id", "owner"), *_times("expires"))


def migrate(connection: Connection) -> None:
    """Apply the missing migrations in one transaction, while no other gateway does."""
    if connection.dialect.name == "postgresql":
        connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _LOCK})
    connection.execute(
        text("CREATE TABLE IF NOT EXISTS schema_steps (number BIGINT PRIMARY KEY, taken_on DOUBLE PRECISION NOT NULL)")
    )
    applied = connection.execute(text("SELECT coalesce(max(number), 0) FROM schema_steps")).scalar_one()
    if applied > len(MIGRATIONS):
        raise FailedPrecondition(
            f"the database was created by a newer headrace (migration {applied}, this one knows {len(MIGRATIONS)}): "
            "update headrace"
        )
    for number in range(applied + 1, len(MIGRATIONS) + 1):
        for statement in MIGRATIONS[number - 1]:
            connection.execute(text(statement))
        connection.execute(
            text("INSERT INTO schema_steps (number, taken_on) VALUES (:number, :now)"),
            {"number": number, "now": time.time()},
        )
