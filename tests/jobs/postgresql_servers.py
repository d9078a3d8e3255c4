# SPDX-License-Identifier: Apache-2.0
"""A PostgreSQL server of Debian's for tests, on loopback, in a folder that is removed with it."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from support.ports import free_port

BINARIES = sorted(Path("/usr/lib/postgresql").glob("*/bin"))


class PostgresqlServer:
    def __enter__(self) -> PostgresqlServer:
        self._folder = Path(tempfile.mkdtemp(prefix="headrace-pg-", dir="/tmp"))
        self.port = free_port()
        self._run("initdb", "-D", self._data, "-A", "trust", "-U", "postgres", "--no-sync", first=True)
        self.start()
        return self

    def start(self) -> None:
        options = f"-p {self.port} -c listen_addresses=127.0.0.1 -c unix_socket_directories={self._folder} -c fsync=off"
        self._run(
            "pg_ctl", "-D", self._data, "-w", "-t", "170", "-l", str(self._folder / "log"), "-o", options, "start"
        )

    def stop(self) -> None:
        self._run("pg_ctl", "-D", self._data, "-m", "immediate", "-w", "-t", "170", "stop")

    def __exit__(self, *exception: object) -> None:
        self.stop()
        shutil.rmtree(self._folder)

    def new_database(self) -> str:
        name = f"t{secrets.token_hex(6)}"
        self._run("createdb", "-h", "127.0.0.1", "-p", str(self.port), "-U", "postgres", name)
        return f"postgresql://postgres@127.0.0.1:{self.port}/{name}"

    @property
    def _data(self) -> str:
        return str(self._folder / "data")

    def _run(self, program: str, *words: str, first: bool = False) -> None:
        command = [str(BINARIES[-1] / program), *words]
        other: dict[str, Any] = {}
        if os.geteuid() == 0:  # it refuses to run as root
            other = {"user": "postgres", "group": "postgres", "extra_groups": []}
            if first:
                shutil.chown(self._folder, "postgres", "postgres")
        said = self._folder / "output"
        with said.open("ab") as output:
            done = subprocess.run(command, check=False, stdout=output, stderr=output, cwd="/tmp", timeout=180, **other)
        if done.returncode:
            log = self._folder / "log"
            raise RuntimeError(f"{program}: {said.read_text()}{log.read_text() if log.exists() else ''}")
