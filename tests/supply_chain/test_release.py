# SPDX-License-Identifier: Apache-2.0
"""A release from the commit: built twice alike, summed up, signed with a real key, and what was changed is seen."""

from __future__ import annotations

import hashlib
import subprocess
import tarfile
import zipfile
from pathlib import Path

import pytest
import release

BUILDS = {"headrace-1.whl": b"a wheel", "headrace-1.tar.gz": b"an sdist"}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A release of the commit, really built."""
    return release_in(tmp_path_factory.mktemp("release"))


def release_in(folder: Path) -> Path:
    key = folder / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "releases@test", "-f", key], check=True)
    public = key.with_suffix(".pub").read_text()
    (folder / "allowed_signers").write_text(f'releases@test namespaces="{release.NAMESPACE}" {public}')
    # Builds twice and raises where they differ.
    release.released(folder / "dist", "HEAD", key)
    return folder


def verified(folder: Path, sums: bytes) -> bool:
    arguments = ["-I", "releases@test", "-n", release.NAMESPACE, "-s", folder / "dist/SHA256SUMS.sig"]
    command = ["ssh-keygen", "-Y", "verify", "-f", folder / "allowed_signers", *arguments]
    return subprocess.run(command, input=sums, capture_output=True, check=False).returncode == 0


def test_sums_are_right_and_signed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(release, "built", lambda commit: dict(BUILDS))
    check_sums(release_in(tmp_path))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_sums_of_a_real_build_are_right_and_signed(made: Path) -> None:
    check_sums(made)


def check_sums(made: Path) -> None:
    sums = (made / "dist/SHA256SUMS").read_bytes()
    listed = dict(line.split("  ")[::-1] for line in sums.decode().splitlines())
    others = {path.name for path in (made / "dist").iterdir() if not path.name.startswith("SHA256SUMS")}
    assert set(listed) == others
    assert {Path(name).suffix for name in others} == {".whl", ".gz", ".json"}
    for name, digest in listed.items():
        assert hashlib.sha256((made / "dist" / name).read_bytes()).hexdigest() == digest
    assert verified(made, sums)
    assert not verified(made, sums.replace(b"0", b"1", 1))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_nothing_of_who_built_it_is_in_the_files(made: Path) -> None:
    with tarfile.open(next((made / "dist").glob("*.tar.gz"))) as archive:
        members = archive.getmembers()
    assert len({member.mtime for member in members}) == 1
    assert {(member.uid, member.gid, member.uname, member.gname) for member in members} == {(0, 0, "", "")}
    assert any(member.name.endswith("/headrace/version.py") for member in members)
    with zipfile.ZipFile(next((made / "dist").glob("*.whl"))) as wheel:
        assert len({member.date_time for member in wheel.infolist()}) == 1
        names = wheel.namelist()
    assert any(name.startswith("headrace/") for name in names)
    assert not any(name.startswith(("tests/", "fuzz/", "soak/", "bench/", "scripts/")) for name in names)


def test_two_builds_that_differ_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    builds = iter([{"a.whl": b"1", "b": b""}, {"a.whl": b"2", "b": b""}])
    monkeypatch.setattr(release, "built", lambda commit: next(builds))
    with pytest.raises(release.NotReproducible, match=r"differ in a\.whl"):
        release.released(tmp_path / "dist", "HEAD", None)
    assert not (tmp_path / "dist").exists()
