# SPDX-License-Identifier: Apache-2.0
"""What to do next about a service, as `describe` tells it: one step for each thing that keeps it from being ready. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import urlsplit

from headrace.fleet.client.contract import Commands
from headrace.fleet.client.rollouts import rollouts_of
from headrace.fleet.client.summaries import NOT_SEEN, NOT_SEEN_AGAIN, mode_of, reason_of, summary, verdict
from headrace.fleet.names import MAIN_CONTAINER, VIRTUAL
from headrace.fleet.status.conditions import READY
from headrace.fleet.status.observed import condition_of
from headrace.fleet.status.pods import FAILED, LOADING, PENDING, PodState, state_of
from headrace.fleet.words import Document, items, name_of, namespace_of, text

_IMAGES = frozenset(
    {"ErrImagePull", "ImagePullBackOff", "ErrImageNeverPull", "InvalidImageName", "RegistryUnavailable"}
)
_CONFIGS = frozenset({"CreateContainerConfigError", "CreateContainerError", "RunContainerError", "StartError"})
KUBECTL = Commands()


def next_steps(
    service: Document, pods: Sequence[Document], model: Document | None = None, commands: Commands = KUBECTL
) -> list[str]:
    """What to do, the most likely first; never empty."""
    if reason_of(service) in (NOT_SEEN, NOT_SEEN_AGAIN):
        return [f"wait a few seconds; if nothing comes, see that the operator runs: {commands.controller}"]
    state = verdict(service)
    if state == "ready":
        return _of_a_ready_one(service, commands)
    if state == "invalid":
        again = f"headrace apply -f FILE -n {namespace_of(service)}{commands.flag}"
        return [f"put right what Ready says above and apply the file again: {again}"]
    found = [step for pod in pods if (step := _of_pod(service, pod, commands))]
    found += _of_model(model, commands)
    if not found and not pods:
        found = _without_pods(service, commands)
    return list(dict.fromkeys(found)) or ["wait: it is on its way, and nothing has failed"]


def _of_a_ready_one(service: Document, commands: Commands) -> list[str]:
    url = urlsplit(summary(service).url)
    found = [f"ask it at {url.geturl()}"] if url.netloc else []
    host = (url.hostname or "").split(".")
    if commands.forward and host[1:3] == [namespace_of(service), "svc"] and mode_of(service) != VIRTUAL:
        forward = commands.forward.format(namespace=host[1], service=host[0], port=url.port or 80)
        found = [f"ask it at {url.geturl()} from inside the cluster; to ask it from here, {forward}"]
    for each in rollouts_of(service):
        if each.two:
            verbs = "promote" if each.asked == 0 else "promote|undo"
            found.append(
                f"move the canary of {each.component}: headrace rollout {verbs} {name_of(service)}{commands.flag}"
            )
    return found or ["nothing: it is ready"]


def _of_pod(service: Document, pod: Document, commands: Commands) -> str:
    seen = state_of(pod)
    logs = commands.logs.format(namespace=namespace_of(service), pod=seen.pod, container=MAIN_CONTAINER)
    if seen.state == FAILED:
        return _of_failure(seen, f"{logs}{commands.previous}")
    if seen.state == PENDING and seen.reason == "Unschedulable":
        return (
            f"no node takes pod {seen.pod}: free or add what is named there, or ask for less in the engine's resources"
        )
    if seen.state == LOADING:
        return f"wait for the model to load, and see how it goes: {logs}"
    return ""


def _of_failure(seen: PodState, logs: str) -> str:
    if seen.reason in _IMAGES:
        return "check the image's name in the runtime or the engine, and imagePullSecrets where its registry is private"
    if seen.reason in _CONFIGS:
        return f"something that pod {seen.pod} mounts or reads is not there: create it, or correct its name"
    if seen.reason == "OOMKilled":
        return "raise the memory limit of the engine, or serve with a shorter context or smaller batches"
    if seen.reason == "Evicted":
        return "the node ran short: request the memory and disk that the pod uses, so that it is placed where they are"
    return f"see what the program said before it ended: {logs}"


def _of_model(model: Document | None, commands: Commands) -> list[str]:
    state = text(model, "status", "state")
    if model is None or state in ("", "Ready"):
        return []
    look = f"headrace describe model {name_of(model)}{commands.flag}"
    if state == "Failed" or items(model, "status", "nodesFailed"):
        return [f"the model could not be brought to a node: {look} says where"]
    return [f"wait for the model to be brought: {look} shows how far it is"]


def _without_pods(service: Document, commands: Commands) -> list[str]:
    said = text(condition_of(service, READY), "reason")
    if said == "ReconcileError":
        return ["do what Ready says above: the API server refuses an object of the service"]
    events = commands.events.format(namespace=namespace_of(service), service=name_of(service))
    return [f"no pod was made: {events} shows what is in the way, such as a quota"]
