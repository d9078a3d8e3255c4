# SPDX-License-Identifier: Apache-2.0
"""The locks fit pyproject.toml, have a hash for everything, and an audit says which of three things is true. No network."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import audit
import lock
import pytest
from packaging.markers import Marker


@pytest.mark.parametrize("name", lock.LOCKS)
def test_a_lock_is_in_step(name: str) -> None:
    assert lock.problems_of(name) == []
    assert len(lock.pinned((lock.FOLDER / f"{name}.lock").read_text())) >= len(lock.wanted_by(lock.LOCKS[name]))


def test_a_new_raised_or_unhashed_dependency_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "requirements").mkdir()
    monkeypatch.setattr(lock, "ROOT", tmp_path)
    monkeypatch.setattr(lock, "FOLDER", tmp_path / "requirements")
    monkeypatch.setattr(lock, "LOCKS", {"one": ("a", "b")})
    project = '[project]\nname = "headrace"\ndependencies = ["first>=2"]\n[project.optional-dependencies]\n'
    (tmp_path / "pyproject.toml").write_text(project + 'a = ["headrace[b]"]\nb = ["Second.One>=1"]\n')
    assert lock.problems_of("one") == ["one.lock is missing: make lock"]
    entries = "first==1.0 \\\n    --hash=sha256:00\nsecond-one==1.5\n    # via headrace\n"
    (tmp_path / "requirements/one.lock").write_text(entries)
    assert lock.problems_of("one") == [
        "one.lock: first>=2 is locked as 1.0: make lock",
        "one.lock: second-one==1.5 has no hash",
    ]


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_on_each_kind_of_machine_one_version_is_installed(machine: str) -> None:
    where = {
        "platform_machine": machine,
        "sys_platform": "linux",
        "python_version": "3.11",
        "python_full_version": "3.11.9",
    }
    for name in lock.LOCKS:
        seen: set[str] = set()
        for package, _, marker in re.findall(lock._PINNED, (lock.FOLDER / f"{name}.lock").read_text()):
            if not marker or Marker(marker).evaluate(where):
                assert package not in seen, f"{name}.lock has two versions of {package}"
                seen.add(package)
        assert ("setuptools" if name == "build" else "numpy") in seen


class FakeAudit:
    """pip-audit as a program that answers, or cannot: what it asks is not reachable from tests."""

    def __init__(self, folder: Path, answer: Any, status: int) -> None:
        script = folder / "fake_audit.py"
        lines = ["import sys", "print('ConnectionError: no route', file=sys.stderr)"]
        if answer is not None:
            lines.append(f"open(sys.argv[sys.argv.index('--output') + 1], 'w').write({json.dumps(answer)!r})")
        script.write_text("\n".join([*lines, f"sys.exit({status})"]))
        self.command = [sys.executable, str(script)]


def test_an_audit_distinguishes_a_vulnerability_from_an_unreachable_service(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "all.lock"
    clean = {"dependencies": [{"name": "a", "version": "1", "vulns": []}], "fixes": []}
    assert audit.audited(FakeAudit(tmp_path, clean, 0).command, file) == audit.CLEAN
    skipped = {"dependencies": [{"name": "a", "skip_reason": "not found"}], "fixes": []}
    assert audit.audited(FakeAudit(tmp_path, skipped, 0).command, file) == audit.UNKNOWN
    hole = {"id": "PYSEC-1", "fix_versions": ["1.2"], "aliases": [], "description": ""}
    holes = {"dependencies": [{"name": "a", "version": "1", "vulns": [hole]}], "fixes": []}
    assert audit.audited(FakeAudit(tmp_path, holes, 1).command, file) == audit.HOLES
    assert "a 1: PYSEC-1, mended in 1.2" in capsys.readouterr().out
    # The same exit code of the program's, and another truth.
    assert audit.audited(FakeAudit(tmp_path, None, 1).command, file) == audit.UNKNOWN
    assert "nothing is known: ConnectionError" in capsys.readouterr().err
