# SPDX-License-Identifier: Apache-2.0
"""The section `activation` of a router's file, to its settings. Called by `router_settings`; mistakes are told with a line.

Its names are those of Kubernetes where it speaks of Kubernetes: the operator writes it (`fleet.planning.front`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import yaml

from headrace.core.errors import InvalidArgument
from headrace.fleet.router.waking.settings import METRICS, ActivationSettings, LocalPlace, Target, TargetScale

_NUMBERS = ("idle_seconds", "wait_seconds", "held_requests", "held_bytes")
_WHOLE = ("held_requests", "held_bytes", "most")
_TARGET = ("apiVersion", "kind", "namespace", "name", "scale")
_LOCAL = ("folder", "service")
_SCALE = ("metric", "target", "most")
_API_VERSION = re.compile(r"([a-z0-9][a-z0-9.-]{0,252}/)?[a-z0-9]{1,63}")
_KIND = re.compile(r"[A-Za-z][A-Za-z0-9]{0,62}")
_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")
_LEAST_IDLE_SECONDS = 0.05


def read_activation(node: yaml.Node, path: str) -> ActivationSettings:
    """What sleeps, and how it is woken. Raises InvalidArgument."""
    numbers: dict[str, Any] = {}
    targets: tuple[Target, ...] = ()
    local: LocalPlace | None = None
    for name, value in _entries(node, path, "activation", (*_NUMBERS, "targets", "local")):
        if name == "targets":
            targets = _targets(value, path)
        elif name == "local":
            said = {each: _text(text, path, each) for each, text in _entries(value, path, "local", _LOCAL)}
            if len(said) < len(_LOCAL):
                raise InvalidArgument(f"{_place(path, value)}: activation.local has a folder and a service")
            local = LocalPlace(**said)
        else:
            numbers[name] = _number(value, path, f"activation.{name}", whole=name in _WHOLE)
    if not targets:
        raise InvalidArgument(
            f"{_place(path, node)}: activation needs targets: what sleeps, by apiVersion, kind and name"
        )
    settings = ActivationSettings(targets, **numbers, local=local)
    if settings.idle_seconds < _LEAST_IDLE_SECONDS or settings.wait_seconds <= 0:
        raise InvalidArgument(
            f"{_place(path, node)}: activation.idle_seconds is at least {_LEAST_IDLE_SECONDS:g}, and wait_seconds over 0"
        )
    return settings


def _targets(node: yaml.Node, path: str) -> tuple[Target, ...]:
    if not isinstance(node, yaml.SequenceNode):
        raise InvalidArgument(f"{_place(path, node)}: activation.targets is a list, such as '- name: chat-engine'")
    targets = tuple(_target(each, path) for each in node.value)
    if len({str(each) for each in targets}) != len(targets):
        raise InvalidArgument(f"{_place(path, node)}: activation.targets has the same one twice")
    return targets


def _target(node: yaml.Node, path: str) -> Target:
    said: dict[str, str] = {}
    scale: TargetScale | None = None
    for name, value in _entries(node, path, "a target", _TARGET):
        if name == "scale":
            scale = _scale(value, path)
        else:
            said[name] = _text(value, path, name)
    if "name" not in said:
        raise InvalidArgument(f"{_place(path, node)}: a target needs a name")
    target = Target(
        said["name"],
        namespace=said.get("namespace", "default"),
        kind=said.get("kind", "Deployment"),
        api_version=said.get("apiVersion", "apps/v1"),
        scale=scale,
    )
    # They become parts of a URL.
    right = (
        _NAME.fullmatch(target.name)
        and _NAME.fullmatch(target.namespace)
        and _KIND.fullmatch(target.kind)
        and _API_VERSION.fullmatch(target.api_version)
    )
    if not right:
        raise InvalidArgument(
            f"{_place(path, node)}: a target has names as Kubernetes has them, such as "
            "{apiVersion: apps/v1, kind: Deployment, namespace: default, name: chat-engine}"
        )
    return target


def _scale(node: yaml.Node, path: str) -> TargetScale:
    metric, target, most = "", 0.0, 0.0
    for name, value in _entries(node, path, "scale", _SCALE):
        if name == "metric":
            metric = _text(value, path, "metric")
        elif name == "target":
            target = _number(value, path, "scale.target")
        else:
            most = _number(value, path, "scale.most", whole=True)
    if metric not in METRICS or target <= 0 or most < 1:
        raise InvalidArgument(
            f"{_place(path, node)}: scale has a metric ({' or '.join(METRICS)}), a target over 0 for one replica, "
            "and most, the replicas there may be"
        )
    return TargetScale(metric, target, int(most))


def _entries(node: yaml.Node, path: str, what: str, known: tuple[str, ...]) -> Iterator[tuple[str, yaml.Node]]:
    if not isinstance(node, yaml.MappingNode):
        raise InvalidArgument(f"{_place(path, node)}: {what} has names and values: {', '.join(known)}")
    seen: set[str] = set()
    for key, value in node.value:
        name = str(key.value) if isinstance(key, yaml.ScalarNode) else ""
        if name not in known:
            raise InvalidArgument(f"{_place(path, key)}: {what} has no {name!r}; there are {', '.join(known)}")
        if name in seen:
            raise InvalidArgument(f"{_place(path, key)}: {name} is set twice")
        seen.add(name)
        yield name, value


def _text(node: yaml.Node, path: str, name: str) -> str:
    if not isinstance(node, yaml.ScalarNode) or not node.tag.endswith(":str"):
        raise InvalidArgument(f"{_place(path, node)}: {name} is a text")
    return str(node.value)


def _number(node: yaml.Node, path: str, name: str, *, whole: bool = False) -> Any:
    word = "a whole number from 0" if whole else "a number from 0"
    tags = (":int",) if whole else (":int", ":float")
    try:
        if not isinstance(node, yaml.ScalarNode) or not node.tag.endswith(tags):
            raise ValueError(name)
        found: Any = yaml.safe_load(node.value)
        if isinstance(found, bool) or not isinstance(found, int | float) or not 0 <= found < float("inf"):
            raise ValueError(name)
    except (ValueError, yaml.YAMLError):
        raise InvalidArgument(f"{_place(path, node)}: {name} is {word}") from None
    return found


def _place(path: str, node: yaml.Node) -> str:
    return f"{path}:{node.start_mark.line + 1}"
