# SPDX-License-Identifier: Apache-2.0
"""`headrace rollout`: promote, undo, pause, resume or show a canary rollout."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.cli.checks import FAILED, print_error
from headrace.cli.common_options import Json, print_json
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

if TYPE_CHECKING:
    from headrace.fleet.client import FleetTarget
    from headrace.fleet.client.contract import Fleet
    from headrace.fleet.client.readiness import Outcome
    from headrace.fleet.client.rollouts import ComponentRollout
    from headrace.platforms.kubernetes_client.objects import Document

rollout = typer.Typer(
    name="rollout",
    help="Control a rollout: promote, undo, pause, resume; show its status and its history.",
    no_args_is_help=True,
)

_TRIES = 5
_RECONCILE_POLLS, _RECONCILE_SECONDS = 25, 0.2
"""How often and how far apart `status` asks until the operator has seen the last change."""
Name = Annotated[str, typer.Argument(metavar="NAME", help="The InferenceService.")]
Wait = Annotated[bool, typer.Option("--wait", help="Wait until the rollout is complete; exit with 1 if it fails.")]

_PROMOTE = """Send all traffic to the newest revision: canaryTrafficPercent becomes 100. Remaining steps are skipped.

Example:

    headrace rollout promote llama-chat --kube --wait
"""
_PAUSE = """Pause a rollout at its current step. Errors still roll it back.

Example:

    headrace rollout pause llama-chat
"""
_RESUME = """Resume a paused rollout. A rollout that was rolled back starts again, with the same pods.

Example:

    headrace rollout resume llama-chat
"""


def _rollout_command(done: str) -> Callable[..., None]:
    """Return a command that changes a rollout."""

    def change_rollout(
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
        from headrace.fleet.client.rollouts import pause, promotion, resume

        change = {"promoted": promotion, "paused": pause, "resumed": resume}[done]
        _change(
            name,
            namespace,
            where_of(kube, kubeconfig, context),
            lambda service: change(service, component),
            done,
            timeout=timeout if wait else None,
            as_json=as_json,
        )

    return change_rollout


def _change(
    name: str,
    namespace: str,
    target: FleetTarget,
    change: Callable[[Document], Document],
    done: str,
    *,
    timeout: float | None,
    as_json: bool,
) -> None:
    """Change a rollout, print what was done, and wait up to `timeout` seconds if there is one."""
    progress = Progress(silent=as_json)

    async def work(fleet: Fleet) -> list[Outcome]:
        service = await _patch(fleet, namespace, name, change)
        if not as_json:
            typer.echo(f"{object_name(service)} {done}")
        return await _wait(fleet, service, progress, timeout) if timeout is not None else []

    outcomes = with_fleet(target, work)
    if as_json:
        ready = {"ready": outcomes[0].ready, "reason": outcomes[0].reason} if outcomes else {}
        print_json({"name": name, "rollout": done, **ready})
    _exit_if_not_ready(outcomes)


rollout.command("promote", help=_PROMOTE)(_rollout_command("promoted"))


@rollout.command()
def undo(
    name: Name,
    component: Component = "",
    to_revision: Annotated[
        int,
        typer.Option("--to-revision", min=0, metavar="N", help="Revision to return to (default: the previous one)."),
    ] = 0,
    wait: Wait = False,
    timeout: Timeout = 600.0,
    kube: Kube = False,
    kubeconfig: Kubeconfig = "",
    context: Context = "",
    namespace: Namespace = "",
    as_json: Json = False,
) -> None:
    """Return to the previous revision.

    During a canary, all traffic goes to the previous pods: canaryTrafficPercent becomes 0, the new pods stay until a file
    is applied, and remaining steps are cancelled. After a promotion, the spec of the previous revision is restored, with
    the current replica counts. `headrace rollout history NAME` lists the revisions.

    Examples:

        headrace rollout undo llama-chat --kube

        headrace rollout undo llama-chat --to-revision 2 --wait
    """
    from headrace.fleet.client.rollouts import rollback

    _change(
        name,
        namespace,
        where_of(kube, kubeconfig, context),
        lambda service: rollback(service, component, to_revision),
        "undone",
        timeout=timeout if wait else None,
        as_json=as_json,
    )


rollout.command("pause", help=_PAUSE)(_rollout_command("paused"))
rollout.command("resume", help=_RESUME)(_rollout_command("resumed"))


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
    """Show the revisions of a service, their traffic shares, and the progress of a stepwise rollout.

    Example:

        headrace rollout status llama-chat --kube
    """
    progress = Progress(silent=as_json)

    async def work(fleet: Fleet) -> tuple[Document, list[Outcome]]:
        service = await _reconciled(fleet, namespace, name)
        if not wait:
            return service, []
        outcomes = await _wait(fleet, service, progress, timeout)
        return await _service(fleet, namespace, name), outcomes

    service, outcomes = with_fleet(where_of(kube, kubeconfig, context), work)
    _show(service, as_json)
    _exit_if_not_ready(outcomes)


@rollout.command()
def history(
    name: Name,
    kube: Kube = False,
    kubeconfig: Kubeconfig = "",
    context: Context = "",
    namespace: Namespace = "",
    as_json: Json = False,
) -> None:
    """List the last ten revisions of a service: when each was applied, its model, what it changed, and its state.

    Example:

        headrace rollout history llama-chat --kube
    """
    from dataclasses import asdict

    from headrace.fleet.client.rollouts import history_rows

    async def work(fleet: Fleet) -> Document:
        return await _service(fleet, namespace, name)

    rows = history_rows(with_fleet(where_of(kube, kubeconfig, context), work))
    if as_json:
        print_json([asdict(row) for row in rows])
        return
    from headrace.cli.tables import line, open_console, table

    console = open_console()
    if not rows:
        console.print(line(f"no revisions of {name} yet: its controller records them when it has planned the service"))
        return
    cells = [(row.revision, row.time, row.model, row.change or "-", row.state or "-") for row in rows]
    console.print(table(("REVISION", "WHEN", "MODEL", "CHANGE", "STATE"), cells, right=("REVISION",)))


async def _patch(fleet: Fleet, namespace: str, name: str, change: Callable[[Document], Document]) -> Document:
    """Patch a service; retry conflicts that come from status updates, as long as its spec has not changed."""
    from headrace.core.errors import Unavailable
    from headrace.fleet.client.contract import kind_named
    from headrace.fleet.names import SERVICE
    from headrace.platforms.kubernetes_client.objects import get_int

    service = await _service(fleet, namespace, name)
    generation = get_int(service, "metadata", "generation")
    for tries_left in reversed(range(_TRIES)):
        try:
            return await fleet.patch(kind_named(SERVICE), namespace or fleet.namespace, name, change(service))
        except Unavailable:
            service = await _service(fleet, namespace, name)
            if not tries_left or get_int(service, "metadata", "generation") != generation:
                raise
    raise Unavailable(f"{name} changes too often; try again")


async def _wait(fleet: Fleet, service: Document, progress: Progress, seconds: float) -> list[Outcome]:
    from headrace.fleet.client.readiness import WaitSettings, wait_until_ready

    with progress:
        return await wait_until_ready(fleet, [service], progress, WaitSettings(seconds=seconds))


async def _service(fleet: Fleet, namespace: str, name: str) -> Document:
    from headrace.cli.fleet import named
    from headrace.fleet.client.contract import kind_named
    from headrace.fleet.names import SERVICE

    (service,) = await named(fleet, [kind_named(SERVICE)], namespace or fleet.namespace, name)
    return service


async def _reconciled(fleet: Fleet, namespace: str, name: str) -> Document:
    """Return a service once the operator has seen its last change, or as it is after a few seconds."""
    from headrace.fleet.client.tables import CHANGE_NOT_RECONCILED, reason_of

    for _ in range(_RECONCILE_POLLS):
        service = await _service(fleet, namespace, name)
        if reason_of(service) != CHANGE_NOT_RECONCILED:
            break
        await asyncio.sleep(_RECONCILE_SECONDS)
    return service


def _exit_if_not_ready(outcomes: list[Outcome]) -> None:
    for outcome in outcomes:
        if not outcome.ready:
            print_error(f"{outcome.name} is not ready: {outcome.reason}")
            raise typer.Exit(FAILED)


def _show(service: Document, as_json: bool) -> None:
    from headrace.cli.fleet_view import state_text
    from headrace.cli.tables import line, open_console, table
    from headrace.fleet.client.rollouts import rollouts_of
    from headrace.fleet.client.tables import reason_of

    rollouts = rollouts_of(service)
    if as_json:
        rows: list[dict[str, Any]] = [
            {
                "component": component.component,
                "state": component.state,
                "canaryTrafficPercent": component.requested_percent,
                **_steps_json(component),
                "traffic": [
                    {"revision": share.revision, "percent": share.percent, "latest": share.latest}
                    for share in component.shares
                ],
            }
            for component in rollouts
        ]
        print_json({"components": rows, "reason": reason_of(service)})
        return
    console = open_console()
    cells = [
        (
            component.component,
            state_text(component.state),
            share.revision,
            f"{share.percent}%",
            "newest" if share.latest else "before",
        )
        for component in rollouts
        for share in component.shares
    ]
    console.print(table(("COMPONENT", "ROLLOUT", "REVISION", "SHARE", ""), cells))
    for component in rollouts:
        if component.rollout is not None and component.steps:
            marks = " ".join(_marked(component, number) for number in range(len(component.steps)))
            console.print(line(f"{component.component} steps: {marks}: {component.rollout.message}"), soft_wrap=True)
    if reason_of(service):
        console.print(line(reason_of(service)), soft_wrap=True)


def _marked(rollout: ComponentRollout, number: int) -> str:
    """Return the percentage of a step, in brackets if it is the current one."""
    text, state = f"{rollout.steps[number]}%", rollout.rollout
    return f"[{text}]" if state is not None and not state.over and state.step == number else text


def _steps_json(rollout: ComponentRollout) -> dict[str, Any]:
    state = rollout.rollout
    if state is None or not rollout.steps:
        return {}
    progress = {"phase": state.phase, "step": state.step + 1, "message": state.message, "paused": rollout.paused}
    return {"steps": {"percents": list(rollout.steps), **progress}}
