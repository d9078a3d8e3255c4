# SPDX-License-Identifier: Apache-2.0
"""The data directory and the database, opened: for the gateway, and for the commands that work beside it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

from headrace.api.access.logins import Access, open_access
from headrace.core.errors import FailedPrecondition
from headrace.jobs.service import JobService
from headrace.jobs.settings import JobSettings
from headrace.platforms.contract import Driver


class Opened(NamedTuple):
    """Jobs and users of one data directory."""

    jobs: JobService
    access: Access


@asynccontextmanager
async def opened(
    settings: JobSettings, token_key: Path | None = None, driver: Driver | None = None
) -> AsyncIterator[Opened]:
    """Open both; they are closed at the end, the driver too. Services run on."""
    make_data_dir(settings.data_dir)
    jobs = await JobService.open(settings, driver)
    try:
        access = open_access(settings.data_dir, jobs.store.users, key_file=token_key)
        try:
            yield Opened(jobs, access)
        finally:
            access.close()
    finally:
        await jobs.close()


def make_data_dir(folder: Path) -> None:
    """Have the folder. A new one is for its owner alone; one that was there is left as it is, and every file in it is."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise FailedPrecondition(
            f"--data-dir {folder} cannot be used: {error.strerror}; give a folder that this user may write to"
        ) from None
