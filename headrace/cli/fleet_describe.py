# SPDX-License-Identifier: Apache-2.0
"""`headrace describe`: all about one service, model or runtime, and what to do next."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from headrace.cli.fleet_options import Context, Kube, Kubeconfig, Namespace, or_sentence, where_of, with_fleet
from headrace.cli.results import Json, print_json

if TYPE_CHECKING:
    from headrace.fleet.client.contract import Fleet
    from headrace.fleet.client.describing import Description


def describe(
    what: Annotated[
        list[str],
        typer.Argument(
            metavar="KIND NAME", help="isvc, runtime, model, weight, accelerator, benchmarkjob; or KIND/NAME."
        ),
    ],
    kube: Kube = False,
    kubeconfig: Kubeconfig = "",
    context: Context = "",
    namespace: Namespace = "",
    as_json: Json = False,
) -> None:
    """Show one service: conditions, components and pods, the model, the runtime and why, traffic, events, what to do next.

    Examples:

        headrace describe isvc llama-chat --kube

        headrace describe model llama-3-8b-instruct --kube
    """
    from headrace.cli.fleet_describe_view import show
    from headrace.core.errors import InvalidArgument
    from headrace.fleet.client.kinds import split

    with or_sentence():
        kinds, names = split(what)
        if not names:
            raise InvalidArgument(f"say which: headrace describe {what[0]} NAME")

    async def work(fleet: Fleet) -> list[Description]:
        from headrace.cli.fleet_get import named
        from headrace.fleet.client.describing import describe as described

        space = namespace or fleet.namespace
        found = [each for name in names for each in await named(fleet, kinds, space, name)]
        return [await described(fleet, each) for each in found]

    found = with_fleet(where_of(kube, kubeconfig, context), work)
    if as_json:
        shown = [each.as_json() for each in found]
        print_json(shown[0] if len(shown) == 1 else shown)
    else:
        show(found)
