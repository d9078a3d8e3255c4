# SPDX-License-Identifier: Apache-2.0
"""`headrace logs` and `headrace scale`: what the fleet of this machine has beside the verbs of every fleet."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from headrace.cli.fleet_options import Component, Namespace, or_sentence
from headrace.cli.fleet_up import StateDir
from headrace.cli.results import Json, print_json

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from headrace.fleet.local.client import LocalFleet

T = TypeVar("T")

Name = Annotated[
    str, typer.Argument(metavar="NAME", help="An InferenceService; for a log also one of its pods, or a benchmark.")
]


def logs(
    name: Name,
    pod: Annotated[str, typer.Option("--pod", metavar="NAME", help="One of its pods; all unless told.")] = "",
    container: Annotated[
        str, typer.Option("--container", "-c", metavar="NAME", help="Of its pods; the main one unless told.")
    ] = "",
    every: Annotated[
        bool, typer.Option("--all-containers", help="Those that come first and those beside, too.")
    ] = False,
    tail: Annotated[int, typer.Option("--tail", min=1, max=100_000, help="Lines of each.")] = 100,
    previous: Annotated[bool, typer.Option("--previous", "-p", help="Of the process before the last restart.")] = False,
    namespace: Namespace = "",
    folder: StateDir = "",
    as_json: Json = False,
) -> None:
    """Show what the pods of a service on this machine said last.

    Examples:

        headrace logs digits

        headrace logs digits --previous --tail 20

        headrace logs digits -c fetch-tokenizer

        headrace logs benchmarkjob/digits-load
    """
    from headrace.fleet.client.kinds import kinds_of

    said = name.partition("/")[0] if "/" in name else ""
    with or_sentence():
        kind = kinds_of(said)[0].name if said not in ("", "pod", "pods") else ""
    found: Sequence[tuple[str, str]] = _with(
        folder,
        lambda fleet: fleet.logs(
            namespace or fleet.namespace,
            _bare(name),
            kind=kind,
            pod=pod,
            container=container,
            every=every,
            tail=tail,
            previous=previous,
        ),
    )
    if as_json:
        print_json([{"pod": each, "log": text} for each, text in found])
        return
    for number, (each, text) in enumerate(found):
        if len(found) > 1:
            typer.echo(f"{'' if not number else chr(10)}==> {each} <==")
        if text:
            typer.echo(text)


def scale(
    name: Name,
    replicas: Annotated[int, typer.Option("--replicas", min=0, max=1000, help="How many there should be.")],
    component: Component = "engine",
    namespace: Namespace = "",
    folder: StateDir = "",
    as_json: Json = False,
) -> None:
    """Have more or fewer replicas of a service on this machine, within its minReplicas and maxReplicas.

    Examples:

        headrace scale digits --replicas 3

        headrace scale digits --replicas 0
    """
    told = _with(folder, lambda fleet: fleet.scale(namespace or fleet.namespace, _bare(name), component, replicas))
    if as_json:
        print_json(told)
        return
    typer.echo(f"{told['name']} is scaled to {told['replicas']}")
    if told["replicas"] != replicas:
        typer.secho("its minReplicas and maxReplicas allow no other number", fg="yellow", err=True)


def _bare(name: str) -> str:
    return name.rpartition("/")[2]


def _with(folder: str, work: Callable[[LocalFleet], Awaitable[T]]) -> T:
    import asyncio

    from headrace.fleet.local.client import open_local

    async def run() -> T:
        return await work(open_local(folder))

    with or_sentence():
        return asyncio.run(run())
