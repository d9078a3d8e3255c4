# SPDX-License-Identifier: Apache-2.0
"""`headrace logs` and `headrace scale`: commands for the local fleet only."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from headrace.cli.checks import print_warning
from headrace.cli.common_options import Json, print_json
from headrace.cli.fleet_options import Component, Namespace, report_fleet_errors
from headrace.cli.fleet_up import StateDir

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from headrace.fleet.local.api_client import LocalFleet

T = TypeVar("T")

Name = Annotated[
    str, typer.Argument(metavar="NAME", help="An InferenceService; for logs also one of its pods, or a benchmark job.")
]


def logs(
    name: Name,
    pod: Annotated[str, typer.Option("--pod", metavar="NAME", help="One of its pods (default: all).")] = "",
    container: Annotated[
        str, typer.Option("--container", "-c", metavar="NAME", help="Container of the pods (default: the main one).")
    ] = "",
    every: Annotated[bool, typer.Option("--all-containers", help="Include init containers and sidecars.")] = False,
    tail: Annotated[int, typer.Option("--tail", min=1, max=100_000, help="Number of lines per container.")] = 100,
    previous: Annotated[
        bool, typer.Option("--previous", "-p", help="Show the log of the process before the last restart.")
    ] = False,
    namespace: Namespace = "",
    folder: StateDir = "",
    as_json: Json = False,
) -> None:
    """Print the last log lines of a service's pods on this machine.

    Examples:

        headrace logs digits

        headrace logs digits --previous --tail 20

        headrace logs digits -c fetch-tokenizer

        headrace logs benchmarkjob/digits-load
    """
    from headrace.fleet.client.contract import kinds_named

    kind_name = name.partition("/")[0] if "/" in name else ""
    with report_fleet_errors():
        kind = kinds_named(kind_name)[0].name if kind_name not in ("", "pod", "pods") else ""
    pod_logs: Sequence[tuple[str, str]] = _with_local_fleet(
        folder,
        lambda fleet: fleet.logs(
            namespace or fleet.namespace,
            _without_kind(name),
            kind=kind,
            pod=pod,
            container=container,
            every=every,
            tail=tail,
            previous=previous,
        ),
    )
    if as_json:
        print_json([{"pod": pod_name, "log": text} for pod_name, text in pod_logs])
        return
    for number, (pod_name, text) in enumerate(pod_logs):
        if len(pod_logs) > 1:
            typer.echo(f"{'' if not number else chr(10)}==> {pod_name} <==")
        if text:
            typer.echo(text)


def scale(
    name: Name,
    replicas: Annotated[int, typer.Option("--replicas", min=0, max=1000, help="Replica count to set.")],
    component: Component = "engine",
    namespace: Namespace = "",
    folder: StateDir = "",
    as_json: Json = False,
) -> None:
    """Set the replica count of a service on this machine, within its minReplicas and maxReplicas.

    Examples:

        headrace scale digits --replicas 3

        headrace scale digits --replicas 0
    """
    result = _with_local_fleet(
        folder, lambda fleet: fleet.scale(namespace or fleet.namespace, _without_kind(name), component, replicas)
    )
    if as_json:
        print_json(result)
        return
    typer.echo(f"{result['name']} scaled to {result['replicas']}")
    if result["replicas"] != replicas:
        field = "maxReplicas" if replicas > result["replicas"] else "minReplicas"
        print_warning(
            f"{replicas} is outside its bounds: minReplicas is {result['min']}, maxReplicas is {result['max']}",
            f"set {component}.{field} to {replicas} in the service's file, then headrace apply -f FILE",
        )


def _without_kind(name: str) -> str:
    return name.rpartition("/")[2]


def _with_local_fleet(folder: str, work: Callable[[LocalFleet], Awaitable[T]]) -> T:
    import asyncio

    from headrace.fleet.local.api_client import open_local

    async def run() -> T:
        return await work(open_local(folder))

    with report_fleet_errors():
        return asyncio.run(run())
