# SPDX-License-Identifier: Apache-2.0
"""From options and a YAML file to a router's settings. Called by `router`; options count for more than the file.

The file has the names of `headrace.fleet.router.settings`: `backends`, `policy`, `host`, `port`, and the sections `health`,
`outliers`, `retries`, `timeouts`, `cache_aware`, `prefix_hash`, `sticky`, `hedging`, `queue`, `discovery` and `pairing`;
`activation` is read by `router_activation`. A mistake is told with its file and line.
"""

from __future__ import annotations

from dataclasses import fields, replace
from math import isfinite
from typing import Any

import yaml

from headrace.cli.checks import address_of, collector_of, tls_of
from headrace.cli.handing import handing_key
from headrace.cli.router_activation import read_activation
from headrace.core.errors import InvalidArgument
from headrace.fleet.router.choosing.checking import check_choices
from headrace.fleet.router.choosing.settings import (
    CacheAwareSettings,
    HedgingSettings,
    PrefixHashSettings,
    QueueSettings,
    StickySettings,
)
from headrace.fleet.router.discovery.settings import DiscoverySettings
from headrace.fleet.router.pairing.settings import PairingSettings
from headrace.fleet.router.settings import (
    ALIASES,
    POLICIES,
    BackendAddress,
    HealthSettings,
    OutlierSettings,
    RetrySettings,
    RouterSettings,
    TimeoutSettings,
)
from headrace.programs.router import RouterAppSettings

_SECTIONS: dict[str, Any] = {
    "health": HealthSettings,
    "outliers": OutlierSettings,
    "retries": RetrySettings,
    "timeouts": TimeoutSettings,
    "cache_aware": CacheAwareSettings,
    "prefix_hash": PrefixHashSettings,
    "sticky": StickySettings,
    "hedging": HedgingSettings,
    "queue": QueueSettings,
    "discovery": DiscoverySettings,
    "pairing": PairingSettings,
}
_KINDS: dict[str, str] = {
    "policy": "str",
    "host": "str",
    "port": "int",
    "tls_certificate": "str",
    "tls_key": "str",
    "tls_client_ca": "str",
    "ca_file": "str",
    "keep_host": "bool",
    "trust_forwarded": "bool",
    "slow_start_seconds": "float",
    "idle_connections": "int",
    "whole_bytes": "int",
    "max_outstanding": "int",
    "grace_seconds": "float",
    "access_log": "bool",
    "trace_endpoint": "str",
    **{f"{section}.{each.name}": str(each.type) for section, made in _SECTIONS.items() for each in fields(made)},
}
_ACTIVATION = "activation"
_WORDS = {"str": "a text", "int": "a whole number from 0", "float": "a number from 0", "bool": "true or false"}
_APP = ("host", "port", "tls_certificate", "tls_key", "tls_client_ca", "grace_seconds", "access_log", "trace_endpoint")


def router_settings(given: dict[str, Any], config: str) -> RouterAppSettings:
    """All settings, checked."""
    values = {**(read_router_file(config) if config else {}), **given}
    for name, value in values.items():
        if isinstance(value, float) and not isfinite(value):
            raise InvalidArgument(f"{name} is a number, not {value}")
    texts = values.pop("backends", ())
    app = {name: values.pop(name) for name in _APP if name in values}
    sections = {
        section: made(
            **{
                each.name: values.pop(f"{section}.{each.name}")
                for each in fields(made)
                if f"{section}.{each.name}" in values
            }
        )
        for section, made in _SECTIONS.items()
    }
    if not texts and not sections["discovery"].wanted:
        raise InvalidArgument("a router needs a backend: add --backend http://host:8000, or say where to find them")
    policy = values.get("policy", POLICIES[0])
    values["policy"] = ALIASES.get(policy, policy)
    if values["policy"] not in POLICIES:
        raise InvalidArgument(f"policy is {', '.join(POLICIES)}, not {policy!r}")
    health = sections["health"]
    if health.path and (not health.path.startswith("/") or not health.path.isprintable() or " " in health.path):
        raise InvalidArgument(f"the health path begins with / and has no spaces: {health.path!r} is none")
    router = RouterSettings(tuple(BackendAddress.parse(text) for text in texts), **values, **sections)
    if router.paired:
        router = replace(router, handing_key=handing_key(router.pairing.key_file))
    check_choices(router)
    return RouterAppSettings(
        router=router,
        address=address_of(app.get("host", "127.0.0.1"), app.get("port", 8070), ""),
        tls=tls_of(app.get("tls_certificate", ""), app.get("tls_key", ""), app.get("tls_client_ca", "")),
        grace_seconds=app.get("grace_seconds", 30.0),
        access_log=app.get("access_log", False),
        trace_endpoint=collector_of(app.get("trace_endpoint", "")),
        config=config,
    )


def read_router_file(path: str) -> dict[str, Any]:
    """What a file says, by dotted names."""
    try:
        with open(path, encoding="utf-8") as stream:
            document = yaml.compose(stream, yaml.SafeLoader)
    except OSError as error:
        raise InvalidArgument(f"--config {path}: {error.strerror}; name a file that can be read") from None
    except UnicodeDecodeError:
        raise InvalidArgument(f"--config {path} is not UTF-8 text") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark is not None else path
        raise InvalidArgument(f"{where}: this is not YAML") from None
    found: dict[str, Any] = {}
    if document is not None:
        _read_mapping(document, "", path, found)
    return found


def _read_mapping(node: yaml.Node, prefix: str, path: str, found: dict[str, Any]) -> None:
    if not isinstance(node, yaml.MappingNode):
        raise InvalidArgument(f"{_place(path, node)}: names and values are expected here, such as 'policy: p2c'")
    for key, value in node.value:
        name = f"{prefix}{key.value}" if isinstance(key, yaml.ScalarNode) else ""
        if name in found:
            raise InvalidArgument(f"{_place(path, key)}: {name} is set twice")
        if not prefix and name in _SECTIONS:
            _read_mapping(value, f"{name}.", path, found)
        elif name == "backends":
            found[name] = _read_backends(value, path)
        elif name == _ACTIVATION:
            found[name] = read_activation(value, path)
        elif name in _KINDS:
            found[name] = _read_value(value, name, path)
        else:
            known = sorted(
                each.removeprefix(prefix)
                for each in (*_KINDS, *_SECTIONS, "backends", _ACTIVATION)
                if each.startswith(prefix)
            )
            known = [each for each in known if "." not in each]
            raise InvalidArgument(f"{_place(path, key)}: there is no setting {name!r}; there are {', '.join(known)}")


def _read_backends(node: yaml.Node, path: str) -> list[str]:
    texts = _plain(node)
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
        raise InvalidArgument(f"{_place(path, node)}: backends is a list of addresses, such as '- http://host:8000'")
    return texts


def _read_value(node: yaml.Node, name: str, path: str) -> Any:
    value, kind = _plain(node), _KINDS[name]
    number = isinstance(value, int | float) and not isinstance(value, bool)
    right = {
        "str": isinstance(value, str),
        "bool": isinstance(value, bool),
        "int": number and isinstance(value, int) and value >= 0,
        "float": number and 0 <= value < float("inf"),
    }
    if not right[kind]:
        raise InvalidArgument(f"{_place(path, node)}: {name} is {_WORDS[kind]}, not {value!r}")
    return value


def _plain(node: yaml.Node) -> Any:
    loader = yaml.SafeLoader("")
    try:
        return loader.construct_object(node, deep=True)
    except (yaml.YAMLError, ValueError):
        return None
    finally:
        loader.dispose()


def _place(path: str, node: yaml.Node) -> str:
    return f"{path}:{node.start_mark.line + 1}"
