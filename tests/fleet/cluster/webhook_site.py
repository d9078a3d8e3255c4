# SPDX-License-Identifier: Apache-2.0
"""An operator with webhooks beside a real API server, which reaches it on loopback."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import httpx2
from controller_site import CountingTransport, at_rest, until

from headrace.fleet.cluster.webhooks.settings import CONFIGURATION, SECRET, WebhookSettings
from headrace.platforms.kubernetes_client.api import ApiClient, connect
from headrace.programs import operator as program
from headrace.programs.operator import Controller, OperatorSettings
from support.ports import free_port

NAMESPACE = "headrace-system"
CONFIGURATIONS = [
    f"/apis/admissionregistration.k8s.io/v1/{kind}webhookconfigurations/{CONFIGURATION}"
    for kind in ("mutating", "validating")
]


__all__ = ["Operator", "answers", "forget", "free_port", "ready", "registered", "webhooks_at"]


def webhooks_at(port: int, **more: Any) -> WebhookSettings:
    settings = WebhookSettings(f"127.0.0.1:{port}", NAMESPACE, f"https://127.0.0.1:{port}", refresh_seconds=0.5)
    return replace(settings, **more)


class TrackingTransport(CountingTransport):
    """Knows how many calls have no answer yet."""

    waiting = 0

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        self.waiting += 1
        try:
            return await super().handle_async_request(request)
        finally:
            self.waiting -= 1


class Operator:
    """`headrace operator run` in a thread; its writes are noted."""

    def __init__(self, kubeconfig: Path, webhooks: WebhookSettings, *, elect: bool = False) -> None:
        self._kubeconfig = kubeconfig
        self._settings = OperatorSettings(elect=elect, discover_seconds=1.0, webhooks=webhooks, namespace=NAMESPACE)
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="operator")
        self._ready = threading.Event()
        self.transport: TrackingTransport | None = None
        self.controller: Controller | None = None
        self._eyes: ApiClient | None = None
        self.code: int | None = None

    def __enter__(self) -> Operator:
        self._thread.start()
        assert self._ready.wait(90)
        return self

    def __exit__(self, *told: object) -> None:
        self.stop()

    def stop(self) -> None:
        while self._thread.is_alive():
            with contextlib.suppress(RuntimeError):  # it has just ended
                self._loop.call_soon_threadsafe(self._end)
            self._thread.join(0.02)
        assert self.code == 0

    def _end(self) -> None:
        # anyio leaves a connection open whose TLS handshake is cancelled, which a test would be told of.
        if self.transport is None or not self.transport.waiting:
            self._stop.set()

    @property
    def writes(self) -> list[str]:
        assert self.transport is not None
        return list(self.transport.writes)

    def quiet(self, seconds: float = 1.5) -> list[str]:
        """What was written until all was at rest, and nothing was written for a while."""

        def still() -> bool:
            before = len(self.writes)
            time.sleep(seconds)
            return self._at_rest() and len(self.writes) == before

        until(still)
        return self.writes

    def _at_rest(self) -> bool:
        if self.controller is None or not self.controller.settled:
            return False
        assert self._eyes is not None
        asked = asyncio.run_coroutine_threadsafe(at_rest(self._eyes, self.controller), self._loop)
        return asked.result(120) and self.controller.settled

    async def _run(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        api = connect(str(self._kubeconfig))
        self._eyes = connect(str(self._kubeconfig))
        self.transport = api._client._transport = TrackingTransport(api._client._transport)
        self._ready.set()
        with patch.object(program, "Controller", self._noted):
            self.code = await program.operate(api, self._settings, self._stop)
        await api.close()
        await self._eyes.close()

    def _noted(self, *told: Any) -> Controller:
        self.controller = Controller(*told)
        return self.controller


def registered(site: Any) -> bool:
    return all(site.fetch(path) is not None for path in CONFIGURATIONS)


def answers(site: Any) -> bool:
    """Whether the API server asks the webhooks, and they know the cluster: a default shows in a dry run."""
    answer = _tried(site, {})
    return answer.status_code == 201 and answer.json()["spec"]["engine"].get("maxReplicas") == 3


def refuses(site: Any) -> bool:
    """Whether it asks the one that checks, too: it hears of the two on different ways."""
    return _tried(site, {"minReplicas": 5, "maxReplicas": 2}).status_code in (400, 403, 422)


def _tried(site: Any, more: dict[str, int]) -> httpx2.Response:
    body = {
        "apiVersion": "ome.io/v1beta1",
        "kind": "InferenceService",
        "metadata": {"name": "probe"},
        "spec": {"engine": {"runner": {"name": "ome-container", "image": "i:1"}, **more}},
    }
    path = "/apis/ome.io/v1beta1/namespaces/default/inferenceservices?dryRun=All"
    return site._client.post(path, json=body)


def ready(site: Any) -> None:
    until(lambda: registered(site) and answers(site) and refuses(site))


def forget(site: Any) -> None:
    """No trace of any operator."""
    for kind in ("mutating", "validating"):
        site.server.kubectl("delete", f"{kind}webhookconfigurations", CONFIGURATION, "--ignore-not-found")
    site.server.kubectl("delete", "secret", "-n", NAMESPACE, SECRET, "--ignore-not-found")
