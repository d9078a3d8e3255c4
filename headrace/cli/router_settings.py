# SPDX-License-Identifier: Apache-2.0
"""Read router settings from command-line options and a YAML file; options take precedence.

The file has the names of `headrace.fleet.router.settings`: `backends`, `policy`, `host`, `port` and one section per
dataclass. The operator writes the section `activation`, which has the names of Kubernetes objects. Errors name the file and
the line.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields, replace
from math import isfinite
from typing import Any

import yaml

from headrace.cli.checks import address_of, collector_of, tls_of
from headrace.cli.serve_settings import transfer_key
from headrace.core.errors import InvalidArgument
from headrace.core.yaml_loader import compose_yaml, load_yaml, yaml_error_line, yaml_error_reason
from headrace.fleet.router.settings import (
    ALIASES,
    METRICS,
    POLICIES,
    ActivationSettings,
    BackendAddress,
    CacheAwareSettings,
    ContinuationSettings,
    DiscoverySettings,
    FairnessSettings,
    HealthSettings,
    HedgingSettings,
    KVEventSettings,
    LocalService,
    OutlierSettings,
    PredictedLatencySettings,
    PrefillDecodeSettings,
    PrefixHashSettings,
    QueueSettings,
    RetrySettings,
    RouterSettings,
    ScaleTarget,
    SessionAffinitySettings,
    TargetScale,
    TimeoutSettings,
    check_settings,
)
from headrace.programs.router import RouterAppSettings

_SECTIONS: dict[str, Any] = {
    "health": HealthSettings,
    "outliers": OutlierSettings,
    "retries": RetrySettings,
    "timeouts": TimeoutSettings,
    "cache_aware": CacheAwareSettings,
    "prefix_hash": PrefixHashSettings,
    "kv_events": KVEventSettings,
    "predicted_latency": PredictedLatencySettings,
    "sticky": SessionAffinitySettings,
    "hedging": HedgingSettings,
    "queue": QueueSettings,
    "fairness": FairnessSettings,
    "continuation": ContinuationSettings,
    "discovery": DiscoverySettings,
    "pairing": PrefillDecodeSettings,
}
_TYPES: dict[str, str] = {
    "policy": "str",
    "host": "str",
    "port": "int",
    "tls_certificate": "str",
    "tls_key": "str",
    "tls_client_ca": "str",
    "ca_file": "str",
    "endpoint_picker": "bool",
    "measure_streams": "bool",
    "keep_host": "bool",
    "trust_forwarded": "bool",
    "slow_start_seconds": "float",
    "idle_connections": "int",
    "whole_bytes": "int",
    "max_outstanding": "int",
    "grace_seconds": "float",
    "access_log": "bool",
    "trace_endpoint": "str",
    "config_version": "str",
    **{f"{section}.{key.name}": str(key.type) for section, settings in _SECTIONS.items() for key in fields(settings)},
}
_ACTIVATION = "activation"
_KIND_TEXTS = {"str": "a string", "int": "a whole number from 0", "float": "a number from 0", "bool": "true or false"}
_PROGRAM_KEYS = (
    "host",
    "port",
    "tls_certificate",
    "tls_key",
    "tls_client_ca",
    "grace_seconds",
    "access_log",
    "trace_endpoint",
    "config_version",
)
_NUMBERS = ("idle_seconds", "wait_seconds", "held_requests", "held_bytes", "sleep_level")
_INTEGERS = ("held_requests", "held_bytes", "most", "sleep_level")
_TARGET_KEYS = ("apiVersion", "kind", "namespace", "name", "scale")
_LOCAL_KEYS = ("folder", "service")
_SCALE_KEYS = ("metric", "target", "most")
_API_VERSION = re.compile(r"([a-z0-9][a-z0-9.-]{0,252}/)?[a-z0-9]{1,63}")
_KIND = re.compile(r"[A-Za-z][A-Za-z0-9]{0,62}")
_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")
_MIN_IDLE_SECONDS = 0.05


def router_settings(given: dict[str, Any], config: str, text: str | None = None) -> RouterAppSettings:
    """Return all settings, checked. Raises InvalidArgument.

    text: the content to use in place of that of the file `config`.
    """
    if text is None and config:
        text = _read_text(config)
    values = {**(_parse_settings(text, config) if text is not None else {}), **given}
    for name, value in values.items():
        if isinstance(value, float) and not isfinite(value):
            raise InvalidArgument(f"{name} is a number, not {value}")
    texts = values.pop("backends", ())
    program = {name: values.pop(name) for name in _PROGRAM_KEYS if name in values}
    sections = {
        section: settings(
            **{
                key.name: values.pop(f"{section}.{key.name}")
                for key in fields(settings)
                if f"{section}.{key.name}" in values
            }
        )
        for section, settings in _SECTIONS.items()
    }
    if not texts and not sections["discovery"].is_enabled:
        raise InvalidArgument("a router needs a backend: add --backend http://host:8000, or configure discovery")
    policy = values.get("policy", POLICIES[0])
    values["policy"] = ALIASES.get(policy, policy)
    if values["policy"] not in POLICIES:
        raise InvalidArgument(f"policy is {', '.join(POLICIES)}, not {policy!r}")
    router = RouterSettings(tuple(BackendAddress.parse(text) for text in texts), **values, **sections)
    if router.paired or router.continuation.enabled:
        router = replace(router, transfer_key=transfer_key(router.pairing.key_file))
    check_settings(router)
    return RouterAppSettings(
        router=router,
        address=address_of(program.get("host", "127.0.0.1"), program.get("port", 8070), ""),
        tls=tls_of(program.get("tls_certificate", ""), program.get("tls_key", ""), program.get("tls_client_ca", "")),
        grace_seconds=program.get("grace_seconds", 30.0),
        access_log=program.get("access_log", False),
        trace_endpoint=collector_of(program.get("trace_endpoint", "")),
        config=config,
        config_version=program.get("config_version", ""),
    )


def _read_text(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as stream:
            return stream.read()
    except OSError as error:
        raise InvalidArgument(f"--config {path}: {error.strerror}; name a file that can be read") from None
    except UnicodeDecodeError:
        raise InvalidArgument(f"--config {path} is not UTF-8 text") from None


def _parse_settings(text: str, path: str) -> dict[str, Any]:
    try:
        document = compose_yaml(text)
    except yaml.YAMLError as error:
        line = yaml_error_line(error)
        location = path if line is None else f"{path}:{line}"
        raise InvalidArgument(f"{location}: {yaml_error_reason(error, 'this is not YAML')}") from None
    values: dict[str, Any] = {}
    if document is not None:
        _read_mapping(document, "", path, values)
    return values


def _read_mapping(node: yaml.Node, prefix: str, path: str, values: dict[str, Any]) -> None:
    if not isinstance(node, yaml.MappingNode):
        raise InvalidArgument(f"{_location(path, node)}: names and values are expected here, such as 'policy: p2c'")
    for key, value in node.value:
        name = f"{prefix}{key.value}" if isinstance(key, yaml.ScalarNode) else ""
        if name in values:
            raise InvalidArgument(f"{_location(path, key)}: {name} is set twice")
        if not prefix and name in _SECTIONS:
            _read_mapping(value, f"{name}.", path, values)
        elif name == "backends":
            values[name] = _read_backends(value, path)
        elif name == _ACTIVATION:
            values[name] = read_activation(value, path)
        elif name in _TYPES:
            values[name] = _read_value(value, name, path)
        else:
            names = sorted(
                key_.removeprefix(prefix)
                for key_ in (*_TYPES, *_SECTIONS, "backends", _ACTIVATION)
                if key_.startswith(prefix)
            )
            names = [key_ for key_ in names if "." not in key_]
            raise InvalidArgument(f"{_location(path, key)}: there is no setting {name!r}; there are {', '.join(names)}")


def _read_backends(node: yaml.Node, path: str) -> list[str]:
    texts = _construct(node)
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
        raise InvalidArgument(f"{_location(path, node)}: backends is a list of addresses, such as '- http://host:8000'")
    return texts


def _read_value(node: yaml.Node, name: str, path: str) -> Any:
    value, kind = _construct(node), _TYPES[name]
    number = isinstance(value, int | float) and not isinstance(value, bool)
    valid = {
        "str": isinstance(value, str),
        "bool": isinstance(value, bool),
        "int": number and isinstance(value, int) and value >= 0,
        "float": number and 0 <= value < float("inf"),
    }
    if not valid[kind]:
        raise InvalidArgument(f"{_location(path, node)}: {name} is {_KIND_TEXTS[kind]}, not {value!r}")
    return value


def _construct(node: yaml.Node) -> Any:
    loader = yaml.SafeLoader("")
    try:
        return loader.construct_object(node, deep=True)
    except (yaml.YAMLError, ValueError):
        return None
    finally:
        loader.dispose()


def _location(path: str, node: yaml.Node) -> str:
    return f"{path}:{node.start_mark.line + 1}"


def read_activation(node: yaml.Node, path: str) -> ActivationSettings:
    """Read the section `activation`. Raises InvalidArgument."""
    numbers: dict[str, Any] = {}
    targets: tuple[ScaleTarget, ...] = ()
    local: LocalService | None = None
    shared = False
    for name, value in _entries(node, path, "activation", (*_NUMBERS, "targets", "local", "shared")):
        if name == "targets":
            targets = _targets(value, path)
        elif name == "shared":
            shared = _boolean(value, path, "activation.shared")
        elif name == "local":
            texts = {key: _text(node_, path, key) for key, node_ in _entries(value, path, "local", _LOCAL_KEYS)}
            if len(texts) < len(_LOCAL_KEYS):
                raise InvalidArgument(f"{_location(path, value)}: activation.local has a folder and a service")
            local = LocalService(**texts)
        else:
            numbers[name] = _number(value, path, f"activation.{name}", integer=name in _INTEGERS)
    if not targets:
        raise InvalidArgument(
            f"{_location(path, node)}: activation needs targets: the workloads to scale, by apiVersion, kind and name"
        )
    settings = ActivationSettings(targets, **numbers, local=local, shared=shared)
    if settings.idle_seconds < _MIN_IDLE_SECONDS or settings.wait_seconds <= 0:
        raise InvalidArgument(
            f"{_location(path, node)}: activation.idle_seconds is at least {_MIN_IDLE_SECONDS:g}, and wait_seconds over 0"
        )
    if settings.sleep_level not in (0, 1, 2):
        raise InvalidArgument(
            f"{_location(path, node)}: activation.sleep_level is 1 (weights in host memory), 2 (weights dropped) or 0"
        )
    return settings


def _targets(node: yaml.Node, path: str) -> tuple[ScaleTarget, ...]:
    if not isinstance(node, yaml.SequenceNode):
        raise InvalidArgument(f"{_location(path, node)}: activation.targets is a list, such as '- name: chat-engine'")
    targets = tuple(_target(entry, path) for entry in node.value)
    if len({str(target) for target in targets}) != len(targets):
        raise InvalidArgument(f"{_location(path, node)}: activation.targets has a target twice")
    return targets


def _target(node: yaml.Node, path: str) -> ScaleTarget:
    texts: dict[str, str] = {}
    scale: TargetScale | None = None
    for name, value in _entries(node, path, "a target", _TARGET_KEYS):
        if name == "scale":
            scale = _scale(value, path)
        else:
            texts[name] = _text(value, path, name)
    if "name" not in texts:
        raise InvalidArgument(f"{_location(path, node)}: a target needs a name")
    target = ScaleTarget(
        texts["name"],
        namespace=texts.get("namespace", "default"),
        kind=texts.get("kind", "Deployment"),
        api_version=texts.get("apiVersion", "apps/v1"),
        scale=scale,
    )
    # They become parts of a URL.
    valid = (
        _NAME.fullmatch(target.name)
        and _NAME.fullmatch(target.namespace)
        and _KIND.fullmatch(target.kind)
        and _API_VERSION.fullmatch(target.api_version)
    )
    if not valid:
        raise InvalidArgument(
            f"{_location(path, node)}: a target has Kubernetes names, such as "
            "{apiVersion: apps/v1, kind: Deployment, namespace: default, name: chat-engine}"
        )
    return target


def _scale(node: yaml.Node, path: str) -> TargetScale:
    metric, target, max_replicas = "", 0.0, 0.0
    for name, value in _entries(node, path, "scale", _SCALE_KEYS):
        if name == "metric":
            metric = _text(value, path, "metric")
        elif name == "target":
            target = _number(value, path, "scale.target")
        else:
            max_replicas = _number(value, path, "scale.most", integer=True)
    if metric not in METRICS or target <= 0 or max_replicas < 1:
        raise InvalidArgument(
            f"{_location(path, node)}: scale has a metric ({' or '.join(METRICS)}), a target over 0 for one replica, "
            "and most, the maximum replicas"
        )
    return TargetScale(metric, target, int(max_replicas))


def _entries(node: yaml.Node, path: str, section: str, names: tuple[str, ...]) -> Iterator[tuple[str, yaml.Node]]:
    if not isinstance(node, yaml.MappingNode):
        raise InvalidArgument(f"{_location(path, node)}: {section} has names and values: {', '.join(names)}")
    seen: set[str] = set()
    for key, value in node.value:
        name = str(key.value) if isinstance(key, yaml.ScalarNode) else ""
        if name not in names:
            raise InvalidArgument(f"{_location(path, key)}: {section} has no {name!r}; there are {', '.join(names)}")
        if name in seen:
            raise InvalidArgument(f"{_location(path, key)}: {name} is set twice")
        seen.add(name)
        yield name, value


def _text(node: yaml.Node, path: str, name: str) -> str:
    if not isinstance(node, yaml.ScalarNode) or not node.tag.endswith(":str"):
        raise InvalidArgument(f"{_location(path, node)}: {name} is a string")
    return str(node.value)


def _boolean(node: yaml.Node, path: str, name: str) -> bool:
    value = _construct(node)
    if not isinstance(value, bool):
        raise InvalidArgument(f"{_location(path, node)}: {name} is {_KIND_TEXTS['bool']}, not {value!r}")
    return value


def _number(node: yaml.Node, path: str, name: str, *, integer: bool = False) -> Any:
    kind = "a whole number from 0" if integer else "a number from 0"
    tags = (":int",) if integer else (":int", ":float")
    try:
        if not isinstance(node, yaml.ScalarNode) or not node.tag.endswith(tags):
            raise ValueError(name)
        number: Any = load_yaml(node.value)
        if isinstance(number, bool) or not isinstance(number, int | float) or not 0 <= number < float("inf"):
            raise ValueError(name)
    except (ValueError, yaml.YAMLError):
        raise InvalidArgument(f"{_location(path, node)}: {name} is {kind}") from None
    return number
