# SPDX-License-Identifier: Apache-2.0
"""`headrace delete`: delete services, models and other objects, by name or by file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.cli.checks import FAILED
from headrace.cli.common_options import Json, print_json
from headrace.cli.fleet_options import (
    Context,
    Files,
    Kube,
    Kubeconfig,
    Namespace,
    Progress,
    object_name,
    print_problems,
    read_files,
    report_fleet_errors,
    where_of,
    with_fleet,
)

if TYPE_CHECKING:
    from headrace.fleet.client.contract import Fleet
    from headrace.fleet.schema.fields import Kind
    from headrace.platforms.kubernetes_client.objects import Document


def delete(
    what: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KIND NAME...]", help="isvc llama-chat, or isvc/llama-chat.", show_default=False),
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

        headrace delete isvc llama-chat --kube

        headrace delete -f isvc.yaml --kube --yes
    """
    from headrace.core.errors import InvalidArgument
    from headrace.fleet.client.contract import parse_targets

    with report_fleet_errors():
        if bool(what) == bool(files):
            raise InvalidArgument("nothing to delete: give either KIND NAME or -f FILE")
        kinds, names = parse_targets(what or [])
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
            left = (
                await wait_until_deleted(fleet, documents, progress, WaitSettings(timeout, poll_seconds=0.2))
                if wait
                else []
            )
        return documents, missing, left

    documents, missing, left = with_fleet(where_of(kube, kubeconfig, context), work)
    if as_json:
        deleted = [object_name(document) for document in documents]
        print_json({"deleted": deleted, "missing": missing, "left": left})
    for name in missing if not ignore else ():
        typer.secho(f"headrace: there is no {name}", fg="red", err=True)
    if left:
        listed = ", ".join(left[:8])
        typer.secho(f"headrace: still terminating after {timeout:g} s: {listed}", fg="red", err=True)
    if left or (missing and not ignore):
        raise typer.Exit(FAILED)


async def _by_name(
    fleet: Fleet, kinds: Sequence[Kind], names: list[str], namespace: str
) -> tuple[list[Document], list[str]]:
    space = namespace or fleet.namespace
    documents: list[Document] = []
    missing: list[str] = []
    for name in dict.fromkeys(names):
        matches = [document for kind in kinds if (document := await fleet.get(kind, space, name)) is not None]
        documents += matches
        if not matches:
            missing.append(f"{' or '.join(kind.name for kind in kinds)} {name}")
    return documents, missing


async def _from_files(fleet: Fleet, files: list[str], namespace: str) -> tuple[list[Document], list[str]]:
    """Return the live objects of the files' documents. Invalid files stop the command before anything is deleted."""
    from headrace.core.errors import InvalidArgument
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


def _confirm(documents: list[Document], place: str) -> None:
    from headrace.cli import service_view

    if not service_view.is_interactive():
        return
    for document in documents:
        typer.echo(f"  {object_name(document)}", err=True)
    typer.confirm(
        f"Delete {'this' if len(documents) == 1 else f'these {len(documents)}'} at {place}?", abort=True, err=True
    )
