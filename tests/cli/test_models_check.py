# SPDX-License-Identifier: Apache-2.0
"""`headrace models check`: lines that an editor can jump to, and an exit code that CI can use."""

from __future__ import annotations

import json
from pathlib import Path

from support.programs import run
from support.tiny_models import BROKEN, CONFIG, make_models


def test_every_mistake_on_a_line_of_its_own(tmp_path: Path) -> None:
    make_models(tmp_path, fine=CONFIG, broken=BROKEN, wrong=CONFIG.replace("max_batch_size: 8", "max_batch_size: -1"))
    done = run("models", "check", tmp_path)
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    assert any(line.startswith("broken/config.pbtxt:3: input: 'dimms' is not a field") for line in lines)
    assert any(line.startswith("wrong/config.pbtxt:2: max_batch_size: -1 is negative") for line in lines)
    results = {line.split()[0]: line.split()[1] for line in lines if len(line.split()) == 3}
    assert results == {"MODEL": "RESULT", "fine": "fine", "broken": "wrong", "wrong": "wrong"}


def test_nothing_wrong(tmp_path: Path) -> None:
    make_models(tmp_path, fine=CONFIG)
    done = run("models", "check", tmp_path)
    assert done.returncode == 0 and done.stdout.splitlines()[1].split() == ["fine", "fine", "0"]


def test_json(tmp_path: Path) -> None:
    make_models(tmp_path / "a", broken=BROKEN)
    make_models(tmp_path / "b", fine=CONFIG)
    done = run("models", "check", tmp_path / "a", tmp_path / "b", "--json")
    report = json.loads(done.stdout)
    assert done.returncode == 1 and report["models"] == ["broken", "fine"]
    (problem,) = report["problems"]
    assert (problem["path"], problem["line"], problem["field"]) == ("broken/config.pbtxt", 3, "input")


def test_nothing_there(tmp_path: Path) -> None:
    assert "no models found" in run("models", "check", tmp_path).stdout
    done = run("models", "check", tmp_path / "none")
    assert done.returncode == 2 and "does not exist" in done.stderr
