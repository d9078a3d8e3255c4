# SPDX-License-Identifier: Apache-2.0
"""The command line `brev`: instances, and commands on them. It does not know services.

A cancelled caller waits for the end of a change: a command that was sent to an instance continues there, and only its answer
says what it did.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import tempfile
from collections.abc import Sequence
from pathlib import Path

from headrace.core.errors import FailedPrecondition, InvalidArgument, Unauthenticated, Unavailable
from headrace.platforms.brev import remote_docker
from headrace.platforms.brev.settings import TOKEN, BrevSettings
from headrace.platforms.commands import Completed, run_command, run_to_end

log = logging.getLogger("headrace.launch")

INSTALL = (
    "install it with `curl -fsSL https://raw.githubusercontent.com/brevdev/brev-cli/main/bin/install-latest.sh | bash` "
    "or `brew install brevdev/homebrew-brev/brev`"
)
LOGIN = f"run `brev login`, or without a browser `brev login --token`; the setting login=true does that with {TOKEN}"
_NOT_LOGGED_IN = re.compile(r"log ?in|unauthori[sz]ed|unauthenticated|401|credentials|auth.*EOF", re.IGNORECASE)
_INSTANCE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


class BrevCli:
    """The account that brev on this machine is logged in to."""

    def __init__(self, settings: BrevSettings) -> None:
        self._settings = settings
        if settings.instance_id and not _INSTANCE_NAME.fullmatch(settings.instance_id):
            raise InvalidArgument(f"{settings.instance_id[:100]!a} cannot be the name of an instance")

    async def instances(self) -> dict[str, str]:
        """Return the statuses of all instances, by name."""
        done = await self._run("ls", "--json")
        if done.code and self._settings.login and self._settings.token and _NOT_LOGGED_IN.search(done.err + done.out):
            await self._run("login", "--token", self._settings.token)
            done = await self._run("ls", "--json")
        if done.code:
            raise self._error(done)
        return remote_docker.parse_instances(done.out)

    async def create(self, name: str) -> None:
        """Request an instance; it is not running yet."""
        settings = self._settings
        args = ["create", name]
        for flag, value in (
            ("--type", settings.instance_type),
            ("--gpu-name", settings.gpu_name),
            ("--cloud-cred-id", settings.cloud_cred_id),
            ("--workspace-group-id", settings.workspace_group_id),
        ):
            if value:
                args += [flag, value]
        done = await run_to_end(self._run(*args, "--detached"))
        if done.code:
            raise self._error(done)

    async def delete(self, name: str) -> None:
        """Request its deletion."""
        done = await run_to_end(self._run("delete", name))
        if done.code and name in await self.instances():
            raise self._error(done)

    async def execute(
        self, instance: str, script: str, args: Sequence[str] = (), *, seconds: float | None = None
    ) -> Completed:
        """Run a script of `remote_docker` on an instance. Raises Unavailable if the instance does not run it."""
        mark = f"headrace-{secrets.token_hex(8)}"
        done = await self._run("exec", instance, remote_docker.exec_command(script, args, mark), seconds=seconds)
        outcome = remote_docker.parse_outcome(done.out, mark)
        if outcome is None:
            raise self._error(done)
        return Completed(outcome[0], outcome[1], done.err)

    async def upload(self, instance: str, content: bytes, name: str) -> None:
        """Copy a private file into the home folder of an instance."""
        with tempfile.TemporaryDirectory(prefix="headrace-") as folder:
            path = Path(folder) / "file"
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), "wb") as file:
                file.write(content)
            done = await self._run("copy", str(path), f"{instance}:{name}")
        if done.code:
            raise self._error(done)

    async def _run(self, *args: str, seconds: float | None = None) -> Completed:
        try:
            return await run_command([self._settings.program, *args], seconds=seconds or self._settings.command_seconds)
        except FailedPrecondition:
            raise FailedPrecondition(
                f"the program {self._settings.program!a} is not installed here: {INSTALL}"
            ) from None

    def _error(self, done: Completed) -> Exception:
        log.warning("brev exited with code %d: %s", done.code, (done.err or done.out)[-2000:])
        if _NOT_LOGGED_IN.search(done.err + done.out):
            return Unauthenticated(f"brev is not logged in: {LOGIN}")
        return Unavailable(f"brev failed: {done.error_line}")
