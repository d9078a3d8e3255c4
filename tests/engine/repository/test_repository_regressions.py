# SPDX-License-Identifier: Apache-2.0
"""Regressions of the repository: files outside, files left behind, unreadable folders, slow unloads."""

from __future__ import annotations

import asyncio
import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
from repository_fakes import RepositoryFixture, put_model

from headrace.backends.contract import ModelFiles
from headrace.core.clock import ManualClock, SystemClock
from headrace.core.errors import Internal, InvalidArgument
from headrace.engine.engine import Engine, EngineSettings
from headrace.engine.repository import scan as scanning
from headrace.engine.repository.check import check_repository
from headrace.engine.repository.load_plan import read_load_plan
from headrace.engine.repository.settings import RepositorySettings
from headrace.models.config.problems import ConfigError
from support.waiting import eventually_async

TENSORS = {
    "input": [{"name": "IN", "data_type": "TYPE_FP32", "dims": [-1]}],
    "output": [{"name": "OUT", "data_type": "TYPE_FP32", "dims": [-1]}],
}


def put_python(repository: Path, source: str, **config: Any) -> Path:
    folder = repository / "m" / "1"
    folder.mkdir(parents=True)
    (folder / "model.py").write_text(source)
    (folder.parent / "config.json").write_text(json.dumps({"backend": "python", **TENSORS, **config}))
    return folder.parent


def test_a_file_outside_of_the_version_is_never_run(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    (tmp_path / "other.py").write_text(f"open({str(ran)!r}, 'w').close()")
    folder = put_python(tmp_path / "models", "", default_model_filename="../../../other.py")
    plan = read_load_plan(folder, None, 0)
    with pytest.raises(ConfigError, match="outside of the version folder"):
        plan.complete(_files(folder))
    report = check_repository(tmp_path / "models")
    assert ["outside of the version folder" in problem.text for problem in report.problems] == [True]
    assert not ran.exists()


def test_an_impossible_file_name_is_reported(tmp_path: Path) -> None:
    folder = put_python(tmp_path, "", default_model_filename="n" * 5000)
    with pytest.raises(ConfigError, match="default_model_filename: 'nnn.* is longer than any file's name"):
        read_load_plan(folder, None, 0).complete(_files(folder))
    assert len(check_repository(tmp_path).problems) == 1


def test_files_of_a_load_that_failed_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with RepositoryFixture(tmp_path, mode="explicit") as fixture:
            for name in ("a", "b"):
                fixture.opener.failures[f"{name}/1"] = InvalidArgument("no")
                with pytest.raises(InvalidArgument):
                    await fixture.control.load(name, "{}", {"file:1/model.x": b"bytes"})
            await fixture.control.settled(retired=True)
            assert list(tmp_path.glob("headrace-models-*/*")) == []
            await fixture.control.load("c", "{}", {"file:1/model.x": b"bytes"})
            await fixture.control.settled(retired=True)
            assert len(list(tmp_path.glob("headrace-models-*/*/c/1/model.x"))) == 1

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    asyncio.run(main())


def test_a_full_disk_is_reported_to_the_sender_of_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Path, data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    async def main() -> None:
        async with RepositoryFixture(tmp_path, mode="explicit") as fixture:
            monkeypatch.setattr(Path, "write_bytes", full)
            with pytest.raises(Internal, match="failed to load 'm', No space left on device while writing the files"):
                await fixture.control.load("m", "{}", {"file:1/model.x": b"bytes"})

    asyncio.run(main())


def test_a_model_whose_folder_cannot_be_read_continues_to_serve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = scanning._listed

    def denied(folder: Path) -> Any:
        if folder.name == "m":
            raise PermissionError(errno.EACCES, "Permission denied")
        return listed(folder)

    async def main() -> None:
        put_model(tmp_path, "m", 1)
        async with RepositoryFixture(tmp_path, mode="poll", poll_seconds=1000) as fixture:
            monkeypatch.setattr(scanning, "_listed", denied)
            for _ in range(3):
                await fixture.control.poll_once()
                await fixture.control.settled()
            assert len(fixture.states("m")) == 1
            assert fixture.states("m")[0].startswith("1 READY serves as it was loaded before")
            assert "the folder of model 'm' cannot be read: Permission denied" in fixture.states("m")[0]

    asyncio.run(main())
    assert [problem.text for problem in check_repository(tmp_path).problems] == [
        "the folder of model 'm' cannot be read: Permission denied; check its permissions"
    ]


def test_check_reports_files_without_read_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(self: Path) -> bool:
        raise PermissionError(errno.EACCES, "Permission denied")

    put_python(tmp_path, "")
    monkeypatch.setattr(Path, "is_file", denied)
    problems = check_repository(tmp_path).problems
    assert [(problem.path, "cannot be read: Permission denied" in problem.text) for problem in problems] == [
        ("m", True)
    ]


def test_closing_gives_what_retires_already_no_second_grace(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        clock = ManualClock()

        async def take_all_of_it(grace_seconds: float) -> None:
            clock.advance(grace_seconds)

        put_model(tmp_path, "a", 1)
        put_model(tmp_path, "b", 1)
        fixture = RepositoryFixture(tmp_path, mode="explicit", load_models=("*",), unload_wait_seconds=0.01)
        await fixture.control.start()
        fixture.control._context.clock = clock
        fixture.newest("b").retire = take_all_of_it  # type: ignore[method-assign]
        fixture.opener.retiring.clear()  # and `a` never comes to its end
        await fixture.control.unload("a")
        await fixture.control.close(1000.0)

    asyncio.run(main())
    assert "1 versions did not retire in 0 s" in caplog.text


@pytest.mark.parametrize("stage", ["initialize", "auto_complete_config"])
def test_closing_does_not_wait_for_a_model_that_takes_long_to_start(tmp_path: Path, stage: str) -> None:
    began = tmp_path / "began"
    put_python(
        tmp_path / "models",
        f"import time\nclass TritonPythonModel:\n    def {stage}(self, args=None):\n"
        f"        open({str(began)!r}, 'w').close()\n        time.sleep(100)\n"
        "    def execute(self, requests): pass\n"
        + ("    auto_complete_config = staticmethod(auto_complete_config)\n" if stage != "initialize" else ""),
    )

    async def main() -> None:
        settings = EngineSettings((tmp_path / "models",), RepositorySettings(mode="none"), gpus=0)
        engine = Engine(settings, SystemClock())
        starting = asyncio.create_task(engine.start())
        await eventually_async(began.exists)
        async with asyncio.timeout(100):
            await engine.close(5)
            await starting

    asyncio.run(main())


def _files(folder: Path) -> ModelFiles:
    return ModelFiles(folder, 1, folder / "1")
