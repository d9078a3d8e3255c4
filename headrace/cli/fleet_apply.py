# SPDX-License-Identifier: Apache-2.0
"""`headrace apply`: validate files, apply them to a fleet, and optionally wait until services are ready."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.cli.checks import BAD_USE, FAILED
from headrace.cli.common_options import Json, print_json
from headrace.cli.fleet_options import (
    Context,
    Files,
    Kube,
    Kubeconfig,
    Namespace,
    Progress,
    Timeout,
    object_name,
    print_problems,
    read_files,
    report_fleet_errors,
    where_of,
    with_fleet,
)

if TYPE_CHECKING:
    from headrace.fleet.client.contract import Applied, Fleet
    from headrace.fleet.client.manifests import ManifestSet
    from headrace.fleet.client.readiness import Outcome
    from headrace.fleet.yaml_documents import ParsedFiles
    from headrace.platforms.kubernetes_client.objects import Document


def apply(
    files: Files = None,
    wait: Annotated[
        bool,
        typer.Option("--wait", help="Wait until all services are ready; exit with 1 and the reason if one is not."),
    ] = False,
    timeout: Timeout = 600.0,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Validate, and let the server simulate the change.")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force-conflicts", help="Take over fields that another manager has set.")
    ] = False,
    kube: Kube = False,
    kubeconfig: Kubeconfig = "",
    context: Context = "",
    namespace: Namespace = "",
    as_json: Json = False,
) -> None:
    """Apply files: services, models, runtimes and the objects they need.

    All files are validated first, with file and line; if there is an error, nothing is applied. Models are applied
    before services.

    Examples:

        headrace apply -f isvc.yaml --kube

        headrace apply -f models/ -f isvc.yaml --kube --wait --timeout 900

        headrace apply -f - --dry-run --kube < isvc.yaml
    """
    from headrace.core.errors import InvalidArgument

    with report_fleet_errors():
        if not files:
            raise InvalidArgument("nothing to apply: give -f FILE, a folder, or - for standard input")
        if wait and dry_run:
            raise InvalidArgument("--dry-run changes nothing: leave --wait out")
    read = read_files(files)
    progress = Progress(silent=as_json)

    async def work(fleet: Fleet) -> tuple[ManifestSet, list[tuple[Document, Applied]], list[Outcome]]:
        from headrace.fleet.client.readiness import WaitSettings, wait_until_ready

        manifests = await _validate(fleet, read, namespace)
        print_problems([] if as_json else manifests.errors, manifests.warnings)
        if manifests.errors:
            return manifests, [], []
        sent = []
        for source in manifests.sources:
            applied = await fleet.apply(source.document, dry_run=dry_run, force=force)
            sent.append((source.document, applied))
            if not as_json:
                # At once: if the next one is rejected, the user knows what was applied.
                typer.echo(f"{object_name(source.document)} {applied.change}{' (dry run)' if dry_run else ''}")
        services = [applied.document for _, applied in sent if _is_service(applied.document)]
        with progress:
            outcomes = await wait_until_ready(fleet, services, progress, WaitSettings(seconds=timeout)) if wait else []
        return manifests, sent, outcomes

    manifests, sent, outcomes = with_fleet(where_of(kube, kubeconfig, context), work)
    if as_json:
        print_json(_as_json(manifests, sent, outcomes))
    else:
        _show(outcomes)
    if manifests.errors:
        raise typer.Exit(BAD_USE)
    if not all(outcome.ready for outcome in outcomes):
        raise typer.Exit(FAILED)


async def _validate(fleet: Fleet, read: ParsedFiles, namespace: str) -> ManifestSet:
    """Validate the documents against the fleet, as far as the user may read it."""
    from headrace.core.errors import PermissionDenied
    from headrace.fleet.client.manifests import collect, needs_facts, validate

    manifests = collect(read, fleet.namespace, namespace)
    if not needs_facts(manifests.sources):
        return manifests
    try:
        facts = await fleet.facts()
    except PermissionDenied as error:
        typer.secho(f"warning: references are not checked: {error.message}", fg="yellow", err=True)
        facts = None
    return validate(manifests, facts)


def _show(outcomes: list[Outcome]) -> None:
    from headrace.core.telemetry.logs import one_line

    for outcome in outcomes:
        if outcome.ready:
            typer.echo(one_line(f"{outcome.name} is ready" + (f": {outcome.url}" if outcome.url else "")))
        else:
            typer.secho(f"headrace: {one_line(f'{outcome.name} is not ready: {outcome.reason}')}", fg="red", err=True)


def _as_json(manifests: ManifestSet, sent: list[tuple[Document, Applied]], outcomes: list[Outcome]) -> dict[str, Any]:
    from headrace.platforms.kubernetes_client.objects import get_str, kind_of, name_of

    outcome_by_name = {(outcome.namespace, outcome.name): outcome for outcome in outcomes}
    documents = []
    for document, applied in sent:
        space = get_str(applied.document, "metadata", "namespace")
        row: dict[str, Any] = {"kind": kind_of(document), "namespace": space, "name": name_of(document)}
        row["change"] = applied.change
        outcome = outcome_by_name.get((space, name_of(document))) if _is_service(document) else None
        if outcome is not None:
            row |= {"ready": outcome.ready, "reason": outcome.reason, "url": outcome.url}
        documents.append(row)
    errors = [
        {
            "place": error.place,
            "field": error.problem.field,
            "message": error.problem.message,
            "fix": error.problem.fix,
        }
        for error in manifests.errors
    ]
    return {"documents": documents, "errors": errors}


def _is_service(document: Document) -> bool:
    from headrace.fleet.client.contract import SERVICE
    from headrace.platforms.kubernetes_client.objects import kind_of

    return kind_of(document) == SERVICE
