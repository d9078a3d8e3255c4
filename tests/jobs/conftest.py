# SPDX-License-Identifier: Apache-2.0
"""Databases for the tests of jobs: SQLite, and PostgreSQL in the platform tier.

A test that uses `database_url` chooses its database itself. Every other test of this folder that has a data directory runs
twice: with its records where `JobSettings` puts them, and in PostgreSQL. The folders below (the gateway, the microservice,
the job API) choose their databases themselves.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from postgresql_servers import PostgresqlServer

from headrace.jobs.settings import JobSettings

KINDS = ["sqlite", pytest.param("postgresql", marks=pytest.mark.platform)]


@pytest.fixture(scope="session")
def postgresql() -> Iterator[PostgresqlServer]:
    with PostgresqlServer() as server:
        yield server


@pytest.fixture(params=KINDS)
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty database, of each kind in turn."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'jobs.sqlite3'}"
    server: PostgresqlServer = request.getfixturevalue("postgresql")
    return server.new_database()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    names = metafunc.fixturenames
    if metafunc.definition.path.parent != Path(__file__).parent:
        return
    if "every_database" in names and "database_url" not in names and {"tmp_path", "folder"} & {*names}:
        metafunc.parametrize("every_database", KINDS, indirect=True)


@pytest.fixture(autouse=True)
def every_database(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With PostgreSQL, a database for each data directory; processes that a test starts are told of theirs."""
    if getattr(request, "param", "sqlite") == "sqlite":
        return
    server: PostgresqlServer = request.getfixturevalue("postgresql")
    document: dict[Path, str] = {}

    def url(settings: JobSettings) -> str:
        if settings.database_url:
            return settings.database_url
        if settings.data_dir not in document:
            document[settings.data_dir] = server.new_database()
        return document[settings.data_dir]

    monkeypatch.setattr(JobSettings, "url", property(url))
    monkeypatch.setenv("HEADRACE_TEST_DATABASE", server.new_database())
