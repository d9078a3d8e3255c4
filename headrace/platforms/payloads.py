# SPDX-License-Identifier: Apache-2.0
"""What a service is told at its start: the job, its variables, and the one shell line that is the same on every platform.

Called by the launcher; pure. Whatever is in a field arrives in the service as the same text, or is refused here. Nothing
secret is in any of it: that goes by `LaunchSpec.secret_environment`.
"""

from __future__ import annotations

import json
import re
import shlex
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass, field

from headrace.core.errors import InvalidArgument
from headrace.platforms.catalogue import Architecture, Option
from headrace.platforms.folders import is_id
from headrace.platforms.variables import check_variable, is_secret

PORT_INSIDE = 8080
"""Where a service listens unless it is told otherwise."""
PREFIX = "umask 0 && "
OWN_PROGRAM = ("headrace", "microservice", "start")
ANY_ADDRESS = "0.0.0.0"  # noqa: S104  # inside a container, whose port is published by whoever runs it

BACKENDS: Mapping[str, str] = {
    "process": "local-process",
    "local-docker": "local-docker",
    "brev": "local-docker",
    "lepton": "lepton",
    "slurm": "slurm",
    "kubernetes": "local-k8s",
}
"""`TAO_EXECUTION_BACKEND` for each platform."""

_MOST_PATH = 4096
_CLOUDS = frozenset({"s3", "gs", "az", "cs", "aws", "azure", "gcp", "abfs", "abfss", "wasb", "wasbs", "seaweedfs"})
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+._-]*):/")
_HUB = "hf_model://"
_REPOSITORY = re.compile(r"([A-Za-z0-9][\w.-]{0,95})/([A-Za-z0-9][\w.-]{0,95})(@[A-Za-z0-9][\w./-]{0,254})?", re.ASCII)
_MODEL_KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,127}")

OptionValue = str | int | float | bool


@dataclass(frozen=True, slots=True)
class Payload:
    """One service."""

    job_id: str
    arch: Architecture
    model_path: str
    platform: str
    variables: Mapping[str, str] = field(default_factory=dict)
    """Those that everybody may see: the first that `variables.from_environment` gives."""
    model_key: str = ""
    """For an architecture of the shape `flags` whose model comes from the Hub: what its program calls the model."""
    options: Mapping[str, OptionValue] = field(default_factory=dict)
    """By the names that `Architecture.options` has."""


def check_platform(name: str) -> str:
    """The platform. Raises InvalidArgument that lists those there are."""
    if name not in BACKENDS:
        raise InvalidArgument(f"the platform {name[:64]!a} is not known; these are: {', '.join(BACKENDS)}")
    return name


def check_model_path(text: str, arch: Architecture | None = None) -> str:
    """A model's path, as it is. Raises InvalidArgument that says what to write instead."""
    if not text:
        raise InvalidArgument("which model? Give hf_model://ORG/NAME or an absolute path as the service sees it")
    if len(text) > _MOST_PATH:
        raise InvalidArgument(f"the model's path has more than {_MOST_PATH} characters")
    if any(unicodedata.category(char) in ("Cc", "Cs", "Zl", "Zp") for char in text):
        raise InvalidArgument("the model's path has a control character, a line's end or half a character in it")
    forms = ("hub", "path", "bare") if arch is None else arch.model_forms
    scheme = _SCHEME.match(text)
    if scheme is not None:
        return _check_scheme(text, scheme[1].lower(), forms)
    if text.startswith("/"):
        return _allowed(text, "path", forms)
    if text.startswith((".", "~")) or not _REPOSITORY.fullmatch(text):
        raise InvalidArgument(
            f"the model's path {text[:100]!a} is neither hf_model://ORG/NAME nor absolute: write it from the root on, "
            "as the service sees it"
        )
    return _allowed(text, "bare", forms)


def is_from_hub(model_path: str) -> bool:
    """Whether the model is downloaded, and a token may be wanted."""
    return not model_path.startswith("/")


def environment(payload: Payload) -> dict[str, str]:
    """The variables of the service that everybody may see. Raises InvalidArgument if one is a secret, or not allowed."""
    for name, value in payload.variables.items():
        check_variable(name, value)
        if is_secret(name, value):
            raise InvalidArgument(f"{name} is a secret, or holds one: it cannot be written where everybody may see it")
    return {
        **payload.variables,
        "TAO_EXECUTION_BACKEND": BACKENDS[check_platform(payload.platform)],
        "TAO_API_JOB_ID": _job_id(payload),
        "CLOUD_BASED": "False",
    }


def env_json(payload: Payload) -> str:
    """For `--docker_env_vars`."""
    return _compact(environment(payload))


def job_json(payload: Payload) -> str:
    """For `--job`."""
    path = check_model_path(payload.model_path, payload.arch)
    return _compact(
        {"job_id": _job_id(payload), "specs": {"model_path": path}, "neural_network_name": payload.arch.name}
    )


def program_words(
    payload: Payload, port: int | str = PORT_INSIDE, own_image: bool = False, host: str = ""
) -> tuple[str, ...]:
    """The service's program and its words. `own_image`: ours, with the same flags; only ours takes a `host`.

    `port` may be a word that a driver replaces.
    """
    if isinstance(port, int) and not 0 < port < 65536:
        raise InvalidArgument(f"{port} is no port: give one from 1 to 65535")
    arch = payload.arch
    told = _job_words(payload) if arch.command == "job" else _flag_words(payload, own_image)
    words = [*(OWN_PROGRAM if own_image else arch.program), *told]
    if arch.port == "always" or str(port) != str(PORT_INSIDE):
        words += ["--port", str(port)]
    if own_image and (host or arch.command == "flags"):
        # Ours would listen on loopback only, as where somebody starts it by hand.
        words += ["--host", host or ANY_ADDRESS]
    for name, value in payload.options.items():
        words += _option_words(arch, name, value)
    return tuple(words)


def inner_command(payload: Payload, port: int = PORT_INSIDE, own_image: bool = False) -> str:
    """One line for a POSIX shell. Our program takes the shell's place, and so gets the platform's signals itself."""
    return PREFIX + ("exec " if own_image else "") + shlex.join(program_words(payload, port, own_image))


def _job_words(payload: Payload) -> list[str]:
    return ["--job", job_json(payload), "--docker_env_vars", env_json(payload)]


def _flag_words(payload: Payload, own_image: bool) -> list[str]:
    arch, path = payload.arch, check_model_path(payload.model_path, payload.arch)
    # Checked although it is not on the command line: the platforms set it all the same.
    environment(payload)
    words: list[str] = []
    if payload.model_key:
        if not _MODEL_KEY.fullmatch(payload.model_key):
            raise InvalidArgument(f"the model key {payload.model_key[:64]!a} is no name such as {arch.model_keys[0]}")
        words += ["--model", payload.model_key]
    elif not is_from_hub(path):
        words += ["--checkpoint-path", path]
    elif own_image:
        words += ["--model-path", path]
    else:
        raise InvalidArgument(
            f"{arch.name} does not know models by their name on the Hub: say which of its own it is, by a model key such "
            f"as {', '.join(arch.model_keys) or 'those that its documents list'}, or give a path"
        )
    if arch.output_dir:
        words += ["--output-dir", arch.output_dir]
    if own_image:
        words += ["--network-arch", arch.name, "--job-id", _job_id(payload)]
    return words


def _option_words(arch: Architecture, name: str, value: OptionValue) -> list[str]:
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
        raise InvalidArgument(
            f"this architecture takes {' or '.join(shapes[each] for each in forms)} as a model's path, not {shapes[form]}"
        )
    return text


def _job_id(payload: Payload) -> str:
    if not is_id(payload.job_id):
        raise InvalidArgument(f"the job id {payload.job_id[:64]!a} is no UUID in its usual form")
    return payload.job_id


def _compact(value: Mapping[str, object]) -> str:
    # Not escaped to ASCII: a server that reads a Python literal would take \\ud83d\\ude00 for two half characters.
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
