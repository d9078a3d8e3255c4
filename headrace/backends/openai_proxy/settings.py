# SPDX-License-Identifier: Apache-2.0
"""Settings of the backend `openai_proxy`: the parameters of a model configuration, parsed and validated.

    one of
      command         how to start the engine: a JSON list of strings, the program first. No shell
      url             where it is: http://host:port or https://host:port, with a path before /v1 if it has one
    and
      env             with command: additional environment variables, a JSON object of strings
      served_model    the model's name there; default: the first of its /v1/models
      health_path     default: /health, and /v1/models if that does not exist
      start_seconds   maximum time until it is healthy: 600
      stop_seconds    time to stop before it is killed: 10
      idle_seconds    maximum silence during a request: 600
      max_in_flight   maximum concurrent requests: 256. More wait in the model's queue
      api_key_env     the environment variable with its API key; the key itself belongs in no configuration

In `command` and `env`, {port} is replaced by a free port and {folder} by the version's folder.
"""

from __future__ import annotations

import json
import os
import shutil
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from headrace.backends.contract import ModelFiles
from headrace.backends.model_config import parse_int
from headrace.core.errors import FailedPrecondition, InvalidArgument
from headrace.models.config.types import ModelConfig

HEALTH_PATH = "/health"
MODELS_PATH = "/v1/models"

_KNOWN = frozenset(
    (
        *("command", "url", "env", "served_model", "health_path", "start_seconds", "stop_seconds", "idle_seconds"),
        *("max_in_flight", "api_key_env"),
    )
)
_MAX_ARGS = 256
_MAX_CHARACTERS = 32_768


@dataclass(frozen=True, slots=True)
class ProxySettings:
    """The validated settings of a model."""

    model_name: str
    folder: Path
    """The version's folder, the working directory of the command."""
    command: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    """Added to the server's own environment."""
    origin: Origin | None = None
    """None: on this machine, at the port that the command got."""
    served_model: str = ""
    health_path: str = HEALTH_PATH
    health_fallback: str = MODELS_PATH
    """"" if the configuration sets health_path."""
    start_seconds: float = 600.0
    stop_seconds: float = 10.0
    idle_seconds: float = 600.0
    max_in_flight: int = 256
    api_key: str = field(default="", repr=False)


def read_settings(config: ModelConfig, files: ModelFiles) -> ProxySettings:
    """Read and validate the parameters, and check that the program exists."""
    parameters = config.parameters
    for name in parameters:
        if name not in _KNOWN:
            raise InvalidArgument(
                f"parameter {name[:64]} is not known to openai_proxy: use {', '.join(sorted(_KNOWN))}"
            )
    command, environment = _parse_command(parameters), _parse_environment(parameters)
    if not command and "url" not in parameters:
        raise InvalidArgument(
            f"model '{config.name}' has neither a command nor a url for its engine: set the parameter command (a "
            'JSON list such as ["vllm", "serve", "{folder}", "--port", "{port}"]) or url (http://host:port)'
        )
    if environment and not command:
        raise InvalidArgument("parameter env needs an engine that the parameter command starts: add command")
    if command and "url" not in parameters and not any("{port}" in arg for arg in (*command, *environment.values())):
        raise InvalidArgument(
            "parameter command does not pass a port to the engine: write {port} where it belongs, such as "
            '"--port", "{port}"'
        )
    health_path = parameters.get("health_path", HEALTH_PATH)
    if (
        not health_path.startswith("/")
        or not health_path.isascii()
        or not health_path.isprintable()
        or " " in health_path
    ):
        raise InvalidArgument(f"parameter health_path is '{health_path[:64]}': write a path such as /health")
    return ProxySettings(
        model_name=config.name,
        folder=files.version_folder.absolute(),
        command=_find_program(command, environment),
        environment=environment,
        origin=parse_origin(parameters["url"]) if "url" in parameters else None,
        served_model=parameters.get("served_model", ""),
        health_path=health_path,
        health_fallback="" if "health_path" in parameters else MODELS_PATH,
        start_seconds=parse_int(parameters, "start_seconds", 600, 86_400) or 1,
        stop_seconds=parse_int(parameters, "stop_seconds", 10, 3600),
        idle_seconds=parse_int(parameters, "idle_seconds", 600, 86_400) or 86_400,
        max_in_flight=parse_int(parameters, "max_in_flight", 256, 100_000) or 100_000,
        api_key=_read_key(parameters),
    )


def _parse_command(parameters: Mapping[str, str]) -> tuple[str, ...]:
    if "command" not in parameters:
        return ()
    args = _parse_json(parameters["command"], "command")
    if not isinstance(args, list) or not args or not all(isinstance(arg, str) for arg in args):
        raise InvalidArgument('parameter command must be a JSON list of strings: ["program", "argument", ...]')
    _check_text("command", args)
    if not args[0]:
        raise InvalidArgument("parameter command begins with an empty string: name the program first")
    return tuple(args)


def _parse_environment(parameters: Mapping[str, str]) -> Mapping[str, str]:
    variables = _parse_json(parameters.get("env", "{}"), "env")
    if not isinstance(variables, dict) or not all(isinstance(value, str) for value in variables.values()):
        raise InvalidArgument('parameter env must be a JSON object of strings: {"NAME": "value"}')
    _check_text("env", [*variables, *variables.values()])
    for name in variables:
        if not name or "=" in name:
            raise InvalidArgument(f"parameter env has the name '{name[:64]}', which no environment variable can have")
    return variables


def _parse_json(text: str, parameter: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise InvalidArgument(
            f'parameter {parameter} is not JSON: mind the quotes, which config.pbtxt needs as \\"'
        ) from None


def _check_text(parameter: str, args: list[str]) -> None:
    if len(args) > _MAX_ARGS or sum(map(len, args)) > _MAX_CHARACTERS:
        raise InvalidArgument(
            f"parameter {parameter} is too long: {_MAX_ARGS} strings of {_MAX_CHARACTERS} characters in all are the most"
        )
    if any("\0" in arg for arg in args):
        raise InvalidArgument(f"parameter {parameter} has a NUL character, which no argument can have: remove it")


def _find_program(command: tuple[str, ...], environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return the command with its program's absolute path; raises if the program is not installed."""
    if not command or "{" in command[0]:
        return command
    path = environment.get("PATH", os.environ.get("PATH"))
    program = shutil.which(command[0], path=path)
    if program is None:
        raise FailedPrecondition(
            f"the program '{command[0][:256]}' of the parameter command is not installed or not executable: install it, or "
            "give its absolute path"
        )
    return (os.path.abspath(program), *command[1:])


def _read_key(parameters: Mapping[str, str]) -> str:
    variable = parameters.get("api_key_env")
    if variable is None:
        return ""
    key = os.environ.get(variable, "")
    if not key:
        raise FailedPrecondition(
            f"parameter api_key_env names the environment variable '{variable[:64]}', which is not set: set it where the "
            "server is started"
        )
    if not (key.isascii() and key.isprintable()):
        raise FailedPrecondition(
            f"the key in the environment variable '{variable[:64]}' has characters that no key has"
        )
    return key


@dataclass(frozen=True, slots=True)
class Origin:
    """Where an engine listens: scheme, host, port, and a prefix of every path."""

    host: str
    port: int
    tls: bool = False
    prefix: str = ""

    @property
    def shown(self) -> str:
        """`host:port`, for messages and for the header `host`."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    def context(self) -> ssl.SSLContext | None:
        """Return a TLS context with the system's certificates, or None for http."""
        return ssl.create_default_context() if self.tls else None


def parse_origin(url: str) -> Origin:
    """Parse a URL; refuse parts that would be ignored."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
    except ValueError:
        host, port = "", None
        parts = urlsplit("")
    plain = url.isascii() and url.isprintable() and " " not in url
    if not plain or parts.scheme not in ("http", "https") or not host:
        raise InvalidArgument(f"parameter url is '{url[:128]}': write http://host:port or https://host:port")
    if parts.username or parts.password or parts.query or parts.fragment:
        raise InvalidArgument(
            "parameter url has a user, a query or a fragment: write http://host:port, and give a key by api_key_env"
        )
    # Users often copy the base URL of an OpenAI client, which ends in /v1.
    prefix = parts.path.rstrip("/").removesuffix("/v1")
    tls = parts.scheme == "https"
    return Origin(host, port or (443 if tls else 80), tls, prefix)
