# SPDX-License-Identifier: Apache-2.0
"""`headrace apply`: files into a fleet, all of them checked before any is sent, and waited for on request."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.cli.checks import BAD_USE, FAILED
from headrace.cli.fleet_options import (
    Context,
    Files,
    Kube,
    Kubeconfig,
    Namespace,
    Progress,
    Timeout,
    object_name,
    or_sentence,
    read_files,
    show_told,
    where_of,
    with_fleet,
)
from headrace.cli.results import Json, print_json

if TYPE_CHECKING:
    from headrace.fleet.client.checking import Checked
    from headrace.fleet.client.contract import Applied, Fleet
    from headrace.fleet.client.waiting import Outcome
    from headrace.fleet.documents import Read
    from headrace.fleet.words import Document


def apply(
    files: Files = None,
    wait: Annotated[
        bool, typer.Option("--wait", help="Until all services are ready; 1 if one is not, with the reason.")
    ] = False,
    timeout: Timeout = 600.0,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check, and ask the server what it would do. Nothing is changed.")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force-conflicts", help="Take over fields that somebody else has set otherwise.")
    ] = False,
    kube: Kube = False,
    kubeconfig: Kubeconfig = "",
    context: Context = "",
    namespace: Namespace = "",
    as_json: Json = False,
) -> None:
    """Apply files: services, models, runtimes and what they need beside them.

    All is checked first, with file and line; if anything is wrong, nothing is applied. Models go before services.

    Examples:

        headrace apply -f isvc.yaml --kube

        headrace apply -f models/ -f isvc.yaml --kube --wait --timeout 900

        headrace apply -f - --dry-run --kube < isvc.yaml
    """
    from headrace.core.errors import InvalidArgument

    with or_sentence():
        if not files:
            raise InvalidArgument("say what to apply: -f FILE, a folder, or - for standard input")
        if wait and dry_run:
            raise InvalidArgument("--dry-run changes nothing, so there is nothing to --wait for")
    read = read_files(files)
    progress = Progress(silent=as_json)

    async def work(fleet: Fleet) -> tuple[Checked, list[tuple[Document, Applied]], list[Outcome]]:
        from headrace.fleet.client.waiting import Patience, until_ready

        found = await _checked(fleet, read, namespace)
        show_told([] if as_json else found.errors, found.warnings)
        if found.errors:
            return found, [], []
        sent = []
        for each in found.sources:
            made = await fleet.apply(each.document, dry_run=dry_run, force=force)
            sent.append((each.document, made))
            if not as_json:
                # At once: should the next be refused, it is known what was done.
                typer.echo(f"{object_name(each.document)} {made.change}{' (dry run)' if dry_run else ''}")
        services = [made.document for _, made in sent if _is_service(made.document)]
        with progress:
            outcomes = await until_ready(fleet, services, progress, Patience(seconds=timeout)) if wait else []
        return found, sent, outcomes

    found, sent, outcomes = with_fleet(where_of(kube, kubeconfig, context), work)
    if as_json:
        print_json(_as_json(found, sent, outcomes))
    else:
        _show(outcomes)
    if found.errors:
        raise typer.Exit(BAD_USE)
    if not all(each.ready for each in outcomes):
        raise typer.Exit(FAILED)


async def _checked(fleet: Fleet, read: Read, namespace: str) -> Checked:
    """The documents, held against what the fleet has, as far as the user may see it."""
    from headrace.core.errors import PermissionDenied
    from headrace.fleet.client.checking import checked, gathered, needs_facts

    found = gathered(read, fleet.namespace, namespace)
    if not needs_facts(found.sources):
        return found
    try:
        facts = await fleet.facts()
    except PermissionDenied as error:
        typer.secho(f"warning: what the documents name is not checked: {error.message}", fg="yellow", err=True)
        facts = None
    return checked(found, facts)


def _show(outcomes: list[Outcome]) -> None:
    from headrace.core.telemetry.logs import one_line

    for each in outcomes:
        if each.ready:
            typer.echo(one_line(f"{each.name} is ready" + (f": {each.url}" if each.url else "")))
        else:
            typer.secho(f"headrace: {one_line(f'{each.name} is not ready: {each.reason}')}", fg="red", err=True)


def _as_json(found: Checked, sent: list[tuple[Document, Applied]], outcomes: list[Outcome]) -> dict[str, Any]:
    from headrace.fleet.words import kind_of, name_of, text

    told = {(each.namespace, each.name): each for each in outcomes}
    documents = []
    for document, made in sent:
        space = text(made.document, "metadata", "namespace")
        row: dict[str, Any] = {"kind": kind_of(document), "namespace": space, "name": name_of(document)}
        row["change"] = made.change
        outcome = told.get((space, name_of(document))) if _is_service(document) else None
        if outcome is not None:
            row |= {"ready": outcome.ready, "reason": outcome.reason, "url": outcome.url}
        documents.append(row)
    errors = [
        {
            "place": each.place,
            "field": each.problem.field,
            "message": each.problem.message,
            "fix": each.problem.fix,
        }
        for each in found.errors
    ]
    return {"documents": documents, "errors": errors}


def _is_service(document: Document) -> bool:
    from headrace.fleet.client.kinds import SERVICE
    from headrace.fleet.words import kind_of

    return kind_of(document) == SERVICE
