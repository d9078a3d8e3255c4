# SPDX-License-Identifier: Apache-2.0
"""Starts services on any platform, and finds, asks and stops them again by what is recorded of them.

Called by `headrace service` and by whoever writes Python:

    async with Launcher() as launcher:
        entry = await launcher.start(StartRequest("tao-dataservices", "hf_model://org/name"))

A service is recorded before it is launched, and a start that fails is undone: whatever is killed at whatever moment, the
record shows what may be left. What each platform does is its driver's business.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

from headrace.core.errors import AlreadyExists, DeadlineExceeded, FailedPrecondition, HeadraceError, NotFound
from headrace.core.telemetry.progress import Progress, silent
from headrace.platforms import asking, catalogue, readiness, variables
from headrace.platforms.contract import Check, Driver, Handle, Observed
from headrace.platforms.drivers import DriverOptions, check_platform, default_state_dir, driver_of, recorded_settings
from headrace.platforms.following import follow
from headrace.platforms.http_asking import Told, get
from headrace.platforms.identity import own_name
from headrace.platforms.planning import GRACE_SECONDS, Plan, StartRequest, plan_of, spec_of
from headrace.platforms.readiness import NeverReady, Patience
from headrace.platforms.registry import DEFAULT_PATH, RUNNING, Entry, Registry
from headrace.platforms.services import OVER, Preflight, Service, handle_of, service_of, with_handle
from headrace.platforms.starting import (
    LAST_LINES,
    SETTLE_SECONDS,
    Existed,
    StartFailed,
    check_platform_ready,
    described,
    first_steps,
    launch,
    undo,
)

__all__ = ["Launcher", "Patience", "Preflight", "Service", "StartFailed", "StartRequest"]

log = logging.getLogger("headrace.launch")

WITH_PORT = ("process", "local-docker", "brev", "slurm")
"""Platforms whose services have a port of 8080..8199 at a machine that they share with others."""
Services = list[Service]


class Launcher:
    """One registry. Use it as a context manager: drivers have threads and connections to let go of."""

    def __init__(
        self,
        registry: Path = DEFAULT_PATH,
        *,
        state_dir: Path | None = None,
        environ: Mapping[str, str] | None = None,
        architectures: Path | None = None,
        config_folders: tuple[Path, ...] = (),
        versions_file: Path | None = None,
        progress: Progress = silent,
        make_driver: Callable[[str, DriverOptions], Driver] = driver_of,
        settle_seconds: float = SETTLE_SECONDS,
    ) -> None:
        self._environ = os.environ if environ is None else environ
        path = registry.expanduser().absolute()
        self.registry = Registry(path)
        self._state_dir = (state_dir or default_state_dir(path, self._environ)).expanduser().absolute()
        self._architectures = architectures
        self._config_folders = config_folders
        self._versions_file = versions_file
        self._progress = progress
        self._make_driver = make_driver
        self._settle_seconds = settle_seconds
        self._drivers: dict[str, Driver] = {}

    async def __aenter__(self) -> Launcher:
        """It is open as it is."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close."""
        await self.close()

    async def close(self) -> None:
        """Let go of the drivers; services run on."""
        drivers, self._drivers = list(self._drivers.values()), {}
        await asyncio.gather(*(driver.close() for driver in drivers))

    def architectures(self) -> Mapping[str, catalogue.Architecture]:
        """Those that can be started. Raises InvalidArgument for a file of the user's folder that is wrong."""
        return catalogue.load(self._architectures)

    async def preflight(self, platform: str, settings: Mapping[str, Any] | None = None) -> Preflight:
        """Look whether all is there that the platform needs. Starts nothing."""
        check_platform(platform)
        present = variables.presence(self._environ, variables.wanted_on(platform))
        try:
            checks = await self._driver(platform, settings or {}).preflight()
        except HeadraceError as error:
            checks = [Check(platform, False, error.message)]
        return Preflight(platform, tuple(checks), tuple(present))

    async def start(
        self, request: StartRequest, *, wait: bool = False, patience: Patience | None = None, preflight: bool = True
    ) -> Entry:
        """Start a service, and with `wait` return when its model is ready; `preflight` looks at the platform first.

        Raises what is wrong with the request before anything is done; StartFailed with the last lines of the log if the
        service ends; what the platform says otherwise. What was begun is undone. A service that merely takes longer than
        `patience` runs on: that is DeadlineExceeded.
        """
        plan = await asyncio.to_thread(self._plan, request)
        driver = self._driver(plan.platform, request.settings)
        if preflight:
            await check_platform_ready(driver)
        await self._mark_stale(driver, plan.platform)
        entry = await asyncio.to_thread(self._record, plan)
        handle = Handle(plan.job_id, plan.platform)
        try:
            spec = spec_of(plan, entry.host_port, self._state_dir)
            handle = await launch(driver, spec)
            entry = with_handle(entry, handle.data)
            url = await first_steps(driver, handle, self._settle_seconds)
            if url:
                entry = with_handle(entry, (await described(driver, handle)).data)
            entry = await asyncio.to_thread(self._running, entry, url)
            if wait:
                await self._wait(driver, entry, patience)
        except Existed as error:
            await asyncio.to_thread(self.registry.remove, plan.job_id)
            raise AlreadyExists(error.message) from None
        except BaseException as error:
            if not isinstance(error, DeadlineExceeded):
                await undo(driver, handle, lambda: self.registry.remove(plan.job_id))
            raise
        return entry if not wait else self._entry(plan.job_id)

    async def list(self) -> Services:
        """All that are recorded, in the order in which they were started, as they really are."""
        entries = await asyncio.to_thread(self.registry.entries)
        groups: dict[str, list[Entry]] = {}
        for entry in entries.values():
            groups.setdefault(_place(entry), []).append(entry)
        seen = await asyncio.gather(*(self._observe(group) for group in groups.values()))
        found = {service.entry.job_id: service for each in seen for service in each}
        return [found[job_id] for job_id in entries]

    async def status(self, job_id: str) -> Service:
        """One that is recorded. Raises NotFound."""
        entry = await asyncio.to_thread(self._entry, job_id)
        driver = self._driver_of(entry)
        handle = handle_of(entry)
        return service_of(await self._with_url(driver, entry, handle), await driver.status(handle))

    async def told(self, job_id: str, seconds: float = 5.0) -> Mapping[str, Any] | None:
        """What the service itself says at /api/v1/status; None if it says nothing."""
        entry = await asyncio.to_thread(self._entry, job_id)
        if not entry.host_url:
            return None
        answer = await get(entry.host_url, "/api/v1/status", seconds, self._headers(entry))
        return answer.body if answer is not None and answer.status == 200 else None

    async def logs(self, job_id: str, tail: int = 1000) -> str:
        """The last lines."""
        entry = await asyncio.to_thread(self._entry, job_id)
        return await self._driver_of(entry).logs(handle_of(entry), tail)

    async def follow(self, job_id: str, tail: int = 100) -> AsyncIterator[str]:
        """The last lines, and each new one until the service ends."""
        entry = await asyncio.to_thread(self._entry, job_id)
        driver, handle = self._driver_of(entry), handle_of(entry)

        async def lives() -> bool:
            return (await driver.status(handle)).phase in ("starting", "running")

        async for line in follow(lambda lines: driver.logs(handle, lines), lives, tail):
            yield line

    async def wait_ready(self, job_id: str, patience: Patience | None = None) -> None:
        """Return when its model is ready. Raises StartFailed, DeadlineExceeded."""
        entry = await asyncio.to_thread(self._entry, job_id)
        await self._wait(self._driver_of(entry), entry, patience)

    async def ask(
        self,
        job_id: str,
        body: Mapping[str, Any],
        *,
        seconds: float = asking.SECONDS,
        on_piece: asking.OnPiece | None = None,
    ) -> asking.Answer:
        """Send a chat request; see `asking.ask` for what it raises."""
        entry = await asyncio.to_thread(self._entry, job_id)
        if not entry.host_url:
            raise asking.NotReadyYet(f"service {job_id} has no address yet; ask again later")
        return await asking.ask(
            entry.host_url,
            body,
            f"service {job_id}",
            seconds=seconds,
            on_piece=on_piece,
            headers=self._headers(entry),
        )

    async def stop(self, job_id: str, grace_seconds: float = GRACE_SECONDS, *, forget: bool = False) -> None:
        """End it, remove what it left on its platform, then its record. Raises NotFound for one that is not recorded.

        With `forget` the record goes even where the platform cannot do its part: what it still has is left to others.
        """
        entry = await asyncio.to_thread(self._entry, job_id)
        try:
            await self._driver_of(entry).stop(handle_of(entry), grace_seconds)
        except HeadraceError as error:
            if not forget:
                raise
            log.warning("service %s is forgotten, and may still be there: %s", job_id, error.message)
        await asyncio.to_thread(self.registry.remove, job_id)

    async def prune(self) -> Services:
        """Remove what has ended or is not there any more; returns it."""
        over = [service for service in await self.list() if service.state in OVER]
        await asyncio.gather(*(self.stop(service.entry.job_id) for service in over))
        return over

    # The steps of a start

    def _plan(self, request: StartRequest) -> Plan:
        known = self.architectures()
        arch = catalogue.configured(catalogue.find(known, request.arch), self._config_folders, known)
        options = DriverOptions(self._state_dir, self._environ, request.settings)
        settings = recorded_settings(check_platform(request.platform), options)
        return plan_of(replace(request, settings=settings), arch, self._environ, self._versions_file)

    def _record(self, plan: Plan) -> Entry:
        settings = plan.settings
        more: dict[str, Any] = {
            "model_path": plan.payload.model_path,
            "num_gpus": plan.gpus,
            "image": "" if plan.image is None else plan.image.name,
            "settings": dict(settings),
            "state_dir": str(self._state_dir),
            "launcher": own_name(),
        }
        entry = Entry(
            plan.job_id,
            plan.platform,
            plan.payload.arch.name,
            instance_id=str(settings.get("instance_id", "")),
            more={name: value for name, value in more.items() if value not in ("", {})},
        )
        return self.registry.begin(entry, wants_port=plan.platform in WITH_PORT)

    def _running(self, entry: Entry, url: str) -> Entry:
        found = self.registry.update(
            entry.job_id,
            lambda old: replace(
                entry, started_at=old.started_at, host_url=url, state=RUNNING, more={**old.more, **entry.more}
            ),
        )
        if found is None:
            raise FailedPrecondition(f"service {entry.job_id} was stopped by somebody else while it was starting")
        return found

    async def _wait(self, driver: Driver, entry: Entry, patience: Patience | None) -> None:
        handle = handle_of(entry)
        bounds = patience or Patience()
        name = f"service {entry.job_id}"

        async def look() -> Observed:
            return await driver.status(handle)

        async def ask_at(_: str, path: str, seconds: float) -> Told | None:
            nonlocal entry
            url = entry.host_url
            told = await get(url, path, seconds, self._headers(entry)) if url else None
            if told is None:
                # Where it is may be known only after a queue or a pull; and the tunnel to it may have to be made again.
                entry = await self._located(driver, entry, handle)
                if entry.host_url and entry.host_url != url:
                    told = await get(entry.host_url, path, seconds, self._headers(entry))
            return told

        try:
            await readiness.wait_ready("", name, look, patience=bounds, progress=self._progress, ask=ask_at)
        except NeverReady as error:
            lines = await driver.logs(handle, LAST_LINES)
            raise StartFailed(error.message, lines) from None

    # What is recorded

    def _entry(self, job_id: str) -> Entry:
        found = self.registry.entries().get(job_id)
        if found is None:
            raise NotFound(
                f"no service has the job id {job_id[:64]!a} in {self.registry.path}: "
                "`headrace service list` shows those there are"
            )
        return found

    async def _with_url(self, driver: Driver, entry: Entry, handle: Handle) -> Entry:
        """The entry with its address, if none is recorded yet."""
        return entry if entry.host_url else await self._located(driver, entry, handle)

    async def _located(self, driver: Driver, entry: Entry, handle: Handle) -> Entry:
        """The entry with its address as it is now, which is recorded."""
        url = await driver.endpoint(handle)
        if url is None:
            return entry
        data = (await described(driver, handle)).data

        def located(old: Entry) -> Entry:
            return replace(with_handle(old, data), host_url=url, state=RUNNING)

        if located(entry) == entry:
            return entry
        return await asyncio.to_thread(self.registry.update, entry.job_id, located) or located(entry)

    async def _observe(self, entries: Sequence[Entry]) -> Services:
        """All of one place, by one look."""
        try:
            driver = self._driver_of(entries[0])
            seen = await driver.found()
        except HeadraceError as error:
            return [Service(entry, "unknown", error.message) for entry in entries]
        return [await self._one(driver, entry, seen.get(entry.job_id)) for entry in entries]

    async def _one(self, driver: Driver, entry: Entry, observed: Observed | None) -> Service:
        handle = handle_of(entry)
        try:
            # Asked for by its name before it is called stale: a Brev instance that sleeps tells nothing of what it has.
            observed = observed or await driver.status(handle)
            if observed.phase == "running":
                entry = await self._with_url(driver, entry, handle)
            return service_of(entry, observed)
        except HeadraceError as error:
            return Service(entry, "unknown", error.message)

    async def _mark_stale(self, driver: Driver, platform: str) -> None:
        """Say what is recorded and not there any more: its port stays taken until it is pruned."""
        entries = await asyncio.to_thread(self.registry.entries)
        mine = [entry for entry in entries.values() if entry.platform == platform]
        if not mine:
            return
        for service in await self._observe([entry for entry in mine if _place(entry) == _place(mine[0])]):
            if service.state == "stale":
                log.warning(
                    "service %s is stale (%s): `headrace service prune` removes it",
                    service.entry.job_id,
                    service.reason,
                )

    def _headers(self, entry: Entry) -> dict[str, str]:
        """What a service's address asks for beside the request: Lepton's endpoints want a token."""
        token = self._environ.get("LEPTON_ENDPOINT_TOKEN") or self._environ.get("LEPTON_AUTH_TOKEN")
        if entry.platform != "lepton" or not token or not entry.host_url.startswith(("https://", "http://127.0.0.1:")):
            return {}
        return {"authorization": f"Bearer {token}"}

    # Drivers

    def _driver_of(self, entry: Entry) -> Driver:
        settings, folder = entry.more.get("settings"), entry.more.get("state_dir")
        state_dir = Path(folder) if isinstance(folder, str) else self._state_dir
        return self._driver(entry.platform, settings if isinstance(settings, dict) else {}, state_dir)

    def _driver(self, platform: str, settings: Mapping[str, Any], state_dir: Path | None = None) -> Driver:
        options = DriverOptions(state_dir or self._state_dir, self._environ, settings)
        key = f"{platform} {options.state_dir} {sorted(settings.items())}"
        if key not in self._drivers:
            self._drivers[key] = self._make_driver(platform, options)
        return self._drivers[key]


def _place(entry: Entry) -> str:
    """The same for entries that one driver can be asked for."""
    return f"{entry.platform} {entry.more.get('state_dir')} {entry.more.get('settings')}"
