# SPDX-License-Identifier: Apache-2.0
"""Parse the command line of a microservice: TAO's `--job` and `--docker_env_vars`, cosmos-predict's flags, or plain options.

JSON is tried first and a Python literal second, since both are in use. Error messages do not show values that may be secret.
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

from headrace.core.errors import InvalidArgument
from headrace.core.kv_transfer import KEY_VARIABLE, MIN_KEY_BYTES
from headrace.core.limits import MIB, Limits
from headrace.core.names import check_name, is_http_url
from headrace.core.nodes import DEFAULT_PORT, NodeSettings, node_environment
from headrace.jobs.microservice.profiles import COSMOS_PREDICT, profile_named
from headrace.jobs.microservice.redaction import Secrets, is_secret_name
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
from headrace.platforms.payloads import ALLOWED, FORBIDDEN, JOB_VARIABLE, MAX_VALUE

log = logging.getLogger("headrace.microservice")

MAX_JSON = 1 * MIB
ALLOWED_VARIABLES = ALLOWED.union(
    FORBIDDEN, ("HF_ENDPOINT", "HF_HOME", "NVIDIA_DRIVER_CAPABILITIES", "NVIDIA_VISIBLE_DEVICES")
)
"""Variables that `--docker_env_vars` may set."""
TASKS = ("language", "vision_language", "classifier", "detector", "embedding", "tensors", "video")
_CONTAINER_HOST = "0.0.0.0"  # noqa: S104  # a container's port is published explicitly
_TRUE = frozenset({"1", "true", "yes", "on"})


@dataclass(frozen=True, slots=True)
class CommandLine:
    """The options as typed; None or "" for a missing option."""

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


def parse_settings(options: CommandLine, environ: MutableMapping[str, str]) -> MicroserviceSettings:
    """Parse the options; put the variables of `--docker_env_vars` into `environ`, where libraries read them."""
    # Removed, so that child processes of the model do not inherit the credentials.
    job_from_environ = environ.pop(JOB_VARIABLE, "")
    job = (
        _object(options.job, "--job")
        if options.job
        else _object(job_from_environ, JOB_VARIABLE)
        if job_from_environ
        else {}
    )
    variables = _variables(options.docker_env_vars)
    environ.update(variables)
    specs = _specs(job)
    arch = str(options.network_arch or job.get("neural_network_name") or "")
    if not arch and (options.checkpoint_path or options.model or options.pipeline):
        arch = COSMOS_PREDICT.name
    profile = profile_named(arch)
    model_path = options.model_path or options.checkpoint_path or str(specs.get("model_path") or "")
    if not model_path and not options.model:
        raise InvalidArgument(
            "no model: use --model-path PATH (a file, a folder, hf_model://ORG/NAME), or --job with specs.model_path"
        )
    task = options.task or str(specs.get("task") or "")
    if task and task not in TASKS:
        raise InvalidArgument(f"--task {task[:32]!a} is unknown: use one of {', '.join(TASKS)}")
    metadata = job.get("cloud_metadata")
    job_id = options.job_id or str(job.get("job_id") or "") or environ.get("TAO_API_JOB_ID", "") or str(uuid.uuid4())
    base = str(specs.get("base_model_path") or "") if specs.get("enable_lora") else ""
    return MicroserviceSettings(
        check_name(job_id, "job"),
        model_path,
        _address(options),
        arch,
        profile,
        specs,
        Path(options.folder or profile.folder),
        task,
        base,
        CloudCredentials.from_metadata(metadata) if metadata is not None else None,
        _idle(options, arch),
        _callback(environ),
        _pipeline(options),
        MediaSettings(
            private_hosts=options.private_hosts, folders=tuple(Path(folder) for folder in options.media_folders)
        ),
        Limits(body_bytes=options.max_body_mib * MIB if options.max_body_mib else BODY_BYTES),
        options.grace_seconds,
        Path(options.pid_file) if options.pid_file else None,
        options.access_log,
        Secrets.of(job, variables, {name: value for name, value in environ.items() if is_secret_name(name)}),
        _nodes(environ),
    )


def _nodes(environ: MutableMapping[str, str]) -> NodeSettings:
    """Return the nodes that the environment describes, if it has their key: `headrace service start --nodes` sets it."""
    key = environ.pop(KEY_VARIABLE, "").encode()
    nodes = node_environment(environ) if key else None
    if nodes is None:
        return NodeSettings()
    if len(key) < MIN_KEY_BYTES:
        raise InvalidArgument(f"the key in {KEY_VARIABLE} has {len(key)} bytes: use at least {MIN_KEY_BYTES}")
    if nodes.rank is None or not nodes.host:
        raise InvalidArgument(f"{nodes.source} has started {nodes.count} nodes, and does not say which this is")
    return NodeSettings(nodes.count, nodes.rank, nodes.host, nodes.port or DEFAULT_PORT, key)


def read_literal(text: str, name: str) -> Any:
    """Parse JSON, or else a Python literal."""
    if len(text) > MAX_JSON:
        raise InvalidArgument(f"{name} has more than {MAX_JSON} characters: pass only what the model needs")
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        pass
    try:
        return ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        raise InvalidArgument(
            f'{name} is neither JSON nor a Python literal: quote it once for the shell, as in {name} \'{{"key": "value"}}\''
        ) from None


def _object(text: str, name: str) -> Mapping[str, Any]:
    value = read_literal(text, name)
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise InvalidArgument(f'{name} is not an object: write {{"key": "value"}}')
    return value


def _specs(job: Mapping[str, Any]) -> Mapping[str, Any]:
    specs = job.get("specs") or {}
    if not isinstance(specs, dict):
        raise InvalidArgument('--job: specs is not an object: write {"specs": {"model_path": "..."}}')
    return specs


def _variables(text: str) -> dict[str, str]:
    variables: dict[str, str] = {}
    for name, value in (_object(text, "--docker_env_vars") if text else {}).items():
        if name not in ALLOWED_VARIABLES:
            log.warning("--docker_env_vars: ignoring %r, which is not an allowed variable.", name[:64])
            continue
        if isinstance(value, dict | list) or len(str(value)) > MAX_VALUE:
            raise InvalidArgument(f"--docker_env_vars: {name} must be a string of at most {MAX_VALUE} characters")
        if value is not None:
            variables[name] = str(value)
    return variables


def _address(options: CommandLine) -> Address:
    # A container is started with --job or cosmos-predict's flags; without them it is a manual start.
    in_container = bool(options.job or options.checkpoint_path or options.model)
    host = options.host or (_CONTAINER_HOST if in_container else "127.0.0.1")
    if in_container and not options.host:
        log.info("Listening on all interfaces, as TAO's container does; use --host 127.0.0.1 for local access only.")
    return Address.parse(f"[{host}]:{options.port}" if ":" in host else f"{host}:{options.port}")


def _idle(options: CommandLine, arch: str) -> IdleSettings:
    minutes = options.idle_timeout_minutes
    # NVIDIA's cosmos-predict2.5 exits by itself when this flag is given; the others only ask for deletion.
    exit_when_idle = options.exit_when_idle or (arch == COSMOS_PREDICT.name and minutes is not None)
    return IdleSettings(30.0 if minutes is None else minutes, not options.disable_auto_deletion, exit_when_idle)


def _callback(environ: Mapping[str, str]) -> CallbackSettings | None:
    url, key = environ.get("TAO_LOGGING_SERVER_URL", ""), environ.get("TAO_ADMIN_KEY", "")
    if not url or not key or environ.get("DEBUG_ENABLED", "").lower() in _TRUE:
        return None
    if not is_http_url(url):
        raise InvalidArgument("TAO_LOGGING_SERVER_URL must be an http:// or https:// URL: correct it, or unset it")
    return CallbackSettings(url.rstrip("/"), key, environ.get("AUTOML_EXPERIMENT_NUMBER") or "0")


def _pipeline(options: CommandLine) -> PipelineChoice:
    return PipelineChoice(
        options.pipeline,
        options.model,
        Path(options.output_dir) if options.output_dir else None,
        options.context_parallel_size or 1,
        options.pipeline_options,
    )
