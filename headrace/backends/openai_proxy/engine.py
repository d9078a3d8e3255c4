# SPDX-License-Identifier: Apache-2.0
"""The engine behind a model: started where it has to be, asked for its health, started again when it dies.

Used by `instance`; all of it in the loop's thread. An engine that is reached by its URL is the same without a process.
Knows nothing of requests but whom to tell when they are lost.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
from collections.abc import Callable, Iterable

from headrace.backends.contract import Placement
from headrace.backends.openai_proxy.child import Child
from headrace.backends.openai_proxy.client import Pool, fetch
from headrace.backends.openai_proxy.origin import Origin
from headrace.backends.openai_proxy.settings import MODELS_PATH, ProxySettings
from headrace.backends.restarts import Backoff
from headrace.core.errors import INTERNAL_TEXT, FailedPrecondition, HeadraceError, Internal, Unavailable

log = logging.getLogger("headrace.backends.openai_proxy")

WATCH_SECONDS = 10.0
_HEALTH_SECONDS = 5.0
_UNHEALTHY_AFTER = 3
_FIRST_LOOK_SECONDS = 0.1
_LONGEST_LOOK_SECONDS = 2.0
_SHOWN_LINES = 8
_SHOWN_CHARACTERS = 1200


class Engine:
    """See the module. `pool` is None while there is nobody to ask; `down` then says why."""

    def __init__(
        self,
        settings: ProxySettings,
        placement: Placement,
        loop: asyncio.AbstractEventLoop,
        lost: Callable[[Unavailable], None],
    ) -> None:
        self._settings = settings
        self._placement = placement
        self._loop = loop
        self._lost = lost
        self._backoff = Backoff((0.5, 1.0), longest=60.0, lived=120.0)
        self._task: asyncio.Task[None] | None = None
        self._opened: asyncio.Future[None] = loop.create_future()
        self._child: Child | None = None
        self.pool: Pool | None = None
        self.down: Unavailable | None = self._unavailable("has not been started")
        self.served_model = settings.served_model or settings.model_name

    async def open(self) -> None:
        """Return when it is healthy; raises when it will not be."""
        self._task = self._loop.create_task(self._tend())
        await self._opened

    def abandon(self) -> None:
        """Let `open` fail soon."""
        self._refuse(Unavailable("the server is closing"))
        if self._child is not None:
            self._child.kill()
        if self._task is not None:
            self._task.cancel()

    async def close(self) -> None:
        """End it."""
        self.down = self._unavailable("is being unloaded")
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    def kill_without_loop(self) -> None:
        """End its process when the loop has stopped already. From any thread."""
        if self._child is not None:
            self._child.kill_without_loop()

    async def _tend(self) -> None:
        """Keep one engine after the other alive, until cancelled."""
        try:
            while True:
                why, shown = await self._live()
                if not self._opened.done():
                    self._refuse(FailedPrecondition(f"the engine of model '{self._settings.model_name}' {why}{shown}"))
                    return
                delay = self._backoff.next_delay(self._loop.time())
                log.error("the engine of %s %s%s; it is started again in %g s", self._placement.name, why, shown, delay)
                self.down = self._unavailable(f"{why}; it is being started again, retry", delay)
                self._lost(self.down)
                await asyncio.sleep(delay)
        except Exception:
            log.exception("the engine of %s is not looked after any more", self._placement.name)
            self._refuse(Internal(INTERNAL_TEXT))
            self.down = self._unavailable("failed; load the model again")
            self._lost(self.down)

    async def _live(self) -> tuple[str, str]:
        """One life: what ended it, and its last words, which are for operators only."""
        settings, pool = self._settings, None
        try:
            port = _free_port() if settings.command else 0
            if settings.command:
                self._child = self._started(port)
            pool = Pool(self._loop, settings.origin or Origin("127.0.0.1", port), settings.api_key)
            why = await self._become_healthy(pool, self._child)
            if why:
                return why, self._last_words()
            await self._learn_name(pool)
            self._is_up(pool)
            return await self._watch(pool, self._child), self._last_words()
        except OSError as error:
            return f"cannot be started ({error.strerror or 'no reason given'})", ""
        finally:
            self.pool = None
            child, self._child = self._child, None
            if child is not None:
                await child.stop(settings.stop_seconds)
            if pool is not None:
                pool.close()

    def _started(self, port: int) -> Child:
        settings, placement = self._settings, self._placement
        environment = dict(os.environ)
        if placement.kind == "gpu":
            environment["CUDA_VISIBLE_DEVICES"] = _gpu_name(placement.device)
        names = list(settings.environment)
        environment |= zip(names, _filled_in(settings.environment.values(), port, settings), strict=True)
        command = _filled_in(settings.command, port, settings)
        log.info("%s: starting %s", placement.name, command[0])
        return Child(self._loop, placement.name, command, environment, settings.folder)

    async def _become_healthy(self, pool: Pool, child: Child | None) -> str:
        """Wait; "" when it is, else what was the matter."""
        seconds = self._settings.start_seconds
        deadline = self._loop.time() + seconds
        pause = _FIRST_LOOK_SECONDS
        while True:
            problem = await self._problem(pool)
            if child is not None and child.exited.done():
                return f"ended before it was healthy ({child.exited.result()})"
            if not problem:
                return ""
            left = deadline - self._loop.time()
            if left <= 0:
                return (
                    f"was not healthy within {seconds:g} seconds: it {problem}. The parameter start_seconds allows more"
                )
            pause = min(pause * 1.5, _LONGEST_LOOK_SECONDS)
            await self._exit_within(child, min(pause, left))

    async def _watch(self, pool: Pool, child: Child | None) -> str:
        """Look after an engine that is up, until it ends: how."""
        failures = 0
        while True:
            if child is not None and await self._exit_within(child, WATCH_SECONDS):
                return f"died ({child.exited.result()})"
            if child is None:
                await asyncio.sleep(WATCH_SECONDS)
            problem = await self._problem(pool)
            failures = failures + 1 if problem else 0
            if failures >= _UNHEALTHY_AFTER:
                if failures == _UNHEALTHY_AFTER:
                    log.error("the engine of %s is not healthy: it %s", self._placement.name, problem)
                self.down = self._unavailable(f"is not healthy: it {problem}", WATCH_SECONDS)
            elif not problem and self.down is not None:
                log.info("the engine of %s is healthy again", self._placement.name)
                self.down = None

    async def _exit_within(self, child: Child | None, seconds: float) -> bool:
        if child is None:
            await asyncio.sleep(seconds)
            return False
        await asyncio.wait({child.exited}, timeout=seconds)
        return child.exited.done()

    async def _problem(self, pool: Pool) -> str:
        """What is the matter with its health; "" for nothing."""
        settings = self._settings
        path = settings.health_path
        try:
            status, _ = await fetch(pool, path, _HEALTH_SECONDS)
            if status == 404 and settings.health_fallback:
                path = settings.health_fallback
                status, _ = await fetch(pool, path, _HEALTH_SECONDS)
        except ConnectionError as error:
            return str(error)
        if 200 <= status < 300:
            return ""
        remedy = "; check the key that api_key_env names" if status in (401, 403) else ""
        return f"answers {path} with status {status}{remedy}"

    async def _learn_name(self, pool: Pool) -> None:
        """What the model is called there, where the configuration does not say."""
        if self._settings.served_model:
            return
        try:
            status, body = await fetch(pool, MODELS_PATH, _HEALTH_SECONDS)
            name = json.loads(body)["data"][0]["id"] if status == 200 else ""
        except (ConnectionError, ValueError, LookupError, TypeError, RecursionError):
            name = ""
        if isinstance(name, str) and name:
            self.served_model = name
        else:
            log.warning("the engine of %s does not list its models: set served_model", self._placement.name)

    def _is_up(self, pool: Pool) -> None:
        self.pool = pool
        self.down = None
        self._backoff.started(self._loop.time())
        log.info("the engine of %s is healthy; it serves '%s'", self._placement.name, self.served_model)
        if not self._opened.done():
            self._opened.set_result(None)

    def _refuse(self, error: HeadraceError) -> None:
        if not self._opened.done():
            self._opened.set_exception(error)

    def _unavailable(self, why: str, seconds: float | None = None) -> Unavailable:
        text = f"the engine of model '{self._settings.model_name}' {why}"
        return Unavailable(text, retry_after_seconds=None if seconds is None else max(seconds, 1.0))

    def _last_words(self) -> str:
        if self._child is None or not self._child.last_lines:
            return ""
        text = " | ".join([*self._child.last_lines][-_SHOWN_LINES:])
        return f". Its last lines: {text[-_SHOWN_CHARACTERS:]}"


def _filled_in(words: Iterable[str], port: int, settings: ProxySettings) -> list[str]:
    return [word.replace("{port}", str(port)).replace("{folder}", str(settings.folder)) for word in words]


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


def _gpu_name(device: int) -> str:
    """What the engine is to call the server's GPU of this number."""
    named = [entry.strip() for entry in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if entry.strip()]
    return named[device] if device < len(named) else str(device)
