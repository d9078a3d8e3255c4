# SPDX-License-Identifier: Apache-2.0
"""The definition of an option of `headrace serve`, and the options of Triton that have no effect."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

from headrace.core.errors import InvalidArgument

Kind = Literal["text", "whole", "number", "truth"]
Value = str | int | float | bool

_TRUTHS = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}


@dataclass(frozen=True, slots=True)
class Flag:
    """An option that has an effect."""

    name: str
    """Without the leading dashes."""
    panel: str
    """Heading in the help."""
    help: str
    kind: Kind = "text"
    default: Value | None = None
    """None if omitting it differs from every value, and for repeatable options."""
    metavar: str = ""
    aliases: tuple[str, ...] = ()
    many: bool = False
    """Whether it is repeatable."""
    least: float = -math.inf
    most: float = math.inf
    choices: tuple[str, ...] = ()
    old: bool = False
    """Whether a newer option replaces it; the help leaves it out."""

    @property
    def names(self) -> tuple[str, ...]:
        """Return the name and its aliases."""
        return (self.name, *self.aliases)

    @property
    def shown(self) -> str:
        """Return the placeholder of the value in the help."""
        usual = {"text": "TEXT", "whole": "COUNT", "number": "NUMBER", "truth": "true|false"}
        return self.metavar or "|".join(self.choices) or usual[self.kind]

    @property
    def explained(self) -> str:
        """Return the help, with the default and the aliases."""
        parts = [self.help]
        if self.default not in (None, ""):
            parts.append(f"Default: {str(self.default).removesuffix('.0').lower()}.")
        if self.aliases:
            parts.append(f"Also {', '.join(f'--{alias}' for alias in self.aliases)}.")
        return " ".join(parts)


@dataclass(frozen=True, slots=True)
class Ignored:
    """An option of Triton (any release) without effect here."""

    name: str
    why: str
    """The rest of the sentence 'NAME does nothing here: ...'."""
    kind: Kind = "text"
    harmless: tuple[str, ...] = ()
    """Values that match what the server does anyway: no warning."""

    def says(self, value: str) -> str:
        """Return the warning; "" if none is needed."""
        return "" if value.lower() in self.harmless else f"--{self.name} does nothing here: {self.why}"


def is_truth(text: str) -> bool:
    """Return whether a text is a boolean value."""
    return text.lower() in _TRUTHS


def parse(flag: Flag, text: str) -> Value:
    """Parse the value of an option. Raise InvalidArgument."""
    if flag.kind == "truth":
        return flag_of(f"--{flag.name}", text)
    if flag.kind == "text":
        if flag.choices and text not in flag.choices:
            raise InvalidArgument(f"--{flag.name} must be {' or '.join(flag.choices)}, not {text!r}")
        return text
    value = _number(text, whole=flag.kind == "whole")
    if value is None or not flag.least <= value <= flag.most:
        raise InvalidArgument(f"--{flag.name} must be {_range_of(flag)}, not {text!r}")
    return value


def flag_of(option: str, text: str) -> bool:
    """Parse a boolean option written `--option=false`, as Triton's are."""
    if not is_truth(text):
        raise InvalidArgument(f"{option} must be true or false, not {text!r}")
    return _TRUTHS[text.lower()]


def _number(text: str, *, whole: bool) -> int | float | None:
    try:
        value = int(text) if whole else float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _range_of(flag: Flag) -> str:
    noun = "a whole number" if flag.kind == "whole" else "a number"
    if math.isfinite(flag.most):
        return f"{noun} from {flag.least:.15g} to {flag.most:.15g}"
    return f"{noun} of {flag.least:.15g} or more" if math.isfinite(flag.least) else noun


class Given:
    """The values of all options: from the command line, else from `settled`, else the defaults."""

    def __init__(
        self,
        flags: Mapping[str, Flag],
        texts: Mapping[str, str | list[str] | None],
        settled: Mapping[str, Any] | None = None,
    ) -> None:
        self._values: dict[str, Any] = {}
        self._given = {name for name, text in texts.items() if text}
        settled = {} if settled is None else settled
        for name, flag in flags.items():
            text = texts.get(name)
            if name in settled and name not in self._given:
                self._values[name] = settled[name]
                self._given.add(name)
            elif isinstance(text, list) or flag.many:
                self._values[name] = tuple(parse(flag, value) for value in text or ())
            else:
                self._values[name] = flag.default if text is None else parse(flag, text)

    def has(self, name: str) -> bool:
        """Return whether an option was given."""
        return name in self._given

    def given(self) -> dict[str, Any]:
        """Return the options that were given."""
        return {name: value for name, value in self._values.items() if name in self._given}

    def text(self, name: str) -> str:
        """Return a string; "" if it was not given and has no default."""
        return cast("str", self._values[name] or "")

    def texts(self, name: str) -> tuple[str, ...]:
        """Return all values of a repeatable option."""
        return cast("tuple[str, ...]", self._values[name])

    def whole(self, name: str) -> int:
        """Return an integer."""
        return cast("int", self._values[name])

    def number(self, name: str) -> float:
        """Return a number."""
        return cast("float", self._values[name])

    def truth(self, name: str) -> bool:
        """Return a boolean."""
        return cast("bool", self._values[name])


_THREADS = "one event loop serves all connections of a process; --workers adds processes"
_POOLS = "memory is allocated on demand, without pools"
_PINGS = "the server answers pings but sends none; idle connections are closed after two minutes"
_TENSORFLOW = "set it in the model's configuration, under parameters"
_SHARED_LIBRARIES = "backends are Python packages; installed ones are found"
_SAGEMAKER = "there is no SageMaker endpoint"
_VERTEX = "there is no Vertex AI endpoint"

IGNORED: tuple[Ignored, ...] = (
    Ignored("api-version", "every version of the protocol is served on the same ports"),
    Ignored("http-thread-count", _THREADS, "whole"),
    Ignored("grpc-infer-thread-count", _THREADS, "whole"),
    Ignored("grpc-stream-infer-thread-count", _THREADS, "whole"),
    Ignored("grpc-infer-allocation-pool-size", _POOLS, "whole"),
    Ignored("buffer-manager-thread-count", "tensors are rarely copied", "whole", ("0",)),
    Ignored("pinned-memory-pool-byte-size", _POOLS, "whole"),
    Ignored("cuda-memory-pool-byte-size", _POOLS),
    Ignored("cuda-virtual-address-size", _POOLS),
    Ignored("min-supported-compute-capability", "each backend's libraries decide which GPUs they support", "number"),
    Ignored("model-load-gpu-limit", "limit a model's GPU memory in its configuration"),
    Ignored("enable-peer-access", "each backend's library decides how GPUs communicate", "truth"),
    Ignored("model-config-name", "a model has one configuration: config.pbtxt, config.json or config.yaml"),
    Ignored("host-policy", "use numactl or taskset to pin the server to cores"),
    Ignored("backend-directory", _SHARED_LIBRARIES),
    Ignored("repoagent-directory", "there are no repository agents"),
    Ignored("cache-directory", "the response cache is built in"),
    Ignored("backend-config", "configure backends in each model's configuration, under parameters"),
    Ignored("model-namespacing", "all repositories share one set of names", "truth", ("false", "0")),
    Ignored("model-load-retry-count", "a failed model is loaded again when its files change", "whole", ("0",)),
    Ignored("tf-gpu-memory-fraction", _TENSORFLOW, "number", ("0", "0.0")),
    Ignored("tf-allow-soft-placement", _TENSORFLOW, "truth", ("true", "1")),
    Ignored("tf-add-vgpu", _TENSORFLOW),
    Ignored("platform-config-file", _TENSORFLOW),
    Ignored(
        "grpc-infer-response-compression-level",
        "responses are compressed for clients that send compressed messages",
        "text",
        ("none",),
    ),
    Ignored("grpc-keepalive-time", _PINGS, "whole"),
    Ignored("grpc-keepalive-timeout", _PINGS, "whole"),
    Ignored("grpc-keepalive-permit-without-calls", _PINGS, "truth"),
    Ignored("grpc-http2-max-pings-without-data", _PINGS, "whole"),
    Ignored("grpc-http2-min-recv-ping-interval-without-data", _PINGS, "whole"),
    Ignored("grpc-http2-max-ping-strikes", _PINGS, "whole"),
    Ignored("grpc-max-connection-age", "connections stay open while they are used", "whole"),
    Ignored("grpc-max-connection-age-grace", "connections stay open while they are used", "whole"),
    Ignored("allow-sagemaker", _SAGEMAKER, "truth", ("false", "0")),
    Ignored("sagemaker-port", _SAGEMAKER, "whole"),
    Ignored("sagemaker-safe-port-range", _SAGEMAKER),
    Ignored("sagemaker-thread-count", _SAGEMAKER, "whole"),
    Ignored("allow-vertex-ai", _VERTEX, "truth", ("false", "0")),
    Ignored("vertex-ai-port", _VERTEX, "whole"),
    Ignored("vertex-ai-thread-count", _VERTEX, "whole"),
    Ignored("vertex-ai-default-model", _VERTEX),
)
