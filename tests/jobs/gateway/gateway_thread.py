# SPDX-License-Identifier: Apache-2.0
"""A gateway inside this process, whose services are in this process, too: the same code but for processes and signals.

with gateway_in_thread(tmp_path) as running:
    everything that `gateway_process.Gateway` offers, but for `process`
"""

from __future__ import annotations

import asyncio
import io
import logging
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import typer
from gateway_process import Gateway
from service_process import LocalService, local_service, settings_of_command

from headrace.cli.gateway import gateway as gateway_command
from headrace.core.errors import AlreadyExists
from headrace.core.telemetry.logs import JsonFormatter
from headrace.jobs.microservice.settings import MicroserviceSettings
from headrace.platforms.contract import PORT, SECRET, Check, Handle, LaunchSpec, PlatformStatus
from headrace.programs import gateway
from headrace.programs.gateway import GatewaySettings
from support.app_threads import AppThread


class ServicesHere:
    """Stands in for `ProcessDriver`: each service is a thread of this process. See `headrace.platforms.contract.Driver`."""

    name = "process"
    place = "this process"

    def __init__(self) -> None:
        self._running: dict[str, tuple[ExitStack, LocalService]] = {}
        self.may_load = threading.Event()
        self.may_load.set()

    async def preflight(self) -> list[Check]:
        return []

    async def start(self, spec: LaunchSpec) -> Handle:
        if spec.job_id in self._running:
            raise AlreadyExists("started before")
        settings = await asyncio.to_thread(_microservice_settings, spec)
        stack = ExitStack()
        service = await asyncio.to_thread(
            stack.enter_context, local_service(settings, before_load=self._wait_until_it_may)
        )
        service.made.port = service.port
        self._running[spec.job_id] = (stack, service)
        return Handle(spec.job_id, self.name, {"port": service.port})

    async def status(self, handle: Handle) -> PlatformStatus:
        if handle.job_id not in self._running:
            return PlatformStatus("gone")
        return PlatformStatus("running", f"service-{handle.job_id[:8]}", "Running")

    async def logs(self, handle: Handle, tail: int) -> str:
        return "its log is that of the tests\n" if handle.job_id in self._running else ""

    async def endpoint(self, handle: Handle) -> str | None:
        result = self._running.get(handle.job_id)
        return f"http://127.0.0.1:{result[1].port}" if result else None

    async def stop(self, handle: Handle, grace_seconds: float) -> None:
        result = self._running.pop(handle.job_id, None)
        if result is not None:
            await asyncio.to_thread(result[0].close)

    async def list_services(self) -> dict[str, PlatformStatus]:
        return {job_id: await self.status(Handle(job_id, self.name)) for job_id in self._running}

    async def close(self) -> None:
        pass

    async def _wait_until_it_may(self) -> None:
        while not self.may_load.is_set():
            await asyncio.sleep(0.005)

    @property
    def jobs(self) -> list[str]:
        return list(self._running)

    def end_all(self) -> None:
        for stack, _ in list(self._running.values()):
            stack.close()
        self._running.clear()


class ThreadGateway(Gateway):
    """A data directory and, while one runs, its gateway."""

    def __init__(self, folder: Path, services: ServicesHere) -> None:
        super().__init__(folder)
        self._services = services
        self._text = io.StringIO()
        self._running: AppThread | None = None

    @property
    def log(self) -> str:
        return self._text.getvalue()

    def start(self, *more: str, wait: bool = True) -> None:
        port = () if "--port" in more else ("--port", str(self.port))
        settings = _gateway_settings("--data-dir", str(self.data_dir), *port, *more, database_url=self.database_url)
        self._running = AppThread(lambda: self._serve(settings))
        self._running.start()
        if not self._running.is_alive:
            raise RuntimeError(f"the gateway has ended with {self._running.wait()}:\n{self.log}")

    async def _serve(self, settings: GatewaySettings) -> int:
        handler = logging.StreamHandler(self._text)
        handler.setFormatter(JsonFormatter())
        logging.getLogger("headrace").addHandler(handler)
        no_collection = SimpleNamespace(collect=lambda: 0, freeze=lambda: None)
        try:
            with patch.object(gateway, "gc", no_collection):  # the tests' garbage must not be kept for ever
                return await gateway._run(settings, self._show)
        finally:
            logging.getLogger("headrace").removeHandler(handler)

    def _show(self, address: Any, admin_key: str | None) -> None:
        self.port = address.port
        self._text.write(f"gateway: {address}\n" + (f"administrator's key: {admin_key}\n" if admin_key else ""))

    def end(self, number: int = signal.SIGTERM) -> int:
        assert self._running is not None
        if self._running.is_alive:
            self._running.send(signal.Signals(number))
        return self._running.wait()

    @contextmanager
    def slow_to_load(self) -> Iterator[None]:
        self._services.may_load.clear()
        try:
            yield
        finally:
            self._services.may_load.set()

    def processes(self) -> list[Any]:
        """Services that run."""
        return self._services.jobs


def _gateway_settings(*words: str, database_url: str) -> GatewaySettings:
    """What the command makes of a command line."""
    seen: list[GatewaySettings] = []
    command = typer.Typer(pretty_exceptions_enable=False, add_completion=False)
    command.command()(gateway_command)
    with (
        patch("headrace.core.telemetry.logs.configure_logging"),
        patch("headrace.programs.gateway.run_gateway", lambda settings, _: seen.append(settings) or 0),
        patch.dict(os.environ, {"HEADRACE_DATABASE_URL": database_url}),
    ):
        typer.main.get_command(command).main(args=list(words), standalone_mode=False)
    return seen[0]


def _microservice_settings(spec: LaunchSpec) -> MicroserviceSettings:
    secrets = {SECRET % name: text for name, text in spec.secrets.items()} | {PORT: "0"}
    with patch.dict(os.environ):
        return settings_of_command(*(secrets.get(word, word) for word in spec.argv))


@contextmanager
def gateway_in_thread(folder: Path, *more: str) -> Iterator[ThreadGateway]:
    """Nothing of it is left at the end."""
    services = ServicesHere()
    logger = logging.getLogger("headrace")
    level = logger.level
    logger.setLevel(logging.INFO)
    with patch("headrace.jobs.service.ProcessDriver", lambda root, **given: services):
        gateway = ThreadGateway(folder, services)
        gateway.start(*more)
        try:
            yield gateway
        finally:
            gateway.end()
            services.end_all()
            logger.setLevel(level)
