# SPDX-License-Identifier: Apache-2.0
"""`headrace get`: list services, models, runtimes and jobs of a fleet, as a table or as documents."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.cli.common_options import Json
from headrace.cli.fleet_options import Context, Kube, Kubeconfig, Namespace, report_fleet_errors, where_of, with_fleet

if TYPE_CHECKING:
    from headrace.fleet.client.contract import Fleet
    from headrace.fleet.schema.fields import Kind
    from headrace.platforms.kubernetes_client.objects import Document

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
    from headrace.core.errors import InvalidArgument
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
    printer = Printer(kinds, shape, spaces=everywhere, one=len(names) == 1, notes=notes)

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
    from headrace.core.errors import NotFound

    documents = [document for kind in kinds if (document := await fleet.get(kind, namespace, name)) is not None]
    if not documents:
        what = " or ".join(kind.name for kind in kinds)
        where = f" in namespace {namespace}" if any(kind.namespaced for kind in kinds) else ""
        raise NotFound(f"there is no {what} {name}{where}: `headrace get {kinds[0].plural} -A` lists all")
    return documents
