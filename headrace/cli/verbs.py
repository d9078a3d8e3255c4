# SPDX-License-Identifier: Apache-2.0
"""The verbs of `headrace`, as a table: what `root` shows in `headrace --help`, and where the rest of each is.

A verb's module is imported when the verb is run, when its own help is asked for, or when a shell completes what follows
it. May not live here: an import of one, or of anything that takes its time.
"""

from __future__ import annotations

from typing import NamedTuple


class Verb(NamedTuple):
    """One row."""

    name: str
    target: str
    """`module:attribute` of a function, or of a Typer with verbs of its own."""
    help: str
    """The first sentence of what is there: a test holds them together."""
    command_class: str = ""
    """`module:attribute`, for a command line that Typer cannot read alone."""


SECTIONS: dict[str, tuple[Verb, ...]] = {
    "Serve models": (
        Verb(
            "serve",
            "headrace.cli.serve:serve",
            "Serve models over HTTP and gRPC.",
            "headrace.cli.serve:ServeCommand",
        ),
        Verb(
            "router",
            "headrace.cli.router_explain:router_group",
            "Spread requests over several servers: HTTP, server-sent events, WebSockets and gRPC on one port.",
        ),
        Verb(
            "microservice",
            "headrace.cli.microservice:microservice",
            "Serve one model as TAO's inference microservice does: at once, with its state, while it downloads and loads.",
        ),
        Verb(
            "service",
            "headrace.cli.service:service",
            "Start inference microservices anywhere, and look at, ask and stop them.",
        ),
        Verb(
            "gateway",
            "headrace.cli.gateway:gateway",
            "Serve the job API: log in, start models as inference microservices, ask them, stop them.",
        ),
        Verb("batch", "headrace.cli.batch:batch", "Run a model once over many items and write a result for each."),
    ),
    "Ask, watch and measure": (
        Verb("infer", "headrace.cli.infer:infer", "Send a request to a model and show what it answers."),
        Verb(
            "top",
            "headrace.cli.top:top",
            "Watch a server: requests, failures, latencies, queues and batches of each model, CPU, memory and GPUs.",
        ),
        Verb(
            "bench",
            "headrace.cli.bench:bench",
            "Put a model under load: requests per second, errors, latencies, and the server's own view of the same time.",
        ),
        Verb(
            "tune",
            "headrace.cli.tune:tune",
            "Find the setting of a model that gives the most throughput within a latency target, by measuring.",
        ),
        Verb("ab", "headrace.cli.ab:ab", "Let versions of a model share its traffic, and see how they compare."),
    ),
    "Models, settings and users": (
        Verb(
            "models",
            "headrace.cli.models:models",
            "Look at models, load and unload them, make and check their folders.",
        ),
        Verb("config", "headrace.cli.config:config", "Look at the configuration of a server."),
        Verb("keys", "headrace.cli.keys:keys", "Make, list and revoke API keys."),
        Verb("users", "headrace.cli.users:users", "Add, list and remove the users of a gateway."),
        Verb("jobs", "headrace.cli.jobs:jobs", "Register trained models; look at jobs, end and delete them."),
    ),
    "Fleets, on this machine and on Kubernetes": (
        Verb(
            "up",
            "headrace.cli.fleet_up:up",
            "Run InferenceServices on this machine: the same files as on Kubernetes, as processes or containers.",
        ),
        Verb(
            "apply",
            "headrace.cli.fleet_apply:apply",
            "Apply files: services, models, runtimes and what they need beside them.",
        ),
        Verb(
            "get",
            "headrace.cli.fleet_get:get",
            "List what a fleet has: where services are, whether they are ready, and why not.",
        ),
        Verb(
            "describe",
            "headrace.cli.fleet_describe:describe",
            "Show one service: conditions, components and pods, the model, the runtime and why, traffic, events, what to do"
            " next.",
        ),
        Verb(
            "delete",
            "headrace.cli.fleet_delete:delete",
            "Delete what is named, and all that was made for it; services go before what they use.",
        ),
        Verb(
            "rollout",
            "headrace.cli.fleet_rollout:rollout",
            "Move a canary on: promote it, undo it, pause and resume its steps, see how far it is.",
        ),
        Verb("logs", "headrace.cli.fleet_local:logs", "Show what the pods of a service on this machine said last."),
        Verb(
            "scale",
            "headrace.cli.fleet_local:scale",
            "Have more or fewer replicas of a service on this machine, within its minReplicas and maxReplicas.",
        ),
        Verb(
            "explain",
            "headrace.cli.explain:explain",
            "Explain a service before it is applied: the runtime and why no other, modes, pods, objects, and what is wrong.",
        ),
        Verb(
            "operator",
            "headrace.cli.operator:operator",
            "Run InferenceServices on Kubernetes: the controller and its manifests.",
        ),
        Verb(
            "model-agent",
            "headrace.cli.model_agent:model_agent",
            "Keep the BaseModels of this node on its disk, until SIGTERM.",
        ),
    ),
    "This machine and this shell": (
        Verb(
            "doctor",
            "headrace.cli.doctor:doctor",
            "Look for what is missing or wrong: ports, GPUs, folders, disk, memory, limits, packages, servers, platforms.",
        ),
        Verb(
            "completion",
            "headrace.cli.completion:completion",
            "Print a script that makes a shell complete verbs, options, policies, platforms and names of models with Tab.",
        ),
    ),
}
"""By the headings of the help, in its order."""
