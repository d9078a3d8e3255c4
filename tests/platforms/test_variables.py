# SPDX-License-Identifier: Apache-2.0
"""Which variables go to a service, and that no secret is told."""

from __future__ import annotations

import pytest

from headrace.core.errors import InvalidArgument
from headrace.jobs.microservice.command_line import ALLOWED_VARIABLES
from headrace.jobs.validation import check_variables
from headrace.platforms import payloads


def test_services_take_what_may_be_set() -> None:
    assert payloads.ALLOWED <= ALLOWED_VARIABLES
    assert not payloads.ALLOWED & set(payloads.FORBIDDEN)


def test_secrets_are_kept_apart() -> None:
    environ = {
        "HF_TOKEN": "hf_canary",
        "TAO_USER_KEY": "user-canary",
        "WANDB_PROJECT": "mine",
        "WANDB_BASE_URL": "https://user:canary@wandb.example",
        "WANDB_ENTITY": "",
        "TAO_API_JOB_ID": "another job's",
        "JOB_ID": "of the scheduler",
        "TAO_ADMIN_KEY": "never",
        "TAO_LOGGING_SERVER_URL": "http://never",
        "PATH": "/bin",
        "AWS_SECRET_ACCESS_KEY": "never",
    }
    plain, secret = payloads.from_environment(environ)
    assert plain == {"WANDB_PROJECT": "mine"}
    assert secret == {name: environ[name] for name in ("HF_TOKEN", "TAO_USER_KEY", "WANDB_BASE_URL")}


def test_a_token_of_the_hub_is_for_models_of_the_hub() -> None:
    environ = {"HF_TOKEN": "hf_canary"}
    assert payloads.from_environment(environ, "hf_model://a/b")[1] == environ
    assert payloads.from_environment(environ, "a/b")[1] == environ
    assert payloads.from_environment(environ, "/models/a") == ({}, {})


@pytest.mark.parametrize(
    "value", ["nvapi-x", "hf_x", "ghp_x", "AKIAX", "sk-x", "s3://k:s@b", "https://b/o?a=1&X-Amz-S=2"]
)
def test_values_like_secrets_are_recognised(value: str) -> None:
    assert payloads.split_secrets({"WANDB_PROJECT": value}) == ({}, {"WANDB_PROJECT": value})


@pytest.mark.parametrize("value", ["https://wandb.example/a@b", "me@example.org", "half_x", "risk-x"])
def test_other_values_are_none(value: str) -> None:
    assert payloads.split_secrets({"WANDB_PROJECT": value}) == ({"WANDB_PROJECT": value}, {})


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("TAO_ADMIN_KEY", "canary", "would call the gateway back"),
        ("LD_PRELOAD", "canary", "is not among the variables"),
        ("A=B\n", "canary", "is not among the variables"),
        ("WANDB_PROJECT", "canary" * 100, "more than 500"),
        ("WANDB_PROJECT", "canary\0", "NUL"),
        ("WANDB_PROJECT", "canary\udc80", "not UTF-8"),
    ],
)
def test_an_invalid_variable_is_reported_without_its_value(name: str, value: str, told: str) -> None:
    with pytest.raises(InvalidArgument, match=told) as caught:
        payloads.split_secrets({name: value})
    assert "canary" not in caught.value.message


def test_presence_exposes_no_value() -> None:
    results = dict(payloads.presence({"HF_TOKEN": "canary", "TAO_API_KEY": ""}))
    assert results["HF_TOKEN"] == "SET"
    assert results["TAO_API_KEY"] == results["WANDB_API_KEY"] == "UNSET"
    assert set(payloads.SECRETS) <= set(results)
    slurm = dict(payloads.presence({"SLURM_PARTITION": "gpu"}, payloads.platform_variables("slurm")))
    assert slurm["SLURM_PARTITION"] == "SET"
    assert slurm["SLURM_ACCOUNT"] == "UNSET"


def test_the_gateway_has_the_same_list() -> None:
    assert check_variables(dict.fromkeys(payloads.ALLOWED, "x")) == dict.fromkeys(payloads.ALLOWED, "x")
    for name in (*payloads.FORBIDDEN, "PATH"):
        with pytest.raises(InvalidArgument, match=name):
            check_variables({name: "x"})
