# SPDX-License-Identifier: Apache-2.0
"""Edits of configurations by `tune`: only the intended values change; comments stay."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest

from headrace.cli import tune_run
from headrace.cli.tune_run import Change, change_of, write_change
from headrace.core.errors import InvalidArgument
from headrace.models.config.drafts import read_draft
from headrace.programs.loadtest.tuning import Setting

ALL = Change(16, 500, 3)


def folder_with(tmp_path: Path, text: str, name: str = "config.pbtxt") -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / name).write_bytes(text.encode())
    return folder


def values(folder: Path) -> tuple[int, int, list[int]]:
    message = read_draft(folder).message
    counts = [group.count for group in message.instance_group]
    return message.max_batch_size, message.dynamic_batching.max_queue_delay_microseconds, counts


ADDED = """dynamic_batching { max_queue_delay_microseconds: 500 }
instance_group [ { count: 3 } ]
"""
MISSING = ("# why\nmax_batch_size: 8 # limit\n", f"# why\nmax_batch_size: 16 # limit\n{ADDED}")
EMPTY = (
    "instance_group [ # here\n  { kind: KIND_CPU # {\n } ]\ndynamic_batching\n{\n  # soon\n}\nmax_batch_size:8",
    (
        "instance_group [ # here\n  { count: 3  kind: KIND_CPU # {\n } ]\n"
        "dynamic_batching\n{ max_queue_delay_microseconds: 500 \n  # soon\n}\nmax_batch_size:16"
    ),
)
THERE = (
    (
        "max_batch_size: 4\r\ndynamic_batching { max_queue_delay_microseconds: auto } # by itself\r\n"
        "instance_group < count: 1 >\r\n"
    ),
    (
        "max_batch_size: 16\r\ndynamic_batching { max_queue_delay_microseconds: 500 } # by itself\r\n"
        "instance_group < count: 3 >\r\n"
    ),
)
IN_QUOTES = (
    'default_model_filename: "max_batch_size: 8"',
    f'default_model_filename: "max_batch_size: 8"\nmax_batch_size: 16\n{ADDED}',
)


@pytest.mark.parametrize(("before", "after"), [MISSING, EMPTY, THERE, IN_QUOTES])
def test_values_are_edited_in_place(tmp_path: Path, before: str, after: str) -> None:
    folder = folder_with(tmp_path, before)
    written = write_change(folder, ALL)
    assert (written.path, written.beside) == (folder / "config.pbtxt", False)
    assert (folder / "config.pbtxt").read_bytes().decode() == after
    assert values(folder) == (16, 500, [3])
    assert sorted(os.listdir(folder)) == ["config.pbtxt"]


def test_only_what_changes_is_touched(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, "max_batch_size: 8\n")
    write_change(folder, Change(None, 0, None))
    assert (folder / "config.pbtxt").read_text() == (
        "max_batch_size: 8\ndynamic_batching { max_queue_delay_microseconds: 0 }\n"
    )


def test_json_keeps_its_other_members_and_its_indent(tmp_path: Path) -> None:
    text = (
        '{\n    "backend": "identity",\n    "max_batch_size": 8,\n    "parameters": {"a": {"string_value": "ü"}}\n}\n'
    )
    folder = folder_with(tmp_path, text, "config.json")
    assert not write_change(folder, ALL).beside
    written = (folder / "config.json").read_text()
    assert written.startswith('{\n    "backend": "identity",\n    "max_batch_size": 16,')
    assert "ü" in written
    assert json.loads(written)["parameters"] == {"a": {"string_value": "ü"}}
    assert values(folder) == (16, 500, [3])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("config.yaml", "max_batch_size: 8 # a comment that no reader keeps\n"),
        ("config.pbtxt", "max_batch_size: 8\ndynamic_batching { max_queue_delay_auto: true }\n"),
        ("config.pbtxt", "max_batch_size: 32\ndynamic_batching { preferred_batch_size: [ 8, 32 ] }\n"),
    ],
)
def test_what_cannot_be_edited_safely_stays_and_a_whole_one_is_beside_it(tmp_path: Path, name: str, text: str) -> None:
    folder = folder_with(tmp_path, text, name)
    written = write_change(folder, ALL)
    assert written.beside
    assert (folder / name).read_text() == text
    # In its place, it says what was meant.
    (folder / name).unlink()
    written.path.rename(folder / "config.pbtxt")
    assert values(folder) == (16, 500, [3])
    assert 32 not in read_draft(folder).message.dynamic_batching.preferred_batch_size


def test_a_model_without_a_configuration_gets_one(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    assert write_change(folder, ALL).path == folder / "config.pbtxt"
    assert (folder / "config.pbtxt").read_text() == ALL.text()
    assert values(folder) == (16, 500, [3])


def test_the_file_keeps_its_permissions(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, "max_batch_size: 8\n")
    (folder / "config.pbtxt").chmod(0o640)
    write_change(folder, ALL)
    assert stat.S_IMODE((folder / "config.pbtxt").stat().st_mode) == 0o640


def test_a_write_that_fails_leaves_the_old_file_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folder_with(tmp_path, "max_batch_size: 8\n")

    def full(number: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tune_run.os, "fsync", full)
    with pytest.raises(InvalidArgument, match=r"No space left on device; nothing was changed"):
        write_change(folder, ALL)
    assert (folder / "config.pbtxt").read_text() == "max_batch_size: 8\n"
    assert os.listdir(folder) == ["config.pbtxt"]


def test_a_change_is_what_differs() -> None:
    start = Setting(8, 100, 1)
    assert not change_of(start, start)
    assert change_of(start, Setting(8, 0, 1)) == Change(None, 0, None)
    assert change_of(start, start, was_auto=True) == Change(None, 100, None)
    assert change_of(start, Setting(4, 100, 2)).text() == "max_batch_size: 4\ninstance_group [ { count: 2 } ]\n"
