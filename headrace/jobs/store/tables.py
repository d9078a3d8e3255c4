# SPDX-License-Identifier: Apache-2.0
"""The tables as SQLAlchemy names them in statements. What they really are is made by `steps`."""

from __future__ import annotations

from sqlalchemy import BigInteger, Boolean, Column, Double, MetaData, Table, Text


def _texts(*names: str) -> list[Column[str]]:
    return [Column(name, Text, nullable=False) for name in names]


def _times(*names: str) -> list[Column[float]]:
    return [Column(name, Double) for name in names]


metadata = MetaData()
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
