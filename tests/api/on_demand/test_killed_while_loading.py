# SPDX-License-Identifier: Apache-2.0
"""A server that is killed while a model is loaded, evicted or its size is written: the next one serves as if nothing was."""

from __future__ import annotations

import json
import signal
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from support.programs import Program
from support.servers import serve_process
from support.tiny_models import CONFIG, write_models
from support.waiting import eventually

pytestmark = pytest.mark.slow

BODY = json.dumps({"inputs": [{"name": "INPUT0", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}]}).encode()
ON_DEMAND = ("--model-control-mode", "on-demand", "--allow-metrics=false")


def infer(server: Program, name: str) -> int:
    request = urllib.request.Request(f"{server.url}/v2/models/{name}/infer", BODY)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return int(answer.status)


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("fault", ["files.replace:die", "files.replace:die@2"])
def test_killed_while_a_size_is_written(tmp_path: Path, fault: str) -> None:
    names = ("a", "b", "c")
    models = write_models(tmp_path / "models", {name: {"config.pbtxt": CONFIG} for name in names})
    for name in names:
        (models / name / "1" / "weights.bin").write_bytes(name.encode() * 1_000_000)
    sizes = tmp_path / "sizes"
    arguments = (models, *ON_DEMAND, "--model-sizes-dir", sizes, "--host-memory-limit", "2500000")
    before = {path: path.read_bytes() for path in models.rglob("*") if path.is_file()}
    with serve_process(tmp_path / "first.log", *arguments, env={"HEADRACE_FAULTS": fault}) as server:
        with pytest.raises((OSError, urllib.error.URLError)):
            for name in (*names, *names, *names):
                infer(server, name)
        eventually(lambda: server.process.poll() is not None)
        assert server.process.returncode == -signal.SIGKILL
    assert {path: path.read_bytes() for path in models.rglob("*") if path.is_file()} == before
    assert all(json.loads((sizes / name).read_text())["memory"] for name in files(sizes) if name.endswith(".json"))
    with serve_process(tmp_path / "second.log", *arguments) as server:
        for name in (*names, *names):
            assert infer(server, name) == 200
        whole = [name for name in files(sizes) if name.endswith(".json")]
        assert len(whole) == 3


def test_killed_while_models_come_and_go(tmp_path: Path) -> None:
    names = tuple("abcdef")
    models = write_models(tmp_path / "models", {name: {"config.pbtxt": CONFIG} for name in names})
    for name in names:
        (models / name / "1" / "weights.bin").write_bytes(name.encode() * 1_000_000)
    arguments = (models, *ON_DEMAND, "--model-sizes-dir", tmp_path / "sizes", "--host-memory-limit", "2500000")
    for turn in range(3):
        with serve_process(tmp_path / f"{turn}.log", *arguments) as server:
            for name in (*names, *names)[: 5 + turn]:
                assert infer(server, name) == 200
            server.process.kill()
            server.process.wait()
    assert files(models) == list(names)
    with serve_process(tmp_path / "last.log", *arguments) as server:
        assert [infer(server, name) for name in names] == [200] * len(names)
