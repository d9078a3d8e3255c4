# SPDX-License-Identifier: Apache-2.0
"""Jobs of Slurm as texts: what is built re-parses to the same values, what Slurm prints is read, and nothing else counts."""

from __future__ import annotations

import json
import os
import socket
import stat
import subprocess
import uuid
from dataclasses import replace
from pathlib import Path

import pytest

pytest.register_assert_rewrite("driver_contract")

from driver_contract import hostile  # noqa: E402

from headrace.core.errors import InvalidArgument  # noqa: E402
from headrace.platforms.contract import Container, LaunchSpec, Mount, PlatformStatus  # noqa: E402
from headrace.platforms.slurm import login_node  # noqa: E402
from headrace.platforms.slurm.batch_script import (  # noqa: E402
    PORT_TAKEN,
    apptainer_image,
    build_batch_job,
    export_lines,
    node_port,
    pyxis_image,
)
from headrace.platforms.slurm.settings import SlurmSettings  # noqa: E402
from headrace.platforms.slurm.status import (  # noqa: E402
    JobRecord,
    job_status,
    parse_checks,
    parse_listing,
    parse_node_address,
    parse_state,
    pending_reason,
    service_status,
)

JOB = "3f0c0a52-5d5c-4a4e-9f5e-0b6a7c1d2e3f"
OTHER = "00000000-0000-4000-8000-000000000001"
RECORDER = """#!/bin/bash
printf '%s\\0' "$@" >"$RECORD.words"
cat >"$RECORD.input"
"""


def ran(tmp_path: Path, spec: LaunchSpec, settings: SlurmSettings) -> tuple[list[str], str]:
    """The words that a script gives to srun, and what it gives it to read, as bash sees them."""
    folder = tmp_path / "a job's folder"
    folder.mkdir()
    created = build_batch_job(spec, settings, str(folder), 0.0)
    subprocess.run(["bash", "-n"], input=created.script.encode(), check=True)
    assert "\r" not in created.script and all(not line.startswith("#SBATCH") for line in created.script.split("\n"))
    (folder / "env").write_text(created.variables)
    srun = tmp_path / "srun"
    srun.write_text(RECORDER)
    srun.chmod(0o700)
    environ = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "RECORD": str(tmp_path / "record")}
    subprocess.run(["bash"], input=created.script.encode(), env=environ, check=True)
    assert not (folder / "env").exists() and (folder / "end").read_text() == "0\n"
    words = (tmp_path / "record.words").read_bytes().decode().split("\0")[:-1]
    return words, (tmp_path / "record.input").read_bytes().decode()


@pytest.mark.parametrize("mode", ["pyxis", "apptainer", "bare"])
def test_a_script_passes_srun_the_same_arguments(tmp_path: Path, mode: str) -> None:
    canary = tmp_path / "canary"
    text = " ".join(hostile(canary)) + "\n#SBATCH --uid=0\r\n"
    settings = SlurmSettings(partition="p", mode=mode, cpus=3, mounts="/extra:/extra:ro" if mode != "bare" else "")
    image = "" if mode == "bare" else "nvcr.io/nvidia/tao/x:1"
    mounts = () if mode == "bare" else (Mount("/models/a b", "/in $(x)"),)
    with socket.socket() as free:
        # Nobody listens there: a script whose port is taken does nothing.
        free.bind(("127.0.0.1", 0))
        box = Container(image, text, free.getsockname()[1], mounts)
        words, given = ran(tmp_path, LaunchSpec(JOB, container=box, environment={"A": text}, gpus=2), settings)
    assert words[-5:-2] == ["/bin/sh", "-c", 'eval "$(cat)" && exec /bin/sh -c "$1" "$0" </dev/null']
    assert words[-2:] == [f"headrace-{JOB}", text]
    assert "--cpus-per-task=3" in words and given == export_lines({"A": text})
    if mode == "pyxis":
        assert "--container-image=nvcr.io#nvidia/tao/x:1" in words and "--no-container-mount-home" in words
        assert "--container-mounts=/models/a b:/in $(x):ro,/extra:/extra:ro" in words
    elif mode == "apptainer":
        at = words.index("apptainer")
        assert words[at : at + 5] == ["apptainer", "exec", "--no-home", "--writable-tmpfs", "--nv"]
        assert words[at + 5 : -5] == [
            *("--bind", "/models/a b:/in $(x):ro", "--bind", "/extra:/extra:ro"),
            "docker://nvcr.io/nvidia/tao/x:1",
        ]
    assert not canary.exists()


def test_variables_are_the_same_in_a_shell_and_never_in_the_script(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    values = {f"V{number}": text for number, text in enumerate(hostile(canary))}
    shown = "import os, json; print(json.dumps({k: v for k, v in os.environ.items() if k[0] == 'V'}))"
    for shell in ("/bin/sh", "bash"):
        text = export_lines(values) + f'python3 -c "{shown}"\n'
        result = subprocess.run(
            [shell, "-s"], input=text.encode(), capture_output=True, check=True, env={"PATH": os.environ["PATH"]}
        )
        assert json.loads(result.stdout) == values
    secret = LaunchSpec(JOB, container=Container("", "true", 20_001), secret_environment={"HF_TOKEN": "hf_very_secret"})
    created = build_batch_job(secret, SlurmSettings(partition="p"), "/f", 0.0)
    assert "hf_very_secret" in created.variables
    assert (
        "hf_very_secret" not in created.script + created.meta + "".join(created.sbatch)
        and "HF_TOKEN" not in created.script
    )
    assert not canary.exists()


def test_the_resources_that_a_job_requests() -> None:
    settings = SlurmSettings(partition="a,b", account="acc", time_limit="4:00:00", memory="8G", cpus=4, qos="q")
    created = build_batch_job(
        LaunchSpec(JOB, container=Container("", "true", 20_001), gpus=2), settings, f"/shared/{JOB}", 0.0
    )
    for word in (
        *(
            f"--job-name={JOB}",
            f"--comment=headrace service {JOB}",
            "--partition=a,b",
            "--account=acc",
            "--time=4:00:00",
        ),
        *("--mem=8G", "--cpus-per-task=4", "--gres=gpu:2", f"--output=/shared/{JOB}/log", "--no-requeue", "--qos=q"),
    ):
        assert word in created.sbatch
    plain = build_batch_job(
        LaunchSpec(JOB, container=Container("", "true", 20_001)), SlurmSettings(partition="a"), "/f", 0.0
    )
    assert not any(word.startswith(("--gres", "--account", "--time")) for word in plain.sbatch)
    assert any(word.startswith("--mem=") for word in plain.sbatch)


def test_a_service_on_several_nodes_is_a_task_on_each(tmp_path: Path) -> None:
    settings = SlurmSettings(partition="p", mode="bare")
    spec = LaunchSpec(JOB, container=Container("", "true", 20_001), gpus=2, nodes=3)
    created = build_batch_job(spec, settings, "/f", 0.0)
    wanted = ("--nodes=3", "--ntasks=3", "--ntasks-per-node=1")
    assert created.sbatch[4:7] == wanted
    assert "--gres=gpu:2" in created.sbatch  # of each node
    tools = tmp_path / "tools"
    tools.mkdir()
    address = "NodeName=n1 Arch=x CPUAlloc=1 NodeAddr=10.0.0.7 NodeHostName=n1"
    for name, text in (
        ("scontrol", f'#!/bin/bash\n[ "$*" = "show node -o n1" ] && echo "{address}"\n'),
        ("srun", '#!/bin/bash\nprintf "%s\\n" "$MASTER_ADDR:$MASTER_PORT" "$@" >"$RECORD"\n'),
    ):
        (tools / name).write_text(text)
        (tools / name).chmod(0o700)
    for node, host in (("n1", "10.0.0.7"), ("n2", "n2")):
        folder = tmp_path / node
        folder.mkdir()
        (folder / "env").write_text("")
        script = build_batch_job(spec, settings, str(folder), 0.0).script
        environ = {
            "PATH": f"{tools}:{os.environ['PATH']}",
            "RECORD": str(tmp_path / "told"),
            "SLURMD_NODENAME": node,
        }
        subprocess.run(["bash"], input=script.encode(), env=environ, check=True)
        lines = (tmp_path / "told").read_text().splitlines()
        assert lines[:4] == [f"{host}:10001", *wanted]
    assert "MASTER_ADDR" not in build_batch_job(replace(spec, nodes=1), settings, "/f", 0.0).script


@pytest.mark.parametrize(
    "box",
    [
        Container("", "", 20_001),
        Container("", "a\0b", 20_001),
        Container("", "true", 80),
        Container("x; touch y", "true", 20_001),
        Container("--privileged", "true", 20_001),
        Container("i", "true", 20_001, (Mount("/a,b", "/c"),)),
        Container("i", "true", 20_001, (Mount("/a", "/c:rw"),)),
        Container("i", "true", 20_001, (Mount("relative", "/c"),)),
        Container("i", "true", 20_001, (Mount("/a\nb", "/c"),)),
        Container("", "true", 20_001, (Mount("/a", "/elsewhere"),)),
        Container("", "x" * 100_001, 20_001),
    ],
)
def test_what_cannot_arrive_is_refused(box: Container) -> None:
    with pytest.raises(InvalidArgument):
        build_batch_job(LaunchSpec(JOB, container=box), SlurmSettings(partition="p"), "/f", 0.0)


def test_images_as_each_runtime_writes_them() -> None:
    assert pyxis_image("nvcr.io/nvidia/tao:1") == "nvcr.io#nvidia/tao:1" == pyxis_image("docker://nvcr.io/nvidia/tao:1")
    assert pyxis_image("nvcr.io#nvidia/tao:1") == "nvcr.io#nvidia/tao:1"
    assert (pyxis_image("ubuntu:22.04"), pyxis_image("library/ubuntu"), pyxis_image("/images/x.sqsh")) == (
        *("ubuntu:22.04", "library/ubuntu", "/images/x.sqsh"),
    )
    assert apptainer_image("nvcr.io#nvidia/tao:1") == "docker://nvcr.io/nvidia/tao:1"
    assert (apptainer_image("/images/x.sif"), apptainer_image("oras://r/x")) == ("/images/x.sif", "oras://r/x")


def test_ports_differ_by_job() -> None:
    ports = {node_port(str(uuid.uuid4())) for _ in range(50)}
    assert len(ports) > 40 and all(20_000 <= port <= 29_999 for port in ports) and node_port(JOB) == node_port(JOB)


def test_a_program_that_was_cut_does_nothing(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    text = login_node.script_text('touch "$1"', (str(canary),))
    for end in range(len(text) - 2):
        subprocess.run(
            ["/bin/sh", "-s"], input=text[:end].encode(), capture_output=True, check=False
        ) if end % 7 == 0 else None
        assert not canary.exists(), end
    subprocess.run(["/bin/sh", "-s"], input=text.encode(), check=True)
    assert canary.exists()


# What Slurm says


@pytest.mark.parametrize(
    ("told", "state"),
    [("CANCELLED+", "CANCELLED"), ("CANCELLED by 0", "CANCELLED"), ("RUNNING", "RUNNING"), ("", ""), (" ", "")],
)
def test_states_are_read_in_all_their_spellings(told: str, state: str) -> None:
    assert parse_state(told) == state


@pytest.mark.parametrize(
    ("state", "phase", "word"),
    [
        *(
            (name, "starting", "Pending")
            for name in ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT")
        ),
        *((name, "running", "Running") for name in ("RUNNING", "SUSPENDED", "STOPPED", "RESIZING", "SIGNALING")),
        *((name, "running", "Terminating") for name in ("COMPLETING", "STAGE_OUT")),
        *(
            (name, "ended", "Failed")
            for name in ("FAILED", "CANCELLED", "TIMEOUT", "OUT_OF_MEMORY", "NODE_FAIL", "BOOT_FAIL")
        ),
        *((name, "ended", "Failed") for name in ("PREEMPTED", "DEADLINE", "REVOKED", "LAUNCH_FAILED")),
        ("COMPLETED", "ended", "Succeeded"),
        ("A_STATE_TO_COME", "running", "Unknown"),
    ],
)
def test_every_state_in_kubernetes_words(state: str, phase: str, word: str) -> None:
    observed = job_status(state, "12", "None", None)
    assert (observed.phase, observed.pod_phase, observed.name) == (phase, word, "12")
    assert observed.reason or word in ("Running", "Succeeded", "Unknown")


def test_reasons_are_sentences_with_slurms_own_term() -> None:
    assert pending_reason("Resources") == "in the queue: no node has enough free GPUs, processors or memory (Resources)"
    assert "down, drained or reserved" in pending_reason("ReqNodeNotAvail, UnavailableNodes:n[1-4]")
    assert "a limit of the account" in pending_reason("QOSMaxGRESPerUser")
    assert pending_reason("SomethingNew") == "in the queue: SomethingNew"
    assert "longer one (SLURM_TIME_HOURS)" in job_status("TIMEOUT", "1", "", None).reason
    assert "taken on its node" in job_status("FAILED", "1", "", PORT_TAKEN).reason
    assert "SIGKILL" in job_status("FAILED", "1", "", 137).reason


LOOKED = f"""\
folder {JOB} 12 - {{"port":20001,"host_port":null,"began":1.5}}
folder {OTHER} - env\x20
folder ../../etc 1 - {{}}
job 7|RUNNING|n1|somebody's|job | of their own|None
job 11|CANCELLED|n1|{JOB}|None
job 12|RUNNING|node7|{JOB}|None
job 10|FAILED|node6|{JOB}|NonZeroExitCode
end {JOB} 3
end nobody 4
"""


def test_a_status_listing_is_parsed() -> None:
    seen = parse_listing(LOOKED)
    assert set(seen) == {JOB, OTHER}
    one = seen[JOB]
    assert (one.folder, one.number, one.has_variables, one.meta["port"], one.end) == (True, "12", False, 20001, 3)
    assert one.row is not None and (one.row.number, one.row.state, one.row.node) == ("12", "RUNNING", "node7")
    assert seen[OTHER].has_variables and seen[OTHER].row is None


def test_what_is_known_decides_how_it_is() -> None:
    assert service_status(JobRecord(), "", 0.0) == PlatformStatus("gone")
    gone = parse_listing(f"job 12|COMPLETED|n|{JOB}|None\n")[JOB]
    assert service_status(gone, "", 0.0) == PlatformStatus("gone"), "stopped, and Slurm still remembers it"
    lost = parse_listing(f"job 12|RUNNING|n|{JOB}|None\n")[JOB]
    assert service_status(lost, "", 0.0) == PlatformStatus("running", "12", "Running"), (
        "its folder is lost, and it runs"
    )
    left = JobRecord(folder=True, number="12", end=3)
    assert service_status(left, "", 0.0) == PlatformStatus(
        "ended", "12", "Failed", 3, "the service has ended with code 3"
    )
    fresh = JobRecord(folder=True, meta={"began": 100.0})
    assert [getattr(service_status(fresh, "", now), "phase", None) for now in (110.0, 1000.0)] == ["starting", "ended"]
    forgotten = JobRecord(folder=True, number="12")
    assert service_status(forgotten, "", 0.0) is None
    status = service_status(forgotten, "CANCELLED by 0|0:15\n", 0.0)
    assert status is not None and (status.pod_phase, status.reason) == ("Failed", "the job was cancelled")
    status = service_status(forgotten, "-", 0.0)
    assert status is not None and status.phase == "ended" and "has forgotten job 12" in status.reason
    assert parse_node_address("NodeName=vm Arch=x NodeAddr=10.0.0.7 NodeHostName=vm", "vm") == "10.0.0.7"
    assert parse_node_address("", "vm") == "vm"


def test_preflight_names_what_is_missing() -> None:
    tools = "".join(f"tool {name}\n" for name in ("sbatch", "squeue", "scancel", "scontrol", "srun"))
    reported = tools + "folder\npartition gpu|up|4:00:00\npartition old|down|1\nsinfo\n"

    def failed(**given: object) -> dict[str, str]:
        checks = parse_checks(reported, SlurmSettings(**given), "/f")
        return {check.name: check.message for check in checks if not check.passed}

    assert failed(partition="gpu", mode="bare") == {}
    assert "SLURM_PARTITION is not set: the cluster has gpu, old" in failed(mode="bare")["partition"]
    assert "there is no cpu" in failed(partition="gpu,cpu", mode="bare")["partition"]
    assert "old is down" in failed(partition="old", mode="bare")["partition"]
    assert "install Pyxis" in failed(partition="gpu")["pyxis"]
    assert "apptainer" in failed(partition="gpu", mode="apptainer")
    assert "srun" in {check.name: check for check in parse_checks("", SlurmSettings(), "/f")}["slurm"].message


def test_settings_of_the_environment() -> None:
    environ = {
        "SLURM_PARTITION": "gpu",
        "SLURM_ACCOUNT": "acc",
        "SLURM_HOSTNAME": "login1, login2",
        "SLURM_USER": "me",
        "SSH_KEY_PATH": "/home/me/key",
        "SLURM_TIME_HOURS": "1.5",
        "SLURM_BASE_RESULTS_DIR": "/lustre/me/",
        "SLURM_CONTAINER_MODE": "apptainer",
    }
    read = SlurmSettings.from_environment(environ, account="other")
    assert (read.partition, read.account, read.hosts, read.user) == ("gpu", "other", ("login1", "login2"), "me")
    assert (read.time_limit, read.folder, read.mode) == ("1:30:00", "/lustre/me/headrace", "apptainer")
    assert SlurmSettings.from_environment({"SLURM_HOST": "one"}).hosts == ("one",)
    assert SlurmSettings.from_environment({}) == SlurmSettings()


@pytest.mark.parametrize(
    "given",
    [
        {"partition": "a b"},
        {"partition": "-x"},
        {"account": "$(id)"},
        {"hosts": ("-oProxyCommand=id",)},
        {"hosts": ("a b",)},
        {"user": "a\nb"},
        {"key_file": "/a b"},
        {"known_hosts": "%d/x"},
        {"folder": "/a/%j"},
        {"folder": "/a/../b"},
        {"folder": "relative"},
        {"folder": "/a\\b"},
        {"time_limit": "soon"},
        {"memory": ""},
        {"memory": "lots"},
        {"mode": "docker"},
        {"cpus": 0},
    ],
)
def test_settings_that_cannot_be_arguments_are_refused(given: dict[str, object]) -> None:
    with pytest.raises(InvalidArgument):
        SlurmSettings(**given)  # type: ignore[arg-type]


def test_the_platforms_script_can_be_run() -> None:
    script = Path(__file__).parents[2] / "scripts" / "platforms" / "slurm.sh"
    assert script.stat().st_mode & stat.S_IXUSR
    subprocess.run(["bash", "-n", script], check=True)
