# SPDX-License-Identifier: Apache-2.0
"""Models, Secrets and ConfigMaps that containers of a simulated machine need: brought, waited for, told."""

from __future__ import annotations

import asyncio
import base64
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from local_site import document, runtime, service
from simulated_fleet import SimulatedFleet

from headrace.core.errors import Unavailable
from headrace.core.telemetry.progress import ProgressEvent
from headrace.fleet.client.contract import NodeProgress, kind_named
from headrace.fleet.local import models
from headrace.platforms.kubernetes_client.objects import Document

MODEL = kind_named("ClusterBaseModel")


class FakeStore:
    """Stands for `storage.bringing.bring`: what it does is set by the test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.asked: list[str] = []
        self.failure: Exception | None = None

    def bring(
        self, place: Any, folder: Path, credentials: Any, heard: Callable[[ProgressEvent], None], *_: Any
    ) -> Path:
        self.asked.append(str(place))
        if self.failure is not None:
            raise self.failure
        self.folder.mkdir(exist_ok=True)
        return self.folder


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeStore:
    store = FakeStore(tmp_path / "brought")
    monkeypatch.setattr(models, "fetch_location", store.bring)
    return store


def remote(uri: str = "hf://org/name", **storage: Any) -> dict[str, Any]:
    spec = {"modelFormat": {"name": "stub"}, "storage": {"storageUri": uri, "path": "/mnt/models/far", **storage}}
    return document("ClusterBaseModel", "far", spec)


def using(name: str) -> dict[str, Any]:
    document = service(name)
    document["spec"]["model"]["name"] = "far"
    return document


async def state(fleet: SimulatedFleet) -> Document:
    result = await fleet.fleet.get(MODEL, "", "far")
    reported: Document = (result or {}).get("status", {})
    return reported


async def test_a_model_is_downloaded_once_for_all_services(fleet: SimulatedFleet, store: FakeStore) -> None:
    await fleet.apply(remote(), using("one"), using("two"))
    await fleet.ready("one")
    await fleet.ready("two")
    assert len(store.asked) == 1
    reported = await state(fleet)
    assert reported["state"] == "Ready" and reported["nodesReady"] == [fleet.settings.node]
    # It is brought again when somebody has deleted it, and for another source.
    await asyncio.sleep(10)
    store.folder.rmdir()
    fleet.process("one").kill()
    await fleet.until(lambda: len(store.asked) == 2)
    await fleet.apply(remote("hf://org/other"))
    fleet.process("two").kill()
    await fleet.until(lambda: len(store.asked) == 3)


@pytest.mark.parametrize(
    ("failure", "words"),
    [
        (Unavailable("the hub does not answer"), "the hub does not answer"),
        (OSError(28, "No space left on device"), "cannot be written to"),
        (RuntimeError("a mistake"), "cannot be downloaded; see the log of `headrace up`"),
    ],
)
async def test_a_failed_download_is_reported_and_retried(
    fleet: SimulatedFleet, store: FakeStore, failure: Exception, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    store.failure = failure
    await fleet.apply(remote(), using("one"))
    await fleet.wait_for_message("one", words, "EngineReady")
    reported = await state(fleet)
    assert (reported["state"], reported["nodesFailed"]) == ("Failed", [fleet.settings.node])
    request = len(store.asked)
    await asyncio.sleep(60)
    assert request < len(store.asked) < 60, "not at once, and not without end"
    store.failure = None
    await fleet.ready("one")
    caplog.clear()  # of the mistake that this test made


async def test_download_progress_of_a_model(
    fleet: SimulatedFleet, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    halfway, go_on, loop = asyncio.Event(), threading.Event(), asyncio.get_running_loop()

    def bring(place: Any, folder: Path, credentials: Any, heard: Callable[[ProgressEvent], None], *_: Any) -> Path:
        heard(ProgressEvent("download far", done=50, total=100))
        loop.call_soon_threadsafe(halfway.set)
        go_on.wait(60)
        return tmp_path

    monkeypatch.setattr(models, "fetch_location", bring)
    await fleet.apply(remote(), using("one"))
    await halfway.wait()  # no time passes until the thread goes on
    (progress,) = await fleet.fleet.progress(document("ClusterBaseModel", "far", {}))
    assert progress == NodeProgress(fleet.settings.node, "Updating", 50, 100, "")
    assert (await state(fleet))["state"] == "In_Transit"
    go_on.set()
    await fleet.ready("one")


async def test_variables_of_secrets_and_config_maps_are_waited_for(fleet: SimulatedFleet) -> None:
    env = [
        {"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "keys", "key": "token"}}},
        {"name": "SIZE", "valueFrom": {"configMapKeyRef": {"name": "knobs", "key": "size"}}},
    ]
    await fleet.apply(runtime("keyed", env=env), service("keyed", "keyed"))
    result = await fleet.wait_for_message("keyed", "Secret keys does not exist: apply it")
    assert result["reason"] == "CreateContainerConfigError"
    secret = {"token": base64.b64encode(b"hidden").decode(), "broken": "no base64"}
    metadata = {"namespace": "default"}
    await fleet.apply({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "keys", **metadata}, "data": secret})
    await fleet.wait_for_message("keyed", "ConfigMap knobs does not exist: apply it")
    knobs = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "knobs", **metadata}, "data": {"size": "7"}}
    await fleet.apply(knobs)
    await fleet.ready("keyed")
    environment = fleet.process("keyed").environment
    assert (environment["TOKEN"], environment["SIZE"]) == ("hidden", "7")


async def test_an_internal_error_in_one_pod_is_logged_and_the_pod_is_watched_again(
    fleet: SimulatedFleet, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from headrace.fleet.local.container import Container

    run, mistakes = Container.run, [RuntimeError("a mistake of ours")]

    async def once_wrong(container: Container) -> None:
        if mistakes:
            raise mistakes.pop()
        await run(container)

    monkeypatch.setattr(Container, "run", once_wrong)
    await fleet.apply(service("followed"), service("other"))
    await fleet.ready("followed")
    await fleet.ready("other")
    assert "The task of pod" in caplog.text
    caplog.clear()
