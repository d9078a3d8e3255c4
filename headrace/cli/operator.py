# SPDX-License-Identifier: Apache-2.0
"""`headrace operator`: run the controller of InferenceServices on Kubernetes, and print its manifests."""

from __future__ import annotations

from typing import Annotated

import typer

from headrace.cli.common_options import CLUSTER, OWN_NAMESPACE, Context, Kubeconfig, LogLevel, LogStyle, Namespace
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
        typer.Option("--elect/--no-elect", help="Elect a leader among replicas, by a Lease.", rich_help_panel=CLUSTER),
    ] = True,
    workers: Annotated[
        int, typer.Option(min=1, max=64, help="Services reconciled concurrently.", rich_help_panel=CLUSTER)
    ] = 4,
    listen: Annotated[
        str,
        typer.Option(metavar="HOST:PORT", help="Address for /metrics and /healthz (default: none)."),
    ] = "",
    webhook_listen: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT",
            help="Address of the admission webhooks, served over HTTPS (default: none).",
            rich_help_panel=_WEBHOOKS,
        ),
    ] = "",
    webhook_url: Annotated[
        str,
        typer.Option(
            metavar="URL",
            help="URL at which the API server reaches the webhooks (default: the Service in the operator's namespace).",
            rich_help_panel=_WEBHOOKS,
        ),
    ] = "",
    webhook_failure_policy: Annotated[
        str,
        typer.Option(
            metavar="POLICY",
            help="Ignore or Fail: whether the API server accepts objects while no operator answers.",
            rich_help_panel=_WEBHOOKS,
        ),
    ] = "Ignore",
    image: Annotated[
        str, typer.Option(metavar="IMAGE", help="Headrace's image, for routers.", rich_help_panel=_FLEET)
    ] = "",
    node_pinning: Annotated[
        str,
        typer.Option(
            metavar="HOW",
            help="required, preferred or none: schedule pods on nodes that have their model.",
            rich_help_panel=_FLEET,
        ),
    ] = "required",
    upstream_selection: Annotated[
        bool,
        typer.Option("--upstream-selection", help="Select runtimes exactly as OME does.", rich_help_panel=_FLEET),
    ] = False,
    log_level: LogLevel = "info",
    log_format: LogStyle = "auto",
) -> None:
    """Reconcile all InferenceServices, until SIGTERM.

    Reads the ConfigMap `inferenceservice-config` in its namespace, as OME does. The exit code is 3 when the leader
    lease is lost. The operator creates, renews and registers the certificates of its webhooks.

    Examples:

        headrace operator run --kubeconfig ~/.kube/config --no-elect

        headrace operator run --node-pinning preferred

        headrace operator run --no-elect --webhook-listen 0.0.0.0:9443 --webhook-url https://my-laptop.example:9443
    """
    from typing import cast

    from headrace.cli.checks import exit_on_error
    from headrace.core.errors import InvalidArgument
    from headrace.core.telemetry.logs import LogFormat, configure_logging
    from headrace.fleet.cluster.webhooks.settings import WebhookSettings
    from headrace.fleet.documents import FleetSettings
    from headrace.programs.operator import OperatorSettings, run_operator

    with exit_on_error():
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
