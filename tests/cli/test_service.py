# SPDX-License-Identifier: Apache-2.0
"""`headrace service` with controlled processes, with and without a terminal."""

from __future__ import annotations

import base64
import json
import logging
import os
import re
import signal
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from service_programs import make_model
from typer.testing import CliRunner

from headrace.cli import service_view
from headrace.cli.main import app
from headrace.platforms import catalogue, launch_plan
from headrace.platforms.registry import RUNNING, Entry, Registry
from support.ports import launchers_ports
from support.programs import run

PROGRAMS = str(Path(__file__).parent.parent / "platforms")
ARCH = "tao-dataservices"
HI = '{"messages": [{"role": "user", "content": "hi"}]}'
UUID = r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"


class Shell:
    """Somebody with a registry of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.registry = folder / "registry.json"

    def run(self, *words: object, code: int = 0, typed: str | None = None) -> Any:
        result = CliRunner().invoke(app, ["service", *map(str, words), "--registry", str(self.registry)], input=typed)
        assert result.exit_code == code, result.output
        return result

    def json(self, *words: object) -> Any:
        return json.loads(self.run(*words, "--json").stdout)

    def start(self, behaviour: str = "ready", *words: object, arch: str = ARCH) -> Any:
        model = make_model(self.folder / behaviour.partition(":")[0], behaviour)
        return self.json("start", "--arch", arch, "--model-path", model, *words)

    def stop_all(self) -> None:
        for job_id in Registry(self.registry).entries():
            self.run("stop", job_id)


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shell]:
    monkeypatch.setattr(launch_plan, "TARGET", "service_programs:serve")
    monkeypatch.setenv("PYTHONPATH", PROGRAMS)
    monkeypatch.setenv("COLUMNS", "250")
    handlers = list(logging.getLogger().handlers)
    with launchers_ports():
        yield Shell(tmp_path)
    logging.getLogger().handlers[:] = handlers
    left = [
        process.pid for process in psutil.process_iter(["cmdline"]) if str(tmp_path) in str(process.info["cmdline"])
    ]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert left == []


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_view, "is_interactive", lambda: True)


def test_three_services_from_start_to_stop(shell: Shell) -> None:
    started = [shell.start() for _ in range(3)]
    assert len({service["host_port"] for service in started}) == 3 and all(service["ready"] for service in started)
    listed = shell.json("list")
    assert [(row["job_id"], row["state"], row["latest"]) for row in listed] == [
        (service["job_id"], "running", service is started[-1]) for service in started
    ]
    table = shell.run("list").stdout
    assert table.splitlines()[0].split()[:4] == ["JOB", "ARCH", "PLATFORM", "STATE"]
    assert f"{started[-1]['job_id']} *" in table
    job = started[1]["job_id"]
    reported = shell.json("status", job)
    assert (reported["state"], reported["platform_status"], reported["service"]["status"]) == (
        "running",
        "Running",
        "healthy",
    )
    assert "reported by the service" in shell.run("status", job).stdout
    assert "started with" in shell.run("logs", job, "--tail", 5).stdout
    assert shell.json("logs", job)["job_id"] == job
    os.kill(reported["handle"]["pid"], signal.SIGKILL)
    psutil.wait_procs(
        [psutil.Process(reported["handle"]["pid"])] if psutil.pid_exists(reported["handle"]["pid"]) else [], 5
    )
    assert shell.json("list")[1]["state"] == "ended"
    assert "started with" in shell.run("logs", "-f", job).stdout
    assert f"{job}: removed (ended)" in shell.run("prune").stdout
    assert "nothing to remove" in shell.run("prune").stdout and shell.json("prune") == []
    for item in (started[0], started[2]):
        assert f"{item['job_id']}: stopped" in shell.run("stop", item["job_id"]).stdout
    assert shell.json("list") == []


def test_start_prints_the_job_its_architecture_and_its_url(shell: Shell) -> None:
    model = make_model(shell.folder / "m")
    stdout = shell.run("start", "--arch", ARCH, "--model-path", model, "--no-wait").stdout
    assert re.search(
        rf"Job ID : {UUID}\n  Arch   : {ARCH}\n  URL    : http://localhost:8\d+/v1/chat/completions", stdout
    )
    assert "headrace service status" in stdout
    shell.run("status")
    shell.run("stop", "--yes")
    stdout = shell.run("start", "--arch", ARCH, "--model-path", model, "--no-wait", "--num-gpus", "0").stdout
    assert f"  Arch   : {ARCH}\n  Device : CPU (0 GPUs)\n  URL    : " in stdout
    shell.run("stop", "--yes")


def test_stopping_the_latest_is_confirmed(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "nothing to stop" in shell.run("stop", code=1).output
    first, latest = shell.start(), shell.start()
    refused = shell.run("stop", code=2).output
    assert latest["job_id"] in refused and "--yes" in refused
    with monkeypatch.context() as patch:
        patch.setattr(service_view, "is_interactive", lambda: True)
        assert "the latest service?" in shell.run("stop", code=1, typed="n\n").output
        assert len(shell.json("list")) == 2
        assert f"{latest['job_id']}: stopped" in shell.run("stop", typed="y\n").output
    assert shell.json("stop", "--yes") == {"job_id": first["job_id"], "status": "stopped"}


def test_a_service_that_exits_at_start_shows_its_last_lines(shell: Shell) -> None:
    model = make_model(shell.folder / "m", "dies")
    stderr = shell.run("start", "--arch", ARCH, "--model-path", model, code=4).stderr
    assert "code 7" in stderr and "first reason\n  last reason: no weights" in stderr
    model = make_model(shell.folder / "m", "broken")
    assert "the weights are torn" in shell.run("start", "--arch", ARCH, "--model-path", model, code=4).stderr
    assert shell.json("list") == []


def test_one_that_is_slow_runs_on(shell: Shell) -> None:
    model = make_model(shell.folder / "m", "loading")
    stderr = shell.run("start", "--arch", ARCH, "--model-path", model, "--timeout", 0.1, code=3).stderr
    assert "half of it is loaded" in stderr
    job = shell.json("list")[0]["job_id"]
    assert "not ready after 0.1 s" in shell.run("request", "--body", HI, "--yes", "--ready-timeout", 0.1, code=3).stderr
    assert "still loading its model" in shell.run("request", "--body", HI, "--yes", "--no-wait", code=3).stderr
    make_model(shell.folder / "m", "broken")
    assert "torn" in shell.run("request", "--body", HI, "--yes", "--no-wait", code=4).stderr
    shell.run("stop", job)


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["start", "--arch", ARCH, "--model-path", "s3://b/m"], 2, "no cloud-storage dependency"),
        (["start", "--arch", "resnet", "--model-path", "/"], 2, "use one of cosmos-predict2.5, cosmos-rl"),
        (["start", "--arch", ARCH, "--model-path", "/", "--platform", "vm"], 2, "use one of process, local-docker"),
        (["start", "--arch", ARCH, "--model-path", "/nowhere"], 1, "there is no model at '/nowhere'"),
        (["start", "--arch", ARCH, "--model-path", "/", "--num-gpus", "-1"], 2, "not -1"),
        (["start", "--arch", ARCH, "--model-path", "/", "--option", "x"], 2, "--option NAME=VALUE"),
        (["start", "--arch", ARCH, "--model-path", "/", "--option", "idle_timeout_minutes=x"], 2, "is not a valid int"),
        (["start", "--arch", ARCH, "--model-path", "/", "--partition", "gpu"], 2, "no setting 'partition'"),
        (["start", "--arch", ARCH, "--model-path", "/m", "--platform", "slurm", "--mount", "/no"], 1, "cannot be mounted"),
        (["start", "--arch", ARCH], 2, "--model-path"),
        (["status", "no-such-job"], 1, "no service has the job id 'no-such-job'"),
        (["logs", str(uuid.UUID(int=1))], 1, "headrace service list"),
        (["stop", "$(touch CANARY)"], 1, "no service has the job id"),
        (["status"], 1, "start one first"),
        (["request", "--body", HI, "--yes"], 1, "no service is running: start one first"),
        (["request", "--body", HI, "--arch", "cosmos-rl", "--yes"], 1, "no service for 'cosmos-rl' is running"),
        (["request", "--body", HI, "--job-id", "x", "--yes"], 1, "no service has the job id 'x'"),
        (["request", "--yes"], 2, "the request is missing"),
        (["request", "--body", "{", "--yes"], 2, "is not JSON"),
        (["request", "--body", "[1]", "--yes"], 2, "is not a JSON object"),
        (["request", "--body", "@/no/such/file", "--yes"], 2, "No such file"),
        (["preflight", "--platform", "vm"], 2, "use one of process"),
    ],
)  # fmt: skip
def test_invalid_input_is_reported_in_a_sentence(shell: Shell, words: list[str], code: int, said: str) -> None:
    output = " ".join(shell.run(*words, code=code).output.split())
    assert said in output
    assert "Traceback" not in output and not Path("CANARY").exists()


def test_preflight_shows_set_and_unset_and_no_value(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_very_secret_thing")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    stdout = shell.run("preflight", "--platform", "process").stdout
    assert re.search(r"HF_TOKEN +SET\n", stdout) and re.search(r"WANDB_API_KEY +UNSET\n", stdout)
    reported = shell.json("preflight")
    assert reported["passed"] and reported["variables"]["HF_TOKEN"] == "SET"
    assert "very_secret" not in stdout + json.dumps(reported)
    shell.folder.joinpath("f").touch()
    failed = shell.run("preflight", "--state-dir", shell.folder / "f", code=1).stdout
    assert "missing" in failed and "is not writable" in failed


def test_a_request_takes_the_defaults_only_if_it_may(shell: Shell) -> None:
    shell.start()
    stderr = shell.run("request", "--body", HI, code=2).stderr
    assert "--yes" in stderr and "max_tokens (whole number" in stderr and "0.7" in stderr
    sent = json.loads(shell.run("request", "--body", HI, "--yes").stdout)
    assert (sent["max_tokens"], sent["top_p"], sent["temperature"]) == (1024, 0.8, 0.7)
    every = ["--max-tokens", "9", "--top-p", "0.5", "--temperature", "1.50", "--param", 'stop=["x"]']
    sent = json.loads(shell.run("request", "--body", HI, *every).stdout)
    assert (sent["max_tokens"], sent["top_p"], sent["temperature"], sent["stop"]) == (9, 0.5, 1.5, ["x"])
    assert "max_tokens is a" in shell.run("request", "--body", HI, "--max-tokens", "many", "--yes", code=2).stderr
    file = shell.folder / "body.json"
    file.write_text(HI)
    whole = shell.json("request", "--body", f"@{file}", "--yes")
    assert json.loads(whole["choices"][0]["message"]["content"])["messages"] == json.loads(HI)["messages"]
    result = shell.run("request", "--body", "-", "--yes", typed=HI)
    assert re.search(rf"sending to job_id={UUID} arch={ARCH} url=http", result.stderr)
    assert shell.run("request", "--prompt", "x", "--yes", "--stream").stdout == "one two\n"
    shell.stop_all()


@pytest.mark.usefixtures("terminal")
def test_on_a_terminal_each_parameter_is_asked_for_and_may_be_skipped(shell: Shell) -> None:
    shell.start()
    result = shell.run("request", "--prompt", "hi", "--temperature", "0.1", typed="many\n12\n\n")
    assert re.search(r"max_tokens \(whole number.*\) \[1024\]:.*is not", result.stderr, re.DOTALL)
    assert "top_p (number" in result.stderr and "temperature" not in result.stderr
    sent = json.loads(result.stdout.splitlines()[-1])
    assert (sent["max_tokens"], sent["top_p"], sent["temperature"]) == (12, 0.8, 0.1)
    shell.stop_all()


def test_of_several_services_none_is_chosen_silently(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = shell.start(), shell.start()
    for words in ([], ["--arch", ARCH]):
        stderr = shell.run("request", "--body", HI, "--yes", *words, code=2).stderr
        assert first["job_id"] in stderr and second["job_id"] in stderr and "--job-id" in stderr
    result = shell.run("request", "--body", HI, "--yes", "--job-id", first["job_id"])
    assert f"job_id={first['job_id']}" in result.stderr
    assert "give one of" in shell.run("status", code=2).stderr
    monkeypatch.setattr(service_view, "is_interactive", lambda: True)
    result = shell.run("request", "--body", HI, "--yes", typed="7\n2\n")
    assert "write a number from 1 to 2" in result.stderr and f"job_id={second['job_id']}" in result.stderr
    os.kill(first["handle"]["pid"], signal.SIGKILL)
    psutil.wait_procs([psutil.Process(first["handle"]["pid"])] if psutil.pid_exists(first["handle"]["pid"]) else [], 5)
    assert f"job_id={second['job_id']}" in shell.run("request", "--body", HI, "--yes").stderr
    stderr = shell.run("request", "--body", HI, "--yes", "--job-id", first["job_id"], code=1).stderr
    assert "is ended" in stderr and "prune" in stderr
    shell.stop_all()


def test_a_request_for_another_architecture_is_held_back(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    shell.start()
    body = ["--body", HI.replace("]", '], "guidance": 7'), "--yes"]
    stderr = shell.run("request", *body, code=2).stderr
    assert "guidance: fields of cosmos-predict2.5, and this service runs tao-dataservices" in stderr
    assert json.loads(shell.run("request", *body, "--force").stdout)["guidance"] == 7
    with monkeypatch.context() as patch:
        patch.setattr(service_view, "is_interactive", lambda: True)
        shell.run("request", *body, code=1, typed="n\n")
        shell.run("request", *body, typed="y\n")
    shell.stop_all()
    shell.start(arch="cosmos-rl")
    assert "only requests with an image or a video" in shell.run("request", "--prompt", "x", "--yes", code=2).stderr
    picture = shell.folder / "it's; $(touch CANARY).png"
    picture.write_bytes(b"not really a picture")
    sent = json.loads(shell.run("request", "--prompt", "x", "--image", picture, "--yes").stdout)
    url = sent["messages"][0]["content"][0]["image_url"]["url"]
    assert url == "data:image/png;base64," + base64.b64encode(b"not really a picture").decode()
    shell.stop_all()


def test_a_video_is_saved_to_a_file_and_secrets_are_not_saved(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    video = b"\0\1video" * 100
    shell.start("film:data:video/mp4;base64," + base64.b64encode(video).decode())
    target = shell.folder / "film.mp4"
    result = shell.run("request", "--prompt", "x", "--yes", "--output", target)
    assert target.read_bytes() == video and result.stdout == ""
    assert "No such file" in shell.run("request", "--prompt", "x", "--yes", "-o", "/no/such/f", code=2).stderr
    monkeypatch.setenv("HF_TOKEN", "hf_0123456789")
    stderr = shell.run("request", "--prompt", "my key is hf_0123456789", "--yes", code=2).stderr
    assert "HF_TOKEN" in stderr and "hf_0123456789" not in stderr
    shell.stop_all()


def test_records_of_other_tools_are_shown_and_kept(shell: Shell) -> None:
    job = str(uuid.uuid4())
    Registry(shell.registry).put(Entry(job, "lunar", "x\x1b[31m", "http://localhost:1", "2020-01-01T00:00:00", RUNNING))
    [row] = shell.json("list")
    assert row["state"] == "unknown" and "unknown platform" in row["reason"]
    assert "\x1b[31m" not in shell.run("list").stdout
    assert shell.json("prune") == [] and len(shell.json("list")) == 1
    sent = shell.run("request", "--body", HI, "--no-wait", code=1).stderr
    assert "arch=x" in sent and "does not answer" in sent and "\x1b[31m" not in sent
    assert "unknown platform" in shell.run("stop", job, code=2).stderr
    assert "Removed the entry" in shell.run("stop", job, "--forget").stderr and shell.json("list") == []


@pytest.mark.parametrize("verb", ["start", "list", "status", "logs", "request", "stop", "prune", "preflight"])
def test_every_verb_has_examples_json_and_a_registry(shell: Shell, verb: str) -> None:
    output = CliRunner().invoke(app, ["service", verb, "--help"], env={"COLUMNS": "200", "TERM": "dumb"}).output
    assert f"headrace service {verb}" in output.partition("Example")[2]
    assert "--json" in output and "--registry" in output


def test_an_unknown_architecture_is_answered_with_the_known_ones_as_the_help_lists_them(tmp_path: Path) -> None:
    known = sorted(catalogue.load(None))
    done = run("service", "start", "--arch", "cosmos", "--model-path", "/m", "--registry", tmp_path / "r.json")
    assert done.returncode == 2 and f"use one of {', '.join(known)}, or add a folder" in done.stderr
    assert "did you mean cosmos-rl?" in done.stderr
    page = " ".join(run("service", "start", "--help", env={"COLUMNS": "300"}).stdout.split())
    assert f"{', '.join(known)}, or one of --architectures" in page
