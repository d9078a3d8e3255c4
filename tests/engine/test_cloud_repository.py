# SPDX-License-Identifier: Apache-2.0
"""`headrace serve s3://...`: a repository in an object store, mirrored and followed, with the environment's credentials."""

from __future__ import annotations

import asyncio
import json
import threading
import urllib.request
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
from store_stub import ACCESS, SECRET, StoreStub

from headrace.cli.repositories import mirrored
from headrace.cli.serve_settings import open_settings
from headrace.core.errors import HeadraceError, NotFound, PermissionDenied, Unimplemented
from headrace.core.telemetry.progress import silent
from headrace.engine.engine import Engine, open_engine
from headrace.engine.repository.scan import open_repositories
from headrace.programs.configuration.resolution import configure
from support.programs import Program
from support.tiny_models import CONFIG
from support.waiting import eventually

URL = "s3://bkt/models"


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[StoreStub]:
    objects = {"models/echo/config.pbtxt": CONFIG.encode(), "models/echo/1/": b"", "models/echo/1/note": b"1"}
    with StoreStub({"bkt": objects}) as stub:
        claims = {
            "AWS_ACCESS_KEY_ID": ACCESS,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_REGION": "us-west-1",
            "AWS_ENDPOINT_URL": stub.url(""),
            "XDG_CACHE_HOME": str(tmp_path / "cache"),
        }
        for name, value in claims.items():
            monkeypatch.setenv(name, value)
        yield stub


def served(work: Callable[[Engine], Awaitable[None]], *repositories: str, **options: str | list[str]) -> None:
    """An engine as the command line would make it, while `work` runs."""
    texts = {name.replace("_", "-"): value for name, value in options.items()}
    with open_settings(configure(texts, repositories, {}), silent) as settings:

        async def run() -> None:
            engine = open_engine(settings.engine)
            await engine.start()
            try:
                await work(engine)
            finally:
                await engine.close(1)

        asyncio.run(run())


async def versions(engine: Engine) -> list[str]:
    assert engine.control is not None
    await engine.control.settled()
    model = engine.control.directory.models.get("echo")
    return [] if model is None else list(model.versions)


async def poll(engine: Engine) -> None:
    """Until nothing more is unsettled: as the server does, but not waiting for a second to pass."""
    assert engine.control is not None
    while await engine.control.poll_once():
        pass


def test_models_are_added_changed_and_removed_with_the_bucket(store: StoreStub) -> None:
    objects = store.buckets["bkt"]

    async def work(engine: Engine) -> None:
        assert await versions(engine) == ["1"]
        objects["models/echo/2/note"] = b"2"
        await poll(engine)
        assert await versions(engine) == ["2"]
        store.down = True
        await poll(engine)
        assert await versions(engine) == ["2"]
        store.down = False
        del objects["models/echo/2/note"]
        await poll(engine)
        assert await versions(engine) == ["1"]
        for key in list(objects):
            del objects[key]
        objects["models/other/1/x"] = b""
        await poll(engine)
        assert await versions(engine) == []

    served(work, URL)


def test_an_explicit_load_sees_new_files(store: StoreStub) -> None:
    objects = store.buckets["bkt"]

    async def work(engine: Engine) -> None:
        assert engine.control is not None
        assert await versions(engine) == ["1"]
        objects["models/echo/5/note"] = b"5"
        await engine.control.load("echo")
        assert await versions(engine) == ["5"]
        store.down = True
        await engine.control.load("echo")  # with what is here
        assert await versions(engine) == ["5"]

    served(work, URL, model_control_mode="explicit", load_model=["echo"])


def test_beside_a_folder(store: StoreStub, tmp_path: Path) -> None:
    (tmp_path / "local" / "mine" / "1").mkdir(parents=True)
    (tmp_path / "local" / "mine" / "config.pbtxt").write_text(CONFIG)

    async def work(engine: Engine) -> None:
        assert engine.control is not None
        assert {entry.name for entry in await engine.control.index(ready_only=True)} == {"echo", "mine"}

    served(work, str(tmp_path / "local"), model_repository=[URL])


def test_closing_does_not_wait_for_a_download(store: StoreStub) -> None:
    reached, go = threading.Event(), threading.Event()

    async def work(engine: Engine) -> None:
        assert engine.control is not None
        store.buckets["bkt"]["models/echo/2/note"] = b"2"

        def before(key: str) -> None:
            reached.set()
            go.wait(60)

        store.before = before
        polling = asyncio.get_running_loop().create_task(engine.control.poll_once())
        await asyncio.to_thread(reached.wait, 60)
        # The index is answered meanwhile.
        assert [entry.name for entry in await engine.control.index()] == ["echo"]
        await engine.close(1)
        go.set()
        with pytest.raises((HeadraceError, asyncio.CancelledError)):
            await polling

    served(work, URL)


@pytest.mark.parametrize(
    ("url", "kind", "said"),
    [
        ("s3://bkt/nothing", NotFound, "there is nothing at s3://bkt/nothing"),
        ("s3://other/models", NotFound, "there is no bucket other"),
        ("as://account/container", Unimplemented, "`headrace serve` mirrors s3://, gs:// and az://"),
        ("hf://org/name", Unimplemented, "sync it to a folder"),
    ],
)
def test_an_unservable_model_is_reported(url: str, kind: type[HeadraceError], said: str, store: StoreStub) -> None:
    with pytest.raises(kind, match=said):
        open_repositories(mirrored((url,))[0])


def test_wrong_credentials_are_reported(store: StoreStub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wr0ng")
    with pytest.raises(PermissionDenied, match="may not be read with these credentials") as caught:
        mirrored((URL,))
    assert "wr0ng" not in caught.value.message


def test_its_models_are_known_to_come_from_elsewhere(store: StoreStub, tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir()
    with open_settings(configure({}, [str(own), URL], {}), silent) as settings:
        assert settings.engine.repository.trial_load == "fetched"
        assert list(map(str, settings.engine.repository.fetched_repositories)) == [settings.engine.repositories[1]]


@pytest.mark.slow
def test_the_program(store: StoreStub, tmp_path: Path) -> None:
    arguments = [URL, "--repository-poll-secs", "0.2", "--http-port", "0", "--grpc-port", "0", "--workers", "2"]
    with Program("serve", *arguments, log=tmp_path / "log", ready="model(s)") as server:
        store.buckets["bkt"]["models/echo/7/note"] = b"7"
        eventually(lambda: _serves(server.url, "7"))
    assert "Mirrored repository s3://bkt/models to" in server.log
    assert SECRET not in server.log


def _serves(url: str, version: str) -> bool:
    with urllib.request.urlopen(f"{url}/v2/models/echo", timeout=30) as answer:
        return json.load(answer)["versions"] == [version]
