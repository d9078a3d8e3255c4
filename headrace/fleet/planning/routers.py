# SPDX-License-Identifier: Apache-2.0
"""The router component: what it may read, what `router.config` tells it, and our own router where the runtime has none."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from headrace.fleet.merging import Component
from headrace.fleet.names import ROUTER_CONTAINER
from headrace.fleet.planning.pods import main_container
from headrace.fleet.planning.site import Object, Site, full_name
from headrace.fleet.words import NOTHING, Document, items, text

ACCOUNT = ("v1", "ServiceAccount")
ROLE = ("rbac.authorization.k8s.io/v1", "Role")
BINDING = ("rbac.authorization.k8s.io/v1", "RoleBinding")
RBAC_GROUP = "rbac.authorization.k8s.io"
PORT = 8080
OUR_POLICIES = {
    "round_robin": "round-robin",
    "power_of_two": "p2c",
    "least_loaded": "least",
    "random": "random",
    "cache_aware": "cache_aware",
}
"""Words of `routing_strategy` to those of `headrace router`."""
_SECONDS = {"": 1.0, "s": 1.0, "ms": 0.001, "m": 60.0, "h": 3600.0}
_TIME = re.compile(r"([0-9]+(?:\.[0-9]+)?)(ms|s|m|h)?")
_SGLANG = ("sglang", "smg", "--service-discovery", "sgl-")


Share = tuple[str, int, int]
"""A Service, its port and its weight."""


def brings_none(component: Component) -> bool:
    """Whether neither runtime nor service says which router to run."""
    return not text(main_container(component.pod), "image")


def address(url: str, weight: int, revision: str = "") -> str:
    """A backend as our router takes it."""
    return f"{url},weight={weight}" + (f",revision={revision}" if revision else "")


def prepared(
    site: Site, component: Component, shares: Sequence[Share], revisions: Mapping[str, str] = NOTHING
) -> Component:
    """The router with its account and its settings: ours before these Services, if any, else the one it brings.

    revisions: of the Services, where they are counted by these.
    """
    pod: Document = {**component.pod, "serviceAccountName": account_of(site, component)}
    if shares:
        pod = _ours(site, pod, shares, revisions)
    return replace(component, pod=_configured(pod, component))


def account_of(site: Site, component: Component) -> str:
    """The service account of the router's pods: the service's own if it names one."""
    return text(site.service, "spec", "router", "serviceAccountName") or full_name(site, component)


def access_objects(site: Site, component: Component) -> list[Object]:
    """What lets a router find pods."""
    name, account = full_name(site, component), account_of(site, component)
    rules = [{"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]}]
    objects = [site.made(ACCOUNT, name, component.labels)] if account == name else []
    return [*objects, *role_objects(site, name, account, component.labels, rules)]


def role_objects(site: Site, name: str, account: str, labels: Any, rules: list[Object]) -> list[Object]:
    """A Role and who has it."""
    return [
        site.made(ROLE, name, labels, rules=rules),
        site.made(
            BINDING,
            name,
            labels,
            roleRef={"apiGroup": RBAC_GROUP, "kind": "Role", "name": name},
            subjects=[{"kind": "ServiceAccount", "name": account, "namespace": site.namespace}],
        ),
    ]


def seconds(time: str) -> float | None:
    """`30s`, `1m` or `30`, in seconds."""
    found = _TIME.fullmatch(time.strip())
    return float(found[1]) * _SECONDS[found[2] or ""] if found else None


def _ours(site: Site, pod: Document, shares: Sequence[Share], revisions: Mapping[str, str]) -> Document:
    """The pod with `headrace router`."""
    main = main_container(pod)
    listening = ["router", "--host", "0.0.0.0", "--port", str(PORT)]  # noqa: S104  in its pod
    for service, port, weight in shares:
        if weight:
            url = f"http://{site.host(service)}:{port}"
            listening += ["--backend", address(url, weight, revisions.get(service, ""))]
    router = {
        "name": ROUTER_CONTAINER,
        "args": [*listening, "--health-path", "", "--policy", "weighted"],
        "ports": [{"name": "http", "containerPort": PORT, "protocol": "TCP"}],
        "readinessProbe": {"tcpSocket": {"port": PORT}, "periodSeconds": 5},
        **main,
        "image": site.facts.settings.image,
    }
    others = [each for each in items(pod, "containers") if each is not main]
    return {**pod, "containers": [router, *others]}


def _configured(pod: Document, component: Component) -> Document:
    """The pod with `router.config` as flags of the routers we know and, for every other, as variables."""
    if not component.config or not items(pod, "containers"):
        return pod
    main = main_container(pod)
    given = {text(each, "name") for each in items(main, "env")}
    more = [{"name": name, "value": value} for name, value in sorted(component.config.items()) if name not in given]
    changed: Document = {**main, "env": [*items(main, "env"), *more]}
    words = [*items(main, "command"), *items(main, "args")]
    if words[:1] == ["router"] or words[:2] == ["headrace", "router"]:
        changed = _flags(changed, _for_ours(component))
    elif any(mark in word for word in words if isinstance(word, str) for mark in _SGLANG):
        changed = _flags(changed, _for_sglang(component))
    return {**pod, "containers": [changed if each is main else each for each in items(pod, "containers")]}


def _for_ours(component: Component) -> dict[str, str]:
    strategy, every = component.config.get("routing_strategy"), _interval(component)
    flags = {"--policy": OUR_POLICIES.get(strategy, strategy)} if strategy else {}
    return {**flags, **({"--health-interval": f"{every:g}"} if every else {})}


def _for_sglang(component: Component) -> dict[str, str]:
    strategy, every = component.config.get("routing_strategy"), _interval(component)
    flags = {"--policy": strategy} if strategy else {}
    return {**flags, **({"--health-check-interval-secs": str(max(1, round(every)))} if every else {})}


def _interval(component: Component) -> float | None:
    return seconds(component.config.get("health_check_interval", ""))


def _flags(container: Document, flags: dict[str, str]) -> Document:
    """The container with these flags, in place of those it has. A line for a shell is left as it is."""
    place = "args" if items(container, "args") else "command"
    words = list(items(container, place))
    if any(isinstance(word, str) and ("\n" in word or " --" in word) for word in words):
        return container
    for flag, value in flags.items():
        joined = next((index for index, word in enumerate(words) if str(word).startswith(f"{flag}=")), None)
        if joined is not None:
            words[joined] = f"{flag}={value}"
        elif flag in words and words.index(flag) + 1 < len(words):
            words[words.index(flag) + 1] = value
        else:
            words += [flag, value]
    return {**container, place: words}
