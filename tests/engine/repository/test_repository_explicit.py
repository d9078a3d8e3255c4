# SPDX-License-Identifier: Apache-2.0
"""Models loaded and unloaded on request."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from repository_fakes import Bench, FakeVersion, put_model, put_version, write_config

from headrace.core.errors import Cancelled, FailedPrecondition, InvalidArgument, NotFound, Unavailable
from headrace.engine.repository.control import IndexEntry
from headrace.engine.repository.load_context import relative_path
from headrace.engine.repository.states import State
from support.waiting import eventually_async


def explicit(*repositories: Path, **settings: Any) -> Bench:
    return Bench(*repositories, **{"mode": "explicit"} | settings)


def test_only_named_models_are_loaded_at_the_start(tmp_path: Path) -> None:
    async def main() -> None:
        for name in ("a", "b", "c"):
            put_model(tmp_path, name, 1)
        async with explicit(tmp_path) as bench:
            assert bench.opener.log == []
            assert bench.control.ready()
        async with explicit(tmp_path, load_models=("a", "c")) as bench:
            assert sorted(bench.control.directory.models) == ["a", "c"]
        async with explicit(tmp_path, load_models=("*",)) as bench:
            assert sorted(bench.control.directory.models) == ["a", "b", "c"]
        bench = explicit(tmp_path, load_models=("a", "typo"), exit_on_error=True)
        with pytest.raises(FailedPrecondition, match="typo: no such model in the repository"):
            await bench.control.start()
        await bench.control.close(1)

    asyncio.run(main())


def test_load_reload_and_unload(tmp_path: Path) -> None:
    async def main() -> None:
        folder = put_model(tmp_path, "m", 1)
        async with explicit(tmp_path) as bench:
            await bench.control.load("m")
            first = bench.newest("m")
            await bench.control.load("m")
            assert bench.newest("m") is first, "nothing changed, nothing to do"
            write_config(folder, tag="new")
            await bench.control.load("m")
            assert bench.newest("m").config.parameters["tag"] == "new"
            await bench.control.settled(retired=True)
            assert first.retired
            await bench.control.unload("m")
            assert bench.opener.live() == []
            assert bench.states("m") == ["1 UNAVAILABLE unloaded"]
            assert bench.control.ready()
            await bench.control.unload("m")
            await bench.control.unload("unknown")

    asyncio.run(main())


def test_unload_does_not_wait_for_ever_for_requests_in_flight(tmp_path: Path) -> None:
    async def main() -> None:
        put_model(tmp_path, "m", 1)
        async with explicit(tmp_path, load_models=("m",), unload_wait_seconds=0.01) as bench:
            bench.opener.retiring.clear()
            await bench.control.unload("m")
            assert bench.states("m") == ["1 UNLOADING unloaded"]
            # It can come back while its old self finishes.
            await bench.control.load("m")
            bench.opener.retiring.set()
            await bench.control.settled(retired=True)
            assert bench.states("m") == ["1 READY"]

    asyncio.run(main())


def test_a_failed_load_states_the_reason_in_tritons_words(tmp_path: Path) -> None:
    async def main() -> None:
        put_model(tmp_path, "bad", 1, bad="input.dims: missing")
        put_model(tmp_path, "empty")
        put_model(tmp_path, "broken", 1)
        async with explicit(tmp_path) as bench:
            bench.opener.failures["broken/1"] = RuntimeError("0x7f00dead")
            for name, kind, text in (
                ("nope", NotFound, "failed to load 'nope', failed to poll from model repository"),
                ("bad", InvalidArgument, "failed to load 'bad', input.dims: missing"),
                ("empty", InvalidArgument, "failed to load 'empty', no version is available: make a folder empty/1"),
                ("broken", Exception, "failed to load 'broken', RuntimeError while loading model 'broken' version 1; "),
                ("../bad", InvalidArgument, "model name '../bad' is not allowed"),
            ):
                with pytest.raises(kind) as raised:
                    await bench.control.load(name)
                assert str(raised.value).startswith(text)
                assert "0x7f" not in str(raised.value)
            assert not bench.control.ready()
            for name in ("bad", "empty", "broken"):
                await bench.control.unload(name)
            assert bench.control.ready()

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
        async with Bench(tmp_path, mode=mode) as bench:
            with pytest.raises(Unavailable, match=text):
                await bench.control.load("m")
            with pytest.raises(Unavailable, match=text):
                await bench.control.unload("m")
        with pytest.raises(Unavailable):
            await bench.control.load("m")

    asyncio.run(main())


def test_a_configuration_in_the_request_replaces_the_file(tmp_path: Path) -> None:
    async def main() -> None:
        put_model(tmp_path, "m", 1, 2, 3)
        async with explicit(tmp_path) as bench:
            await bench.control.load("m", json.dumps({"policy": "specific:1,2", "tag": "mine"}))
            assert bench.served("m") == ["1", "2"]
            assert bench.newest("m").config.parameters["tag"] == "mine"
            await bench.control.load("m")
            assert bench.served("m") == ["3"]

    asyncio.run(main())


def test_files_with_the_request_live_as_long_as_the_copy_that_reads_them(tmp_path: Path) -> None:
    async def main() -> None:
        put_model(tmp_path, "m", 3)
        files = {"file:1/model.bin": b"sent", "file:1/sub/extra.bin": b"too", "file:labels.txt": b"cat"}
        async with explicit(tmp_path, unload_wait_seconds=0.0) as bench:
            with pytest.raises(
                InvalidArgument, match="failed to load 'm', files can only be given together with a con"
            ):
                await bench.control.load("m", files=files)
            for name in ("m", "not_in_the_repository"):
                await bench.control.load(name, "{}", files)
                loaded = bench.newest(name)
                folder = loaded.files.model_folder
                assert bench.served(name) == ["1"] and folder.name == name
                assert (folder / "1" / "model.bin").read_bytes() == b"sent"
                assert (folder / "1" / "sub" / "extra.bin").read_bytes() == b"too"
                assert not folder.is_relative_to(tmp_path)
                bench.opener.retiring.clear()
                await bench.control.unload(name)
                assert folder.exists(), "requests in flight may still read"
                bench.opener.retiring.set()
                await bench.control.settled(retired=True)
                assert not folder.parent.exists()
            # A failed load leaves nothing either, and what closing finds is removed with it.
            bench.opener.failures["m/1"] = InvalidArgument("no")
            with pytest.raises(InvalidArgument):
                await bench.control.load("m", "{}", files)
            bench.opener.failures.clear()
            await bench.control.load("m", "{}", files)
            folder = bench.newest("m").files.model_folder
            await bench.control.settled(retired=True)
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
        async with explicit(tmp_path) as bench:
            with pytest.raises(InvalidArgument, match="is a file and a folder at once"):
                await bench.control.load("m", "{}", {"file:1/a": b"", "file:1/a/b": b""})

    asyncio.run(main())


def test_requests_for_one_model_run_in_order_and_newer_ones_replace_waiting_ones(tmp_path: Path) -> None:
    async def main() -> None:
        folder = put_model(tmp_path, "m", 1)
        async with explicit(tmp_path) as bench:
            gate = bench.opener.gates["m/1"] = asyncio.Event()
            first = asyncio.create_task(bench.control.load("m"))
            await eventually_async(lambda: bench.opener.running == 1)
            unload = asyncio.create_task(bench.control.unload("m"))
            await asyncio.sleep(0)
            put_version(folder, 2)
            loads = [asyncio.create_task(bench.control.load("m")) for _ in range(16)]
            await eventually_async(unload.done)
            with pytest.raises(Cancelled, match="failed to unload 'm', replaced by a newer request for model 'm'"):
                await unload
            gate.set()
            await asyncio.gather(first, *loads)
            assert bench.served("m") == ["2"]
            assert bench.opener.log.count("open m/2") == 1

    asyncio.run(main())


def test_a_caller_that_disconnects_changes_nothing(tmp_path: Path) -> None:
    async def main() -> None:
        put_model(tmp_path, "m", 1)
        async with explicit(tmp_path) as bench:
            gate = bench.opener.gates["m/1"] = asyncio.Event()
            caller = asyncio.create_task(bench.control.load("m"))
            await eventually_async(lambda: bench.opener.running == 1)
            caller.cancel()
            gate.set()
            await bench.control.settled()
            assert bench.served("m") == ["1"]

    asyncio.run(main())


def test_the_index_lists_every_model_ever_loaded(tmp_path: Path) -> None:
    async def main() -> None:
        put_model(tmp_path, "loaded", 9, 10, policy="all")
        put_model(tmp_path, "never", 1)
        put_model(tmp_path, "broken", 1, bad="no backend")
        (tmp_path / ".git").mkdir()
        (tmp_path / "notes").mkdir()
        async with explicit(tmp_path, load_models=("loaded", "broken")) as bench:
            assert await bench.control.index() == [
                IndexEntry("broken", "", State.UNAVAILABLE, "no backend"),
                IndexEntry("loaded", "9", State.READY),
                IndexEntry("loaded", "10", State.READY),
                IndexEntry("never"),
            ]
            assert [entry.version for entry in await bench.control.index(ready_only=True)] == ["9", "10"]
            config = bench.control.config_of("loaded", "9")
            assert config is not None and config.name == "loaded"
            assert bench.control.config_of("never") is None
            state = bench.control.state_of("loaded", 10)
            assert state is not None and state.load_seconds is not None and state.since > 0

    asyncio.run(main())


def test_16_callers_load_and_unload_one_model(tmp_path: Path) -> None:
    async def main() -> None:
        put_model(tmp_path, "m", 1)
        overtaken: list[int] = []
        async with explicit(tmp_path) as bench:
            bench.opener.pause = lambda: asyncio.sleep(0)

            async def caller(number: int) -> None:
                for turn in range(10):
                    try:
                        if (number + turn) % 2:
                            await bench.control.load("m", json.dumps({"tag": f"{number} {turn}"}))
                        else:
                            await bench.control.unload("m")
                    except Cancelled:
                        overtaken.append(number)
                    found = bench.control.directory.find("m")
                    assert found is None or (isinstance(found, FakeVersion) and not found.retired)

            await asyncio.gather(*(caller(number) for number in range(16)))
            await bench.control.unload("m")
            await bench.control.settled(retired=True)
            assert bench.opener.live() == []
            assert bench.served("m") == []
            assert len(overtaken) < 160

    asyncio.run(main())
