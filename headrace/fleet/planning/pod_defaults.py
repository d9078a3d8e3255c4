# SPDX-License-Identifier: Apache-2.0
"""Defaults of every pod of a service: a stop that loses no request, few privileges, the last log lines in its status.

Nothing here replaces what a runtime or a service sets itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.fleet.merging import Component
from headrace.fleet.planning.context import Object, PlanContext
from headrace.fleet.planning.pod_templates import main_container
from headrace.platforms.kubernetes_client.objects import Document, get_list, get_mapping, get_str

SLEEP_ACTION = "sleep-action"
"""Capability of a cluster whose kubelets support `sleep` in a `preStop` hook; others need the program in the image."""
SLOWEST_REQUEST_SECONDS = 300
"""Longest duration of a request of a component without `timeoutSeconds`."""
_DRAIN_SECONDS = 30
"""From the last response to the end of the process."""
_GRACE_VARIABLE = "INFERENCE_SERVER_GRACE_S"
"""Environment variable of `headrace serve`: how long open requests may take after SIGTERM."""


def serving_pod(context: PlanContext, component: Component, pod: Document) -> Object:
    """Return a pod spec of a component with all defaults."""
    graceful = with_graceful_stop(context, pod, request_seconds(component))
    return with_last_log_lines(with_few_privileges(context, graceful))


def with_last_log_lines(pod: Document) -> Object:
    """Return a pod whose status has the last log lines of a failed container, unless it writes a message of its own."""
    changed: Object = dict(pod)
    for kind in ("containers", "initContainers"):
        if kind in pod:
            changed[kind] = [
                {"terminationMessagePolicy": "FallbackToLogsOnError", **container}
                if isinstance(container, Mapping)
                else container
                for container in get_list(pod, kind)
            ]
    return changed


def request_seconds(component: Component) -> int:
    """Return how long a request of a component may take."""
    return component.extension.timeout_seconds or SLOWEST_REQUEST_SECONDS


def stop_seconds(context: PlanContext, seconds: int) -> int:
    """Return the time that a pod needs to stop, with requests of up to `seconds`."""
    return context.facts.settings.pre_stop_seconds + seconds + _DRAIN_SECONDS


def with_graceful_stop(context: PlanContext, pod: Document, seconds: int) -> Object:
    """Return a pod that keeps serving until kube-proxy and routers have removed it, and then finishes its open requests.

    A pod that is deleted leaves the endpoints of its Services, but requests come to it for a few seconds more. Without a
    wait its server would refuse them. seconds: how long a request may take.
    """
    if context.facts.settings.pre_stop_seconds <= 0 or not get_list(pod, "containers"):
        return dict(pod)
    main = main_container(pod)
    containers = [
        _with_wait(context, container, seconds) if container is main or get_list(container, "ports") else container
        for container in get_list(pod, "containers")
    ]
    changed: Object = {**pod, "containers": containers}
    changed.setdefault("terminationGracePeriodSeconds", stop_seconds(context, seconds))
    return changed


def pre_stop(context: PlanContext) -> Object:
    """Return the `preStop` hook that waits."""
    wait = context.facts.settings.pre_stop_seconds
    if context.has(SLEEP_ACTION):
        return {"sleep": {"seconds": wait}}
    return {"exec": {"command": ["sleep", str(wait)]}}


def _with_wait(context: PlanContext, container: Any, seconds: int) -> Any:
    if not isinstance(container, Mapping):
        return container
    lifecycle = get_mapping(container, "lifecycle")
    changed: Object = dict(container)
    if not lifecycle.get("preStop"):
        changed["lifecycle"] = {**lifecycle, "preStop": pre_stop(context)}
    if _runs_headrace(container):
        changed["env"] = _with_variable(get_list(container, "env"), str(seconds))
    return changed


def _runs_headrace(container: Document) -> bool:
    """Whether a container runs `headrace serve` without a grace period of its own."""
    words = [word for word in (*get_list(container, "command"), *get_list(container, "args")) if isinstance(word, str)]
    begins = words[:1] == ["serve"] or words[:2] == ["headrace", "serve"]
    return begins and not any(word.startswith(("--grace-seconds", "--exit-timeout-secs")) for word in words)


def _with_variable(env: list[Any], value: str) -> list[Any]:
    if any(get_str(variable, "name") == _GRACE_VARIABLE for variable in env):
        return env
    return [*env, {"name": _GRACE_VARIABLE, "value": value}]


RESTRICTED, COMPATIBLE, UNCHANGED = "restricted", "compatible", "unchanged"
POD_SECURITY = (RESTRICTED, COMPATIBLE, UNCHANGED)
"""Values of the setting `pod_security`."""
_ESCALATING = frozenset({"SYS_ADMIN", "CAP_SYS_ADMIN", "ALL"})
"""Capabilities that the API server refuses together with `allowPrivilegeEscalation: false`."""


def with_few_privileges(context: PlanContext, pod: Document) -> Object:
    """Return a pod that meets the Pod Security Standard `restricted`, except for fields set by the runtime or the service.

    The fields are those of the containers, since Knative takes none of the pod.
    """
    setting = context.facts.settings.pod_security
    if setting == UNCHANGED:
        return dict(pod)
    changed: Object = dict(pod)
    for kind in ("containers", "initContainers"):
        if kind in pod:
            changed[kind] = [_with_few_privileges(container, pod, setting) for container in get_list(pod, kind)]
    if not get_str(pod, "serviceAccountName"):
        # A pod with its own ServiceAccount needs its token.
        changed.setdefault("automountServiceAccountToken", False)
    return changed


def _with_few_privileges(container: Any, pod: Document, setting: str) -> Any:
    if not isinstance(container, Mapping):
        return container
    own, shared = get_mapping(container, "securityContext"), get_mapping(pod, "securityContext")
    if own.get("privileged") is True:
        return container
    security: Object = dict(own)
    if "seccompProfile" not in shared:
        security.setdefault("seccompProfile", {"type": "RuntimeDefault"})
    if not _ESCALATING & set(get_list(own, "capabilities", "add")):
        security.setdefault("allowPrivilegeEscalation", False)
    security.setdefault("capabilities", {"drop": ["ALL"]})
    user = own.get("runAsUser", shared.get("runAsUser"))
    must_be_user = setting == RESTRICTED or is_headrace_image(get_str(container, "image"))
    if must_be_user and user != 0 and "runAsNonRoot" not in shared:
        security.setdefault("runAsNonRoot", True)
    return {**container, "securityContext": security}


def is_headrace_image(image: str) -> bool:
    """Whether an image is one of ours, by its name: they run as a user of their own."""
    name = image.rpartition("/")[2].partition("@")[0].partition(":")[0]
    return name == "headrace" or name.startswith("headrace-")
