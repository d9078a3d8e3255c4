# SPDX-License-Identifier: Apache-2.0
"""What the Docker driver says to docker, and how it reads what docker says: without an engine."""

from __future__ import annotations

import csv
import json
import subprocess
import uuid
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as some

from headrace.core.errors import (
    AlreadyExists,
    FailedPrecondition,
    InvalidArgument,
    PermissionDenied,
    ResourceExhausted,
    Unavailable,
)
from headrace.platforms.commands import Completed
from headrace.platforms.contract import Container, LaunchSpec, Mount
from headrace.platforms.docker.cli import (
    engine_error,
    error_line,
    is_missing,
    lost_network,
    parse_version,
    pull_error,
    remote_host,
)
from headrace.platforms.docker.containers import (
    Image,
    checked_container,
    container_status,
    create_args,
    entry_command,
    gpu_args,
    is_tegra,
    is_user_network,
    mount_args,
    published_port,
    secrets_tar,
    with_log_tail,
)
from headrace.platforms.docker.settings import DockerSettings

JOB = str(uuid.UUID(int=7))
BOX = Container(
    "nvcr.io/nvidia/tao/tao-toolkit:7.0.1-cosmos-rl", "umask 0 && serve '$x'", mounts=(Mount("/m", "/models"),)
)
TEXT = some.text(some.characters(exclude_characters="\0", exclude_categories=("Cs",)), max_size=60)


def arguments_of(spec: LaunchSpec, image: str = "", tegra: bool = False, **settings: Any) -> list[str]:
    box = checked_container(spec)
    return list(create_args(spec, box, Image(box.image, image), DockerSettings(**settings), tegra=tegra))


def values(words: list[str], option: str) -> list[str]:
    return [value for name, value in zip(words, words[1:], strict=False) if name == option]


def test_the_arguments_of_a_service() -> None:
    spec = LaunchSpec(JOB, container=BOX, host_port=8085, environment={"A": "b c"}, labels={"org": "x"})
    arguments = arguments_of(spec)
    assert arguments[:3] == ["create", "--name", JOB]
    assert arguments[-4:] == [BOX.image, "/bin/bash", "-c", BOX.command]
    assert values(arguments, "--publish") == ["127.0.0.1:8085:8080"] and values(arguments, "--network") == [
        "tao_default"
    ]
    assert values(arguments, "--label") == [
        "headrace.org=x",
        "tao-toolkit=headrace",
        f"tao-job={JOB}",
        f"headrace.job={JOB}",
    ]
    assert values(arguments, "--env") == ["A=b c"]
    assert values(arguments, "--mount") == ["type=bind,source=/m,target=/models,readonly"]
    assert "--gpus" not in arguments and "--runtime" not in arguments and "--privileged" not in arguments


def test_published_elsewhere_on_a_port_that_the_engine_chooses() -> None:
    spec = LaunchSpec(JOB, container=Container("i", "c", port=9000))
    assert values(arguments_of(spec, address="0.0.0.0"), "--publish") == ["0.0.0.0::9000"]
    assert values(arguments_of(spec, address="::1"), "--publish") == ["[::1]::9000"]


def test_an_image_of_ours_is_entered_by_its_shell() -> None:
    arguments = arguments_of(LaunchSpec(JOB, container=Container("headrace", "c")), "/bin/sh")
    assert arguments[-5:] == ["--entrypoint", "/bin/sh", "headrace", "-c", "c"]
    assert arguments_of(LaunchSpec(JOB, container=Container("i", "c")), shell_path="/bin/sh")[-4:] == [
        "i",
        "/bin/sh",
        "-c",
        "c",
    ]


def test_gpus_by_requests_and_as_on_tegra() -> None:
    spec = LaunchSpec(JOB, container=BOX, gpus=2)
    assert values(arguments_of(spec), "--gpus") == ["2"]
    (chosen,) = values(arguments_of(spec, gpu_ids=("3", "5", "7")), "--gpus")
    assert next(csv.reader([chosen])) == ["device=3,5"]
    arguments = arguments_of(spec, tegra=True, gpu_ids=("0", "1"))
    assert values(arguments, "--runtime") == ["nvidia"] and "--gpus" not in arguments
    assert values(arguments, "--env") == ["NVIDIA_DRIVER_CAPABILITIES=all", "NVIDIA_VISIBLE_DEVICES=0,1"]
    assert "NVIDIA_VISIBLE_DEVICES=all" in arguments_of(spec, tegra=True)
    assert "--gpus" not in arguments_of(spec, gpu_way="none")
    with pytest.raises(ResourceExhausted, match="2 may be given"):
        gpu_args(3, ("0", "1"), tegra=False)


@given(some.text(some.characters(min_codepoint=32, exclude_categories=("Cs",)), min_size=1, max_size=40))
def test_a_mount_reads_back_as_the_same_paths(path: str) -> None:
    _, word = mount_args(Mount("/" + path, "/in" + path))
    assert next(csv.reader([word], strict=True)) == ["type=bind", f"source=/{path}", f"target=/in{path}", "readonly"]


def test_secrets_are_in_the_tar_and_not_in_the_arguments() -> None:
    spec = LaunchSpec(JOB, container=BOX, secret_environment={"HF_TOKEN": "hf_secret"})
    arguments = arguments_of(spec)
    assert "hf_secret" not in str(arguments) and "HF_TOKEN" not in str(arguments)
    assert arguments[-1].endswith(BOX.command) and arguments[-1] != BOX.command
    assert "key" not in repr(DockerSettings(registry_key="key-key")).replace("registry_key", "")


def test_a_shell_takes_secrets_and_removes_them(tmp_path: Path) -> None:
    values = {"A": 'it\'s "x" $(touch canary) `id`', "B": "two\nlines\r\n", "C": "", "D": "größe -e \\n"}
    show = "python3 -c 'import json, os; print(json.dumps(dict(os.environ)))'"
    line = entry_command(show, secret=True).replace("/headrace-secrets", str(tmp_path / "headrace-secrets"))
    for shell in ("bash", "sh"):
        subprocess.run(["tar", "-x"], input=secrets_tar(values), check=True, cwd=tmp_path)
        result = subprocess.run([shell, "-c", line], check=True, capture_output=True, cwd=tmp_path)
        seen = json.loads(result.stdout)
        assert {name: seen[name] for name in values} == values
        assert [path.name for path in tmp_path.rglob("*")] == ["headrace-secrets"]


@given(some.dictionaries(some.from_regex(r"[A-Z_][A-Z0-9_]{0,8}", fullmatch=True), TEXT, max_size=4), TEXT)
def test_texts_are_separate_arguments(environment: dict[str, str], command: str) -> None:
    arguments = arguments_of(LaunchSpec(JOB, container=Container("image", command), environment=environment))
    assert arguments[-1] == command
    assert values(arguments[: arguments.index("image")], "--env") == [
        f"{name}={value}" for name, value in environment.items()
    ]


@pytest.mark.parametrize("image", ["", "-v", "--privileged", "a b", "$(id)", "a;b", "a\nb", "é", "/x", "a" * 600])
def test_invalid_image_names_are_refused(image: str) -> None:
    with pytest.raises(InvalidArgument):
        checked_container(LaunchSpec(JOB, container=Container(image, "c")))


def test_refused_before_anything_runs() -> None:
    for spec in (
        LaunchSpec("x", container=BOX),
        LaunchSpec(JOB),
        LaunchSpec(JOB, container=BOX, environment={"A B": "x"}),
        LaunchSpec(JOB, container=BOX, labels={"a": "\0"}),
        LaunchSpec(JOB, container=Container("i", "a\0b")),
        LaunchSpec(JOB, container=Container("i", "c", mounts=(Mount("relative", "/x"),))),
        LaunchSpec(JOB, container=Container("i", "c", mounts=(Mount("/a\nb", "/x"),))),
    ):
        with pytest.raises(InvalidArgument):
            checked_container(spec)
    for name in ("", "-x", "a b", "a/b"):
        with pytest.raises(InvalidArgument, match="DOCKER_NETWORK"):
            is_user_network(name)
    assert is_user_network("tao_default") and not is_user_network("host")


def test_settings_from_variables() -> None:
    environ = {"DOCKER_HOST": "ssh://u@m", "DOCKER_NETWORK": "n", "NGC_KEY": "k", "DOCKER_USERNAME": "", "OTHER": "x"}
    settings = DockerSettings.from_environment(environ, address="0.0.0.0", network="given")
    assert (settings.host, settings.network, settings.registry_key) == ("ssh://u@m", "given", "k")
    with pytest.raises(InvalidArgument, match="auto, devices, tegra, none"):
        DockerSettings.from_environment({}, gpu_way="magic")
    assert settings.registry_user == "$oauthtoken" and DockerSettings.from_environment({}) == DockerSettings()


def test_machines_and_versions() -> None:
    assert remote_host("ssh://me@gpu7:2222") == "gpu7" and remote_host("tcp://10.0.0.1:2376") == "10.0.0.1"
    assert remote_host("unix:///x") == remote_host("") == remote_host("tcp://127.0.0.1:1") == ""
    assert parse_version('{"Client":{"Version":"28.2"},"Server":{"Version":"20.10.24+dfsg1"}}') == (20, 10, 24)
    assert (
        parse_version('{"Server":{"Version":"19.3"}}') < (20, 10) <= parse_version('{"Server":{"Version":"29.0.1-rc"}}')
    )
    assert parse_version('{"Client":{}}') == parse_version("nonsense") == (0,)


def state(**more: Any) -> dict[str, Any]:
    return {"Name": f"/{JOB}", "State": more}


@pytest.mark.parametrize(
    ("shown", "phase", "word", "code", "reason"),
    [
        (state(Status="created", ExitCode=0), "starting", "Pending", None, ""),
        (state(Status="created", ExitCode=127, Error="exec: no such file"), "ended", "Failed", 127, "no such file"),
        (state(Status="restarting"), "starting", "Pending", None, ""),
        (state(Status="running"), "running", "Running", None, ""),
        (state(Status="paused"), "running", "Running", None, "paused"),
        (state(Status="removing"), "ended", "Terminating", None, "removed"),
        (state(Status="exited", ExitCode=0), "ended", "Succeeded", 0, "code 0"),
        (state(Status="exited", ExitCode=3), "ended", "Failed", 3, "code 3"),
        (state(Status="exited", ExitCode=137), "ended", "Failed", 137, "SIGKILL"),
        (state(Status="exited", ExitCode=137, OOMKilled=True), "ended", "Failed", 137, "memory"),
        (state(Status="dead", ExitCode=1), "ended", "Failed", 1, "remove"),
        (state(Status="new word"), "ended", "Unknown", None, "new word"),
    ],
)
def test_states(shown: dict[str, Any], phase: str, word: str, code: int | None, reason: str) -> None:
    seen = container_status(shown)
    assert (seen.phase, seen.name, seen.pod_phase, seen.exit_code) == (phase, JOB, word, code)
    assert reason in seen.reason and bool(reason) == bool(seen.reason)


def test_last_log_lines_and_ports() -> None:
    failed = container_status(state(Status="exited", ExitCode=3))
    assert with_log_tail(failed, ["a", "", "b"]).reason.endswith("the log ends with: a | b")
    assert with_log_tail(failed, []) == failed
    ports = {"8080/tcp": [{"HostIp": "127.0.0.1", "HostPort": "8085"}], "1/tcp": None}
    assert published_port({"NetworkSettings": {"Ports": ports}}) == 8085
    assert published_port({"NetworkSettings": {"Ports": {}}}) is published_port({}) is None
    assert is_tegra({"KernelVersion": "5.10.104-tegra", "Runtimes": {"nvidia": {}}})
    assert not is_tegra({"KernelVersion": "6.1.0", "Runtimes": {"nvidia": {}}}) and not is_tegra({})


DAEMON = "Error response from daemon: "


@pytest.mark.parametrize(
    ("err", "kind", "told"),
    [
        ("Cannot connect to the Docker daemon at unix:///x. Is the docker daemon running?", Unavailable, "DOCKER_HOST"),
        (
            "Got permission denied while trying to connect to the Docker daemon socket at unix:///x: Get ...",
            PermissionDenied,
            "group docker",
        ),
        (DAEMON + 'Conflict. The container name "/x" is already in use by container "y".', AlreadyExists, "before"),
        (
            DAEMON + "driver failed programming external connectivity on endpoint x: Bind for 127.0.0.1:1 failed: "
            "port is already allocated\nError: failed to start containers: x",
            ResourceExhausted,
            "port",
        ),
        (DAEMON + "... listen tcp4 127.0.0.1:1: bind: address already in use", ResourceExhausted, "port"),
        (
            DAEMON + 'could not select device driver "" with capabilities: [[gpu]]\nError: failed to start',
            FailedPrecondition,
            "NVIDIA container toolkit",
        ),
        (DAEMON + "Unknown runtime specified nvidia", FailedPrecondition, "runtime nvidia"),
        (DAEMON + "write /x: no space left on device", ResourceExhausted, "disk"),
        (DAEMON + "something new\nError: failed to start containers: x", FailedPrecondition, "something new"),
    ],
)
def test_complaints(err: str, kind: type[Exception], told: str) -> None:
    error = engine_error(Completed(1, "", err), "it cannot be started")
    assert type(error) is kind and told in error.message
    assert "failed to start containers" not in error.message


def test_what_is_missing() -> None:
    for err in ("Error: No such container: x", "Error: No such object: x", "Error: No such network: x"):
        assert is_missing(Completed(1, "", err)) and not is_missing(Completed(0, "", err))
    assert lost_network(Completed(1, "", DAEMON + "network tao_default not found"))
    assert lost_network(Completed(1, "", DAEMON + "network tao_default is ambiguous (2 matches found on name)"))
    assert error_line(Completed(1, "", "")) == "code 1, without a message"


@pytest.mark.parametrize(
    ("image", "said", "keyed", "kind", "told"),
    [
        ("nvcr.io/a/b:1", "unauthorized: authentication required", False, FailedPrecondition, "set NGC_KEY"),
        ("nvcr.io/a/b:1", "denied: requested access", True, FailedPrecondition, "NGC_KEY, used as $oauthtoken"),
        ("ghcr.io/a/b:1", "denied: requested access", True, FailedPrecondition, "docker login ghcr.io"),
        (
            "a/b:1",
            "pull access denied for a/b, repository does not exist or may require 'docker login'",
            False,
            FailedPrecondition,
            "docker login docker.io",
        ),
        ("nvcr.io/a/b:1", "manifest for nvcr.io/a/b:1 not found: manifest unknown", True, FailedPrecondition, "tag"),
        ("x", 'Get "https://registry-1.docker.io/v2/": dial tcp: lookup: no such host', False, Unavailable, "reached"),
        ("x", "write: no space left on device", False, ResourceExhausted, "disk"),
    ],
)
def test_images_that_do_not_arrive(image: str, said: str, keyed: bool, kind: type[Exception], told: str) -> None:
    error = pull_error([DAEMON + said], image, "nvcr.io", keyed=keyed, user="$oauthtoken")
    assert type(error) is kind and told in error.message and image in error.message
