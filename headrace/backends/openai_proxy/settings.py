# SPDX-License-Identifier: Apache-2.0
"""What a model's configuration says of the engine behind it.

    parameters, one of
      command         how to start it: a JSON list of strings, the program first. No shell reads it
      url             where it is: http://host:port or https://host:port, with a path before /v1 where it has one
    and
      env             with command: more of its environment, a JSON object of strings
      served_model    what the model is called there; the first of its /v1/models unless told
      health_path     /health unless told, and /v1/models where it has no such path
      start_seconds   how long it may take until it is healthy: 600
      stop_seconds    how long it may take to end before it is killed: 10
      idle_seconds    how long it may be silent in the middle of a request: 600
      max_in_flight   requests it is given at a time: 256. Others wait in the model's queue
      api_key_env     the environment variable that has its key; the key itself belongs in no configuration

In `command` and `env`, {port} stands for a free port and {folder} for the version's folder. Called by `backend`.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace.backends.contract import ModelFiles
from headrace.backends.openai_proxy.origin import Origin, origin_of
from headrace.backends.parameters import number_of
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
_MOST_WORDS = 256
_MOST_CHARACTERS = 32_768


@dataclass(frozen=True, slots=True)
class ProxySettings:
    """All of them, read and checked."""

    model_name: str
    folder: Path
    """The version's, where a command is run."""
    command: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    """What is added to the server's own."""
    origin: Origin | None = None
    """None: on this machine, at the port that the command was given."""
    served_model: str = ""
    health_path: str = HEALTH_PATH
    health_fallback: str = MODELS_PATH
    """"" where the configuration names the one path that counts."""
    start_seconds: float = 600.0
    stop_seconds: float = 10.0
    idle_seconds: float = 600.0
    max_in_flight: int = 256
    api_key: str = field(default="", repr=False)


def settings_of(config: ModelConfig, files: ModelFiles) -> ProxySettings:
    """Read the parameters, and look whether the program is there."""
    given = config.parameters
    for name in given:
        if name not in _KNOWN:
            raise InvalidArgument(
                f"parameter {name[:64]} is not known to openai_proxy: use {', '.join(sorted(_KNOWN))}"
            )
    command, environment = _command(given), _environment(given)
    if not command and "url" not in given:
        raise InvalidArgument(
            f"model '{config.name}' says neither how to start its engine nor where it is: give the parameter command (a "
            'JSON list such as ["vllm", "serve", "{folder}", "--port", "{port}"]) or url (http://host:port)'
        )
    if environment and not command:
        raise InvalidArgument("parameter env is for an engine that is started by the parameter command: add that")
    if command and "url" not in given and not any("{port}" in word for word in (*command, *environment.values())):
        raise InvalidArgument(
            "parameter command does not say which port the engine is to take: write {port} where it belongs, such as "
            '"--port", "{port}"'
        )
    health_path = given.get("health_path", HEALTH_PATH)
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
        command=_found(command, environment),
        environment=environment,
        origin=origin_of(given["url"]) if "url" in given else None,
        served_model=given.get("served_model", ""),
        health_path=health_path,
        health_fallback="" if "health_path" in given else MODELS_PATH,
        start_seconds=number_of(given, "start_seconds", 600, 86_400) or 1,
        stop_seconds=number_of(given, "stop_seconds", 10, 3600),
        idle_seconds=number_of(given, "idle_seconds", 600, 86_400) or 86_400,
        max_in_flight=number_of(given, "max_in_flight", 256, 100_000) or 100_000,
        api_key=_key(given),
    )


def _command(given: Mapping[str, str]) -> tuple[str, ...]:
    if "command" not in given:
        return ()
    words = _json(given["command"], "command")
    if not isinstance(words, list) or not words or not all(isinstance(word, str) for word in words):
        raise InvalidArgument('parameter command must be a JSON list of strings: ["program", "argument", ...]')
    _check_text("command", words)
    if not words[0]:
        raise InvalidArgument("parameter command begins with an empty string: name the program first")
    return tuple(words)


def _environment(given: Mapping[str, str]) -> Mapping[str, str]:
    named = _json(given.get("env", "{}"), "env")
    if not isinstance(named, dict) or not all(isinstance(value, str) for value in named.values()):
        raise InvalidArgument('parameter env must be a JSON object of strings: {"NAME": "value"}')
    _check_text("env", [*named, *named.values()])
    for name in named:
        if not name or "=" in name:
            raise InvalidArgument(f"parameter env has the name '{name[:64]}', which no variable can have")
    return named


def _json(text: str, parameter: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise InvalidArgument(
            f'parameter {parameter} is not JSON: mind the quotes, which config.pbtxt needs as \\"'
        ) from None


def _check_text(parameter: str, words: list[str]) -> None:
    if len(words) > _MOST_WORDS or sum(map(len, words)) > _MOST_CHARACTERS:
        raise InvalidArgument(
            f"parameter {parameter} is too long: {_MOST_WORDS} strings of {_MOST_CHARACTERS} characters in all are the most"
        )
    if any("\0" in word for word in words):
        raise InvalidArgument(f"parameter {parameter} has a NUL character, which no argument can have: remove it")


def _found(command: tuple[str, ...], environment: Mapping[str, str]) -> tuple[str, ...]:
    """The command with its program's whole path, so that one that is not installed is told before it is started."""
    if not command or "{" in command[0]:
        return command
    path = environment.get("PATH", os.environ.get("PATH"))
    program = shutil.which(command[0], path=path)
    if program is None:
        raise FailedPrecondition(
            f"the program '{command[0][:256]}' of the parameter command is not there, or cannot be executed: install it, or "
            "give its whole path"
        )
    return (os.path.abspath(program), *command[1:])


def _key(given: Mapping[str, str]) -> str:
    variable = given.get("api_key_env")
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
