# SPDX-License-Identifier: Apache-2.0
"""The cache of tiny models (`support.model_cache`): made once, complete or not at all, and again when something changes."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from support import model_cache
from support.model_cache import copy_of, made_once

MADE: list[str] = []
"""What was made, by the names of the folders."""


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(model_cache, "CACHE", tmp_path / "cache")
    MADE.clear()
    return tmp_path / "cache"


def write(folder: Path, text: str = "weights") -> None:
    MADE.append(folder.name)
    (folder / "model").write_text(text)


def write_half(folder: Path) -> None:
    (folder / "model").write_text("half")
    raise RuntimeError("no disk left")


def test_a_folder_is_made_once_for_each_argument() -> None:
    first = made_once(write)
    assert (first / "model").read_text() == "weights"
    assert made_once(write) == first
    assert (made_once(write, "others") / "model").read_text() == "others"
    assert len(MADE) == 2


def test_a_copy_may_be_changed(tmp_path: Path) -> None:
    copy = copy_of(tmp_path / "a" / "copy", write)
    (copy / "model").write_text("changed")
    assert (copy_of(tmp_path / "b", write) / "model").read_text() == "weights"


def test_a_changed_builder_file_rebuilds_the_model(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_text("1")
    first = made_once(write, sources=(source,))
    source.write_text("2")
    assert made_once(write, sources=(source,)) != first


def test_what_failed_is_not_there_and_is_tried_again(empty_cache: Path) -> None:
    for _ in range(2):
        with pytest.raises(RuntimeError, match="no disk left"):
            made_once(write_half)
    assert [path for path in empty_cache.iterdir() if path.is_dir() and not path.name.endswith(".unfinished")] == []


def test_several_who_want_the_same_wait_for_the_first() -> None:
    begun = threading.Barrier(4)

    def want(_: int) -> Path:
        begun.wait(60)
        return made_once(write)

    with ThreadPoolExecutor(4) as threads:
        assert len(set(threads.map(want, range(4)))) == 1
    assert len(MADE) == 1


def test_entries_unused_for_weeks_are_deleted(empty_cache: Path) -> None:
    old = made_once(write, "old")
    for path in empty_cache.iterdir():
        os.utime(path, (0, time.time() - 15 * 86_400))
    new = made_once(write, "new")
    assert [path for path in empty_cache.iterdir() if path.is_dir()] == [new] != [old]
