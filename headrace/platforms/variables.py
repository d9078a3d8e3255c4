# SPDX-License-Identifier: Apache-2.0
"""Which variables a service may be given, and which of them nobody may see (facts of TAO, 1.5). Pure.

Called by the launcher, which takes them from the environment it was started in, and by `jobs`, whose users write them into
requests. Nobody is ever asked for a secret, and none is ever shown: only whether it is set.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from headrace.core.errors import InvalidArgument

MOST_VALUE = 500
"""Characters; what services take."""

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
"""What people may be asked for."""
PER_JOB = frozenset({"CLOUD_BASED", "TAO_EXECUTION_BACKEND", "TAO_API_JOB_ID", "JOB_ID"})
"""Allowed, and never taken from the launcher's own environment: they tell of the one job that they are set for."""
# fmt: off
ALLOWED = frozenset({*SECRETS, *ASKABLE, *PER_JOB}) | frozenset({
    "WANDB_INSECURE_LOGGING", "TAO_API_SERVER", "TAO_API_RESULTS_DIR", "TAO_LOG_LEVEL", "TAO_TELEMETRY_SERVER",
    "TAO_CLIENT_TYPE", "TAO_AUTOML_TRIGGERED", "TELEMETRY_OPT_OUT", "AUTOML_EXPERIMENT_NUMBER",
    "RETAIN_CHECKPOINTS_FOR_RESUME", "EARLY_STOP_EPOCH", "DEBUG_ENABLED", "RECURSIVE_DATASET_FILE_DOWNLOAD",
    "ORCHESTRATION_API_NETWORK", "ORCHESTRATION_API_ACTION", "CUDA_OVERRIDE_VERSION",
})
# fmt: on
FORBIDDEN = ("TAO_LOGGING_SERVER_URL", "TAO_ADMIN_KEY")
"""With these a service calls back: only the gateway sets them."""

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
"""What a platform's own tools or driver look at; services do not get these."""

# Names and values by which upstream's checks know a secret.
_SECRET_NAME = re.compile(r"SECRET|PASSWORD|PASSWD|API_KEY|ACCESS_KEY|NGC_KEY|TOKEN|CREDENTIAL|USER_KEY")
_SECRET_VALUE = re.compile(
    r"(nvapi-|hf_|ghp_|AKIA|sk-)|[a-z][a-z0-9+.-]*://[^/?#]*@|.*[?&]X-Amz-", re.IGNORECASE | re.DOTALL
)


def is_secret(name: str, value: str = "") -> bool:
    """Whether nobody may see this variable, by its name or by what it looks like: a key, or a URL with a password."""
    return name in SECRETS or _SECRET_NAME.search(name) is not None or _SECRET_VALUE.match(value) is not None


def from_environment(environ: Mapping[str, str], model_path: str = "") -> tuple[dict[str, str], dict[str, str]]:
    """The variables of `environ` that a service gets: those that may be seen, and those that may not.

    Empty ones are as good as not set. `HF_TOKEN` is left out for a model that does not come from the Hub. Raises
    InvalidArgument that names a variable, never its value.
    """
    given = {
        name: value
        for name, value in environ.items()
        if value and name in ALLOWED - PER_JOB and not (name == "HF_TOKEN" and model_path.startswith("/"))
    }
    return split(given)


def split(given: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Variables that may be seen, and those that may not. Raises InvalidArgument for those that may not be set."""
    plain: dict[str, str] = {}
    secret: dict[str, str] = {}
    for name, value in sorted(given.items()):
        check_variable(name, value)
        (secret if is_secret(name, value) else plain)[name] = value
    return plain, secret


def check_variable(name: str, value: str) -> None:
    """Raises InvalidArgument that names the variable, never its value."""
    if name in FORBIDDEN:
        raise InvalidArgument(
            f"{name} must not be set for a service: with it the service would call back. Leave it out"
        )
    if name not in ALLOWED:
        raise InvalidArgument(f"{name[:64]!a} is not among the variables that a service may be given")
    if len(value) > MOST_VALUE:
        raise InvalidArgument(f"{name} has more than {MOST_VALUE} characters, which no service takes")
    if "\0" in value or any("\ud800" <= char <= "\udfff" for char in value):
        raise InvalidArgument(f"{name} holds a NUL or what is not UTF-8")


def presence(environ: Mapping[str, str], names: Iterable[str] = (*SECRETS, *ASKABLE)) -> list[tuple[str, str]]:
    """Which are there: "SET" or "UNSET", and nothing of what they hold."""
    return [(name, "SET" if environ.get(name) else "UNSET") for name in names]


def wanted_on(platform: str) -> tuple[str, ...]:
    """The names for `presence` on this platform: those of services, then those of its own."""
    return (*SECRETS, *ASKABLE, *PLATFORM_VARIABLES.get(platform, ()))
