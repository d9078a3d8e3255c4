# SPDX-License-Identifier: Apache-2.0
"""What a service is told: TAO's words for each architecture, and every text as it was given or refused."""

from __future__ import annotations

import ast
import json
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import typer.main
from hypothesis import assume, given
from hypothesis import strategies as st

from headrace.cli.main import app
from headrace.core.errors import InvalidArgument
from headrace.platforms.catalogue import Architecture, load
from headrace.platforms.contract import PORT
from headrace.platforms.payloads import (
    BACKENDS,
    Payload,
    check_model_path,
    check_platform,
    env_json,
    environment,
    inner_command,
    is_secret,
    job_json,
    program_args,
)

JOB = "0f9b1c2e-6a4d-4f3b-8a57-3c1d2e4f5a6b"
CATALOGUE = load()
COSMOS_RL, PREDICT, DATA = (CATALOGUE[name] for name in ("cosmos-rl", "cosmos-predict2.5", "tao-dataservices"))
JOB_WORDS = (
    """'{"job_id":"%s","specs":{"model_path":"/models/m"},"neural_network_name":"%s"}' --docker_env_vars """
    """'{"TAO_EXECUTION_BACKEND":"local-docker","TAO_API_JOB_ID":"%s","CLOUD_BASED":"False"}'"""
)

paths = st.text(st.characters(exclude_categories=("Cc", "Cs", "Zl", "Zp")), max_size=60).map(lambda text: "/" + text)
values = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=60)


def _payload(arch: Architecture = COSMOS_RL, path: str = "/models/m", **more: object) -> Payload:
    return replace(Payload(JOB, arch, path, "local-docker"), **more)  # type: ignore[arg-type]


def test_the_line_of_each_architecture() -> None:
    assert inner_command(_payload()) == "umask 0 && cosmos-rl-inference-microservice --job " + JOB_WORDS % (
        JOB,
        "cosmos-rl",
        JOB,
    )
    assert inner_command(_payload(DATA)) == (
        "umask 0 && python -m nvidia_tao_core.microservices.handlers.huggingface_inference_microservice_server --job "
        + JOB_WORDS % (JOB, "tao-dataservices", JOB)
        + " --port 8080"
    )
    predict = "umask 0 && cosmos_predict inference_microservice start "
    out = " --output-dir /tmp/cosmos-predict2.5-output --port 8080"
    assert inner_command(_payload(PREDICT)) == predict + "--checkpoint-path /models/m" + out
    hub = _payload(PREDICT, "hf_model://nvidia/Cosmos", model_key="base-2b")
    assert inner_command(hub) == predict + "--model base-2b" + out


def test_our_own_program_takes_the_place_of_the_shell() -> None:
    for arch in (COSMOS_RL, PREDICT, DATA):
        assert inner_command(_payload(arch), own_image=True).startswith(
            "umask 0 && exec headrace microservice start --"
        )


def test_another_port_is_reported() -> None:
    for arch in (COSMOS_RL, PREDICT, DATA):
        assert shlex.split(inner_command(_payload(arch), 8091))[-2:] == ["--port", "8091"]
        assert program_args(_payload(arch), PORT)[-1] == PORT
    with pytest.raises(InvalidArgument, match="not a port"):
        inner_command(_payload(), 70_000)


def test_a_key_is_never_derived_from_a_name() -> None:
    with pytest.raises(InvalidArgument, match="base-2b, base-14b, auto-multiview"):
        inner_command(_payload(PREDICT, "hf_model://nvidia/Cosmos-Predict2.5-2B"))
    with pytest.raises(InvalidArgument, match="model key"):
        inner_command(_payload(PREDICT, "hf_model://a/b", model_key="--port"))


def test_the_command_line_is_the_same_on_all_platforms_except_the_backend() -> None:
    for platform, backend in BACKENDS.items():
        arguments = shlex.split(inner_command(_payload(platform=platform)))
        assert json.loads(arguments[-1])["TAO_EXECUTION_BACKEND"] == backend
        assert arguments[:-1] == shlex.split(inner_command(_payload()))[:-1]
    assert BACKENDS == {
        "process": "local-process",
        "local-docker": "local-docker",
        "brev": "local-docker",
        "lepton": "lepton",
        "slurm": "slurm",
        "kubernetes": "local-k8s",
    }
    with pytest.raises(InvalidArgument, match="known: process, local-docker"):
        check_platform("aws; rm")


@given(paths, st.dictionaries(st.sampled_from(["WANDB_PROJECT", "WANDB_ENTITY", "TAO_LOG_LEVEL"]), values))
def test_what_was_given_is_read_back_from_the_line(path: str, variables: dict[str, str]) -> None:
    # Values that look like keys are refused, and that is another test's.
    assume(not any(is_secret(name, value) for name, value in variables.items()))
    payload = _payload(path=path, variables=variables)
    line = inner_command(payload, 8085)
    assert "\n" not in line
    arguments = shlex.split(line)
    assert arguments[:4] == ["umask", "0", "&&", "cosmos-rl-inference-microservice"]
    assert arguments[4::2] == ["--job", "--docker_env_vars", "--port"]
    # Public servers read the one or the other.
    for read in (json.loads, ast.literal_eval):
        assert read(arguments[5])["specs"] == {"model_path": path}
        reported = read(arguments[7])
        assert {name: reported[name] for name in variables} == variables


@given(paths)
def test_a_path_is_read_back_from_flags(path: str) -> None:
    arguments = shlex.split(inner_command(_payload(PREDICT, path)))
    assert arguments[arguments.index("--checkpoint-path") + 1] == path


@pytest.mark.parametrize("platform", ["local-docker", "slurm"])
def test_a_real_shell_passes_hostile_texts_on(tmp_path: Path, platform: str) -> None:
    canary = tmp_path / "canary"
    show = "import sys, json; print(json.dumps(sys.argv[1:]))"
    arch = replace(COSMOS_RL, program=(sys.executable, "-c", show))
    for text in (
        "'",
        '"',
        "\\",
        f"$(touch {canary})",
        f"; touch {canary} #",
        f"`touch {canary}`",
        "$HOME",
        "* ? [a]",
        "é😀",
    ):
        path = f"/models/{text}"
        payload = _payload(arch, path, platform=platform, variables={"WANDB_PROJECT": f"a\n{text}\n"})
        done = subprocess.run(
            ["/bin/sh", "-c", inner_command(payload, 9000)], capture_output=True, check=True, cwd=tmp_path
        )
        words = json.loads(done.stdout)
        assert json.loads(words[1])["specs"]["model_path"] == path
        assert json.loads(words[3])["WANDB_PROJECT"] == f"a\n{text}\n"
        assert words[4:] == ["--port", "9000"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("arch", [COSMOS_RL, PREDICT, DATA], ids=lambda arch: arch.name)
@pytest.mark.parametrize("path", ["/models/m", "hf_model://a/b"])
def test_our_own_program_accepts_its_arguments(arch: Architecture, path: str) -> None:
    payload = _payload(arch, path, options={"idle_timeout_minutes": 5})
    words = program_args(payload, 8085, own_image=True)
    assert words[:3] == ("headrace", "microservice", "start")
    assert JOB in " ".join(words)
    command = typer.main.get_command(app).commands["microservice"]  # type: ignore[attr-defined]
    reported = command.make_context("microservice", list(words[2:])).params
    assert reported["port"] == 8085
    assert reported["idle_timeout_minutes"] == 5
    if arch is PREDICT:
        assert (reported["network_arch"], reported["job_id"], reported["host"]) == ("cosmos-predict2.5", JOB, "0.0.0.0")
        assert reported["checkpoint_path" if path.startswith("/") else "model_path"] == path
    else:
        assert json.loads(reported["job"])["specs"]["model_path"] == path
    assert program_args(payload, PORT, own_image=True, host="127.0.0.1")[-4:-2] == ("--host", "127.0.0.1")


def test_options_are_those_of_the_architecture() -> None:
    def options(arch: Architecture, **given: object) -> list[str]:
        return shlex.split(inner_command(_payload(arch, options=given)))[-2:]

    assert options(PREDICT, context_parallel_size=2) == ["--context-parallel-size", "2"]
    assert options(PREDICT, idle_timeout_minutes=0.5) == ["--idle-timeout-minutes", "0.5"]
    assert options(PREDICT, disable_guardrails=True)[-1] == "--disable-guardrails"
    assert "--disable-guardrails" not in options(PREDICT, disable_guardrails=False)
    assert options(PREDICT, pid_file="a b;c") == ["--pid-file", "a b;c"]
    for wrong in (
        {"idle_timeout_minutes": "5"},
        {"context_parallel_size": 1.5},
        {"context_parallel_size": True},
        {"disable_guardrails": "yes"},
        {"pid_file": "--port"},
        {"pid_file": "a\nb"},
        {"pid_file": ""},
        {"host": "x"},
    ):
        with pytest.raises(InvalidArgument, match="option"):
            options(PREDICT, **wrong)


@pytest.mark.parametrize("path", ["hf_model://org/model", "hf_model://org/model@main", "/a/b", "/", "org/model"])
def test_accepted_paths(path: str) -> None:
    assert check_model_path(path) == path
    assert check_model_path(path, COSMOS_RL) == path


@pytest.mark.parametrize("scheme", ["s3", "gs", "az", "cs", "aws", "S3"])
def test_cloud_uris_are_refused_with_the_reason(scheme: str) -> None:
    with pytest.raises(InvalidArgument, match="the inference service has no cloud-storage dependency"):
        check_model_path(f"{scheme}://bucket/model")


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("", "no model is given"),
        ("hf://org/model", "is written hf_model://ORG/NAME"),
        ("hf_model://model", "is written hf_model://ORG/NAME"),
        ("hf_model://org/model/file", "is written hf_model://ORG/NAME"),
        ("hf_model://org/mo del", "is written hf_model://ORG/NAME"),
        ("HF_MODEL://org/model", "is written hf_model://ORG/NAME"),
        ("https://example.org/m", "cannot begin with https"),
        ("file:///etc", "cannot begin with file"),
        ("model", "write the absolute path"),
        ("./org/model", "write the absolute path"),
        ("../model", "write the absolute path"),
        ("~/model", "write the absolute path"),
        ("-o/model", "write the absolute path"),
        ("/a\nb", "control character"),
        ("/a\0b", "control character"),
        ("/a\x85b", "control character"),
        ("/a\u2028b", "control character"),
        ("/a\udc80b", "control character"),
        ("/" + "a" * 5000, "more than 4096"),
    ],
)
def test_paths_that_are_refused(path: str, told: str) -> None:
    with pytest.raises(InvalidArgument, match=told):
        check_model_path(path)


def test_a_bare_name_is_for_architectures_that_take_it() -> None:
    with pytest.raises(InvalidArgument, match="takes hf_model://ORG/NAME or an absolute path"):
        check_model_path("org/model", PREDICT)
    with pytest.raises(InvalidArgument, match="takes hf_model://ORG/NAME or an absolute path"):
        inner_command(_payload(PREDICT, "org/model", model_key="base-2b"))


def test_nothing_secret_gets_onto_the_line() -> None:
    for name, value in (("HF_TOKEN", "canary"), ("TAO_USER_KEY", "canary"), ("WANDB_BASE_URL", "https://a:canary@b")):
        for arch in (COSMOS_RL, PREDICT):
            with pytest.raises(InvalidArgument, match="secret") as caught:
                inner_command(_payload(arch, variables={name: value}))
            assert "canary" not in caught.value.message
    with pytest.raises(InvalidArgument, match="call the gateway back"):
        env_json(_payload(variables={"TAO_ADMIN_KEY": "canary"}))


def test_a_job_is_named_by_its_uuid_and_labelled_with_it() -> None:
    assert environment(_payload(variables={"TAO_API_JOB_ID": "other", "CLOUD_BASED": "True"})) == {
        "TAO_EXECUTION_BACKEND": "local-docker",
        "TAO_API_JOB_ID": JOB,
        "CLOUD_BASED": "False",
    }
    for job_id in ("", "1", JOB.upper(), f"{{{JOB}}}", "../x"):
        with pytest.raises(InvalidArgument, match="UUID"):
            job_json(_payload(job_id=job_id))
