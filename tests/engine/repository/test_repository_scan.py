# SPDX-License-Identifier: Apache-2.0
"""What a scan sees, what it passes over, and what counts as a change."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from repository_fakes import put_model, put_version

from headrace.core.errors import InvalidArgument, Unimplemented
from headrace.engine.repository.scan import (
    ChangeDetector,
    ScannedModel,
    model_names,
    open_repositories,
    scan,
    scan_model,
)


def found(repository: Path, name: str = "m") -> ScannedModel:
    return scan([repository]).models[name]


def test_versions_are_numbers_and_everything_else_is_passed_over(tmp_path: Path) -> None:
    folder = put_model(tmp_path, "m", 0, 1, 12)
    for stray in ("01", "-1", "v2", "1.0", "backup", ".hidden"):
        (folder / stray).mkdir()
    (folder / "3").write_text("a file, no version")
    assert list(found(tmp_path).versions) == [0, 1, 12]


def test_stray_files_in_a_repository_break_nothing(tmp_path: Path) -> None:
    put_model(tmp_path, "m", 1)
    for name in (".git", "lost+found", "empty", "with space", "..dots"):
        (tmp_path / name).mkdir()
    (tmp_path / ".DS_Store").write_text("")
    (tmp_path / "README.md").write_text("")
    (tmp_path / "broken").symlink_to(tmp_path / "nowhere")
    snapshot = scan([tmp_path])
    assert list(snapshot.models) == ["m"]
    assert {stray.path.name for stray in snapshot.ignored} == {
        "lost+found", "empty", "with space", "README.md", "broken",
    }  # fmt: skip


def test_a_model_needs_a_version_or_a_configuration(tmp_path: Path) -> None:
    put_version_only = tmp_path / "bare"
    put_version_only.mkdir()
    put_version(put_version_only, 1)
    put_model(tmp_path, "configured")
    assert sorted(scan([tmp_path]).models) == ["bare", "configured"]


def test_the_same_name_twice_is_a_problem_of_that_model_alone(tmp_path: Path) -> None:
    one, two, three = tmp_path / "one", tmp_path / "two", tmp_path / "three"
    for repository in (one, two, three):
        put_model(repository, "m", 1)
    put_model(one, "a", 1)
    put_model(two, "b", 1)
    models = scan([one, two]).models
    assert models["m"].problem == f"model 'm' is in two repositories, {one / 'm'} and {two / 'm'}; remove one"
    assert not models["m"].versions
    assert not models["a"].problem and not models["b"].problem
    assert scan_model([one, two], "m") == models["m"]
    assert scan([one, two, three]).models["m"].problem.count("; remove one") == 1


def test_one_model_is_found_as_in_the_scan_of_all(tmp_path: Path) -> None:
    put_model(tmp_path, "m", 1, 2)
    assert scan_model([tmp_path], "m") == found(tmp_path)
    assert scan_model([tmp_path], "other") is None
    assert scan_model([tmp_path], "../m") is None
    assert model_names([tmp_path]) == ["m"]


def test_repositories_must_be_folders(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert open_repositories([str(tmp_path)]) == (tmp_path,)
    with pytest.raises(InvalidArgument, match="nowhere' does not exist: give a folder"):
        open_repositories([tmp_path, tmp_path / "nowhere"])
    with pytest.raises(InvalidArgument, match="is not a folder"):
        open_repositories([tmp_path / "file"])


@pytest.mark.parametrize("path", ["gs://bucket/models", "s3://b", "az://a/b", Path("s3://b/models")])
def test_cloud_repositories_are_for_the_command_line_to_mirror(path: str | Path) -> None:
    with pytest.raises(Unimplemented, match="`headrace serve` mirrors s3://"):
        open_repositories([path])


def test_an_unreadable_repository_is_not_an_empty_one(tmp_path: Path) -> None:
    put_model(tmp_path / "a", "m", 1)
    snapshot = scan([tmp_path / "a", tmp_path / "gone"])
    assert list(snapshot.models) == ["m"]
    assert snapshot.unreadable == (tmp_path / "gone",)


def test_every_kind_of_change_changes_the_fingerprint(tmp_path: Path) -> None:
    folder = put_model(tmp_path, "m", 1)
    (folder / "1" / "deep").mkdir()
    seen = [found(tmp_path).versions[1]]

    def differs() -> None:
        now = found(tmp_path).versions[1]
        assert now not in seen
        assert now == found(tmp_path).versions[1]
        seen.append(now)

    (folder / "1" / "model.bin").write_text("longer weights")
    differs()
    os.utime(folder / "1" / "model.bin", ns=(1, 1))
    differs()
    (folder / "1" / "deep" / "extra.bin").write_text("")
    differs()
    (folder / "1" / "model.bin").rename(folder / "1" / "other.bin")
    differs()
    shutil.copytree(folder / "1", folder / "copy")
    shutil.rmtree(folder / "1")
    (folder / "copy").rename(folder / "1")
    differs()


def test_files_written_by_a_running_model_are_not_a_change(tmp_path: Path) -> None:
    folder = put_model(tmp_path, "m", 1)
    before = found(tmp_path)
    (folder / "1" / "__pycache__").mkdir()
    (folder / "1" / "__pycache__" / "model.pyc").write_text("")
    (folder / "1" / ".nfs0001").write_text("")
    (folder / "README.md").write_text("")
    assert found(tmp_path) == before


@pytest.mark.parametrize("beside", ["config.pbtxt", "labels.txt", "warmup/input"])
def test_files_beside_the_versions_are_watched_too(tmp_path: Path, beside: str) -> None:
    folder = put_model(tmp_path, "m", 1)
    before = found(tmp_path)
    (folder / beside).parent.mkdir(exist_ok=True)
    (folder / beside).write_text("something else")
    after = found(tmp_path)
    assert after.versions == before.versions
    assert after.shared != before.shared


def test_symlinked_versions_are_followed_and_a_new_target_is_a_change(tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    folder = put_model(repository, "m")
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.bin").write_text(name)
        os.utime(tmp_path / name / "model.bin", ns=(5, 5))
    (folder / "1").symlink_to(tmp_path / "old")
    before = found(repository).versions[1]
    (folder / "1").unlink()
    (folder / "1").symlink_to(tmp_path / "new")
    assert found(repository).versions[1] != before


def test_a_symlink_in_a_circle_ends(tmp_path: Path) -> None:
    folder = put_model(tmp_path, "m", 1)
    (folder / "1" / "again").symlink_to(folder / "1")
    (folder / "1" / "and_again").symlink_to(folder)
    assert list(found(tmp_path).versions) == [1]


def test_a_change_is_loaded_when_quiet_or_seen_twice(tmp_path: Path) -> None:
    watch = ChangeDetector(settle_seconds=10)
    put_model(tmp_path, "m", 1)
    snapshot = scan([tmp_path])
    changed = snapshot.models["m"].changed
    first = watch.diff(snapshot, changed + 1)
    assert (first.to_load, first.unsettled) == ((), True)
    second = watch.diff(snapshot, changed + 1)
    assert ([model.name for model in second.to_load], second.unsettled) == (["m"], False)
    assert watch.diff(snapshot, changed + 1).to_load == ()
    put_version(tmp_path / "m", 2)
    later = scan([tmp_path])
    assert watch.diff(later, later.models["m"].changed + 10).to_load == (later.models["m"],)


def test_a_growing_file_is_never_loaded_whatever_its_times(tmp_path: Path) -> None:
    watch = ChangeDetector(settle_seconds=10)
    folder = put_model(tmp_path, "m", 1)
    for size in range(3):
        (folder / "1" / "model.bin").write_text("x" * size)
        os.utime(folder / "1" / "model.bin", (1, 1))
        snapshot = scan([tmp_path])
        assert watch.diff(snapshot, snapshot.models["m"].changed + 1).to_load == ()


def test_a_model_must_be_missing_twice_and_in_a_readable_repository(tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    put_model(repository, "m", 1)
    watch = ChangeDetector(settle_seconds=10)
    before = scan([repository])
    watch.accept_all(before.models)
    repository.rename(tmp_path / "away")
    for _ in range(3):
        unreadable = watch.diff(scan([repository]), 0)
        assert unreadable.removed == ()
    repository.mkdir()
    assert watch.diff(scan([repository]), 0).removed == ()
    (tmp_path / "away" / "m").rename(repository / "m")
    assert watch.diff(scan([repository]), 0).removed == ()
    shutil.rmtree(repository / "m")
    assert watch.diff(scan([repository]), 0).removed == ()
    assert watch.diff(scan([repository]), 0).removed == ("m",)
