# SPDX-License-Identifier: Apache-2.0
"""scripts/run_tests.py: with --retry a failed test runs once more; one that fails again fails the run."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.programs import run_script

RUN_TESTS = Path(__file__).resolve().parents[2] / "scripts/run_tests.py"

FAILS_ONCE = """
from pathlib import Path

def test_lucky(): pass

def test_unlucky():
    ran_before = Path(__file__).with_name("ran")
    if not ran_before.exists():
        ran_before.touch()
        raise ConnectionError
"""

pytestmark = pytest.mark.slow


@pytest.fixture
def tests(tmp_path: Path) -> Path:
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    slow: slow\n    platform: platform\n")
    path = tmp_path / "test_sample.py"
    path.write_text(FAILS_ONCE)
    return path


def test_a_test_that_fails_once_is_listed_as_unstable(tests: Path) -> None:
    ran = run_script(RUN_TESTS, "--retry", "quick", "--", str(tests))
    assert ran.returncode == 0, ran.stdout
    assert "1 failed, 1 passed; once more: 1 passed; UNSTABLE: " in ran.stdout
    assert ran.stdout.rstrip().endswith("test_sample.py::test_unlucky")


def test_without_retry_it_fails_the_run(tests: Path) -> None:
    ran = run_script(RUN_TESTS, "quick", "--", str(tests))
    assert ran.returncode == 1
    assert "once more" not in ran.stdout


def test_a_test_that_fails_again_fails_the_run(tests: Path) -> None:
    tests.write_text("def test_wrong(): raise ValueError\n")
    ran = run_script(RUN_TESTS, "--retry", "quick", "--", str(tests))
    assert ran.returncode == 1
    assert "1 failed; once more: 1 failed" in ran.stdout
    assert "UNSTABLE" not in ran.stdout


def test_many_failures_are_not_run_again(tests: Path) -> None:
    tests.write_text("\n".join(f"def test_wrong_{number}(): raise ValueError" for number in range(6)))
    ran = run_script(RUN_TESTS, "--retry", "quick", "--", str(tests))
    assert ran.returncode == 1
    assert "once more" not in ran.stdout
