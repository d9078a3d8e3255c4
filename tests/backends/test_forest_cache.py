# SPDX-License-Identifier: Apache-2.0
"""XGBoost's and LightGBM's files are checked once: the second load, by whoever, uses what the first has found."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tabular_models import completed_tensors, configured, open_instance, placed

from headrace.backends.tabular import check_cache, lightgbm_file, ubjson, xgboost_file
from headrace.backends.tabular.xgboost_file import PackedTrees, _Passed
from headrace.core.dtypes import FP32, FP64
from headrace.core.errors import InvalidArgument
from support.late_imports import late

pytestmark = pytest.mark.worker("frameworks")

lightgbm_case = late("cases.lightgbm")
xgboost_case = late("cases.xgboost")

ROWS = np.random.default_rng(1).standard_normal((7, 6))
KINDS = ("ubj", "json", "txt")


def content_of(kind: str) -> bytes:
    if kind == "txt":
        return str(lightgbm_case.booster("regression").model_to_string()).encode()
    return bytes(xgboost_case.booster("reg:squarederror").save_raw(kind))


def answer_of(kind: str, folder: Path, content: bytes | None, **parameters: str) -> Any:
    backend, dtype = ("lightgbm", FP64) if kind == "txt" else ("xgboost", FP32)
    config = configured(backend, {"input": (dtype, (6,))}, parameters=parameters)
    files = placed(folder, content, f"model.{kind}")
    return open_instance(config, files).compute({"input": ROWS.astype(dtype.numpy)}, ["predict"])["predict"]


@pytest.fixture
def entries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[Path]]:
    """What is in the cache, which is the test's own and takes small files too."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(check_cache.ENVIRONMENT_VARIABLE, raising=False)
    monkeypatch.setattr(check_cache, "MIN_FILE_BYTES", 0)
    # No file of a test is old enough for its digest to be remembered, however slow the machine.
    monkeypatch.setattr(check_cache, "SETTLED_SECONDS", 1e9)
    folder = tmp_path / "cache" / "headrace" / "checked"
    return lambda: sorted(folder.iterdir()) if folder.exists() else []


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Grows with every look at trees."""
    seen: list[str] = []

    def counted(owner: Any, name: str) -> None:
        genuine = getattr(owner, name)

        def record_call(*given: Any) -> Any:
            seen.append(name)
            return genuine(*given)

        monkeypatch.setattr(owner, name, record_call)

    counted(_Passed, "are_trees")
    counted(xgboost_file, "_tree")
    counted(lightgbm_file, "read_trees")
    counted(lightgbm_file, "_checked")
    return seen


@pytest.mark.parametrize("kind", KINDS)
def test_the_second_load_checks_no_tree_and_answers_the_same(
    tmp_path: Path, entries: Any, checks: list[str], kind: str
) -> None:
    first = answer_of(kind, tmp_path, content_of(kind))
    looks = len(checks)
    (entry,) = entries()
    assert looks > 0
    assert entry.stat().st_mode & 0o777 == 0o600
    assert entry.parent.stat().st_mode & 0o777 == 0o700
    # Another model with the same file has been checked, too.
    for folder in (tmp_path, tmp_path / "other"):
        np.testing.assert_array_equal(answer_of(kind, folder, content_of(kind)), first)
    assert len(checks) == looks
    assert entries() == [entry]


@pytest.fixture
def hashes(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each file that was read was hashed."""
    seen: list[bool] = []
    genuine = check_cache.read_file

    def read_file(file: Path, *, hashed: bool = True) -> tuple[bytearray, str]:
        seen.append(hashed)
        return genuine(file, hashed=hashed)

    monkeypatch.setattr(check_cache, "read_file", read_file)
    return seen


def test_an_unchanged_file_is_not_even_hashed(
    tmp_path: Path, entries: Any, checks: list[str], hashes: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = answer_of("ubj", tmp_path, content_of("ubj"))
    monkeypatch.setattr(check_cache, "SETTLED_SECONDS", -1e9)
    looks = len(checks)
    for _ in range(3):
        np.testing.assert_array_equal(answer_of("ubj", tmp_path, None), first)
    assert (hashes, len(checks)) == ([True, True, False, False], looks)
    # What the kernel notes of a change cannot be set back, as the time of the last writing can.
    file = tmp_path / "test" / "1" / "model.ubj"
    written = file.stat()
    changed = bytearray(file.read_bytes())
    match = re.search(rb"left_children\[\$l#L.{8}", changed, re.DOTALL)
    assert match is not None
    changed[match.end()] = 0x7F
    file.write_bytes(changed)
    os.utime(file, ns=(written.st_atime_ns, written.st_mtime_ns))
    with pytest.raises(InvalidArgument, match="cannot read 'model"):
        answer_of("ubj", tmp_path, None)
    assert hashes[-1]


def test_a_file_that_changes_while_it_is_read_is_hashed_after_all(
    tmp_path: Path, entries: Any, checks: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check_cache, "SETTLED_SECONDS", -1e9)
    answer_of("ubj", tmp_path, content_of("ubj"))
    other = bytes(xgboost_case.booster("binary:logistic").save_raw("ubj"))
    genuine = check_cache.read_file

    def overtaken(file: Path, *, hashed: bool = True) -> tuple[bytearray, str]:
        file.write_bytes(other)
        return genuine(file, hashed=hashed)

    monkeypatch.setattr(check_cache, "read_file", overtaken)
    looks = len(checks)
    answer_of("ubj", tmp_path, None)
    assert len(checks) > looks


@pytest.mark.parametrize("kind", ["ubj", "txt"])
def test_a_file_is_checked_once_for_its_configuration_and_the_load(
    tmp_path: Path, entries: Any, checks: list[str], kind: str
) -> None:
    files = placed(tmp_path, content_of(kind), f"model.{kind}")
    before = completed_tensors("lightgbm" if kind == "txt" else "xgboost", files)
    looks = len(checks)
    answer_of(kind, tmp_path, None)
    assert completed_tensors("lightgbm" if kind == "txt" else "xgboost", files) == before
    assert len(checks) == looks
    assert len(entries()) == 1


@pytest.mark.parametrize(
    ("kind", "place", "instead"),
    [
        ("ubj", rb"left_children\[\$l#L.{8}", b"\x7f"),
        ("json", rb'"left_children":\[', b"9"),
        ("txt", rb"left_child=", b"9"),
    ],
)
def test_a_changed_byte_is_checked_again_and_refused(
    tmp_path: Path, entries: Any, checks: list[str], kind: str, place: bytes, instead: bytes
) -> None:
    content = content_of(kind)
    answer_of(kind, tmp_path, content)
    kept, looks = entries(), len(checks)
    match = re.search(place, content, re.DOTALL)
    assert match is not None
    changed = content[: match.end()] + instead + content[match.end() + 1 :]
    for _ in range(2):
        with pytest.raises(InvalidArgument, match="cannot read 'model"):
            answer_of(kind, tmp_path, changed)
        assert len(checks) > looks
        looks = len(checks)
    assert entries() == kept


@pytest.mark.parametrize("kind", KINDS)
def test_other_checks_and_another_library_check_again(
    tmp_path: Path, entries: Any, checks: list[str], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer_of(kind, tmp_path, content_of(kind))
    module = import_module(f"headrace.backends.tabular.{'lightgbm' if kind == 'txt' else 'xgboost'}")
    backend = module.LightGBMBackend if kind == "txt" else module.XGBoostBackend
    other_checks = replace(backend.format, checks=999)
    for count, (owner, name, value) in enumerate(
        [
            (backend, "format", other_checks),
            (backend, "format", replace(other_checks, library="0.0")),
            (check_cache, "__version__", "9.9"),
        ],
        2,
    ):
        monkeypatch.setattr(owner, name, value)
        looks = len(checks)
        answer_of(kind, tmp_path, None)
        assert len(checks) > looks
        assert len(entries()) == count


@pytest.mark.parametrize("kind", KINDS)
def test_the_switches_keep_nothing(
    tmp_path: Path, entries: Any, checks: list[str], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer_of(kind, tmp_path, content_of(kind), checked_file_cache="0")
    assert entries() == []
    with pytest.raises(InvalidArgument, match="parameter checked_file_cache is 'perhaps'"):
        answer_of(kind, tmp_path, None, checked_file_cache="perhaps")
    monkeypatch.setenv(check_cache.ENVIRONMENT_VARIABLE, "0")
    answer_of(kind, tmp_path, None)
    assert entries() == []
    monkeypatch.delenv(check_cache.ENVIRONMENT_VARIABLE)
    monkeypatch.setattr(check_cache, "MIN_FILE_BYTES", 10**6)
    answer_of(kind, tmp_path, None)
    assert entries() == []
    # An entry that is there is not looked at, either.
    monkeypatch.setattr(check_cache, "MIN_FILE_BYTES", 0)
    answer_of(kind, tmp_path, None)
    looks = len(checks)
    answer_of(kind, tmp_path, None, checked_file_cache="0")
    assert len(checks) > looks


def test_threads_that_load_the_same_file_do_not_conflict(tmp_path: Path, entries: Any) -> None:
    expected = {kind: answer_of(kind, tmp_path, content_of(kind)).tolist() for kind in ("ubj", "txt")}

    def load(number: int) -> bool:
        if number % 4 == 0:
            for entry in entries():
                entry.unlink(missing_ok=True)
        folder = tmp_path / str(number)
        return all(answer_of(kind, folder, content_of(kind)).tolist() == answer for kind, answer in expected.items())

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(load, range(16)))


TOGETHER = """
import os, sys
from pathlib import Path
sys.path[:0] = sys.argv[2:]
from test_forest_cache import answer_of, content_of
from headrace.backends.tabular import check_cache
from headrace.backends.tabular.check_cache import default_folder
check_cache.MIN_FILE_BYTES, check_cache.SETTLED_SECONDS = 0, 1e9
folder, here = Path(sys.argv[1], str(os.getpid())), default_folder(os.environ)
kinds = ("ubj", "txt")
expected = {kind: answer_of(kind, folder, content_of(kind), checked_file_cache="0").tolist() for kind in kinds}
print("ready", flush=True)
sys.stdin.readline()
for number in range(24):
    if number % 4 == 0:
        for entry in list(here.glob("*.checked")):
            entry.unlink(missing_ok=True)
    for kind in kinds:
        if answer_of(kind, folder, None).tolist() != expected[kind]:
            sys.exit("another answer")
"""


@pytest.mark.slow
def test_processes_that_load_the_same_file_do_not_conflict(tmp_path: Path, entries: Any) -> None:
    here = Path(__file__).parent
    command = [sys.executable, "-c", TOGETHER, str(tmp_path), str(here), str(here.parent)]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    both = [subprocess.Popen(command, text=True, **pipes) for _ in range(2)]
    outputs = [entry.stdout.readline() for entry in both if entry.stdout]
    for item in both:
        if item.stdin:
            item.stdin.write("go\n")
            item.stdin.flush()
    for item in both:
        _, errors = item.communicate(timeout=100)
        assert item.returncode == 0, errors[-2000:]
        assert "damaged" not in errors
    assert outputs == ["ready\n", "ready\n"]
    assert [entry.suffix for entry in entries()] == [".checked", ".checked"]


def test_what_is_around_the_trees_is_checked_at_every_load(tmp_path: Path, entries: Any, checks: list[str]) -> None:
    # Only where the trees are is remembered of such a file, and nothing that it says besides.
    answer_of("ubj", tmp_path, content_of("ubj"))
    (entry,) = entries()
    assert entry.stat().st_size < 500
    data = bytearray(content_of("ubj"))
    known = xgboost_file.read_booster(bytearray(data)).trees
    assert isinstance(known, PackedTrees)
    looks = len(checks)
    facts = {"trees": {"begin": known.begin, "end": known.end, "count": known.count, "columns": known.columns}}
    data[-2:-1] = b"\xff"
    with pytest.raises(ValueError, match="."):
        xgboost_file.recall_booster(data, facts, memoryview(b""))
    assert len(checks) == looks


@pytest.mark.parametrize(
    "numbers", [[0] * 700, list(range(40000)), [-5, 3], [0, 2**31, 5], [1, 200] * 500, [126, 127, 32766, 32767, 2**40]]
)
def test_whole_numbers_are_written_as_they_are_read(numbers: list[int]) -> None:
    assert ubjson.decode(ubjson.encode(numbers)) == numbers


def test_a_text_that_lightgbm_would_take_to_end_early_is_refused(tmp_path: Path) -> None:
    content = content_of("txt")
    end = content.index(b"\n", content.index(b"feature_infos="))
    place = content.rindex(b"]", 0, end)
    with pytest.raises(InvalidArgument, match=r"cannot read 'model\.txt'"):
        answer_of("txt", tmp_path, content[:place] + b"\0" + content[place:])
