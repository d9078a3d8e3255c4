# SPDX-License-Identifier: Apache-2.0
"""The table of commands: their help in `headrace --help` and the module of each.

A command's module is imported when the command runs, when its help is printed, or when a shell completes its arguments.
This module must not import any of them, nor anything slow.
"""

from __future__ import annotations

from typing import NamedTuple


class CommandSpec(NamedTuple):
    """One command."""

    name: str
    target: str
    """`module:attribute` of a function, or of a Typer with subcommands."""
    help: str
    """First sentence of the command's help; a test compares the two."""
    command_class: str = ""
    """`module:attribute` of a command class, if Typer cannot parse the arguments alone."""


SECTIONS: dict[str, tuple[CommandSpec, ...]] = {
    "Serve models": (
        CommandSpec(
            "serve",
            "headrace.cli.serve:serve",
            "Serve models over HTTP and gRPC.",
            "headrace.cli.serve:ServeCommand",
        ),
        CommandSpec(
            "router",
            "headrace.cli.router:router_group",
            "Spread requests over several servers: HTTP, server-sent events, WebSockets and gRPC on one port.",
        ),
        CommandSpec(
            "microservice",
            "headrace.cli.microservice:microservice",
            "Serve one model with the API of TAO's inference microservice; it reports its status while the model loads.",
        ),
        CommandSpec(
            "service",
            "headrace.cli.service:service",
            "Start inference microservices on any platform; inspect, query and stop them.",
        ),
        CommandSpec(
            "gateway",
            "headrace.cli.gateway:gateway_group",
            "Serve the job API: log in, start models as inference microservices, send requests, stop them.",
        ),
        CommandSpec(
            "batch", "headrace.cli.batch:batch", "Run a model once over many items and write a result for each."
        ),
    ),
    "Query, watch and measure": (
        CommandSpec("infer", "headrace.cli.infer:infer", "Send a request to a model and print the response."),
        CommandSpec(
            "chat",
            "headrace.cli.chat:chat",
            "Chat with a language model in the terminal; answers are printed as they are generated.",
        ),
        CommandSpec(
            "top",
            "headrace.cli.top:top",
            "Watch a server: requests, failures, latencies, queues and batches per model, CPU, memory and GPUs.",
        ),
        CommandSpec(
            "bench",
            "headrace.cli.bench:bench",
            "Measure a model under load: requests per second, errors, latencies, and the server's own statistics.",
        ),
        CommandSpec(
            "tune",
            "headrace.cli.tune:tune",
            "Find the model settings with the highest throughput within a latency target, by measurement.",
        ),
        CommandSpec("ab", "headrace.cli.ab:ab", "Split a model's traffic between versions and compare their results."),
    ),
    "Models, settings and users": (
        CommandSpec(
            "models",
            "headrace.cli.models:models",
            "Inspect, load and unload models; create and check their folders.",
        ),
        CommandSpec("config", "headrace.cli.config:config", "Show and check the configuration of a server."),
        CommandSpec("keys", "headrace.cli.keys:keys", "Create, list, change and revoke API keys."),
        CommandSpec("users", "headrace.cli.users:users", "Add, list and remove the users of a gateway."),
        CommandSpec("jobs", "headrace.cli.jobs:jobs", "Register trained models; list, cancel and delete jobs."),
    ),
    "Fleets, on this machine and on Kubernetes": (
        CommandSpec(
            "up",
            "headrace.cli.fleet_up:up",
            "Run InferenceServices on this machine: the same files as on Kubernetes, as processes or containers.",
        ),
        CommandSpec(
            "apply",
            "headrace.cli.fleet:apply",
            "Apply files: services, models, runtimes and the objects they need.",
        ),
        CommandSpec(
            "get",
            "headrace.cli.fleet:get",
            "List the objects of a fleet: services with their URL, whether they are ready, and why not.",
        ),
        CommandSpec(
            "describe",
            "headrace.cli.fleet:describe",
            "Show one service: conditions, components, pods, model, runtime and why, traffic, events and next steps.",
        ),
        CommandSpec(
            "delete",
            "headrace.cli.fleet:delete",
            "Delete objects and everything created for them; services before what they use.",
        ),
        CommandSpec(
            "rollout",
            "headrace.cli.fleet_rollout:rollout",
            "Control a rollout: promote, undo, pause, resume; show its status and its history.",
        ),
        CommandSpec(
            "logs", "headrace.cli.fleet_local:logs", "Print the last log lines of a service's pods on this machine."
        ),
        CommandSpec(
            "scale",
            "headrace.cli.fleet_local:scale",
            "Set the replica count of a service on this machine, within its minReplicas and maxReplicas.",
        ),
        CommandSpec("ray", "headrace.cli.ray:ray", "Run InferenceServices on a Ray cluster."),
        CommandSpec(
            "explain",
            "headrace.cli.explain:explain",
            "Explain a service before it is applied: the runtime and why, deployment modes, pods, objects, and errors.",
        ),
        CommandSpec(
            "operator",
            "headrace.cli.operator:operator",
            "Run InferenceServices on Kubernetes: the controller and its manifests.",
        ),
        CommandSpec(
            "model-agent",
            "headrace.cli.model_agent:model_agent",
            "Download and keep the BaseModels of this node, until SIGTERM.",
        ),
    ),
    "This machine and this shell": (
        CommandSpec(
            "doctor",
            "headrace.cli.doctor:doctor",
            "Check this machine: ports, GPUs, folders, disk, memory, limits, packages, servers, platforms.",
        ),
        CommandSpec(
            "completion",
            "headrace.cli.completion:completion",
            "Print a shell completion script for commands, options, policies, platforms and model names.",
        ),
    ),
}
"""By the headings of the help, in order."""
