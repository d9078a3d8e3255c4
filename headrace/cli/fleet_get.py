# SPDX-License-Identifier: Apache-2.0
"""`headrace get`: services, models, runtimes and jobs of a fleet, as a table or as documents."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.cli.fleet_options import Context, Kube, Kubeconfig, Namespace, or_sentence, where_of, with_fleet
from headrace.cli.results import Json

if TYPE_CHECKING:
    from headrace.fleet.client.contract import Fleet
    from headrace.fleet.schema.fields import Kind
    from headrace.fleet.words import Document

_OUTPUTS = ("table", "wide", "json", "yaml", "name")


def get(
    what: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KIND] [NAME]...",
            help="isvc (unless told), runtimes, models, weights, accelerators, benchmarkjobs; or KIND/NAME.",
            show_default=False,
        ),
    ] = None,
    everywhere: Annotated[bool, typer.Option("--all-namespaces", "-A", help="Of all namespaces.")] = False,
    selector: Annotated[
        str, typer.Option("--selector", "-l", metavar="LABELS", help="Those with these labels: a=b,c!=d.")
    ] = "",
    output: Annotated[
        str, typer.Option("-o", "--output", metavar="FORMAT", help="table, wide, json, yaml or name.")
    ] = "table",
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Go on with every change, until Ctrl-C.")] = False,
    notes: Annotated[
        bool, typer.Option("--show-managed-fields", help="With json and yaml: also who set which field.")
    ] = False,
    kube: Kube = False,
    kubeconfig: Kubeconfig = "",
    context: Context = "",
    namespace: Namespace = "",
    as_json: Json = False,
) -> None:
    """List what a fleet has: where services are, whether they are ready, and why not.

    Examples:

        headrace get --kube

        headrace get isvc -A --kube -o wide

        headrace get models llama-3-8b-instruct --kube -o yaml

        headrace get isvc -w --kube
    """
    from headrace.cli.fleet_view import Printer
    from headrace.core.errors import InvalidArgument
    from headrace.fleet.client.kinds import split
    from headrace.fleet.client.tasks import closing
    from headrace.fleet.words import name_of

    with or_sentence():
        kinds, names = split(what or [])
        shape = "json" if as_json else output
        if shape not in _OUTPUTS:
            raise InvalidArgument(f"-o {output}: there are {', '.join(_OUTPUTS)}")
        if everywhere and names:
            raise InvalidArgument("-A lists all namespaces: leave the names out, or name one with -n")
        if watch and len(kinds) > 1:
            raise InvalidArgument(f"-w follows one kind at a time: {', '.join(each.plural for each in kinds)}")
        if names and selector:
            raise InvalidArgument("-l chooses by labels: leave the names out")
    printer = Printer(kinds, shape, spaces=everywhere, one=len(names) == 1, notes=notes)

    async def work(fleet: Fleet) -> None:
        space = "" if everywhere else namespace or fleet.namespace
        if watch:
            async with closing(fleet.watch(kinds[0], space, selector)) as changes:
                async for change, each in changes:
                    if not names or name_of(each) in names:
                        printer.change(change, each)
            return
        found = await _found(fleet, kinds, names, space, selector)
        anywhere = everywhere or not any(each.namespaced for each in kinds)
        printer.all(found, "the fleet" if anywhere else f"namespace {space}")

    with_fleet(where_of(kube, kubeconfig, context), work)


async def _found(
    fleet: Fleet, kinds: Sequence[Kind], names: list[str], namespace: str, selector: str
) -> list[Document]:
    if not names:
        return [each for kind in kinds for each in await fleet.list(kind, namespace, selector)]
    return [each for name in names for each in await named(fleet, kinds, namespace, name)]


async def named(fleet: Fleet, kinds: Sequence[Kind], namespace: str, name: str) -> list[Document]:
    """Those of a name, of each of the kinds. Raises NotFound."""
    from headrace.core.errors import NotFound

    found = [each for kind in kinds if (each := await fleet.get(kind, namespace, name)) is not None]
    if not found:
        what = " or ".join(each.name for each in kinds)
        where = f" in namespace {namespace}" if any(each.namespaced for each in kinds) else ""
        raise NotFound(f"there is no {what} {name}{where}: `headrace get {kinds[0].plural} -A` lists all there are")
    return found
