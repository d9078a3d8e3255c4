# SPDX-License-Identifier: Apache-2.0
"""The program `brev`, by its words. Called by `driver`; knows instances, not services.

Whoever is cancelled while something is being changed waits for the end of it first: a command that was sent to an instance
goes on there, and only its answer tells what it did.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import secrets
import tempfile
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

from headrace.core.errors import FailedPrecondition, InvalidArgument, Unauthenticated, Unavailable
from headrace.platforms.brev import remote, states
from headrace.platforms.brev.settings import TOKEN, BrevSettings
from headrace.platforms.commands import Completed, run_command

log = logging.getLogger("headrace.launch")

T = TypeVar("T")
INSTALL = (
    "install it with `curl -fsSL https://raw.githubusercontent.com/brevdev/brev-cli/main/bin/install-latest.sh | bash` "
    "or `brew install brevdev/homebrew-brev/brev`"
)
LOGIN = f"run `brev login`, or without a browser `brev login --token`; the setting login=true does that with {TOKEN}"
_NOT_LOGGED_IN = re.compile(r"log ?in|unauthori[sz]ed|unauthenticated|401|credentials|auth.*EOF", re.IGNORECASE)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


class BrevCli:
    """One account, as brev on this machine is logged in."""

    def __init__(self, settings: BrevSettings) -> None:
        self._settings = settings
        if settings.instance_id and not _NAME.fullmatch(settings.instance_id):
            raise InvalidArgument(f"{settings.instance_id[:100]!a} cannot be the name of an instance")

    async def instances(self) -> dict[str, str]:
        """Names and statuses of all."""
        done = await self._run("ls", "--json")
        if done.code and self._settings.login and self._settings.token and _NOT_LOGGED_IN.search(done.err + done.out):
            await self._run("login", "--token", self._settings.token)
            done = await self._run("ls", "--json")
        if done.code:
            raise self._trouble(done)
        return states.instances_of(done.out)

    async def create(self, name: str) -> None:
        """Ask for an instance; it is not there yet."""
        settings = self._settings
        words = ["create", name]
        for flag, value in (
            ("--type", settings.instance_type),
            ("--gpu-name", settings.gpu_name),
            ("--cloud-cred-id", settings.cloud_cred_id),
            ("--workspace-group-id", settings.workspace_group_id),
        ):
            if value:
                words += [flag, value]
        done = await to_its_end(self._run(*words, "--detached"))
        if done.code:
            raise self._trouble(done)

    async def delete(self, name: str) -> None:
        """Ask for its deletion."""
        done = await to_its_end(self._run("delete", name))
        if done.code and name in await self.instances():
            raise self._trouble(done)

    async def execute(
        self, instance: str, script: str, words: Sequence[str] = (), *, seconds: float | None = None
    ) -> Completed:
        """Run one of `remote`'s scripts there. Raises Unavailable where the instance does not run it."""
        mark = f"headrace-{secrets.token_hex(8)}"
        done = await self._run("exec", instance, remote.line_of(script, words, mark), seconds=seconds)
        told = remote.outcome(done.out, mark)
        if told is None:
            raise self._trouble(done)
        return Completed(told[0], told[1], done.err)

    async def upload(self, instance: str, content: bytes, name: str) -> None:
        """Put a file for its owner alone into the instance's home."""
        with tempfile.TemporaryDirectory(prefix="headrace-") as folder:
            path = Path(folder) / "file"
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), "wb") as file:
                file.write(content)
            done = await self._run("copy", str(path), f"{instance}:{name}")
        if done.code:
            raise self._trouble(done)

    async def _run(self, *words: str, seconds: float | None = None) -> Completed:
        try:
            return await run_command(
                [self._settings.program, *words], seconds=seconds or self._settings.command_seconds
            )
        except FailedPrecondition:
            raise FailedPrecondition(
                f"the program {self._settings.program!a} is not installed here: {INSTALL}"
            ) from None

    def _trouble(self, done: Completed) -> Exception:
        log.warning("brev ended with %d: %s", done.code, (done.err or done.out)[-2000:])
        if _NOT_LOGGED_IN.search(done.err + done.out):
            return Unauthenticated(f"brev is not logged in: {LOGIN}")
        return Unavailable(f"brev says: {done.told}")


async def to_its_end(work: Coroutine[Any, Any, T]) -> T:
    """The result of something that changes an instance; a caller who is cancelled waits for its end too."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        if not task.cancelled():
            task.exception()
        raise
