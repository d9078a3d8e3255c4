# SPDX-License-Identifier: Apache-2.0
"""The router component: its RBAC, its `router.config`, and our own router if the runtime has none."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from headrace.fleet.merging import Component
from headrace.fleet.names import ROUTER_CONTAINER
from headrace.fleet.planning.context import Object, PlanContext, full_name
from headrace.fleet.planning.pod_defaults import request_seconds
from headrace.fleet.planning.pod_templates import main_container
from headrace.platforms.kubernetes_client.objects import EMPTY, Document, get_list, get_str

SERVICE_ACCOUNT = ("v1", "ServiceAccount")
ROLE = ("rbac.authorization.k8s.io/v1", "Role")
ROLE_BINDING = ("rbac.authorization.k8s.io/v1", "RoleBinding")
RBAC_GROUP = "rbac.authorization.k8s.io"
PORT = 8080
OUR_POLICIES = {
    "round_robin": "round-robin",
    "power_of_two": "p2c",
    "least_loaded": "least",
    "random": "random",
    "cache_aware": "cache_aware",
}
"""Values of `routing_strategy` to policies of `headrace router`."""
_SECONDS = {"": 1.0, "s": 1.0, "ms": 0.001, "m": 60.0, "h": 3600.0}
_TIME = re.compile(r"([0-9]+(?:\.[0-9]+)?)(ms|s|m|h)?")
_SGLANG = ("sglang", "smg", "--service-discovery", "sgl-")


Share = tuple[str, int, int]
"""A Service, its port and its weight."""


def has_no_image(component: Component) -> bool:
    """Whether neither the runtime nor the service has a router image."""
    return not get_str(main_container(component.pod), "image")


def backend_argument(url: str, weight: int, revision: str = "") -> str:
    """Return the `--backend` argument of `headrace router`."""
    return f"{url},weight={weight}" + (f",revision={revision}" if revision else "")


def prepare_router(
    context: PlanContext, component: Component, shares: Sequence[Share], revisions: Mapping[str, str] = EMPTY
) -> Component:
    """Return the router with its ServiceAccount and settings: our own in front of `shares`, if any, else its own.

    revisions: revisions by Service, under which requests are counted.
    """
    pod: Document = {**component.pod, "serviceAccountName": service_account_of(context, component)}
    if shares:
        pod = _with_headrace_router(context, component, pod, shares, revisions)
    return replace(component, pod=_with_config(pod, component))


def service_account_of(context: PlanContext, component: Component) -> str:
    """Return the ServiceAccount of the router's pods: the one that the service names, if any."""
    return get_str(context.service, "spec", "router", "serviceAccountName") or full_name(context, component)


def access_objects(context: PlanContext, component: Component) -> list[Object]:
    """Return the ServiceAccount, Role and binding that let a router discover pods."""
    name, account = full_name(context, component), service_account_of(context, component)
    rules = [{"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]}]
    objects = [context.new_object(SERVICE_ACCOUNT, name, component.labels)] if account == name else []
    return [*objects, *role_objects(context, name, [(context.namespace, account)], component.labels, rules)]


def role_objects(
    context: PlanContext, name: str, accounts: Sequence[tuple[str, str]], labels: Any, rules: list[Object]
) -> list[Object]:
    """Return a Role and its binding to these ServiceAccounts (namespace, name)."""
    return [
        context.new_object(ROLE, name, labels, rules=rules),
        context.new_object(
            ROLE_BINDING,
            name,
            labels,
            roleRef={"apiGroup": RBAC_GROUP, "kind": "Role", "name": name},
            subjects=[
                {"kind": "ServiceAccount", "name": account, "namespace": namespace} for namespace, account in accounts
            ],
        ),
    ]


def parse_seconds(time: str) -> float | None:
    """Parse `30s`, `1m` or `30` to seconds."""
    match = _TIME.fullmatch(time.strip())
    return float(match[1]) * _SECONDS[match[2] or ""] if match else None


def _with_headrace_router(
    context: PlanContext,
    component: Component,
    pod: Document,
    shares: Sequence[Share],
    revisions: Mapping[str, str],
) -> Document:
    """Return the pod with `headrace router`."""
    main = main_container(pod)
    grace = str(request_seconds(component))
    args = ["router", "--host", "0.0.0.0", "--port", str(PORT)]  # noqa: S104  in its pod
    for service, port, weight in shares:
        if weight:
            url = f"http://{context.host(service)}:{port}"
            args += ["--backend", backend_argument(url, weight, revisions.get(service, ""))]
    router = {
        "name": ROUTER_CONTAINER,
        "args": [*args, "--health-path", "", "--policy", "weighted", "--grace-seconds", grace],
        "ports": [{"name": "http", "containerPort": PORT, "protocol": "TCP"}],
        "readinessProbe": {"tcpSocket": {"port": PORT}, "periodSeconds": 5},
        **main,
        "image": context.facts.settings.image,
    }
    # Its backends are arguments: it asks the API server nothing.
    pod = {"automountServiceAccountToken": False, **pod}
    others = [container for container in get_list(pod, "containers") if container is not main]
    return {**pod, "containers": [router, *others]}


def _with_config(pod: Document, component: Component) -> Document:
    """Return the pod with `router.config` as flags of known routers and as variables."""
    if not component.config or not get_list(pod, "containers"):
        return pod
    main = main_container(pod)
    variable_names = {get_str(variable, "name") for variable in get_list(main, "env")}
    more = [
        {"name": name, "value": value} for name, value in sorted(component.config.items()) if name not in variable_names
    ]
    changed: Document = {**main, "env": [*get_list(main, "env"), *more]}
    args = [*get_list(main, "command"), *get_list(main, "args")]
    if args[:1] == ["router"] or args[:2] == ["headrace", "router"]:
        changed = _set_flags(changed, _headrace_flags(component))
    elif any(marker in arg for arg in args if isinstance(arg, str) for marker in _SGLANG):
        changed = _set_flags(changed, _sglang_flags(component))
    return {
        **pod,
        "containers": [changed if container is main else container for container in get_list(pod, "containers")],
    }


def _headrace_flags(component: Component) -> dict[str, str]:
    strategy, interval = component.config.get("routing_strategy"), _interval(component)
    flags = {"--policy": OUR_POLICIES.get(strategy, strategy)} if strategy else {}
    return {**flags, **({"--health-interval": f"{interval:g}"} if interval else {})}


def _sglang_flags(component: Component) -> dict[str, str]:
    strategy, interval = component.config.get("routing_strategy"), _interval(component)
    flags = {"--policy": strategy} if strategy else {}
    return {**flags, **({"--health-check-interval-secs": str(max(1, round(interval)))} if interval else {})}


def _interval(component: Component) -> float | None:
    return parse_seconds(component.config.get("health_check_interval", ""))


def _set_flags(container: Document, flags: dict[str, str]) -> Document:
    """Set flags of a container. A shell script is left unchanged."""
    field = "args" if get_list(container, "args") else "command"
    args = list(get_list(container, field))
    if any(isinstance(arg, str) and ("\n" in arg or " --" in arg) for arg in args):
        return container
    for flag, value in flags.items():
        joined = next((index for index, arg in enumerate(args) if str(arg).startswith(f"{flag}=")), None)
        if joined is not None:
            args[joined] = f"{flag}={value}"
        elif flag in args and args.index(flag) + 1 < len(args):
            args[args.index(flag) + 1] = value
        else:
            args += [flag, value]
    return {**container, field: args}
