# SPDX-License-Identifier: Apache-2.0
"""Command lines to settings: JSON or Python, what is passed on, what is refused, and that no secret is shown."""

from __future__ import annotations

import json
import logging
import socket
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from service_process import settings_for

from headrace.core.errors import HeadraceError, InvalidArgument
from headrace.core.kv_transfer import KEY_VARIABLE
from headrace.core.nodes import NodeSettings
from headrace.jobs.microservice.command_line import CommandLine, parse_settings, read_literal
from headrace.jobs.microservice.lifecycle import StateFile, prepare_folder
from headrace.jobs.microservice.model_loader import display_name, kind_from_config, locate_model
from headrace.jobs.microservice.redaction import REDACTED, RedactingFilter, Secrets
from headrace.models.storage.credentials import CloudCredentials
from headrace.models.storage.locations import HubLocation, LocalLocation, ObjectLocation
from support.programs import run

JOB: dict[str, Any] = {
    "job_id": "0b6ee2c1",
    "specs": {"model_path": "/models/m", "enable_lora": True, "base_model_path": "/models/base", "labels": None},
    "neural_network_name": "cosmos-rl",
}


NODES = {
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
    "MASTER_PORT": "10001",
}


def test_several_nodes_need_slurm_and_a_key() -> None:
    key = "a key of many bytes"
    given = {**NODES, KEY_VARIABLE: key}
    found = parse_settings(CommandLine(model_path="m"), given).nodes
    assert found == NodeSettings(2, 1, "gpu07", 10001, key.encode())
    assert KEY_VARIABLE not in given  # not for child processes
    assert key not in repr(found)
    # A service that was started on several nodes by other means is one of several, each alone.
    assert parse_settings(CommandLine(model_path="m"), dict(NODES)).nodes == NodeSettings()
    assert parse_settings(CommandLine(model_path="m"), {KEY_VARIABLE: key}).nodes == NodeSettings()
    with pytest.raises(InvalidArgument, match="at least 16"):
        parse_settings(CommandLine(model_path="m"), {**NODES, KEY_VARIABLE: "short"})


@pytest.mark.parametrize("written", [json.dumps(JOB), repr(JOB), json.dumps(JOB, separators=(",", ":"))])
def test_a_job_is_json_or_python(written: str) -> None:
    environ: dict[str, str] = {}
    given = CommandLine(
        job=written, docker_env_vars='{"HF_TOKEN": "hf_0123456789", "CLOUD_BASED": "False", "PATH": "/evil"}'
    )
    settings = parse_settings(given, environ)
    assert (settings.job_id, settings.model_path, settings.profile.name) == ("0b6ee2c1", "/models/m", "cosmos-rl")
    assert (settings.base_model_path, str(settings.folder)) == ("/models/base", "/tmp/cosmos_models")
    assert str(settings.address) == "0.0.0.0:8080"
    assert environ == {"HF_TOKEN": "hf_0123456789", "CLOUD_BASED": "False"}
    assert settings.credentials is None and settings.callback is None
    assert "hf_0123456789" not in repr(settings)
    assert settings.secrets.redact("a hf_0123456789 b") == f"a {REDACTED} b"


def test_a_job_from_the_environment_is_not_passed_on() -> None:
    cloud = {"aws": {"bkt": {"access_key": "AKIA000000", "secret_key": "s3-secret-key", "cloud_region": "r"}}}
    environ = {"HEADRACE_JOB": json.dumps({**JOB, "cloud_metadata": cloud}), "HF_TOKEN": "hf_0123456789"}
    settings = parse_settings(CommandLine(job_id="own", host="0.0.0.0"), environ)
    assert (settings.job_id, settings.model_path, settings.network_arch) == ("own", "/models/m", "cosmos-rl")
    assert settings.credentials is not None and environ == {"HF_TOKEN": "hf_0123456789"}
    assert settings.secrets.redact("s3-secret-key hf_0123456789") == f"{REDACTED} {REDACTED}"
    # What is written on the command line counts before it.
    both = {"HEADRACE_JOB": '{"specs": {"model_path": "/other"}}'}
    assert parse_settings(CommandLine(job=json.dumps(JOB)), both).model_path == "/models/m"
    with pytest.raises(InvalidArgument, match="HEADRACE_JOB is neither JSON"):
        parse_settings(CommandLine(), {"HEADRACE_JOB": "{secret"})


def test_started_by_hand_it_listens_on_loopback() -> None:
    settings = parse_settings(CommandLine(model_path="m", port=1234), {})
    assert str(settings.address) == "127.0.0.1:1234"
    assert (settings.profile.name, settings.idle.timeout_minutes, settings.idle.exit_when_idle) == ("", 30, False)
    assert len(settings.job_id) == 36
    assert str(parse_settings(CommandLine(model_path="m", host="::1"), {}).address) == "[::1]:8080"


def test_cosmos_predicts_flags_choose_its_profile() -> None:
    settings = parse_settings(CommandLine(checkpoint_path="/c", output_dir="/o", idle_timeout_minutes=5), {})
    assert (settings.profile.name, settings.model_path, settings.idle.exit_when_idle) == (
        "cosmos-predict2.5",
        "/c",
        True,
    )
    assert str(settings.address) == "0.0.0.0:8080"
    settings = parse_settings(CommandLine(model="base-2b"), {})
    assert (settings.pipeline.model_key, settings.model_path, settings.idle.exit_when_idle) == ("base-2b", "", False)


def test_callbacks_need_both_and_no_debugging() -> None:
    both = {"TAO_LOGGING_SERVER_URL": "https://api/x/", "TAO_ADMIN_KEY": "k" * 10, "AUTOML_EXPERIMENT_NUMBER": "3"}
    created = parse_settings(CommandLine(model_path="m", docker_env_vars=json.dumps(both)), {}).callback
    assert created is not None and (created.url, created.experiment_number) == ("https://api/x", "3")
    assert "kkkk" not in repr(created)
    for without in ({"TAO_ADMIN_KEY": ""}, {"TAO_LOGGING_SERVER_URL": ""}, {"DEBUG_ENABLED": "true"}):
        assert parse_settings(CommandLine(model_path="m"), {**both, **without}).callback is None
    with pytest.raises(InvalidArgument, match="TAO_LOGGING_SERVER_URL"):
        parse_settings(CommandLine(model_path="m"), {**both, "TAO_LOGGING_SERVER_URL": "ftp://x"})


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (CommandLine(), "no model: use --model-path"),
        (CommandLine(job="{]"), "--job is neither JSON nor a Python literal"),
        (CommandLine(job="[1]"), "--job is not an object"),
        (CommandLine(job='{"specs": [1]}'), "specs is not an object"),
        (CommandLine(job="__import__('os').system('true')"), "neither JSON nor"),
        (CommandLine(job="(" * 100_000), "neither JSON nor"),
        (CommandLine(job='{"job_id": "../../etc", "specs": {"model_path": "m"}}'), "job name"),
        (CommandLine(model_path="m", docker_env_vars='{"HF_TOKEN": ["x"]}'), "HF_TOKEN must be a string"),
        (CommandLine(model_path="m", docker_env_vars=json.dumps({"HF_TOKEN": "x" * 501})), "HF_TOKEN must be a string"),
        (CommandLine(model_path="m", task="dance"), "--task 'dance'"),
        (CommandLine(model_path="m", job='{"cloud_metadata": {"aws": 7}}'), "cloud_metadata"),
    ],
)
def test_wrong_command_lines_are_named(given: CommandLine, text: str) -> None:
    with pytest.raises(HeadraceError) as caught:
        parse_settings(given, {})
    assert text in caught.value.message


def test_a_wrong_command_line_ends_with_2() -> None:
    def refused(*words: str) -> tuple[int, str]:
        with patch("headrace.programs.microservice.end_process"):
            done = run("microservice", *words)
        return done.returncode, done.stdout + done.stderr

    code, text = refused("--job", "{]")
    assert code == 2 and "neither JSON nor a Python literal" in text and "Traceback" not in text
    code, text = refused("stop", "--model-path", "m")
    assert code == 2 and "SIGTERM stops a service" in text
    with socket.create_server(("127.0.0.1", 0)) as taken:
        code, text = refused("--model-path", "m", "--port", str(taken.getsockname()[1]))
    assert code == 2 and "Traceback" not in text


def test_json_is_preferred() -> None:
    assert read_literal('{"a": true, "b": null}', "x") == {"a": True, "b": None}
    assert read_literal("{'a': True, 'b': None}", "x") == {"a": True, "b": None}


def test_places(tmp_path: Path) -> None:
    launched = settings_for(tmp_path, tmp_path)
    rest = settings_for(tmp_path, tmp_path, credentials=CloudCredentials())
    assert locate_model(str(tmp_path), launched) == LocalLocation(tmp_path)
    assert locate_model("org/model", launched) == HubLocation("org/model")
    assert locate_model("hf_model://org/model@v1", launched) == HubLocation("org/model", "v1")
    assert locate_model("hf://org/model@v1", rest) == HubLocation("org/model", "v1")
    assert locate_model("s3://bucket/key", rest) == ObjectLocation("aws", "bucket", "key")
    for scheme in ("s3", "gs", "az", "cs", "aws"):
        with pytest.raises(InvalidArgument, match="Cloud-storage URIs are not supported by the inference service: "):
            locate_model(f"{scheme}://bucket/key", launched)
    with pytest.raises(InvalidArgument, match="hf_model://ORG/NAME"):
        locate_model("hf://org/model", launched)
    with pytest.raises(HeadraceError, match="does not exist"):
        locate_model("/no/where", launched)
    assert [display_name(text) for text in ("hf_model://org/m@r", "org/m", "/a/b/m", "s3://b/k/m?x=y")] == [
        "org/m",
        "org/m",
        "m",
        "m",
    ]


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "language"),
        ({"architectures": ["Qwen2VLForConditionalGeneration"], "vision_config": {}}, "vision_language"),
        ({"architectures": ["DetrForObjectDetection"]}, "detector"),
        ({"architectures": ["ViTForImageClassification"]}, "classifier"),
        ({"architectures": ["BertModel"]}, "embedding"),
        ({}, "embedding"),
    ],
)
def test_the_contents_of_a_folder(tmp_path: Path, config: dict[str, Any], kind: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert kind_from_config(tmp_path) == kind


def test_secrets_stay_hidden(caplog: pytest.LogCaptureFixture) -> None:
    tree = {"cloud_metadata": {"aws": {"b": {"secret_key": "s3cr3tvalue", "cloud_region": "us"}}}, "max_tokens": 5}
    secrets = Secrets.of(tree, {"HF_TOKEN": "hf_abcdef", "SHORT_KEY": "abc"})
    assert "s3cr3tvalue" not in repr(secrets)
    assert secrets.redact_tree(tree)["cloud_metadata"]["aws"]["b"] == {"secret_key": REDACTED, "cloud_region": "us"}
    assert secrets.redact_tree({"note": ["x hf_abcdef"], "max_tokens": 5}) == {
        "note": [f"x {REDACTED}"],
        "max_tokens": 5,
    }
    record = logging.LogRecord("n", logging.INFO, "", 0, "%s and %d", ("hf_abcdef", 5), None)
    assert RedactingFilter(secrets).filter(record) and record.getMessage() == f"{REDACTED} and 5"
    assert secrets.redact("abc") == "abc", "too short to be looked for"
    try:
        raise RuntimeError("refused: hf_abcdef")
    except RuntimeError:
        record = logging.LogRecord("n", logging.INFO, "", 0, "failed", (), sys.exc_info())
    assert RedactingFilter(secrets).filter(record) and record.exc_info is None
    assert "hf_abcdef" not in record.getMessage() and "RuntimeError" in record.getMessage()


def test_a_state_file_is_whole_and_never_fatal(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = StateFile(tmp_path / "new" / "folder", "job")
    file.write({"a": 1})
    assert json.loads(file.path.read_text()) == {"a": 1}
    assert [path.name for path in file.path.parent.iterdir()] == ["job_server.json"]
    (tmp_path / "file").touch()
    broken = StateFile(tmp_path / "file", "job")
    broken.write({"a": 1})
    broken.write({"a": 1})
    assert caplog.text.count("Could not write") == 1
    with pytest.raises(HeadraceError, match="--models-dir"):
        prepare_folder(tmp_path / "file")
