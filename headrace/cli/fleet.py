# SPDX-License-Identifier: Apache-2.0
"""`headrace apply`, `get`, `describe` and `delete`: the objects of a fleet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.cli.checks import BAD_USE, FAILED, print_error, print_warning
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
from headrace.core.errors import InvalidArgument, NotFound, PermissionDenied

if TYPE_CHECKING:
    from headrace.fleet.client.contract import Applied, Fleet
    from headrace.fleet.client.describe import Description
    from headrace.fleet.client.manifests import ManifestSet
    from headrace.fleet.client.readiness import Outcome
    from headrace.fleet.schema.fields import Kind
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
        _show_outcomes(outcomes)
    if manifests.errors:
        raise typer.Exit(BAD_USE)
    if not all(outcome.ready for outcome in outcomes):
        raise typer.Exit(FAILED)


async def _validate(fleet: Fleet, read: ParsedFiles, namespace: str) -> ManifestSet:
    """Validate the documents against the fleet, as far as the user may read it."""
    from headrace.fleet.client.manifests import collect, needs_facts, validate

    manifests = collect(read, fleet.namespace, namespace)
    if not needs_facts(manifests.sources):
        return manifests
    try:
        facts = await fleet.facts()
    except PermissionDenied as error:
        print_warning(f"references are not checked: {error.message}")
        facts = None
    return validate(manifests, facts)


def _show_outcomes(outcomes: list[Outcome]) -> None:
    from headrace.core.telemetry.logs import one_line

    for outcome in outcomes:
        if outcome.ready:
            typer.echo(one_line(f"{outcome.name} is ready" + (f": {outcome.url}" if outcome.url else "")))
        else:
            print_error(f"{outcome.name} is not ready: {outcome.reason}")


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
    from headrace.fleet.names import SERVICE
    from headrace.platforms.kubernetes_client.objects import kind_of

    return kind_of(document) == SERVICE


_OUTPUTS = ("table", "wide", "json", "yaml", "name")


def get(
    what: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KIND] [NAME]...",
            help="isvc (default), runtimes, models, weights, accelerators, benchmarkjobs; or KIND/NAME.",
            show_default=False,
        ),
    ] = None,
    everywhere: Annotated[bool, typer.Option("--all-namespaces", "-A", help="List all namespaces.")] = False,
    selector: Annotated[
        str, typer.Option("--selector", "-l", metavar="LABELS", help="Label selector, such as a=b,c!=d.")
    ] = "",
    output: Annotated[
        str, typer.Option("-o", "--output", metavar="FORMAT", help="table, wide, json, yaml or name.")
    ] = "table",
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Print every change, until Ctrl-C.")] = False,
    notes: Annotated[
        bool, typer.Option("--show-managed-fields", help="With json and yaml: include managedFields.")
    ] = False,
    kube: Kube = False,
    kubeconfig: Kubeconfig = "",
    context: Context = "",
    namespace: Namespace = "",
    as_json: Json = False,
) -> None:
    """List the objects of a fleet: services with their URL, whether they are ready, and why not.

    Examples:

        headrace get --kube

        headrace get isvc -A --kube -o wide

        headrace get models llama-3-8b-instruct --kube -o yaml

        headrace get isvc -w --kube
    """
    from headrace.cli.fleet_view import Printer
    from headrace.fleet.client.contract import closing, parse_targets
    from headrace.platforms.kubernetes_client.objects import name_of

    with report_fleet_errors():
        kinds, names = parse_targets(what or [])
        shape = "json" if as_json else output
        if shape not in _OUTPUTS:
            raise InvalidArgument(f"-o {output}: write one of {', '.join(_OUTPUTS)}")
        if everywhere and names:
            raise InvalidArgument("-A lists all namespaces: leave the names out, or name one with -n")
        if watch and len(kinds) > 1:
            raise InvalidArgument(f"-w watches one kind at a time: {', '.join(kind.plural for kind in kinds)}")
        if names and selector:
            raise InvalidArgument("-l selects by labels: leave the names out")
    printer = Printer(kinds, shape, spaces=everywhere, single=len(names) == 1, notes=notes)

    async def work(fleet: Fleet) -> None:
        space = "" if everywhere else namespace or fleet.namespace
        if watch:
            async with closing(fleet.watch(kinds[0], space, selector)) as changes:
                async for change, document in changes:
                    if not names or name_of(document) in names:
                        printer.change(change, document)
            return
        documents = await _list(fleet, kinds, names, space, selector)
        anywhere = everywhere or not any(kind.namespaced for kind in kinds)
        printer.all(documents, "the fleet" if anywhere else f"namespace {space}")

    with_fleet(where_of(kube, kubeconfig, context), work)


async def _list(fleet: Fleet, kinds: Sequence[Kind], names: list[str], namespace: str, selector: str) -> list[Document]:
    if not names:
        return [document for kind in kinds for document in await fleet.list(kind, namespace, selector)]
    return [document for name in names for document in await named(fleet, kinds, namespace, name)]


async def named(fleet: Fleet, kinds: Sequence[Kind], namespace: str, name: str) -> list[Document]:
    """Return the objects of a name, of any of the kinds. Raise NotFound if there is none."""
    documents = await _find(fleet, kinds, namespace, name)
    if not documents:
        kind_names = " or ".join(kind.name for kind in kinds)
        namespace_text = f" in namespace {namespace}" if any(kind.namespaced for kind in kinds) else ""
        raise NotFound(
            f"there is no {kind_names} {name}{namespace_text}: `headrace get {kinds[0].plural} -A` lists all"
        )
    return documents


async def _find(fleet: Fleet, kinds: Sequence[Kind], namespace: str, name: str) -> list[Document]:
    return [document for kind in kinds if (document := await fleet.get(kind, namespace, name)) is not None]


def describe(
    what: Annotated[
        list[str],
        typer.Argument(
            metavar="[KIND] NAME",
            help="isvc (the default), runtime, model, weight, accelerator, benchmarkjob; or KIND/NAME.",
        ),
    ],
    kube: Kube = False,
    kubeconfig: Kubeconfig = "",
    context: Context = "",
    namespace: Namespace = "",
    as_json: Json = False,
) -> None:
    """Show one service: conditions, components, pods, model, runtime and why, traffic, events and next steps.

    Examples:

        headrace describe llama-chat --kube

        headrace describe model llama-3-8b-instruct --kube
    """
    from headrace.cli.fleet_describe_view import show
    from headrace.fleet.client.contract import parse_targets

    with report_fleet_errors():
        kinds, names = parse_targets(what, named=True)
        if not names:
            raise InvalidArgument(f"the name is missing: headrace describe {what[0]} NAME")

    async def work(fleet: Fleet) -> list[Description]:
        from headrace.fleet.client.describe import describe as described

        space = namespace or fleet.namespace
        documents = [document for name in names for document in await named(fleet, kinds, space, name)]
        return [await described(fleet, document) for document in documents]

    descriptions = with_fleet(where_of(kube, kubeconfig, context), work)
    if as_json:
        shown = [description.as_json() for description in descriptions]
        print_json(shown[0] if len(shown) == 1 else shown)
    else:
        show(descriptions)


def delete(
    what: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KIND] NAME...", help="llama-chat, model llama-3-8b, or model/llama-3-8b.", show_default=False
        ),
    ] = None,
    files: Files = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask. Without a terminal, nothing is asked.")] = False,
    wait: Annotated[
        bool, typer.Option("--wait/--no-wait", help="Wait until the objects and the pods of services are gone.")
    ] = True,
    timeout: Annotated[
        float, typer.Option("--timeout", min=0, metavar="SECONDS", help="Maximum time to wait.")
    ] = 120.0,
    ignore: Annotated[bool, typer.Option("--ignore-not-found", help="Succeed if an object does not exist.")] = False,
    kube: Kube = False,
    kubeconfig: Kubeconfig = "",
    context: Context = "",
    namespace: Namespace = "",
    as_json: Json = False,
) -> None:
    """Delete objects and everything created for them; services before what they use.

    Examples:

        headrace delete llama-chat --kube

        headrace delete -f isvc.yaml --kube --yes
    """
    from headrace.fleet.client.contract import parse_targets

    with report_fleet_errors():
        if bool(what) == bool(files):
            raise InvalidArgument("nothing to delete: give either [KIND] NAME or -f FILE")
        kinds, names = parse_targets(what or [], named=True)
        if what and not names:
            raise InvalidArgument(f"the name is missing: headrace delete {what[0]} NAME")
    progress = Progress(silent=as_json)

    async def work(fleet: Fleet) -> tuple[list[Document], list[str], list[str]]:
        from headrace.fleet.client.readiness import WaitSettings, wait_until_deleted

        if files:
            documents, missing = await _from_files(fleet, files, namespace)
        else:
            documents, missing = await _by_name(fleet, kinds, names, namespace)
        if documents and not yes:
            _confirm(documents, fleet.place)
        for document in documents:
            await fleet.delete(document)
            if not as_json:
                typer.echo(f"{object_name(document)} deleted")
        with progress:
            remaining = (
                await wait_until_deleted(fleet, documents, progress, WaitSettings(timeout, poll_seconds=0.2))
                if wait
                else []
            )
        return documents, missing, remaining

    documents, missing, remaining = with_fleet(where_of(kube, kubeconfig, context), work)
    if as_json:
        deleted = [object_name(document) for document in documents]
        print_json({"deleted": deleted, "missing": missing, "left": remaining})
    for name in missing if not ignore else ():
        print_error(f"there is no {name}")
    if remaining:
        listed = ", ".join(remaining[:8])
        print_error(f"still terminating after {timeout:g} s: {listed}")
    if remaining or (missing and not ignore):
        raise typer.Exit(FAILED)


async def _by_name(
    fleet: Fleet, kinds: Sequence[Kind], names: list[str], namespace: str
) -> tuple[list[Document], list[str]]:
    space = namespace or fleet.namespace
    documents: list[Document] = []
    missing: list[str] = []
    for name in dict.fromkeys(names):
        matches = await _find(fleet, kinds, space, name)
        documents += matches
        if not matches:
            missing.append(f"{' or '.join(kind.name for kind in kinds)} {name}")
    return documents, missing


async def _from_files(fleet: Fleet, files: list[str], namespace: str) -> tuple[list[Document], list[str]]:
    """Return the live objects of the files' documents. Invalid files stop the command before anything is deleted."""
    from headrace.fleet.client.manifests import collect
    from headrace.platforms.kubernetes_client.objects import kind_of, name_of

    manifests = collect(read_files(files), fleet.namespace, namespace)
    if manifests.errors:
        print_problems(manifests.errors, [])
        raise InvalidArgument("nothing was deleted: fix the errors in the files first")
    documents: list[Document] = []
    missing: list[str] = []
    for source in reversed(manifests.sources):
        live = await fleet.live(source.document)
        if live is not None:
            documents.append(live)
        else:
            missing.append(f"{kind_of(source.document)} {name_of(source.document)}")
    return documents, missing


def _confirm(documents: list[Document], fleet_location: str) -> None:
    from headrace.cli import service_view

    if not service_view.is_interactive():
        return
    for document in documents:
        typer.echo(f"  {object_name(document)}", err=True)
    typer.confirm(
        f"Delete {'this' if len(documents) == 1 else f'these {len(documents)}'} at {fleet_location}?",
        abort=True,
        err=True,
    )
