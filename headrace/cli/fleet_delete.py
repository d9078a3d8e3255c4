# SPDX-License-Identifier: Apache-2.0
"""`headrace delete`: services, models and the like, by name or by the file that they came from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.cli.checks import FAILED
from headrace.cli.fleet_options import (
    Context,
    Files,
    Kube,
    Kubeconfig,
    Namespace,
    Progress,
    object_name,
    or_sentence,
    read_files,
    show_told,
    where_of,
    with_fleet,
)
from headrace.cli.results import Json, print_json

if TYPE_CHECKING:
    from headrace.fleet.client.contract import Fleet
    from headrace.fleet.schema.fields import Kind
    from headrace.fleet.words import Document


def delete(
    what: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KIND NAME...]", help="isvc llama-chat, or isvc/llama-chat.", show_default=False),
    ] = None,
    files: Files = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask. Nobody is asked without a terminal.")] = False,
    wait: Annotated[
        bool, typer.Option("--wait/--no-wait", help="Until they are gone, and the pods of services with them.")
    ] = True,
    timeout: Annotated[float, typer.Option("--timeout", min=0, metavar="SECONDS", help="The longest to wait.")] = 120.0,
    ignore: Annotated[bool, typer.Option("--ignore-not-found", help="What is not there is fine.")] = False,
    kube: Kube = False,
    kubeconfig: Kubeconfig = "",
    context: Context = "",
    namespace: Namespace = "",
    as_json: Json = False,
) -> None:
    """Delete what is named, and all that was made for it; services go before what they use.

    Examples:

        headrace delete isvc llama-chat --kube

        headrace delete -f isvc.yaml --kube --yes
    """
    from headrace.core.errors import InvalidArgument
    from headrace.fleet.client.kinds import split

    with or_sentence():
        if bool(what) == bool(files):
            raise InvalidArgument("say what to delete: KIND NAME, or -f FILE, and not both")
        kinds, names = split(what or [])
        if what and not names:
            raise InvalidArgument(f"say which: headrace delete {what[0]} NAME")
    progress = Progress(silent=as_json)

    async def work(fleet: Fleet) -> tuple[list[Document], list[str], list[str]]:
        from headrace.fleet.client.waiting import Patience, until_gone

        if files:
            found, missing = await _from_files(fleet, files, namespace)
        else:
            found, missing = await _by_name(fleet, kinds, names, namespace)
        if found and not yes:
            _confirm(found, fleet.place)
        for each in found:
            await fleet.delete(each)
            if not as_json:
                typer.echo(f"{object_name(each)} deleted")
        with progress:
            left = await until_gone(fleet, found, progress, Patience(timeout, look_seconds=0.2)) if wait else []
        return found, missing, left

    found, missing, left = with_fleet(where_of(kube, kubeconfig, context), work)
    if as_json:
        gone = [object_name(each) for each in found]
        print_json({"deleted": gone, "missing": missing, "left": left})
    for each in missing if not ignore else ():
        typer.secho(f"headrace: there is no {each}", fg="red", err=True)
    if left:
        told = ", ".join(left[:8])
        typer.secho(f"headrace: after {timeout:g} s these still end: {told}", fg="red", err=True)
    if left or (missing and not ignore):
        raise typer.Exit(FAILED)


async def _by_name(
    fleet: Fleet, kinds: Sequence[Kind], names: list[str], namespace: str
) -> tuple[list[Document], list[str]]:
    space = namespace or fleet.namespace
    found: list[Document] = []
    missing: list[str] = []
    for name in dict.fromkeys(names):
        there = [each for kind in kinds if (each := await fleet.get(kind, space, name)) is not None]
        found += there
        if not there:
            missing.append(f"{' or '.join(each.name for each in kinds)} {name}")
    return found, missing


async def _from_files(fleet: Fleet, files: list[str], namespace: str) -> tuple[list[Document], list[str]]:
    """What the documents of files have become. Those that cannot be read end it before anything is deleted."""
    from headrace.core.errors import InvalidArgument
    from headrace.fleet.client.checking import gathered
    from headrace.fleet.words import kind_of, name_of

    asked = gathered(read_files(files), fleet.namespace, namespace)
    if asked.errors:
        show_told(asked.errors, [])
        raise InvalidArgument("nothing was deleted: put right what is wrong with the files first")
    found: list[Document] = []
    missing: list[str] = []
    for each in reversed(asked.sources):
        live = await fleet.live(each.document)
        if live is not None:
            found.append(live)
        else:
            missing.append(f"{kind_of(each.document)} {name_of(each.document)}")
    return found, missing


def _confirm(found: list[Document], place: str) -> None:
    from headrace.cli import service_view

    if not service_view.is_interactive():
        return
    for each in found:
        typer.echo(f"  {object_name(each)}", err=True)
    typer.confirm(f"Delete {'this' if len(found) == 1 else f'these {len(found)}'} at {place}?", abort=True, err=True)
