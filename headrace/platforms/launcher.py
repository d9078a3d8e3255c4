# SPDX-License-Identifier: Apache-2.0
"""The launcher: starts services on any platform, and finds, queries and stops them by their registry entries.

`headrace service` uses it, and Python programs:

    async with Launcher() as launcher:
        entry = await launcher.start(StartRequest("tao-dataservices", "hf_model://org/name"))

A service is registered before it is launched, and a start that fails is rolled back: after a kill at any moment, the
registry shows what may be left. Drivers know the platforms.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, runtime_checkable

from headrace.core.errors import AlreadyExists, DeadlineExceeded, FailedPrecondition, HeadraceError, NotFound
from headrace.core.telemetry.progress import Progress, silent
from headrace.platforms import catalogue, payloads, service_client
from headrace.platforms.commands import run_to_end
from headrace.platforms.contract import Check, Driver, Handle, LaunchSpec, PlatformStatus
from headrace.platforms.drivers import (
    DriverOptions,
    check_platform,
    create_driver,
    default_state_dir,
    recorded_settings,
)
from headrace.platforms.launch_plan import GRACE_SECONDS, LaunchPlan, StartRequest, launch_spec, plan_launch
from headrace.platforms.log_files import follow_log
from headrace.platforms.processes import process_name
from headrace.platforms.registry import DEFAULT_PATH, RUNNING, Entry, Registry
from headrace.platforms.service_client import NeverReady, Response, WaitPolicy, get
from headrace.platforms.services import ENDED_STATES, Preflight, Service, handle_of, service_of, with_handle

__all__ = ["Launcher", "Preflight", "Service", "StartFailed", "StartRequest", "WaitPolicy"]

log = logging.getLogger("headrace.launch")

WITH_PORT = ("process", "local-docker", "brev", "slurm")
"""Platforms whose services get a port of 8080..8199 on a machine that they share with others."""
Services = list[Service]
SETTLE_SECONDS = 5.0
"""How long a start waits for the service to answer, or to fail at once. It does not wait for a queue."""
LAST_LINES = 20
_LIVENESS = "/api/v1/health/liveness"
_ROLLBACK_SECONDS = 5.0


class Launcher:
    """The services of one registry. Use it as a context manager: drivers have threads and connections to close."""

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
        make_driver: Callable[[str, DriverOptions], Driver] = create_driver,
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
        """Return the launcher."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close."""
        await self.close()

    async def close(self) -> None:
        """Close the drivers; services keep running."""
        drivers, self._drivers = list(self._drivers.values()), {}
        await asyncio.gather(*(driver.close() for driver in drivers))

    def architectures(self) -> Mapping[str, catalogue.Architecture]:
        """Return the architectures that can be started. Raises InvalidArgument for an invalid file of the user's folder."""
        return catalogue.load(self._architectures)

    async def preflight(self, platform: str, settings: Mapping[str, Any] | None = None) -> Preflight:
        """Check what the platform needs. Starts nothing."""
        check_platform(platform)
        present = payloads.presence(self._environ, payloads.platform_variables(platform))
        try:
            checks = await self._driver(platform, settings or {}).preflight()
        except HeadraceError as error:
            checks = [Check(platform, False, error.message)]
        return Preflight(platform, tuple(checks), tuple(present))

    async def start(
        self,
        request: StartRequest,
        *,
        wait: bool = False,
        wait_policy: WaitPolicy | None = None,
        preflight: bool = True,
    ) -> Entry:
        """Start a service; with `wait`, return when its model is ready. `preflight` checks the platform first.

        Raises InvalidArgument and the like for an invalid request, before anything is done; StartFailed with the last
        lines of the log if the service ends; else the error of the platform. A failed start is rolled back. A service that
        takes longer than `wait_policy` keeps running: that is DeadlineExceeded.
        """
        plan = await asyncio.to_thread(self._plan, request)
        driver = self._driver(plan.platform, request.settings)
        if preflight:
            await check_preflight(driver)
        await self._log_stale(driver, plan.platform)
        entry = await asyncio.to_thread(self._record, plan)
        handle = Handle(plan.job_id, plan.platform)
        try:
            spec = launch_spec(plan, entry.host_port, self._state_dir)
            handle = await start_service(driver, spec)
            entry = with_handle(entry, handle.data)
            url = await wait_settled(driver, handle, self._settle_seconds)
            if url:
                entry = with_handle(entry, (await describe(driver, handle)).data)
            entry = await asyncio.to_thread(self._running, entry, url)
            if wait:
                await self._wait(driver, entry, wait_policy)
        except AlreadyStarted as error:
            await asyncio.to_thread(self.registry.remove, plan.job_id)
            raise AlreadyExists(error.message) from None
        except BaseException as error:
            if not isinstance(error, DeadlineExceeded):
                await roll_back(driver, handle, lambda: self.registry.remove(plan.job_id))
            raise
        return entry if not wait else self._entry(plan.job_id)

    async def list(self) -> Services:
        """Return all registered services with their current states, in the order of their start."""
        entries = await asyncio.to_thread(self.registry.entries)
        groups: dict[str, list[Entry]] = {}
        for entry in entries.values():
            groups.setdefault(_location(entry), []).append(entry)
        results = await asyncio.gather(*(self._query_place(group) for group in groups.values()))
        services = {service.entry.job_id: service for result in results for service in result}
        return [services[job_id] for job_id in entries]

    async def status(self, job_id: str) -> Service:
        """Return a registered service. Raises NotFound."""
        entry = await asyncio.to_thread(self._entry, job_id)
        driver = self._driver_of(entry)
        handle = handle_of(entry)
        return service_of(await self._with_url(driver, entry, handle), await driver.status(handle))

    async def fetch_status(self, job_id: str, seconds: float = 5.0) -> Mapping[str, Any] | None:
        """Return the answer of the service at /api/v1/status; None if there is none."""
        entry = await asyncio.to_thread(self._entry, job_id)
        if not entry.host_url:
            return None
        answer = await get(entry.host_url, "/api/v1/status", seconds, self._headers(entry))
        return answer.body if answer is not None and answer.status == 200 else None

    async def logs(self, job_id: str, tail: int = 1000) -> str:
        """Return the last lines of its log."""
        entry = await asyncio.to_thread(self._entry, job_id)
        return await self._driver_of(entry).logs(handle_of(entry), tail)

    async def follow(self, job_id: str, tail: int = 100) -> AsyncIterator[str]:
        """Yield the last lines of its log, and each new line until the service ends."""
        entry = await asyncio.to_thread(self._entry, job_id)
        driver, handle = self._driver_of(entry), handle_of(entry)

        async def is_alive() -> bool:
            return (await driver.status(handle)).phase in ("starting", "running")

        async for line in follow_log(lambda lines: driver.logs(handle, lines), is_alive, tail):
            yield line

    async def wait_ready(self, job_id: str, wait_policy: WaitPolicy | None = None) -> None:
        """Wait until its model is ready. Raises StartFailed, DeadlineExceeded."""
        entry = await asyncio.to_thread(self._entry, job_id)
        await self._wait(self._driver_of(entry), entry, wait_policy)

    async def send_chat(
        self,
        job_id: str,
        body: Mapping[str, Any],
        *,
        seconds: float = service_client.CHAT_SECONDS,
        on_piece: service_client.OnPiece | None = None,
    ) -> service_client.ChatAnswer:
        """Send a chat request; raises what `service_client.send_chat` raises."""
        entry = await asyncio.to_thread(self._entry, job_id)
        if not entry.host_url:
            raise service_client.NotReadyYet(f"service {job_id} has no address yet; try again later")
        return await service_client.send_chat(
            entry.host_url,
            body,
            f"service {job_id}",
            seconds=seconds,
            on_piece=on_piece,
            headers=self._headers(entry),
        )

    async def stop(self, job_id: str, grace_seconds: float = GRACE_SECONDS, *, forget: bool = False) -> None:
        """Stop it, remove what is left on its platform, then its registry entry. Raises NotFound if it is not registered.

        `forget`: remove the entry even if the platform cannot stop the service.
        """
        entry = await asyncio.to_thread(self._entry, job_id)
        try:
            await self._driver_of(entry).stop(handle_of(entry), grace_seconds)
        except HeadraceError as error:
            if not forget:
                raise
            log.warning("Removed the entry of service %s, which may still run: %s", job_id, error.message)
        await asyncio.to_thread(self.registry.remove, job_id)

    async def prune(self) -> Services:
        """Remove services that have ended or do not exist any more; return them."""
        ended = [service for service in await self.list() if service.state in ENDED_STATES]
        await asyncio.gather(*(self.stop(service.entry.job_id) for service in ended))
        return ended

    # The steps of a start

    def _plan(self, request: StartRequest) -> LaunchPlan:
        known = self.architectures()
        arch = catalogue.configured(catalogue.find(known, request.arch), self._config_folders, known)
        options = DriverOptions(self._state_dir, self._environ, request.settings)
        settings = recorded_settings(check_platform(request.platform), options)
        return plan_launch(replace(request, settings=settings), arch, self._environ, self._versions_file)

    def _record(self, plan: LaunchPlan) -> Entry:
        settings = plan.settings
        more: dict[str, Any] = {
            "model_path": plan.payload.model_path,
            "num_gpus": plan.gpus,
            "image": "" if plan.image is None else plan.image.name,
            "settings": dict(settings),
            "state_dir": str(self._state_dir),
            "launcher": process_name(),
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
        updated = self.registry.update(
            entry.job_id,
            lambda old: replace(
                entry,
                started_at=old.started_at,
                host_url=_public_url(url),
                state=RUNNING,
                more={**old.more, **entry.more},
            ),
        )
        if updated is None:
            raise FailedPrecondition(f"service {entry.job_id} was stopped by another process while it was starting")
        return updated

    async def _wait(self, driver: Driver, entry: Entry, wait_policy: WaitPolicy | None) -> None:
        handle = handle_of(entry)
        policy = wait_policy or WaitPolicy()
        name = f"service {entry.job_id}"

        async def poll() -> PlatformStatus:
            return await driver.status(handle)

        async def get_at(_: str, path: str, seconds: float) -> Response | None:
            nonlocal entry
            url = entry.host_url
            response = await get(url, path, seconds, self._headers(entry)) if url else None
            if response is None:
                # Its address may be known only after a queue or a pull, and its tunnel may have to be opened again.
                entry = await self._located(driver, entry, handle)
                if entry.host_url and entry.host_url != url:
                    response = await get(entry.host_url, path, seconds, self._headers(entry))
            return response

        try:
            await service_client.wait_ready(
                "", name, poll, wait_policy=policy, progress=self._progress, get_response=get_at
            )
        except NeverReady as error:
            lines = await driver.logs(handle, LAST_LINES)
            raise StartFailed(error.message, lines) from None

    # Registry entries

    def _entry(self, job_id: str) -> Entry:
        entry = self.registry.entries().get(job_id)
        if entry is None:
            raise NotFound(
                f"no service has the job id {job_id[:64]!a} in {self.registry.path}: "
                "`headrace service list` shows those there are"
            )
        return entry

    async def _with_url(self, driver: Driver, entry: Entry, handle: Handle) -> Entry:
        """Return the entry with its address, if it has none yet."""
        return entry if entry.host_url else await self._located(driver, entry, handle)

    async def _located(self, driver: Driver, entry: Entry, handle: Handle) -> Entry:
        """Return the entry with its current address, and store it."""
        url = await driver.endpoint(handle)
        if url is None:
            return entry
        data = (await describe(driver, handle)).data

        def located(old: Entry) -> Entry:
            return replace(with_handle(old, data), host_url=_public_url(url), state=RUNNING)

        if located(entry) == entry:
            return entry
        return await asyncio.to_thread(self.registry.update, entry.job_id, located) or located(entry)

    async def _query_place(self, entries: Sequence[Entry]) -> Services:
        """Return the services of one place, with one query."""
        try:
            driver = self._driver_of(entries[0])
            statuses = await driver.list_services()
        except HeadraceError as error:
            return [Service(entry, "unknown", error.message) for entry in entries]
        return [await self._service_state(driver, entry, statuses.get(entry.job_id)) for entry in entries]

    async def _service_state(self, driver: Driver, entry: Entry, status: PlatformStatus | None) -> Service:
        handle = handle_of(entry)
        try:
            # Query it by name before it is called stale: a stopped Brev instance does not list its services.
            status = status or await driver.status(handle)
            if status.phase == "running":
                entry = await self._with_url(driver, entry, handle)
            return service_of(entry, status)
        except HeadraceError as error:
            return Service(entry, "unknown", error.message)

    async def _log_stale(self, driver: Driver, platform: str) -> None:
        """Log services that do not exist any more: their ports stay taken until they are pruned."""
        entries = await asyncio.to_thread(self.registry.entries)
        registered = [entry for entry in entries.values() if entry.platform == platform]
        if not registered:
            return
        for service in await self._query_place(
            [entry for entry in registered if _location(entry) == _location(registered[0])]
        ):
            if service.state == "stale":
                log.warning(
                    "Service %s is stale (%s): `headrace service prune` removes it",
                    service.entry.job_id,
                    service.reason,
                )

    def _headers(self, entry: Entry) -> dict[str, str]:
        """Return the headers that the address needs: Lepton's endpoints need a token."""
        token = self._environ.get("LEPTON_ENDPOINT_TOKEN") or self._environ.get("LEPTON_AUTH_TOKEN")
        if entry.platform != "lepton" or not token or not entry.host_url.startswith(("https://", "http://localhost:")):
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


def _location(entry: Entry) -> str:
    """Return a key that is equal for entries of the same driver."""
    return f"{entry.platform} {entry.more.get('state_dir')} {entry.more.get('settings')}"


class StartFailed(FailedPrecondition):
    """Raise when a service ends by itself instead of becoming ready."""

    def __init__(self, message: str, last_lines: str = "") -> None:
        super().__init__(message)
        self.last_lines = last_lines
        """The last lines of its log."""


class AlreadyStarted(Exception):
    """The platform already has a service of this name, which a rollback must not stop."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


@runtime_checkable
class Describing(Protocol):
    """A driver that can add data to a handle once the service has an address: its node, its tunnel."""

    async def describe(self, handle: Handle) -> Handle:
        """Return the handle with the data known so far."""


async def describe(driver: Driver, handle: Handle) -> Handle:
    """Return the handle with the data that the driver can add so far."""
    return await driver.describe(handle) if isinstance(driver, Describing) else handle


async def check_preflight(driver: Driver) -> None:
    """Raise FailedPrecondition with all failed checks, before anything is registered or started."""
    missing = [check for check in await driver.preflight() if not check.passed]
    if missing:
        problems = "; ".join(f"{check.name}: {check.message}" for check in missing)
        raise FailedPrecondition(f"{driver.name} is not ready for services. {problems}")


async def start_service(driver: Driver, spec: LaunchSpec) -> Handle:
    """Start it. Raises AlreadyStarted, or the error of the platform."""
    try:
        return await driver.start(spec)
    except AlreadyExists as error:
        raise AlreadyStarted(error.message) from None


async def wait_settled(driver: Driver, handle: Handle, settle_seconds: float = SETTLE_SECONDS) -> str:
    """Return its URL as soon as it answers, or after the time limit; "" if it has none yet. Raises StartFailed."""
    loop = asyncio.get_running_loop()
    limit = loop.time() + settle_seconds
    pause, url = 0.02, None
    while True:
        status = await driver.status(handle)
        if status.phase in ("ended", "gone"):
            raise await failed_start(driver, handle, status)
        url = url or await driver.endpoint(handle)
        if url is not None and await get(url, _LIVENESS, 1.0) is not None:
            return url
        if loop.time() >= limit:
            return url or ""
        await asyncio.sleep(pause)
        pause = min(pause * 1.5, 0.5)


async def failed_start(driver: Driver, handle: Handle, status: PlatformStatus) -> StartFailed:
    """Return the error of a service that did not stay up, with the last lines of its log."""
    lines = await driver.logs(handle, LAST_LINES)
    reason = status.reason or ("it is gone" if status.phase == "gone" else "it has ended")
    last = next((line for line in reversed(lines.splitlines()) if line.strip()), "")
    message = f"service {handle.job_id} did not stay up: {reason}"
    return StartFailed(f"{message}; its log ends with: {last.strip()[:300]}" if last else message, lines)


async def roll_back(driver: Driver, handle: Handle, remove_entry: Callable[[], bool]) -> None:
    """Stop it and remove its entry; not interrupted by a cancellation. A service that cannot be stopped stays registered."""

    async def work() -> None:
        try:
            await driver.stop(handle, _ROLLBACK_SECONDS)
        except HeadraceError as error:
            log.error("Cannot remove service %s: %s; it stays registered", handle.job_id, error.message)
            return
        await asyncio.to_thread(remove_entry)

    await run_to_end(work())


def _public_url(url: str) -> str:
    """Return a service's address as the registry has it: `localhost` for this machine, as TAO writes it."""
    return url.replace("http://127.0.0.1:", "http://localhost:", 1)
