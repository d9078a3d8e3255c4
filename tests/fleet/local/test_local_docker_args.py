# SPDX-License-Identifier: Apache-2.0
"""A container as words for Docker, and what its engine says of an end. The engine itself: `test_local_docker`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace.core.errors import InvalidArgument
from headrace.fleet.local.container_command import CommandContext, ContainerCommand, ContainerStartError, build_command
from headrace.fleet.local.container_runtime import ContainerSpec, ExitStatus, ResourceLimits, VolumeMount
from headrace.fleet.local.docker_runtime import create_args, exit_status
from headrace.fleet.local.volumes import shared_memory, volume_mounts
from headrace.platforms.docker.containers import ContainerState
from headrace.platforms.docker.settings import DockerSettings


def words(**said: Any) -> tuple[str, dict[str, str]]:
    """In one line, and what goes by the program's own variables."""
    line = said.pop("line", ContainerCommand((), {}, False))
    spec = ContainerSpec("uid", "main", Path("/f"), line, Path("/f"), **{"image": "example/stub:1", **said})
    made, passed = create_args(spec, "name", "fleet", DockerSettings(shm_bytes=5), 5000)
    return " ".join(made), passed


def test_a_container_is_labelled_with_its_owner_and_shares_the_hosts_network() -> None:
    made, _ = words()
    assert made.startswith("create --name name --network host --label headrace.fleet=fleet --label headrace.pod=uid")
    assert made.endswith("--log-opt max-size=5000 --log-opt max-file=2 example/stub:1") and "--shm-size 5" in made


def test_the_command_takes_the_place_of_the_entry_point_and_arguments_follow() -> None:
    assert words(line=ContainerCommand(("python3", "-c", "x", "--port=1"), {}, False, 3))[0].endswith(
        "--entrypoint python3 example/stub:1 -c x --port=1"
    )
    assert words(line=ContainerCommand(("serve", "/models"), {}, True))[0].endswith(
        "max-file=2 example/stub:1 serve /models"
    )


def test_values_are_hidden_from_process_lists_unless_they_would_change_docker_itself() -> None:
    variables = {"TOKEN": "secret\nof two lines", "PATH": "/opt/bin", "DOCKER_HOST": "x", "LD_PRELOAD": "y"}
    made, passed = words(line=ContainerCommand((), variables, False))
    assert passed == {"TOKEN": "secret\nof two lines"} and "--env TOKEN --env PATH=/opt/bin" in made
    assert "secret" not in made and "--env DOCKER_HOST=x --env LD_PRELOAD=y" in made


def test_limits_gpus_and_folders_are_the_engines_own() -> None:
    made, _ = words(
        limits=ResourceLimits(64 << 20, 1.5, 0.25, 30),
        gpus=("1", "3"),
        mounts=[VolumeMount("/mnt/models/a", "/data/a,b", True), VolumeMount("/work/", "/pods/w")],
        shared_memory=7,
        document={"workingDir": "/srv", "securityContext": {"runAsUser": 1000, "runAsGroup": 5}},
    )
    for item in (
        "--memory 67108864 --memory-swap 67108864 --cpus 1.50 --cpu-shares 256 --pids-limit 30",
        '--gpus "device=1,3"',
        '--mount type=bind,"source=/data/a,b",target=/mnt/models/a,readonly',
        "--mount type=bind,source=/pods/w,target=/work --user 1000:5 --workdir /srv",
        "--shm-size 7",
    ):
        assert item in made, made


@pytest.mark.parametrize("image", ["--privileged", "", "a b", "x\0"])
def test_an_invalid_image_name_reaches_no_engine(image: str) -> None:
    with pytest.raises(InvalidArgument, match="is not an image's name"):
        words(image=image)


@pytest.mark.parametrize(
    ("state", "ended"),
    [
        ({"Status": "running", "ExitCode": 0}, None),
        ({"Status": "exited", "ExitCode": 3}, ExitStatus(3)),
        (
            {"Status": "exited", "ExitCode": 137, "OOMKilled": True},
            ExitStatus(137, "OOMKilled", "it used more memory than its limit"),
        ),
        ({"Status": "created", "Error": "no such program"}, ExitStatus(None, message="no such program")),
        ({"Status": "dead", "ExitCode": 1, "Error": "device busy"}, ExitStatus(1, message="device busy")),
    ],
)
def test_how_a_container_ended(state: dict[str, Any], ended: ExitStatus | None) -> None:
    assert exit_status(ContainerState.parse({"State": state})) == ended


def test_a_missing_container_ended_with_an_unknown_code() -> None:
    assert exit_status(None) == ExitStatus(None)


def test_an_image_needs_no_command_and_its_paths_stay() -> None:
    container = {
        "name": "ome-container",
        "image": "vllm/vllm-openai:v1",
        "args": ["--model=/mnt/models/a", "--port=8080"],
    }
    pod = {"spec": {"containers": [container]}}
    line = build_command(CommandContext(pod, "node", ports={8080: 22001}, runs_image=True), container)
    assert line.args == ("--model=/mnt/models/a", "--port=22001") and line.entrypoint_args == 0


def test_volumes_are_open_to_the_users_of_an_image(tmp_path: Path) -> None:
    volumes = [
        {"name": "scratch", "emptyDir": {}},
        {"name": "knobs", "configMap": {"name": "knobs"}},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "2Gi"}},
    ]
    mounts = [
        {"name": "scratch", "mountPath": "/scratch"},
        {"name": "knobs", "mountPath": "/etc/knobs"},
        {"name": "shm", "mountPath": "/dev/shm"},
    ]
    container = {"name": "main", "volumeMounts": mounts}
    pod = {"spec": {"containers": [container], "volumes": volumes}}
    result = volume_mounts(pod, container, tmp_path, lambda *_: {"data": {"a": "1"}}, {}, other_users=True)
    assert [item.mount_path for item in result] == ["/scratch", "/etc/knobs"] and shared_memory(
        pod, container
    ) == 2 << 30
    assert (tmp_path / "volumes" / "scratch").stat().st_mode & 0o777 == 0o777
    assert (tmp_path / "volumes" / "knobs" / "a").stat().st_mode & 0o777 == 0o644


def test_a_key_removed_from_a_configmap_is_not_a_file_after_the_next_start(tmp_path: Path) -> None:
    chosen = {"name": "knobs", "items": [{"key": key, "path": f"deep/{key}"} for key in ("a", "b")]}
    volumes = [{"name": "all", "configMap": {"name": "knobs"}}, {"name": "some", "configMap": chosen}]
    mounts = [{"name": "all", "mountPath": "/etc/all"}, {"name": "some", "mountPath": "/etc/some"}]
    container = {"name": "main", "volumeMounts": mounts}
    pod = {"spec": {"containers": [container], "volumes": volumes}}

    def files(**data: str) -> list[str]:
        volume_mounts(pod, container, tmp_path, lambda *_: {"data": data}, {})
        below = tmp_path / "volumes"
        return sorted(str(path.relative_to(below)) for path in below.rglob("*") if path.is_file())

    assert files(a="1", b="2") == ["all/a", "all/b", "some/deep/a", "some/deep/b"]
    assert files(b="3") == ["all/b", "some/deep/b"]
    assert (tmp_path / "volumes" / "all" / "b").read_text() == "3"


@pytest.mark.parametrize("name", ["../../../elsewhere", "a/b", "..", "", "A"])
def test_a_volume_cannot_leave_its_pod(tmp_path: Path, name: str) -> None:
    container = {"name": "main", "volumeMounts": [{"name": name, "mountPath": "/scratch"}]}
    pod = {"spec": {"containers": [container], "volumes": [{"name": name, "emptyDir": {}}]}}
    with pytest.raises(ContainerStartError, match="lower-case"):
        volume_mounts(pod, container, tmp_path / "pod", lambda *_: None, {})
    assert list(tmp_path.iterdir()) == []
