# SPDX-License-Identifier: Apache-2.0
"""Every input that is kept is fed once: those that broke something do not any more. As a process, as a user does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fuzz.target import CORPUS, REGRESSIONS, inputs_of
from fuzz.targets.table import TARGETS

REPOSITORY = Path(__file__).parents[2]


def fuzz(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "fuzz", *arguments]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=600, check=False)


@pytest.mark.timeout(600)
def test_every_kept_input_passes() -> None:
    done = fuzz("all", "--replay")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"{name}: {len(inputs_of(name))} inputs, no failure" for name in TARGETS]


@pytest.mark.parametrize("name", TARGETS)
def test_every_target_has_inputs_to_begin_with(name: str) -> None:
    assert sum(path.parent.parent == CORPUS for path in inputs_of(name)) >= 3


def test_every_kept_input_belongs_to_a_target_and_is_small() -> None:
    for folder in (CORPUS, REGRESSIONS):
        assert {path.name for path in folder.iterdir()} <= set(TARGETS)
    sizes = [path.stat().st_size for name in TARGETS for path in inputs_of(name)]
    assert max(sizes) <= 8192
    assert sum(sizes) < 1 << 20


def test_the_targets_are_listed_and_an_unknown_name_is_refused() -> None:
    listed = fuzz()
    assert listed.returncode == 0
    assert all(name in listed.stdout for name in TARGETS)
    wrong = fuzz("htpp1")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert "unknown target 'htpp1'" in wrong.stderr


def test_a_file_that_is_not_there() -> None:
    assert fuzz("url", "--replay", "nowhere").returncode == 2
