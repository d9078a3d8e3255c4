# SPDX-License-Identifier: Apache-2.0
"""One lifecycle test for every platform: `headrace service ...` as users type it, on what each
`test_service_lifecycle_<platform>.py` provides.

Three are started at once, listed, asked and read; one is killed behind the launcher's back and reported; all are stopped,
and the platform has the resources that it had before.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from support.ports import launchers_ports
from support.waiting import eventually

ARCH = "tao-dataservices"
HEADRACE = Path(sys.executable).parent / "headrace"
PROGRAM = Path(__file__).parent / "chat_program.py"
SECRET = "wandb-0123456789abcdef"
_PATIENCE_SECONDS = 120.0

Row = dict[str, Any]


class Shell:
    """Somebody's shell: a folder, variables, and a registry of its own."""

    def __init__(self, folder: Path, environ: Mapping[str, str], *, chat: bool, words: Sequence[object] = ()) -> None:
        self.folder = folder
        self._environ = {**os.environ, "WANDB_API_KEY": SECRET, "HOME": str(folder), **environ}
        self._chat = chat
        self._start = ["start", *map(str, words), "--json"]
        self.said: list[str] = []
        """All that was printed: no secret is among it."""

    def __call__(self, *words: object, code: int = 0) -> Any:
        """One command to its end, and the JSON that it prints."""
        return self.read(self.begin(*words), code)

    def begin(self, *words: object) -> subprocess.Popen[str]:
        """A command that is not waited for."""
        argv = [str(HEADRACE), "service", *map(str, words), "--registry", "services.json"]
        return subprocess.Popen(
            argv, cwd=self.folder, env=self._environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def read(self, command: subprocess.Popen[str], code: int = 0) -> Any:
        """What a command printed as JSON; its errors where it was to fail."""
        out, err = command.communicate(timeout=240)
        self.said += [out, err]
        assert command.returncode == code, f"{command.args}: {command.returncode}\n{out}\n{err}"
        return json.loads(out) if code == 0 else err

    def start(self, number: int) -> list[Row]:
        """So many at once."""
        commands = [self.begin(*self._start) for _ in range(number)]
        return [self.read(command) for command in commands]

    def ask(self, rows: Sequence[Row]) -> None:
        """Each of these services answers, and no other: by `request` where it chats, else at the address from `start`."""
        if self._chat:
            requests = [self.request(row["job_id"], "--architectures", "architectures") for row in rows]
            received = [self.read(request)["choices"][0]["message"]["content"] for request in requests]
            assert received == [f"{row['job_id']} heard: it's $(me)" for row in rows]
        for row in [] if self._chat else rows:
            self._infer(row)

    def request(self, job_id: str, *words: str) -> subprocess.Popen[str]:
        """A chat that is begun."""
        return self.begin("request", "--job-id", job_id, "--prompt", "it's $(me)", "--yes", "--json", *words)

    def _infer(self, row: Row) -> None:
        body = {"inputs": {"x": [[-1.0, 2.5]]}}
        request = urllib.request.Request(
            f"{row['host_url']}/api/v1/inference", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=30) as response:
            document = json.load(response)
        assert document["results"]["outputs"] == {"y": [[0.0, 2.5]]}, document

    def has_arrived(self, row: Row) -> bool:
        """Whether the secret variable is there, as the stand-in tells."""
        service = self("status", row["job_id"], "--json")["service"]
        return bool(service["job_id"] == row["job_id"] and (service["token"] if self._chat else True))


def run_lifecycle(
    shell: Shell, *, kill: Callable[[Row], None], resources: Callable[[], set[str]], logged: str
) -> list[Row]:
    """The whole of it. Returns the three as they were started."""
    with launchers_ports():
        return _run_lifecycle(shell, kill, resources, logged)


def _run_lifecycle(
    shell: Shell, kill: Callable[[Row], None], resources: Callable[[], set[str]], logged: str
) -> list[Row]:
    before = resources()
    started = shell.start(3)
    assert all(service["ready"] and service["state"] == "running" for service in started), started
    ids = [service["job_id"] for service in started]
    assert len({service["host_url"] for service in started}) == len(set(ids)) == 3, started
    rows = {row["job_id"]: row for row in shell("list", "--json")}
    assert set(rows) == set(ids) and {row["state"] for row in rows.values()} == {"running"}, rows
    assert [service["host_url"] for service in started] == [rows[job]["host_url"] for job in ids]
    shell.ask(started)
    assert shell.has_arrived(started[0])
    # A platform may show what a service said later than the service's answers.
    eventually(lambda: logged in shell("logs", ids[0], "--json")["log"], within=_PATIENCE_SECONDS)
    kept, killed, _ = started
    kill(killed)
    eventually(lambda: _state(shell, killed["job_id"])["state"] in ("ended", "stale"), within=_PATIENCE_SECONDS)
    row = _state(shell, killed["job_id"])
    assert row["reason"], row
    states = {row["job_id"]: row["state"] for row in shell("list", "--json")}
    assert [states[job] for job in (ids[0], ids[2])] == ["running", "running"]
    shell.ask([kept])
    stopping = [shell.begin("stop", job, "--json") for job in ids]
    assert [shell.read(service) for service in stopping] == [{"job_id": job, "status": "stopped"} for job in ids]
    assert shell("list", "--json") == []
    eventually(lambda: resources() == before, within=_PATIENCE_SECONDS)
    recorded = (shell.folder / "services.json").read_text()
    assert SECRET not in recorded + "".join(shell.said)
    return started


def write_architecture(folder: Path, program: Sequence[str], image: str) -> Path:
    """An architecture of the user's own: the stand-in, in an image of theirs."""
    created = folder / "architectures"
    created.mkdir()
    document = {
        "name": "show",
        "image": {"key": "SHOW", "default": image},
        "model_path": {"means": "folder", "forms": ["path"]},
        "command": {"shape": "job", "program": list(program), "port": "always"},
        "request": {"fields": {"max_tokens": {"type": "int", "default": 16, "least": 1}}},
    }
    (created / "show.json").write_text(json.dumps(document))
    return created


def tiny_model(folder: Path) -> Path:
    """max(x, 0), in ONNX."""
    from onnx import TensorProto, helper

    folder.mkdir()
    tensors = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 2]) for name in "xy"]
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "g", tensors[:1], tensors[1:])
    whole = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    (folder / "model.onnx").write_bytes(whole.SerializeToString())
    return folder


def _state(shell: Shell, job_id: str) -> Row:
    return next(row for row in shell("list", "--json") if row["job_id"] == job_id)
