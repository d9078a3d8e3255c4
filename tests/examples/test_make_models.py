# SPDX-License-Identifier: Apache-2.0
"""The script that makes the example repository: whole or not at all, and only when something has changed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


@pytest.fixture
def quick(make_models: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """With one small model in place of all of them."""

    def fill(folder: Path, say: Any) -> None:
        say("filling")
        (folder / "a" / "1").mkdir(parents=True)

    monkeypatch.setattr(make_models, "_fill", fill)
    return make_models


def test_it_is_made_once(quick: ModuleType, tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "models"
    outputs: list[str] = []
    assert quick.make(folder, say=outputs.append) == folder
    (folder / "a" / "mark").touch()
    quick.make(folder, say=outputs.append)
    assert outputs.count("filling") == 1
    assert "is up to date" in outputs[-1]
    assert (folder / "a" / "mark").exists()
    quick.make(folder, force=True)
    assert not (folder / "a" / "mark").exists()
    assert sorted(path.name for path in folder.parent.iterdir()) == ["models"]


def test_it_is_made_again_when_its_sources_change(
    quick: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "sources" / "models" / "config.pbtxt"
    source.parent.mkdir(parents=True)
    source.write_text("one")
    monkeypatch.setattr(quick, "HANDWRITTEN", source.parent)
    monkeypatch.setattr(quick, "_source_files", lambda: [source])
    monkeypatch.setattr(quick, "SOURCES", tmp_path / "sources")
    outputs: list[str] = []
    for text in ("one", "one", "two"):
        source.write_text(text)
        quick.make(tmp_path / "models", say=outputs.append)
    assert outputs.count("filling") == 2


def test_a_failure_leaves_what_was_there(quick: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = quick.make(tmp_path / "models")

    def fail(folder: Path, say: Any) -> None:
        (folder / "half").mkdir(parents=True)
        raise OSError("no space left")

    monkeypatch.setattr(quick, "_fill", fail)
    with pytest.raises(OSError, match="no space left"):
        quick.make(folder, force=True)
    assert sorted(path.name for path in folder.iterdir()) == [quick.STAMP, "a"]
    with pytest.raises(OSError, match="no space left"):
        quick.make(tmp_path / "other")
    assert [path.name for path in tmp_path.iterdir()] == ["models"]


def test_a_folder_of_another_owner_is_not_touched(quick: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").touch()
    with pytest.raises(FileExistsError, match="has something else in it"):
        quick.make(tmp_path, force=True)
    assert (tmp_path / "thesis.txt").exists()
    (tmp_path / "empty").mkdir()
    quick.make(tmp_path / "empty")
    assert (tmp_path / "empty" / "a").is_dir()


def test_the_command_line(make_models: ModuleType, repository: Path, tmp_path: Path) -> None:
    script = [sys.executable, make_models.__file__]
    done = subprocess.run([*script, repository], capture_output=True, text=True, check=True, timeout=180)
    assert "is up to date" in done.stdout
    (tmp_path / "mine").touch()
    refused = subprocess.run([*script, tmp_path], capture_output=True, text=True, check=False, timeout=180)
    assert refused.returncode == 1
    assert "name another folder" in refused.stderr
