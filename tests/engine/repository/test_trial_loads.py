# SPDX-License-Identifier: Apache-2.0
"""Trial loads: which models are tried, once each, and what becomes of a child process that dies or takes too much."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest
from repository_fakes import RepositoryFixture, put_model, write_config

from headrace.backends.contract import ModelFiles
from headrace.core.errors import Cancelled, FailedPrecondition, HeadraceError, InvalidArgument, ResourceExhausted
from headrace.engine.repository import trial as trial_module
from headrace.engine.repository.scan import Fingerprint
from headrace.engine.repository.settings import RepositorySettings
from headrace.engine.repository.trial import Trial, TrialLoads, _MemoryBound
from headrace.engine.trial_process import _load
from support.faulty_backend import add_faulty_model, install_faulty_backend
from support.waiting import eventually, eventually_async

MODEL = Trial(ModelFiles(Path("m"), 1, Path("m/1")), "onnxruntime", None, (None, Fingerprint(b"")), False)


class Tried:
    """In place of the child processes: which models were tried, and what follows."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.names: list[str] = []
        self.work: Callable[[Trial, Event], None] = lambda trial, stop: None
        monkeypatch.setattr(TrialLoads, "run", self._run)

    def _run(self, trial: Trial, stop: Event) -> None:
        self.names.append(f"{trial.files.model_folder.name}/{trial.files.version}")
        self.work(trial, stop)


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> Tried:
    return Tried(monkeypatch)


def explicit(*repositories: Path, **settings: Any) -> RepositoryFixture:
    return RepositoryFixture(*repositories, **{"mode": "explicit"} | settings)


def test_which_models_are_tried(tmp_path: Path, tried: Tried) -> None:
    async def main() -> None:
        local, fetched = tmp_path / "local", tmp_path / "fetched"
        put_model(local, "own", 1, backend="onnxruntime")
        put_model(fetched, "theirs", 1, backend="onnxruntime")
        put_model(fetched, "code", 1, backend="python")
        put_model(fetched, "proxy", 1, backend="openai_proxy")
        put_model(fetched, "steps", 1, steps=["theirs"])
        for value, expected in (("fetched", ["theirs/1"]), ("always", ["own/1", "theirs/1"]), ("never", [])):
            tried.names.clear()
            fixture = RepositoryFixture(local, fetched, mode="none", trial_load=value, fetched_repositories=(fetched,))
            async with fixture:
                assert sorted(tried.names) == expected
                assert len(fixture.opener.live()) == 5

    asyncio.run(main())


def test_files_of_a_request_are_tried_each_time(tmp_path: Path, tried: Tried) -> None:
    async def main() -> None:
        config = json.dumps({"backend": "onnxruntime"})
        async with explicit(tmp_path) as fixture:
            for _ in range(2):
                await fixture.control.load("m", config, {"file:1/model.onnx": b"bytes"})
            assert tried.names == ["m/1", "m/1"]

    asyncio.run(main())


def test_what_has_passed_is_tried_again_when_it_changes(tmp_path: Path, tried: Tried) -> None:
    async def main() -> None:
        folder = put_model(tmp_path, "m", 1, backend="onnxruntime")
        async with explicit(tmp_path, trial_load="always") as fixture:
            for _ in range(2):
                await fixture.control.load("m")
                await fixture.control.unload("m")
            assert tried.names == ["m/1"]
            (folder / "1" / "model.bin").write_text("others")
            await fixture.control.load("m")
            write_config(folder, backend="onnxruntime", tag="new")
            await fixture.control.load("m")
            await fixture.control.load("m", json.dumps({"backend": "onnxruntime", "tag": "newer"}))
            assert tried.names == ["m/1"] * 4

    asyncio.run(main())


def test_what_fails_is_not_loaded_by_the_server(tmp_path: Path, tried: Tried) -> None:
    async def main() -> None:
        def fail(trial: Trial, stop: Event) -> None:
            if trial.files.model_folder.name == "bad":
                raise ResourceExhausted("too much")

        tried.work = fail
        put_model(tmp_path, "bad", 1, backend="onnxruntime")
        put_model(tmp_path, "good", 1, backend="onnxruntime")
        async with explicit(tmp_path, trial_load="always", load_models=("*",)) as fixture:
            assert fixture.opener.live() == ["good/1"]
            assert "open bad/1" not in fixture.opener.log
            assert fixture.states("bad") == ["1 UNAVAILABLE too much"]
            with pytest.raises(ResourceExhausted, match="failed to load 'bad', too much"):
                await fixture.control.load("bad")
            assert tried.names.count("bad/1") == 2, "a failure is not remembered"

    asyncio.run(main())


def test_files_that_change_during_the_trial_are_not_loaded(tmp_path: Path, tried: Tried) -> None:
    async def main() -> None:
        folder = put_model(tmp_path, "m", 1, backend="onnxruntime")
        tried.work = lambda trial, stop: None if (folder / "1" / "more").exists() else (folder / "1" / "more").touch()
        async with explicit(tmp_path, trial_load="always") as fixture:
            with pytest.raises(FailedPrecondition, match="changed during its trial load: load it again"):
                await fixture.control.load("m")
            assert fixture.opener.log == []
            await fixture.control.load("m")
            assert fixture.opener.live() == ["m/1"]

    asyncio.run(main())


@pytest.mark.parametrize("ended_by", ["time", "close"])
def test_a_trial_ends_with_its_load(tmp_path: Path, tried: Tried, ended_by: str) -> None:
    async def main() -> None:
        stopped = Event()

        def wait(trial: Trial, stop: Event) -> None:
            stop.wait()
            stopped.set()

        tried.work = wait
        put_model(tmp_path, "m", 1, backend="onnxruntime")
        limit = 0.01 if ended_by == "time" else 0
        async with explicit(tmp_path, trial_load="always", load_seconds=limit) as fixture:
            load = asyncio.create_task(fixture.control.load("m"))
            if ended_by == "time":
                with pytest.raises(HeadraceError, match=r"not loaded within 0\.01 s"):
                    await load
            else:
                await eventually_async(lambda: tried.names)
        await asyncio.gather(load, return_exceptions=True)
        await eventually_async(stopped.is_set)

    asyncio.run(main())


def child(monkeypatch: pytest.MonkeyPatch, folder: Path, code: str) -> None:
    """Let another script be the child process."""
    script = folder / "child.py"
    script.write_text("import os, signal, sys\n" + code)
    monkeypatch.setattr(trial_module, "_PROCESS", script)


def run(**settings: Any) -> None:
    TrialLoads(RepositorySettings(**settings)).run(MODEL, Event())


@pytest.mark.parametrize(
    ("code", "error", "text"),
    [
        (
            "os.kill(os.getpid(), signal.SIGSEGV)",
            FailedPrecondition,
            r"ended \(signal 11: segmentation fault\): a file",
        ),
        ("os.abort()", FailedPrecondition, r"ended \(signal 6: aborted\): a file of it is damaged"),
        ("os.kill(os.getpid(), signal.SIGKILL)", ResourceExhausted, r"by the kernel because memory ran out: free"),
        ("sys.exit(3)", FailedPrecondition, r"ended \(exit code 3\)"),
        ("print('half a rep', end='')", FailedPrecondition, r"ended \(exit code 0\)"),
        (
            """print('{"code": "invalid_argument", "message": "as it is today", "log": ""}')""",
            InvalidArgument,
            "^as it is today$",
        ),
    ],
)
def test_how_a_child_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, error: type[HeadraceError], text: str
) -> None:
    child(monkeypatch, tmp_path, code)
    with pytest.raises(error, match=text) as raised:
        run()
    assert "version 1" in str(raised.value) or error is InvalidArgument


def test_a_child_that_reports_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    child(monkeypatch, tmp_path, "sys.stdin.read(); print('{}')")
    run()


def test_a_child_that_allocates_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    child(monkeypatch, tmp_path, "taken = []\nwhile True: taken.append(bytearray(b'x') * 1_000_000)")
    with pytest.raises(
        ResourceExhausted, match=r"took .* MB of memory, and it may take 50\.0 MB: .* --trial-load-bytes"
    ):
        run(trial_load_bytes=50_000_000)


def test_a_child_that_loops_is_ended_with_what_it_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pids = tmp_path / "pids"
    child(
        monkeypatch,
        tmp_path,
        f"pid = os.fork()\nif pid: open({str(pids)!r}, 'w').write(f'{{os.getpid()}} {{pid}} ')\nwhile True: pass",
    )
    stop, errors = Event(), []

    def work() -> None:
        try:
            TrialLoads(RepositorySettings()).run(MODEL, stop)
        except Cancelled as error:
            errors.append(error)

    thread = Thread(target=work)
    thread.start()
    eventually(lambda: pids.exists() and pids.read_text().endswith(" "))
    stop.set()
    thread.join()
    assert len(errors) == 1
    for pid in pids.read_text().split():
        eventually(lambda pid=pid: not _runs(int(pid)))


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    # A process whose parent was killed stays until the first process of the machine asks for its exit code.
    return ") Z " not in Path(f"/proc/{pid}/stat").read_text()


def test_the_memory_of_a_child(monkeypatch: pytest.MonkeyPatch) -> None:
    used, free = 0, 0
    monkeypatch.setattr(trial_module, "process_memory", lambda pid: used)
    monkeypatch.setattr(trial_module, "available_memory", lambda within: free)
    used, free = 900, 100
    assert not _MemoryBound(0).excess(1), "a tenth of what would be free without it"
    used, free = 901, 99
    assert _MemoryBound(0).excess(1) == "901 bytes of memory, and it may take 900 bytes"
    assert not _MemoryBound(901).excess(1), "the option counts alone"
    assert _MemoryBound(900).excess(1)
    monkeypatch.setattr(trial_module, "available_memory", lambda within: None)
    assert not _MemoryBound(0).excess(1)


def test_the_child_loads_as_the_server_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_faulty_backend(tmp_path / "site", monkeypatch)
    for how in ("good", "error"):
        add_faulty_model(tmp_path, how, how)

    def load(name: str, config_json: str | None = None, *, strict: bool = False) -> dict[str, str]:
        folder = str(tmp_path / name)
        return _load({"folder": folder, "version": 1, "config_json": config_json, "gpus": 0, "strict": strict})

    assert load("good") == {}
    assert load("good", '{"backend": "no_such"}')["message"].startswith("backend 'no_such' is not known: use one of")
    assert "--strict-model-config asks for one" in load("none", strict=True)["message"]
    report = load("error")
    assert report["message"] == "KeyError while loading model 'error' version 1; the server's log has the details"
    assert report["code"] == "internal" and "a secret of the backend" in report["log"]
