# SPDX-License-Identifier: Apache-2.0
"""Parse the arguments of `headrace serve`, in every way to write an option.

`--strict_readiness false`, `--strict-readiness` and `--strict-readiness=False` all work. Options of Triton without
effect here are removed with a warning; an unknown option is reported with the nearest known one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from headrace.core.errors import InvalidArgument
from headrace.core.names import nearest
from headrace.programs.configuration.option import BOOLEANS, Option
from headrace.programs.configuration.option_table import FLAGS

_HELP = ("--help", "-h")


@dataclass(frozen=True, slots=True)
class Ignored:
    """An option of Triton (any release) without effect here."""

    flag: str
    reason: str
    """The rest of the sentence 'NAME does nothing here: ...'."""
    type: Literal["str", "bool"] = "str"
    harmless: tuple[str, ...] = ()
    """Values that match what the server does anyway: no warning."""

    def warning(self, value: str) -> str:
        """Return the warning; "" if none is needed."""
        return "" if value.lower() in self.harmless else f"--{self.flag} does nothing here: {self.reason}"


@dataclass(slots=True)
class ServeArguments:
    """The parsed arguments."""

    texts: dict[str, list[str]] = field(default_factory=dict)
    """Values by option."""
    folders: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    """About options without effect."""
    help: bool = False

    def normalised(self) -> list[str]:
        """Return the arguments for Typer: every option as `--name=value`."""
        options = [f"--{flag}={text}" for flag, texts in self.texts.items() for text in texts]
        # Folders last, after `--`: one may begin with a dash.
        return [*(["--help"] if self.help else []), *options, *(["--", *self.folders] if self.folders else [])]


def parse_arguments(arguments: Sequence[str]) -> ServeArguments:
    """Parse the arguments. Raise InvalidArgument for an unknown option, or one without its value."""
    options: dict[str, Option | Ignored] = {flag: option for option in FLAGS.values() for flag in option.flags}
    options |= {ignored.flag: ignored for ignored in IGNORED}
    parsed = ServeArguments()
    remaining = _Arguments(arguments)
    while (argument := remaining.take()) is not None:
        if argument == "--":
            parsed.folders += remaining.take_all()
        elif argument in _HELP:
            parsed.help = True
        elif not argument.startswith("-"):
            parsed.folders.append(argument)
        else:
            name, equals, value = argument.lstrip("-").partition("=")
            option = options.get(name.replace("_", "-").lower())
            if option is None:
                raise InvalidArgument(_unknown(name, options))
            text = value if equals else _take_value(option, remaining)
            if isinstance(option, Option):
                parsed.texts.setdefault(option.flag, []).append(text)
            elif warning := option.warning(text):
                parsed.warnings.append(warning)
    return parsed


class _Arguments:
    """An argument iterator that can peek at the next argument."""

    def __init__(self, arguments: Sequence[str]) -> None:
        self._remaining = list(reversed(arguments))

    @property
    def next(self) -> str | None:
        return self._remaining[-1] if self._remaining else None

    def take(self) -> str | None:
        return self._remaining.pop() if self._remaining else None

    def take_all(self) -> list[str]:
        remaining, self._remaining = self._remaining[::-1], []
        return remaining


def _take_value(option: Option | Ignored, remaining: _Arguments) -> str:
    """Return the value of an option that has none after a `=`."""
    following = remaining.next
    if option.type == "bool":
        # Without a value it is true: the next argument is a value only if it is a boolean.
        return remaining.take() or "" if following is not None and following.lower() in BOOLEANS else "true"
    if following is None or following.startswith("--"):
        placeholder = option.placeholder if isinstance(option, Option) else "VALUE"
        raise InvalidArgument(f"--{option.flag} needs a value: write --{option.flag}={placeholder}")
    return remaining.take() or ""


def _unknown(name: str, options: dict[str, Option | Ignored]) -> str:
    normalised = name.replace("_", "-").lower()
    prefixed = [flag for flag in options if flag.startswith(normalised)] if len(normalised) > 2 else []
    closest = prefixed[0] if prefixed else nearest(normalised, options)
    advice = f"did you mean --{closest}?" if closest else "'headrace serve --help' lists the options"
    return f"there is no option --{name[:64]}: {advice}"


_THREADS = "one event loop serves all connections of a process; --workers adds processes"
_POOLS = "memory is allocated on demand, without pools"
_PINGS = "the server answers pings but sends none; idle connections are closed after two minutes"
_TENSORFLOW = "set it in the model's configuration, under parameters"
_SHARED_LIBRARIES = "backends are Python packages; installed ones are found"
_SAGEMAKER = "there is no SageMaker endpoint"
_VERTEX = "there is no Vertex AI endpoint"

IGNORED: tuple[Ignored, ...] = (
    Ignored("api-version", "every version of the protocol is served on the same ports"),
    Ignored("http-thread-count", _THREADS),
    Ignored("grpc-infer-thread-count", _THREADS),
    Ignored("grpc-stream-infer-thread-count", _THREADS),
    Ignored("grpc-infer-allocation-pool-size", _POOLS),
    Ignored("grpc-max-response-pool-size", _POOLS),
    Ignored("buffer-manager-thread-count", "tensors are rarely copied", harmless=("0",)),
    Ignored("pinned-memory-pool-byte-size", _POOLS),
    Ignored("cuda-memory-pool-byte-size", _POOLS),
    Ignored("cuda-virtual-address-size", _POOLS),
    Ignored("min-supported-compute-capability", "each backend's libraries decide which GPUs they support"),
    Ignored("model-load-gpu-limit", "limit a model's GPU memory in its configuration"),
    Ignored("enable-peer-access", "each backend's library decides how GPUs communicate", "bool"),
    Ignored("model-config-name", "a model has one configuration: config.pbtxt, config.json or config.yaml"),
    Ignored("host-policy", "use numactl or taskset to pin the server to cores"),
    Ignored("backend-directory", _SHARED_LIBRARIES),
    Ignored("repoagent-directory", "there are no repository agents"),
    Ignored("cache-directory", "the response cache is built in"),
    Ignored("backend-config", "configure backends in each model's configuration, under parameters"),
    Ignored("model-load-retry-count", "a failed model is loaded again when its files change", harmless=("0",)),
    Ignored("tf-gpu-memory-fraction", _TENSORFLOW, harmless=("0", "0.0")),
    Ignored("tf-allow-soft-placement", _TENSORFLOW, "bool", ("true", "1")),
    Ignored("tf-add-vgpu", _TENSORFLOW),
    Ignored("platform-config-file", _TENSORFLOW),
    Ignored(
        "grpc-infer-response-compression-level",
        "responses are compressed for clients that send compressed messages",
        harmless=("none",),
    ),
    Ignored("grpc-keepalive-time", _PINGS),
    Ignored("grpc-keepalive-timeout", _PINGS),
    Ignored("grpc-keepalive-permit-without-calls", _PINGS, "bool"),
    Ignored("grpc-http2-max-pings-without-data", _PINGS),
    Ignored("grpc-http2-min-recv-ping-interval-without-data", _PINGS),
    Ignored("grpc-http2-max-ping-strikes", _PINGS),
    Ignored("grpc-max-connection-age", "connections stay open while they are used"),
    Ignored("grpc-max-connection-age-grace", "connections stay open while they are used"),
    Ignored("allow-sagemaker", _SAGEMAKER, "bool", ("false", "0")),
    Ignored("sagemaker-port", _SAGEMAKER),
    Ignored("sagemaker-safe-port-range", _SAGEMAKER),
    Ignored("sagemaker-thread-count", _SAGEMAKER),
    Ignored("allow-vertex-ai", _VERTEX, "bool", ("false", "0")),
    Ignored("vertex-ai-port", _VERTEX),
    Ignored("vertex-ai-thread-count", _VERTEX),
    Ignored("vertex-ai-default-model", _VERTEX),
)
