# SPDX-License-Identifier: Apache-2.0
"""`headrace describe`: details of one service, model or runtime, and the next steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from headrace.cli.common_options import Json, print_json
from headrace.cli.fleet_options import Context, Kube, Kubeconfig, Namespace, report_fleet_errors, where_of, with_fleet

if TYPE_CHECKING:
    from headrace.fleet.client.contract import Fleet
    from headrace.fleet.client.describe import Description


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
    """Show one service: conditions, components, pods, model, runtime and why, traffic, events and next steps.

    Examples:

        headrace describe isvc llama-chat --kube

        headrace describe model llama-3-8b-instruct --kube
    """
    from headrace.cli.fleet_describe_view import show
    from headrace.core.errors import InvalidArgument
    from headrace.fleet.client.contract import parse_targets

    with report_fleet_errors():
        kinds, names = parse_targets(what)
        if not names:
            raise InvalidArgument(f"the name is missing: headrace describe {what[0]} NAME")

    async def work(fleet: Fleet) -> list[Description]:
        from headrace.cli.fleet_get import named
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
