# SPDX-License-Identifier: Apache-2.0
"""From a command line to settings: TAO's `--job` and `--docker_env_vars`, cosmos-predict's flags, or plain ones.

Called by `headrace microservice`. JSON is read first and a Python literal second, since both are in use. Nothing that is
refused is shown if it may be a secret.
"""

from __future__ import annotations

import ast
import json
import logging
import uuid
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from headrace.core.errors import InvalidArgument
from headrace.core.limits import MIB, Limits
from headrace.core.names import check_name
from headrace.jobs.microservice.profiles import COSMOS_PREDICT, profile_named
from headrace.jobs.microservice.secrets import Secrets, is_secret_name
from headrace.jobs.microservice.settings import (
    BODY_BYTES,
    CallbackSettings,
    IdleSettings,
    MicroserviceSettings,
    PipelineChoice,
)
from headrace.models.media.settings import MediaSettings
from headrace.models.storage.credentials import CloudCredentials
from headrace.net.sockets import Address

log = logging.getLogger("headrace.microservice")

MOST_JSON = 1 * MIB
MOST_VALUE = 500
# fmt: off
PASSED_ON = frozenset(
    {
        "HF_TOKEN", "HF_ENDPOINT", "HF_HOME", "WANDB_API_KEY", "CLEARML_API_ACCESS_KEY", "CLEARML_API_SECRET_KEY",
        "TAO_API_KEY", "TAO_USER_KEY", "TAO_ADMIN_KEY", "WANDB_BASE_URL", "WANDB_USERNAME", "WANDB_ENTITY",
        "WANDB_PROJECT", "WANDB_INSECURE_LOGGING", "CLEARML_WEB_HOST", "CLEARML_API_HOST", "CLEARML_FILES_HOST",
        "TAO_API_SERVER", "CLOUD_BASED", "TAO_EXECUTION_BACKEND", "TAO_LOGGING_SERVER_URL", "TAO_API_JOB_ID",
        "TAO_API_RESULTS_DIR", "TAO_LOG_LEVEL", "TAO_TELEMETRY_SERVER", "TAO_CLIENT_TYPE", "TAO_AUTOML_TRIGGERED",
        "TELEMETRY_OPT_OUT", "JOB_ID", "AUTOML_EXPERIMENT_NUMBER", "RETAIN_CHECKPOINTS_FOR_RESUME",
        "EARLY_STOP_EPOCH", "DEBUG_ENABLED", "RECURSIVE_DATASET_FILE_DOWNLOAD", "ORCHESTRATION_API_NETWORK",
        "ORCHESTRATION_API_ACTION", "CUDA_OVERRIDE_VERSION", "NVIDIA_DRIVER_CAPABILITIES", "NVIDIA_VISIBLE_DEVICES",
    }
)
# fmt: on
"""Variables that `--docker_env_vars` may set."""
JOB_VARIABLE = "HEADRACE_JOB"
"""Says what `--job` says, for platforms whose command lines are read by others: a job has the keys of its buckets."""
TASKS = ("language", "vision_language", "classifier", "detector", "embedding", "tensors", "video")
_CONTAINER_HOST = "0.0.0.0"  # noqa: S104  # a container's port is published by whoever runs it
_TRUE = frozenset({"1", "true", "yes", "on"})


@dataclass(frozen=True, slots=True)
class Given:
    """What the command line says, each word as it was typed; None or "" where it says nothing."""

    job: str = ""
    docker_env_vars: str = ""
    model_path: str = ""
    network_arch: str = ""
    job_id: str = ""
    host: str = ""
    port: int = 8080
    task: str = ""
    folder: str = ""
    idle_timeout_minutes: float | None = None
    disable_auto_deletion: bool = False
    exit_when_idle: bool = False
    checkpoint_path: str = ""
    model: str = ""
    output_dir: str = ""
    context_parallel_size: int | None = None
    pipeline_options: Mapping[str, bool] = field(default_factory=dict)
    pipeline: str = ""
    pid_file: str = ""
    private_hosts: tuple[str, ...] = ()
    media_folders: tuple[str, ...] = ()
    max_body_mib: int = 0
    grace_seconds: float = 30.0
    access_log: bool = False


def launch_settings(given: Given, environ: MutableMapping[str, str]) -> MicroserviceSettings:
    """Read everything; variables of `--docker_env_vars` are put into `environ`, where libraries look for them."""
    # Taken away, so that no program that the model starts has the credentials in its environment.
    in_environ = environ.pop(JOB_VARIABLE, "")
    job = _object(given.job, "--job") if given.job else _object(in_environ, JOB_VARIABLE) if in_environ else {}
    told = _variables(given.docker_env_vars)
    environ.update(told)
    specs = _specs(job)
    arch = str(given.network_arch or job.get("neural_network_name") or "")
    if not arch and (given.checkpoint_path or given.model or given.pipeline):
        arch = COSMOS_PREDICT.name
    profile = profile_named(arch)
    model_path = given.model_path or given.checkpoint_path or str(specs.get("model_path") or "")
    if not model_path and not given.model:
        raise InvalidArgument(
            "which model? Give --model-path PATH (a file, a folder, hf_model://ORG/NAME), or --job with specs.model_path"
        )
    task = given.task or str(specs.get("task") or "")
    if task and task not in TASKS:
        raise InvalidArgument(f"--task {task[:32]!a} is not known: use one of {', '.join(TASKS)}")
    metadata = job.get("cloud_metadata")
    job_id = given.job_id or str(job.get("job_id") or "") or environ.get("TAO_API_JOB_ID", "") or str(uuid.uuid4())
    base = str(specs.get("base_model_path") or "") if specs.get("enable_lora") else ""
    return MicroserviceSettings(
        check_name(job_id, "job"),
        model_path,
        _address(given),
        arch,
        profile,
        specs,
        Path(given.folder or profile.folder),
        task,
        base,
        CloudCredentials.from_metadata(metadata) if metadata is not None else None,
        _idle(given, arch),
        _callback(environ),
        _pipeline(given),
        MediaSettings(private_hosts=given.private_hosts, folders=tuple(Path(each) for each in given.media_folders)),
        Limits(body_bytes=given.max_body_mib * MIB if given.max_body_mib else BODY_BYTES),
        given.grace_seconds,
        Path(given.pid_file) if given.pid_file else None,
        given.access_log,
        Secrets.of(job, told, {name: value for name, value in environ.items() if is_secret_name(name)}),
    )


def read_literal(text: str, what: str) -> Any:
    """JSON, or else a Python literal."""
    if len(text) > MOST_JSON:
        raise InvalidArgument(f"{what} has more than {MOST_JSON} characters: give what the model needs and no more")
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        pass
    try:
        return ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        raise InvalidArgument(
            f'{what} is neither JSON nor a Python literal: quote it once for the shell, as in {what} \'{{"key": "value"}}\''
        ) from None


def _object(text: str, what: str) -> Mapping[str, Any]:
    value = read_literal(text, what)
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise InvalidArgument(f'{what} is no object: write {{"key": "value"}}')
    return value


def _specs(job: Mapping[str, Any]) -> Mapping[str, Any]:
    specs = job.get("specs") or {}
    if not isinstance(specs, dict):
        raise InvalidArgument('--job: specs is no object: write {"specs": {"model_path": "..."}}')
    return specs


def _variables(text: str) -> dict[str, str]:
    made: dict[str, str] = {}
    for name, value in (_object(text, "--docker_env_vars") if text else {}).items():
        if name not in PASSED_ON:
            log.warning(
                "--docker_env_vars: %r is not among the variables that a service takes, and is left out", name[:64]
            )
            continue
        if isinstance(value, dict | list) or len(str(value)) > MOST_VALUE:
            raise InvalidArgument(f"--docker_env_vars: {name} is no text of at most {MOST_VALUE} characters")
        if value is not None:
            made[name] = str(value)
    return made


def _address(given: Given) -> Address:
    # A container is started with --job, or with cosmos-predict's flags; others start it by hand on their machine.
    contained = bool(given.job or given.checkpoint_path or given.model)
    host = given.host or (_CONTAINER_HOST if contained else "127.0.0.1")
    if contained and not given.host:
        log.info("listening on every interface, as the container does: --host 127.0.0.1 keeps others out")
    return Address.parse(f"[{host}]:{given.port}" if ":" in host else f"{host}:{given.port}")


def _idle(given: Given, arch: str) -> IdleSettings:
    minutes = given.idle_timeout_minutes
    # Upstream's cosmos-predict2.5 ends by itself when its flag is given; the others only ask.
    exits = given.exit_when_idle or (arch == COSMOS_PREDICT.name and minutes is not None)
    return IdleSettings(30.0 if minutes is None else minutes, not given.disable_auto_deletion, exits)


def _callback(environ: Mapping[str, str]) -> CallbackSettings | None:
    url, key = environ.get("TAO_LOGGING_SERVER_URL", ""), environ.get("TAO_ADMIN_KEY", "")
    if not url or not key or environ.get("DEBUG_ENABLED", "").lower() in _TRUE:
        return None
    if not _is_web(url):
        raise InvalidArgument("TAO_LOGGING_SERVER_URL is no http:// or https:// URL: correct it, or leave it out")
    return CallbackSettings(url.rstrip("/"), key, environ.get("AUTOML_EXPERIMENT_NUMBER") or "0")


def _is_web(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        return False


def _pipeline(given: Given) -> PipelineChoice:
    return PipelineChoice(
        given.pipeline,
        given.model,
        Path(given.output_dir) if given.output_dir else None,
        given.context_parallel_size or 1,
        given.pipeline_options,
    )
