# SPDX-License-Identifier: Apache-2.0
"""The payload of a service at its start: job JSON, variables and shell command, the same on every platform. Pure.

A value reaches the service as the same text, or is refused here. The payload contains no secrets: those go into
`LaunchSpec.secret_environment`. TAO's allow-list of variables is here too; secret variables are never prompted for nor
shown, only whether they are set.
"""

from __future__ import annotations

import json
import re
import shlex
import unicodedata
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from headrace.core.errors import InvalidArgument
from headrace.platforms.catalogue import Architecture, Option
from headrace.platforms.contract import is_job_id

CONTAINER_PORT = 8080
"""The default port of a service in its container."""
PREFIX = "umask 0 && "
OWN_PROGRAM = ("headrace", "microservice", "start")
ANY_ADDRESS = "0.0.0.0"  # noqa: S104  # inside a container, whose port the platform publishes

BACKENDS: Mapping[str, str] = {
    "process": "local-process",
    "local-docker": "local-docker",
    "brev": "local-docker",
    "lepton": "lepton",
    "slurm": "slurm",
    "kubernetes": "local-k8s",
}
"""`TAO_EXECUTION_BACKEND` for each platform."""

_MAX_PATH = 4096
_CLOUDS = frozenset({"s3", "gs", "az", "cs", "aws", "azure", "gcp", "abfs", "abfss", "wasb", "wasbs", "seaweedfs"})
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+._-]*):/")
_HUB = "hf_model://"
_REPOSITORY = re.compile(r"([A-Za-z0-9][\w.-]{0,95})/([A-Za-z0-9][\w.-]{0,95})(@[A-Za-z0-9][\w./-]{0,254})?", re.ASCII)
_MODEL_KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,127}")

OptionValue = str | int | float | bool


@dataclass(frozen=True, slots=True)
class Payload:
    """One service to start."""

    job_id: str
    arch: Architecture
    model_path: str
    platform: str
    variables: Mapping[str, str] = field(default_factory=dict)
    """Variables that are not secret: the first result of `from_environment`."""
    model_key: str = ""
    """For an architecture of the shape `flags` with a model of the Hub: its program's own name of the model."""
    options: Mapping[str, OptionValue] = field(default_factory=dict)
    """By name in `Architecture.options`."""


def check_platform(name: str) -> str:
    """Return the platform. Raises InvalidArgument with the known ones."""
    if name not in BACKENDS:
        raise InvalidArgument(f"unknown platform {name[:64]!a}; known: {', '.join(BACKENDS)}")
    return name


def check_model_path(text: str, arch: Architecture | None = None) -> str:
    """Return a model's path. Raises InvalidArgument with what to write instead."""
    if not text:
        raise InvalidArgument("no model is given: give hf_model://ORG/NAME or an absolute path as the service sees it")
    if len(text) > _MAX_PATH:
        raise InvalidArgument(f"the model's path has more than {_MAX_PATH} characters")
    if any(unicodedata.category(char) in ("Cc", "Cs", "Zl", "Zp") for char in text):
        raise InvalidArgument("the model's path has a control character, a line break or an unpaired surrogate in it")
    forms = ("hub", "path", "bare") if arch is None else arch.model_forms
    scheme = _SCHEME.match(text)
    if scheme is not None:
        return _check_scheme(text, scheme[1].lower(), forms)
    if text.startswith("/"):
        return _allowed(text, "path", forms)
    if text.startswith((".", "~")) or not _REPOSITORY.fullmatch(text):
        raise InvalidArgument(
            f"the model's path {text[:100]!a} is neither hf_model://ORG/NAME nor absolute: write the absolute path, "
            "as the service sees it"
        )
    return _allowed(text, "bare", forms)


def is_from_hub(model_path: str) -> bool:
    """Whether the model is downloaded from the Hub, and may need a token."""
    return not model_path.startswith("/")


def environment(payload: Payload) -> dict[str, str]:
    """Return the variables of the service that are not secret. Raises InvalidArgument if one is secret or not allowed."""
    for name, value in payload.variables.items():
        check_variable(name, value)
        if is_secret(name, value):
            raise InvalidArgument(f"{name} is a secret, or holds one: it cannot be passed where every user may see it")
    return {
        **payload.variables,
        "TAO_EXECUTION_BACKEND": BACKENDS[check_platform(payload.platform)],
        "TAO_API_JOB_ID": _job_id(payload),
        "CLOUD_BASED": "False",
    }


def env_json(payload: Payload) -> str:
    """Return the value of `--docker_env_vars`."""
    return _compact(environment(payload))


def job_json(payload: Payload) -> str:
    """Return the value of `--job`."""
    path = check_model_path(payload.model_path, payload.arch)
    return _compact(
        {"job_id": _job_id(payload), "specs": {"model_path": path}, "neural_network_name": payload.arch.name}
    )


def program_args(
    payload: Payload, port: int | str = CONTAINER_PORT, own_image: bool = False, host: str = ""
) -> tuple[str, ...]:
    """Return the program of the service and its arguments. `own_image`: our program, which also takes a `host`.

    `port` may be a placeholder that a driver replaces.
    """
    if isinstance(port, int) and not 0 < port < 65536:
        raise InvalidArgument(f"{port} is not a port: give one from 1 to 65535")
    arch = payload.arch
    arguments = _job_args(payload) if arch.command == "job" else _flag_args(payload, own_image)
    args = [*(OWN_PROGRAM if own_image else arch.program), *arguments]
    if arch.port == "always" or str(port) != str(CONTAINER_PORT):
        args += ["--port", str(port)]
    if own_image and (host or arch.command == "flags"):
        # By default our program listens on the loopback interface only.
        args += ["--host", host or ANY_ADDRESS]
    for name, value in payload.options.items():
        args += _option_args(arch, name, value)
    return tuple(args)


def inner_command(payload: Payload, port: int = CONTAINER_PORT, own_image: bool = False) -> str:
    """Return one line for a POSIX shell. Our program replaces the shell, and so gets the platform's signals itself."""
    return PREFIX + ("exec " if own_image else "") + shlex.join(program_args(payload, port, own_image))


def _job_args(payload: Payload) -> list[str]:
    return ["--job", job_json(payload), "--docker_env_vars", env_json(payload)]


def _flag_args(payload: Payload, own_image: bool) -> list[str]:
    arch, path = payload.arch, check_model_path(payload.model_path, payload.arch)
    # Checked although it is not on the command line: the platforms set it anyway.
    environment(payload)
    args: list[str] = []
    if payload.model_key:
        if not _MODEL_KEY.fullmatch(payload.model_key):
            raise InvalidArgument(
                f"the model key {payload.model_key[:64]!a} is not a name such as {arch.model_keys[0]}"
            )
        args += ["--model", payload.model_key]
    elif not is_from_hub(path):
        args += ["--checkpoint-path", path]
    elif own_image:
        args += ["--model-path", path]
    else:
        raise InvalidArgument(
            f"{arch.name} does not load models by their Hub name: name one of its own models by a model key such "
            f"as {', '.join(arch.model_keys) or 'those in its documentation'}, or give a path"
        )
    if arch.output_dir:
        args += ["--output-dir", arch.output_dir]
    if own_image:
        args += ["--network-arch", arch.name, "--job-id", _job_id(payload)]
    return args


def _option_args(arch: Architecture, name: str, value: OptionValue) -> list[str]:
    option = arch.options.get(name)
    if option is None:
        raise InvalidArgument(f"{arch.name} has no option {name[:64]!a}; it has: {', '.join(arch.options) or 'none'}")
    if option.type == "flag":
        if not isinstance(value, bool):
            raise _wrong_option(option)
        return [option.flag] if value else []
    types: Mapping[str, tuple[type, ...]] = {"int": (int,), "float": (int, float), "str": (str,)}
    if isinstance(value, bool) or not isinstance(value, types[option.type]):
        raise _wrong_option(option)
    if isinstance(value, str):
        if not value or value.startswith("-") or any(unicodedata.category(char) in ("Cc", "Cs") for char in value):
            raise InvalidArgument(
                f"the option {option.name} is empty, begins with '-', or has a control character in it"
            )
        return [option.flag, value]
    return [option.flag, f"{value:g}" if isinstance(value, float) else str(value)]


def _wrong_option(option: Option) -> InvalidArgument:
    kinds = {"flag": "true or false", "int": "a whole number", "float": "a number", "str": "a text"}
    return InvalidArgument(f"the option {option.name} must be {kinds[option.type]}")


def _check_scheme(text: str, scheme: str, forms: tuple[str, ...]) -> str:
    if scheme in _CLOUDS:
        raise InvalidArgument(
            f"a model's path cannot be a cloud URI ({scheme}://): the inference service has no cloud-storage dependency. "
            "Give hf_model://ORG/NAME, or copy the model and give its path as the service sees it"
        )
    if text.startswith(_HUB) and _REPOSITORY.fullmatch(text[len(_HUB) :]):
        return _allowed(text, "hub", forms)
    if scheme in ("hf", "hf_model", "huggingface"):
        raise InvalidArgument("a model of the Hugging Face Hub is written hf_model://ORG/NAME")
    raise InvalidArgument(f"a model's path cannot begin with {scheme}: give hf_model://ORG/NAME or an absolute path")


def _allowed(text: str, form: str, forms: tuple[str, ...]) -> str:
    if form not in forms:
        shapes = {"hub": "hf_model://ORG/NAME", "path": "an absolute path", "bare": "ORG/NAME"}
        accepted = " or ".join(shapes[name] for name in forms)
        raise InvalidArgument(f"this architecture takes {accepted} as a model's path, not {shapes[form]}")
    return text


def _job_id(payload: Payload) -> str:
    if not is_job_id(payload.job_id):
        raise InvalidArgument(f"the job id {payload.job_id[:64]!a} is not a UUID in its usual form")
    return payload.job_id


def _compact(value: Mapping[str, object]) -> str:
    # Not escaped to ASCII: a server that parses a Python literal would read \\ud83d\\ude00 as two surrogates.
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


MAX_VALUE = 500
"""Maximum characters of a value that services accept."""

SECRETS = (
    "HF_TOKEN",
    "WANDB_API_KEY",
    "CLEARML_API_ACCESS_KEY",
    "CLEARML_API_SECRET_KEY",
    "TAO_API_KEY",
    "TAO_USER_KEY",
)
ASKABLE = (
    "WANDB_BASE_URL",
    "WANDB_USERNAME",
    "WANDB_ENTITY",
    "WANDB_PROJECT",
    "CLEARML_WEB_HOST",
    "CLEARML_API_HOST",
    "CLEARML_FILES_HOST",
)
"""Variables that users may be prompted for."""
PER_JOB = frozenset({"CLOUD_BASED", "TAO_EXECUTION_BACKEND", "TAO_API_JOB_ID", "JOB_ID"})
"""Allowed, but never taken from the launcher's environment: they belong to one job."""
# fmt: off
ALLOWED = frozenset({*SECRETS, *ASKABLE, *PER_JOB}) | frozenset({
    "WANDB_INSECURE_LOGGING", "TAO_API_SERVER", "TAO_API_RESULTS_DIR", "TAO_LOG_LEVEL", "TAO_TELEMETRY_SERVER",
    "TAO_CLIENT_TYPE", "TAO_AUTOML_TRIGGERED", "TELEMETRY_OPT_OUT", "AUTOML_EXPERIMENT_NUMBER",
    "RETAIN_CHECKPOINTS_FOR_RESUME", "EARLY_STOP_EPOCH", "DEBUG_ENABLED", "RECURSIVE_DATASET_FILE_DOWNLOAD",
    "ORCHESTRATION_API_NETWORK", "ORCHESTRATION_API_ACTION", "CUDA_OVERRIDE_VERSION",
})
# fmt: on
JOB_VARIABLE = "HEADRACE_JOB"
"""Variable with the job's JSON: Headrace reads it; for TAO's images the shell passes it to `--job`.

Command lines are visible on some platforms, and a job contains bucket keys.
"""
FORBIDDEN = ("TAO_LOGGING_SERVER_URL", "TAO_ADMIN_KEY")
"""With these a service calls the gateway back: only the gateway sets them."""

PLATFORM_VARIABLES: Mapping[str, tuple[str, ...]] = {
    "process": (),
    "local-docker": ("NGC_KEY", "DOCKER_HOST", "DOCKER_NETWORK", "DOCKER_USERNAME"),
    "brev": ("BREV_API_TOKEN", "NGC_KEY"),
    "lepton": ("LEPTON_WORKSPACE_ID", "LEPTON_AUTH_TOKEN", "NGC_KEY"),
    "slurm": (
        "SLURM_USER",
        "SLURM_HOSTNAME",
        "SLURM_PARTITION",
        "SLURM_ACCOUNT",
        "SSH_KEY_PATH",
        "SSH_AUTH_SOCK",
        "SLURM_BASE_RESULTS_DIR",
        "SLURM_CONTAINER_MOUNTS",
        "SLURM_TIME_HOURS",
    ),
    "kubernetes": ("KUBECONFIG", "TAO_K8S_NAMESPACE", "TAO_K8S_CONTEXT"),
}
"""Variables of a platform's own tools or driver; services do not get them."""

# Names and values that upstream's checks treat as secret.
_SECRET_NAME = re.compile(r"SECRET|PASSWORD|PASSWD|API_KEY|ACCESS_KEY|NGC_KEY|TOKEN|CREDENTIAL|USER_KEY")
_SECRET_VALUE = re.compile(
    r"(nvapi-|hf_|ghp_|AKIA|sk-)|[a-z][a-z0-9+.-]*://[^/?#]*@|.*[?&]X-Amz-", re.IGNORECASE | re.DOTALL
)


def is_secret(name: str, value: str = "") -> bool:
    """Whether a variable is secret, by its name or its value: a key, or a URL with a password."""
    return name in SECRETS or _SECRET_NAME.search(name) is not None or _SECRET_VALUE.match(value) is not None


def from_environment(environ: Mapping[str, str], model_path: str = "") -> tuple[dict[str, str], dict[str, str]]:
    """Return the variables of `environ` that a service gets: plain ones, and secret ones.

    Empty ones count as not set. `HF_TOKEN` is left out for a model that is not from the Hub. Raises InvalidArgument with the
    name of a variable, never its value.
    """
    variables = {
        name: value
        for name, value in environ.items()
        if value and name in ALLOWED - PER_JOB and not (name == "HF_TOKEN" and model_path.startswith("/"))
    }
    return split_secrets(variables)


def split_secrets(variables: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Return plain and secret variables. Raises InvalidArgument for variables that may not be set."""
    plain: dict[str, str] = {}
    secret: dict[str, str] = {}
    for name, value in sorted(variables.items()):
        check_variable(name, value)
        (secret if is_secret(name, value) else plain)[name] = value
    return plain, secret


def check_variable(name: str, value: str) -> None:
    """Check one variable. Raises InvalidArgument with its name, never its value."""
    if name in FORBIDDEN:
        raise InvalidArgument(
            f"{name} must not be set for a service: with it the service would call the gateway back. Leave it out"
        )
    if name not in ALLOWED:
        raise InvalidArgument(f"{name[:64]!a} is not among the variables that a service may be given")
    if len(value) > MAX_VALUE:
        raise InvalidArgument(f"{name} has more than {MAX_VALUE} characters, which no service accepts")
    if "\0" in value or any("\ud800" <= char <= "\udfff" for char in value):
        raise InvalidArgument(f"{name} contains a NUL or is not UTF-8")


def presence(environ: Mapping[str, str], names: Iterable[str] = (*SECRETS, *ASKABLE)) -> list[tuple[str, str]]:
    """Return which variables are set: "SET" or "UNSET", never their values."""
    return [(name, "SET" if environ.get(name) else "UNSET") for name in names]


def platform_variables(platform: str) -> tuple[str, ...]:
    """Return the variables to show for a platform: those of services, then its own."""
    return (*SECRETS, *ASKABLE, *PLATFORM_VARIABLES.get(platform, ()))
