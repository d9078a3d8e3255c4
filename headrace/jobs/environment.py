# SPDX-License-Identifier: Apache-2.0
"""Which variables users may set for their services (facts 1.5). Called by `service` and `services`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.core.errors import InvalidArgument
from headrace.jobs.checks import check_text

MOST_VALUE = 500
# fmt: off
ALLOWED = frozenset({
    "HF_TOKEN", "WANDB_API_KEY", "CLEARML_API_ACCESS_KEY", "CLEARML_API_SECRET_KEY", "TAO_API_KEY", "TAO_USER_KEY",
    "WANDB_BASE_URL", "WANDB_USERNAME", "WANDB_ENTITY", "WANDB_PROJECT", "WANDB_INSECURE_LOGGING", "CLEARML_WEB_HOST",
    "CLEARML_API_HOST", "CLEARML_FILES_HOST", "TAO_API_SERVER", "CLOUD_BASED", "TAO_EXECUTION_BACKEND", "TAO_API_JOB_ID",
    "TAO_API_RESULTS_DIR", "TAO_LOG_LEVEL", "TAO_TELEMETRY_SERVER", "TAO_CLIENT_TYPE", "TAO_AUTOML_TRIGGERED",
    "TELEMETRY_OPT_OUT", "JOB_ID", "AUTOML_EXPERIMENT_NUMBER", "RETAIN_CHECKPOINTS_FOR_RESUME", "EARLY_STOP_EPOCH",
    "DEBUG_ENABLED", "RECURSIVE_DATASET_FILE_DOWNLOAD", "ORCHESTRATION_API_NETWORK", "ORCHESTRATION_API_ACTION",
    "CUDA_OVERRIDE_VERSION",
})
# fmt: on
FORBIDDEN = ("TAO_LOGGING_SERVER_URL", "TAO_ADMIN_KEY")
"""The gateway sets these: with them a service calls back."""


def check_variables(given: object) -> dict[str, str]:
    """The variables as texts. Raises InvalidArgument that names one, never its value."""
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise InvalidArgument("docker_env_vars must be an object of names and texts")
    made: dict[str, str] = {}
    for name, value in given.items():
        if name not in ALLOWED:
            raise InvalidArgument(f"docker_env_vars: {str(name)[:64]!a} is not among the variables that may be set")
        if value is None:
            continue
        if not isinstance(value, str | int | float):
            raise InvalidArgument(f"docker_env_vars: {name} must be a string")
        made[name] = check_text(str(value), f"docker_env_vars: {name}", MOST_VALUE)
    return made


def shown(variables: Mapping[str, Any]) -> list[str]:
    """What of them may be told: their names."""
    return sorted(variables)
