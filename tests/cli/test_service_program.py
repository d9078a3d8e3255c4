# SPDX-License-Identifier: Apache-2.0
"""The launcher's arguments are parsed by `service_program` and by the command `microservice` alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace.cli.service_program import parse_args
from headrace.platforms import catalogue
from headrace.platforms.launch_plan import StartRequest, launch_spec, plan_launch

JOB = "0b6e5c2e-7f2e-4d0c-9f0e-3a1b2c3d4e5f"


def arguments_of(folder: Path, arch: str, **more: Any) -> list[str]:
    request = StartRequest(arch, str(folder), job_id=JOB, **more)
    plan = plan_launch(request, catalogue.load()[arch], {})
    return [word.replace("{port}", "8123") for word in launch_spec(plan, 8123, folder).argv]


@pytest.mark.parametrize("arch", ["cosmos-rl", "tao-dataservices", "cosmos-predict2.5"])
def test_every_architecture_is_read_without_the_verb(tmp_path: Path, arch: str) -> None:
    read = parse_args(arguments_of(tmp_path, arch, options={"idle_timeout_minutes": 7}))
    assert read is not None
    assert (read["host"], read["port"], read["idle_timeout_minutes"]) == ("127.0.0.1", 8123, 7.0)
    assert read["exit_when_idle"] and not read["disable_auto_deletion"]
    assert read["folder"] == str(tmp_path / "models")
    if arch == "cosmos-predict2.5":
        assert (read["checkpoint_path"], read["job_id"], read["network_arch"]) == (str(tmp_path), JOB, arch)
    else:
        assert f'"model_path":"{tmp_path}"' in read["job"] and "local-process" in read["docker_env_vars"]


def test_a_service_without_an_idle_limit_stays(tmp_path: Path) -> None:
    read = parse_args(arguments_of(tmp_path, "cosmos-rl"))
    assert read is not None and read["disable_auto_deletion"] and not read["exit_when_idle"]


@pytest.mark.parametrize("words", [["--my-own", "1"], ["--port", "many"], ["stop"], ["--job"]])
def test_other_arguments_are_passed_to_the_verb(words: list[str]) -> None:
    assert parse_args(words) is None
