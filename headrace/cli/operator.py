# SPDX-License-Identifier: Apache-2.0
"""`headrace operator`: the controller of InferenceServices on Kubernetes, and the objects that it is installed with."""

from __future__ import annotations

from typing import Annotated

import typer

from headrace.cli.cluster_options import CLUSTER, OWN_NAMESPACE, Context, Kubeconfig, Namespace
from headrace.cli.log_options import LogLevel, LogStyle
from headrace.cli.operator_manifests import manifests

operator = typer.Typer(
    name="operator", help="Run InferenceServices on Kubernetes: the controller and its manifests.", no_args_is_help=True
)

_WEBHOOKS, _FLEET = "Webhooks", "Services"


@operator.command()
def run(
    namespace: Namespace = OWN_NAMESPACE,
    kubeconfig: Kubeconfig = "",
    context: Context = "",
    elect: Annotated[
        bool,
        typer.Option(
            "--elect/--no-elect", help="One of several leads, by a Lease in its namespace.", rich_help_panel=CLUSTER
        ),
    ] = True,
    workers: Annotated[
        int, typer.Option(min=1, max=64, help="Services looked at at once.", rich_help_panel=CLUSTER)
    ] = 4,
    listen: Annotated[
        str,
        typer.Option(metavar="HOST:PORT", help="Where /metrics and /healthz are. Nowhere unless told."),
    ] = "",
    webhook_listen: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT",
            help="Where the API server asks about documents before it keeps them, by HTTPS. Nowhere unless told.",
            rich_help_panel=_WEBHOOKS,
        ),
    ] = "",
    webhook_url: Annotated[
        str,
        typer.Option(
            metavar="URL",
            help="https://HOST:PORT, as the API server reaches that address. By the Service of its namespace unless told.",
            rich_help_panel=_WEBHOOKS,
        ),
    ] = "",
    webhook_failure_policy: Annotated[
        str,
        typer.Option(
            metavar="POLICY",
            help="Ignore or Fail: whether documents are kept while no operator answers.",
            rich_help_panel=_WEBHOOKS,
        ),
    ] = "Ignore",
    image: Annotated[
        str, typer.Option(metavar="IMAGE", help="Headrace's, for the router in front.", rich_help_panel=_FLEET)
    ] = "",
    node_pinning: Annotated[
        str,
        typer.Option(
            metavar="HOW",
            help="required, preferred or none: whether pods go where their model is.",
            rich_help_panel=_FLEET,
        ),
    ] = "required",
    upstream_selection: Annotated[
        bool,
        typer.Option(
            "--upstream-selection", help="Choose runtimes as OME does, weak points included.", rich_help_panel=_FLEET
        ),
    ] = False,
    log_level: LogLevel = "info",
    log_format: LogStyle = "auto",
) -> None:
    """Keep the objects of all InferenceServices as they should be, until SIGTERM.

    Reads the ConfigMap `inferenceservice-config` of its namespace, as OME does. Ends with 3 when another has taken the lead.
    The certificates of its webhooks are its own: made, renewed and registered without help.

    Examples:

        headrace operator run --kubeconfig ~/.kube/config --no-elect

        headrace operator run --node-pinning preferred

        headrace operator run --no-elect --webhook-listen 0.0.0.0:9443 --webhook-url https://my-laptop.example:9443
    """
    from typing import cast

    from headrace.cli.checks import or_exit
    from headrace.core.errors import InvalidArgument
    from headrace.core.telemetry.logs import LogFormat, configure_logging
    from headrace.fleet.cluster.webhooks.settings import WebhookSettings
    from headrace.fleet.words import FleetSettings
    from headrace.programs.operator import OperatorSettings, run_operator

    with or_exit():
        configure_logging(log_level, cast("LogFormat", log_format))
        if node_pinning not in ("required", "preferred", "none"):
            raise InvalidArgument(f"--node-pinning {node_pinning}: write required, preferred or none")
        fleet = FleetSettings(
            upstream_selection=upstream_selection,
            node_pinning=node_pinning,  # type: ignore[arg-type]
            image=image or FleetSettings.image,
        )
        webhooks = None
        if webhook_listen:
            webhooks = WebhookSettings(webhook_listen, namespace, webhook_url, webhook_failure_policy).checked()
        elif webhook_url:
            raise InvalidArgument("--webhook-url needs --webhook-listen: HOST:PORT to listen on")
        settings = OperatorSettings(
            kubeconfig, context, namespace, elect, workers, listen, fleet=fleet, webhooks=webhooks
        )
        code = run_operator(settings)
    raise typer.Exit(code)


operator.command()(manifests)
