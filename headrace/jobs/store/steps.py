# SPDX-License-Identifier: Apache-2.0
"""The shape of the database, as numbered steps that led to it. A step that was published is never changed: add another.

Called by `database` when it is opened. Words that SQLite and PostgreSQL both know.
"""

from __future__ import annotations

import time

from sqlalchemy import Connection, text

from headrace.core.errors import FailedPrecondition

_LOCK = 7_237_104_391  # any number, the same for every gateway

STEPS: tuple[tuple[str, ...], ...] = (
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
    (  # Which jobs are in a list, and whether they have changed, is found in an index alone.
        "DROP INDEX jobs_org",
        "CREATE INDEX jobs_org ON jobs (org, created_on, id, version)",
        "DROP INDEX jobs_experiment",
        "CREATE INDEX jobs_experiment ON jobs (experiment_id, created_on, id, version, org)",
        "CREATE INDEX jobs_newest ON jobs (created_on)",
    ),
)


def migrate(connection: Connection) -> None:
    """Take the steps that were not taken yet; in one transaction, while no other gateway does."""
    if connection.dialect.name == "postgresql":
        connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _LOCK})
    connection.execute(
        text("CREATE TABLE IF NOT EXISTS schema_steps (number BIGINT PRIMARY KEY, taken_on DOUBLE PRECISION NOT NULL)")
    )
    taken = connection.execute(text("SELECT coalesce(max(number), 0) FROM schema_steps")).scalar_one()
    if taken > len(STEPS):
        raise FailedPrecondition(
            f"the database was made by a newer version of headrace (step {taken}, this one knows {len(STEPS)}): update it"
        )
    for number in range(taken + 1, len(STEPS) + 1):
        for statement in STEPS[number - 1]:
            connection.execute(text(statement))
        connection.execute(
            text("INSERT INTO schema_steps (number, taken_on) VALUES (:number, :now)"),
            {"number": number, "now": time.time()},
        )
