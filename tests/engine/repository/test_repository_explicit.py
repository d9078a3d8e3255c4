# SPDX-License-Identifier: Apache-2.0
"""Models loaded and unloaded on request."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from repository_fakes import FakeVersion, RepositoryFixture, put_model, put_version, write_config

from headrace.core.errors import Cancelled, FailedPrecondition, InvalidArgument, NotFound, Unavailable
from headrace.engine.repository.control import IndexEntry
from headrace.engine.repository.load_context import relative_path
from headrace.engine.repository.states import State
from support.waiting import eventually_async


def explicit(*repositories: Path, **settings: Any) -> RepositoryFixture:
    return RepositoryFixture(*repositories, **{"mode": "explicit"} | settings)


def test_only_named_models_are_loaded_at_the_start(tmp_path: Path) -> None:
    async def main() -> None:
        for name in ("a", "b", "c"):
            put_model(tmp_path, name, 1)
        async with explicit(tmp_path) as fixture:
            assert fixture.opener.log == []
            assert fixture.control.ready()
        async with explicit(tmp_path, load_models=("a", "c")) as fixture:
            assert sorted(fixture.control.directory.models) == ["a", "c"]
        async with explicit(tmp_path, load_models=("*",)) as fixture:
            assert sorted(fixture.control.directory.models) == ["a", "b", "c"]
        fixture = explicit(tmp_path, load_models=("a", "typo"), exit_on_error=True)
        with pytest.raises(FailedPrecondition, match="typo: no such model in the repository"):
            await fixture.control.start()
        await fixture.control.close(1)

    asyncio.run(main())


def test_load_reload_and_unload(tmp_path: Path) -> None:
    async def main() -> None:
        folder = put_model(tmp_path, "m", 1)
        async with explicit(tmp_path) as fixture:
            await fixture.control.load("m")
            first = fixture.newest("m")
            await fixture.control.load("m")
            assert fixture.newest("m") is first, "nothing changed, nothing to do"
            write_config(folder, tag="new")
            await fixture.control.load("m")
            assert fixture.newest("m").config.parameters["tag"] == "new"
            await fixture.control.settled(retired=True)
            assert first.retired
            await fixture.control.unload("m")
            assert fixture.opener.live() == []
            assert fixture.states("m") == ["1 UNAVAILABLE unloaded"]
            assert fixture.control.ready()
            await fixture.control.unload("m")
            await fixture.control.unload("unknown")

    asyncio.run(main())


def test_unload_does_not_wait_for_ever_for_requests_in_flight(tmp_path: Path) -> None:
    async def main() -> None:
        put_model(tmp_path, "m", 1)
        async with explicit(tmp_path, load_models=("m",), unload_wait_seconds=0.01) as fixture:
            fixture.opener.retiring.clear()
            await fixture.control.unload("m")
            assert fixture.states("m") == ["1 UNLOADING unloaded"]
            # It can come back while its old self finishes.
            await fixture.control.load("m")
            fixture.opener.retiring.set()
            await fixture.control.settled(retired=True)
            assert fixture.states("m") == ["1 READY"]

    asyncio.run(main())


def test_a_failed_load_states_the_reason_in_tritons_words(tmp_path: Path) -> None:
    async def main() -> None:
        put_model(tmp_path, "bad", 1, bad="input.dims: missing")
        put_model(tmp_path, "empty")
        put_model(tmp_path, "broken", 1)
        async with explicit(tmp_path) as fixture:
            fixture.opener.failures["broken/1"] = RuntimeError("0x7f00dead")
            for name, kind, text in (
                ("nope", NotFound, "failed to load 'nope', failed to poll from model repository"),
                ("bad", InvalidArgument, "failed to load 'bad', input.dims: missing"),
                ("empty", InvalidArgument, "failed to load 'empty', no version is available: make a folder empty/1"),
                ("broken", Exception, "failed to load 'broken', RuntimeError while loading model 'broken' version 1; "),
                ("../bad", InvalidArgument, "model name '../bad' is not allowed"),
            ):
                with pytest.raises(kind) as raised:
                    await fixture.control.load(name)
                assert str(raised.value).startswith(text)
                assert "0x7f" not in str(raised.value)
            assert not fixture.control.ready()
            for name in ("bad", "empty", "broken"):
                await fixture.control.unload(name)
            assert fixture.control.ready()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("mode", "text"),
    [
        ("poll", "explicit model load / unload is not allowed if polling is enabled"),
        ("none", "restart the server with --model-control-mode explicit"),
    ],
)
def test_other_modes_refuse(tmp_path: Path, mode: str, text: str) -> None:
    async def main() -> None:
        put_model(tmp_path, "m", 1)
        async with RepositoryFixture(tmp_path, mode=mode) as fixture:
            with pytest.raises(Unavailable, match=text):
                await fixture.control.load("m")
            with pytest.raises(Unavailable, match=text):
                await fixture.control.unload("m")
        with pytest.raises(Unavailable):
            await fixture.control.load("m")

    asyncio.run(main())


def test_a_configuration_in_the_request_replaces_the_file(tmp_path: Path) -> None:
    async def main() -> None:
        put_model(tmp_path, "m", 1, 2, 3)
        async with explicit(tmp_path) as fixture:
            await fixture.control.load("m", json.dumps({"policy": "specific:1,2", "tag": "mine"}))
            assert fixture.served("m") == ["1", "2"]
            assert fixture.newest("m").config.parameters["tag"] == "mine"
            await fixture.control.load("m")
            assert fixture.served("m") == ["3"]

    asyncio.run(main())


def test_files_with_the_request_live_as_long_as_the_copy_that_reads_them(tmp_path: Path) -> None:
    async def main() -> None:
        put_model(tmp_path, "m", 3)
        files = {"file:1/model.bin": b"sent", "file:1/sub/extra.bin": b"too", "file:labels.txt": b"cat"}
        async with explicit(tmp_path, unload_wait_seconds=0.0) as fixture:
            with pytest.raises(
                InvalidArgument, match="failed to load 'm', files can only be given together with a con"
            ):
                await fixture.control.load("m", files=files)
            for name in ("m", "not_in_the_repository"):
                await fixture.control.load(name, "{}", files)
                loaded = fixture.newest(name)
                folder = loaded.files.model_folder
                assert fixture.served(name) == ["1"] and folder.name == name
                assert (folder / "1" / "model.bin").read_bytes() == b"sent"
                assert (folder / "1" / "sub" / "extra.bin").read_bytes() == b"too"
                assert not folder.is_relative_to(tmp_path)
                fixture.opener.retiring.clear()
                await fixture.control.unload(name)
                assert folder.exists(), "requests in flight may still read"
                fixture.opener.retiring.set()
                await fixture.control.settled(retired=True)
                assert not folder.parent.exists()
            # A failed load leaves nothing either, and what closing finds is removed with it.
            fixture.opener.failures["m/1"] = InvalidArgument("no")
            with pytest.raises(InvalidArgument):
                await fixture.control.load("m", "{}", files)
            fixture.opener.failures.clear()
            await fixture.control.load("m", "{}", files)
            folder = fixture.newest("m").files.model_folder
            await fixture.control.settled(retired=True)
            assert [path.name for path in folder.parent.parent.iterdir()] == [folder.parent.name]
        assert not folder.parent.parent.exists()

    asyncio.run(main())


@pytest.mark.parametrize(
    "key",
    ["1/model.onnx", "file:", "file:/etc/passwd", "file:../x", "file:1/../../x", "file:1//x", "file:1/./x",
     "file:1\\x", "file:1/a\0b", "file:1/" + "x" * 300, "file:" + "/".join("x" * 40), "file:1/\n"],
)  # fmt: skip
def test_file_names_cannot_leave_their_folder(key: str) -> None:
    with pytest.raises(InvalidArgument, match="is not allowed: use 'file:<version>/<name>'"):
        relative_path(key)


def test_a_file_that_is_also_a_folder_is_refused(tmp_path: Path) -> None:
    async def main() -> None:
        async with explicit(tmp_path) as fixture:
            with pytest.raises(InvalidArgument, match="is a file and a folder at once"):
                await fixture.control.load("m", "{}", {"file:1/a": b"", "file:1/a/b": b""})

    asyncio.run(main())


def test_requests_for_one_model_run_in_order_and_newer_ones_replace_waiting_ones(tmp_path: Path) -> None:
    async def main() -> None:
        folder = put_model(tmp_path, "m", 1)
        async with explicit(tmp_path) as fixture:
            gate = fixture.opener.gates["m/1"] = asyncio.Event()
            first = asyncio.create_task(fixture.control.load("m"))
            await eventually_async(lambda: fixture.opener.running == 1)
            unload = asyncio.create_task(fixture.control.unload("m"))
            await asyncio.sleep(0)
            put_version(folder, 2)
            loads = [asyncio.create_task(fixture.control.load("m")) for _ in range(16)]
            await eventually_async(unload.done)
            with pytest.raises(Cancelled, match="failed to unload 'm', replaced by a newer request for model 'm'"):
                await unload
            gate.set()
            await asyncio.gather(first, *loads)
            assert fixture.served("m") == ["2"]
            assert fixture.opener.log.count("open m/2") == 1

    asyncio.run(main())


def test_a_caller_that_disconnects_changes_nothing(tmp_path: Path) -> None:
    async def main() -> None:
        put_model(tmp_path, "m", 1)
        async with explicit(tmp_path) as fixture:
            gate = fixture.opener.gates["m/1"] = asyncio.Event()
            caller = asyncio.create_task(fixture.control.load("m"))
            await eventually_async(lambda: fixture.opener.running == 1)
            caller.cancel()
            gate.set()
            await fixture.control.settled()
            assert fixture.served("m") == ["1"]

    asyncio.run(main())


def test_the_index_lists_every_model_ever_loaded(tmp_path: Path) -> None:
    async def main() -> None:
        put_model(tmp_path, "loaded", 9, 10, policy="all")
        put_model(tmp_path, "never", 1)
        put_model(tmp_path, "broken", 1, bad="no backend")
        (tmp_path / ".git").mkdir()
        (tmp_path / "notes").mkdir()
        async with explicit(tmp_path, load_models=("loaded", "broken")) as fixture:
            assert await fixture.control.index() == [
                IndexEntry("broken", "", State.UNAVAILABLE, "no backend"),
                IndexEntry("loaded", "9", State.READY),
                IndexEntry("loaded", "10", State.READY),
                IndexEntry("never"),
            ]
            assert [entry.version for entry in await fixture.control.index(ready_only=True)] == ["9", "10"]
            loaded = fixture.control.directory.find("loaded", "9")
            assert loaded is not None and loaded.config.name == "loaded"
            assert fixture.control.directory.find("never") is None
            state = fixture.control.state_of("loaded", 10)
            assert state is not None and state.load_seconds is not None and state.since > 0

    asyncio.run(main())


def test_16_callers_load_and_unload_one_model(tmp_path: Path) -> None:
    async def main() -> None:
        put_model(tmp_path, "m", 1)
        overtaken: list[int] = []
        async with explicit(tmp_path) as fixture:
            fixture.opener.pause = lambda: asyncio.sleep(0)

            async def caller(number: int) -> None:
                for turn in range(10):
                    try:
                        if (number + turn) % 2:
                            await fixture.control.load("m", json.dumps({"tag": f"{number} {turn}"}))
                        else:
                            await fixture.control.unload("m")
                    except Cancelled:
                        overtaken.append(number)
                    found = fixture.control.directory.find("m")
                    assert found is None or (isinstance(found, FakeVersion) and not found.retired)

            await asyncio.gather(*(caller(number) for number in range(16)))
            await fixture.control.unload("m")
            await fixture.control.settled(retired=True)
            assert fixture.opener.live() == []
            assert fixture.served("m") == []
            assert len(overtaken) < 160

    asyncio.run(main())
