# SPDX-License-Identifier: Apache-2.0
"""`headrace rollout`: a canary promoted, taken back, stopped at its step, or looked at."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.cli.checks import FAILED
from headrace.cli.fleet_options import (
    Component,
    Context,
    Kube,
    Kubeconfig,
    Namespace,
    Progress,
    Timeout,
    object_name,
    where_of,
    with_fleet,
)
from headrace.cli.results import Json, print_json

if TYPE_CHECKING:
    from headrace.fleet.client.contract import Fleet
    from headrace.fleet.client.rollouts import ComponentRollout
    from headrace.fleet.client.waiting import Outcome
    from headrace.fleet.words import Document

rollout = typer.Typer(
    name="rollout",
    help="Move a canary on: promote it, undo it, pause and resume its steps, see how far it is.",
    no_args_is_help=True,
)

_TRIES = 5
Name = Annotated[str, typer.Argument(metavar="NAME", help="The InferenceService.")]
Wait = Annotated[bool, typer.Option("--wait", help="Until it has arrived; 1 if it does not.")]

_PROMOTE = """Give the newest revision all requests: canaryTrafficPercent becomes 100. Steps that are left are passed over.

Example:

    headrace rollout promote llama-chat --kube --wait
"""
_UNDO = """Give all requests to what ran before: canaryTrafficPercent becomes 0. The new pods stay until a file is applied;
where there are steps, they end.

Example:

    headrace rollout undo llama-chat --kube
"""
_PAUSE = """Keep a rollout at its step. Errors still take it back.

Example:

    headrace rollout pause llama-chat
"""
_RESUME = """Let a paused rollout go on. One that was rolled back begins anew, with the same pods.

Example:

    headrace rollout resume llama-chat
"""


def _moving(done: str) -> Callable[..., None]:
    """A verb that changes a rollout."""

    def move(
        name: Name,
        component: Component = "",
        wait: Wait = False,
        timeout: Timeout = 600.0,
        kube: Kube = False,
        kubeconfig: Kubeconfig = "",
        context: Context = "",
        namespace: Namespace = "",
        as_json: Json = False,
    ) -> None:
        from headrace.fleet.client.rollouts import pause, promotion, resume, rollback

        change = {"promoted": promotion, "undone": rollback, "paused": pause, "resumed": resume}[done]
        progress = Progress(silent=as_json)

        async def work(fleet: Fleet) -> list[Outcome]:
            made = await _changed(fleet, namespace, name, lambda service: change(service, component))
            if not as_json:
                typer.echo(f"{object_name(made)} {done}")
            return await _awaited(fleet, made, progress, timeout) if wait else []

        outcomes = with_fleet(where_of(kube, kubeconfig, context), work)
        if as_json:
            ready = {"ready": outcomes[0].ready, "reason": outcomes[0].reason} if outcomes else {}
            print_json({"name": name, "rollout": done, **ready})
        _end(outcomes)

    return move


rollout.command("promote", help=_PROMOTE)(_moving("promoted"))
rollout.command("undo", help=_UNDO)(_moving("undone"))
rollout.command("pause", help=_PAUSE)(_moving("paused"))
rollout.command("resume", help=_RESUME)(_moving("resumed"))


@rollout.command()
def status(
    name: Name,
    wait: Wait = False,
    timeout: Timeout = 600.0,
    kube: Kube = False,
    kubeconfig: Kubeconfig = "",
    context: Context = "",
    namespace: Namespace = "",
    as_json: Json = False,
) -> None:
    """Show the revisions of a service, their shares of the requests, and how far a rollout by steps is.

    Example:

        headrace rollout status llama-chat --kube
    """
    progress = Progress(silent=as_json)

    async def work(fleet: Fleet) -> tuple[Document, list[Outcome]]:
        service = await _service(fleet, namespace, name)
        outcomes = await _awaited(fleet, service, progress, timeout) if wait else []
        return await _service(fleet, namespace, name), outcomes

    service, outcomes = with_fleet(where_of(kube, kubeconfig, context), work)
    _show(service, as_json)
    _end(outcomes)


async def _changed(fleet: Fleet, namespace: str, name: str, change: Callable[[Document], Document]) -> Document:
    """Change a service that was looked at. Its status is written all the time; its spec must be the one that was seen."""
    from headrace.core.errors import Unavailable
    from headrace.fleet.client.kinds import SERVICE, kind_named
    from headrace.fleet.words import whole

    service = await _service(fleet, namespace, name)
    seen = whole(service, "metadata", "generation")
    for left in reversed(range(_TRIES)):
        try:
            return await fleet.patch(kind_named(SERVICE), namespace or fleet.namespace, name, change(service))
        except Unavailable:
            service = await _service(fleet, namespace, name)
            if not left or whole(service, "metadata", "generation") != seen:
                raise
    raise Unavailable(f"{name} is changed all the time; try again")


async def _awaited(fleet: Fleet, service: Document, progress: Progress, seconds: float) -> list[Outcome]:
    from headrace.fleet.client.waiting import Patience, until_ready

    with progress:
        return await until_ready(fleet, [service], progress, Patience(seconds=seconds))


async def _service(fleet: Fleet, namespace: str, name: str) -> Document:
    from headrace.cli.fleet_get import named
    from headrace.fleet.client.kinds import SERVICE, kind_named

    (found,) = await named(fleet, [kind_named(SERVICE)], namespace or fleet.namespace, name)
    return found


def _end(outcomes: list[Outcome]) -> None:
    from headrace.core.telemetry.logs import one_line

    for each in outcomes:
        if not each.ready:
            typer.secho(f"headrace: {one_line(f'{each.name} is not ready: {each.reason}')}", fg="red", err=True)
            raise typer.Exit(FAILED)


def _show(service: Document, as_json: bool) -> None:
    from headrace.cli.fleet_view import state_text
    from headrace.cli.tables import line, open_console, table
    from headrace.fleet.client.rollouts import rollouts_of
    from headrace.fleet.client.summaries import reason_of

    found = rollouts_of(service)
    if as_json:
        rows: list[dict[str, Any]] = [
            {
                "component": each.component,
                "state": each.state,
                "canaryTrafficPercent": each.asked,
                **_steps_json(each),
                "traffic": [
                    {"revision": share.revision, "percent": share.percent, "latest": share.latest}
                    for share in each.shares
                ],
            }
            for each in found
        ]
        print_json({"components": rows, "reason": reason_of(service)})
        return
    console = open_console()
    cells = [
        (
            each.component,
            state_text(each.state),
            share.revision,
            f"{share.percent}%",
            "newest" if share.latest else "before",
        )
        for each in found
        for share in each.shares
    ]
    console.print(table(("COMPONENT", "ROLLOUT", "REVISION", "SHARE", ""), cells))
    for each in found:
        if each.rollout is not None and each.steps:
            marks = " ".join(_marked(each, number) for number in range(len(each.steps)))
            console.print(line(f"{each.component} steps: {marks}: {each.rollout.message}"), soft_wrap=True)
    if reason_of(service):
        console.print(line(reason_of(service)), soft_wrap=True)


def _marked(rollout: ComponentRollout, number: int) -> str:
    """A step: with brackets the one that it is at."""
    said, state = f"{rollout.steps[number]}%", rollout.rollout
    return f"[{said}]" if state is not None and not state.over and state.step == number else said


def _steps_json(rollout: ComponentRollout) -> dict[str, Any]:
    state = rollout.rollout
    if state is None or not rollout.steps:
        return {}
    told = {"phase": state.phase, "step": state.step + 1, "message": state.message, "paused": rollout.paused}
    return {"steps": {"percents": list(rollout.steps), **told}}
