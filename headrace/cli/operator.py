# SPDX-License-Identifier: Apache-2.0
"""`headrace operator`: the controller of InferenceServices on Kubernetes, and the objects that it is installed with."""

from __future__ import annotations

from typing import Annotated

import typer

operator = typer.Typer(
    name="operator", help="Run InferenceServices on Kubernetes: the controller and its manifests.", no_args_is_help=True
)

_NAMESPACE = "headrace-system"
_CLUSTER, _FLEET, _LOGS = "Cluster", "Services", "Logs"

Namespace = Annotated[
    str, typer.Option("--namespace", "-n", metavar="NAME", help="The operator's own.", rich_help_panel=_CLUSTER)
]


@operator.command()
def run(
    namespace: Namespace = _NAMESPACE,
    kubeconfig: Annotated[
        str,
        typer.Option(
            envvar="KUBECONFIG",
            metavar="FILE",
            help="In a pod its service account, else ~/.kube/config.",
            rich_help_panel=_CLUSTER,
        ),
    ] = "",
    context: Annotated[
        str, typer.Option(metavar="NAME", help="The kubeconfig's own unless told.", rich_help_panel=_CLUSTER)
    ] = "",
    elect: Annotated[
        bool,
        typer.Option(
            "--elect/--no-elect", help="One of several leads, by a Lease in its namespace.", rich_help_panel=_CLUSTER
        ),
    ] = True,
    workers: Annotated[
        int, typer.Option(min=1, max=64, help="Services looked at at once.", rich_help_panel=_CLUSTER)
    ] = 4,
    listen: Annotated[
        str,
        typer.Option(metavar="HOST:PORT", help="Where /metrics and /healthz are. Nowhere unless told."),
    ] = "",
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
    log_level: Annotated[
        str, typer.Option(metavar="LEVEL", help="debug, info, warning or error.", rich_help_panel=_LOGS)
    ] = "info",
    log_format: Annotated[
        str, typer.Option(metavar="FORMAT", help="auto, json or text.", rich_help_panel=_LOGS)
    ] = "auto",
) -> None:
    """Keep the objects of all InferenceServices as they should be, until SIGTERM.

    Reads the ConfigMap `inferenceservice-config` of its namespace, as OME does. Ends with 3 when another has taken the lead.

    Examples:

        headrace operator run --kubeconfig ~/.kube/config --no-elect

        headrace operator run --node-pinning preferred
    """
    from typing import cast

    from headrace.cli.checks import or_exit
    from headrace.core.errors import InvalidArgument
    from headrace.fleet.cluster.program import OperatorSettings, run_operator
    from headrace.fleet.words import FleetSettings
    from headrace.telemetry.logs import LogFormat, configure_logging

    with or_exit():
        configure_logging(log_level, cast("LogFormat", log_format))
        if node_pinning not in ("required", "preferred", "none"):
            raise InvalidArgument(f"--node-pinning {node_pinning}: write required, preferred or none")
        fleet = FleetSettings(
            upstream_selection=upstream_selection,
            node_pinning=node_pinning,  # type: ignore[arg-type]
            image=image or FleetSettings.image,
        )
        code = run_operator(OperatorSettings(kubeconfig, context, namespace, elect, workers, listen, fleet=fleet))
    raise typer.Exit(code)


@operator.command()
def manifests(
    namespace: Namespace = _NAMESPACE,
    image: Annotated[str, typer.Option(metavar="IMAGE", help="Headrace's.")] = "",
    replicas: Annotated[int, typer.Option(min=0, max=9, help="Of which one leads.")] = 1,
    runtimes: Annotated[
        bool, typer.Option("--runtimes", help="The runtimes that come with Headrace instead; once the kinds are there.")
    ] = False,
) -> None:
    """Print what the operator is installed with: kinds, namespace, rights and its Deployment.

    Examples:

        headrace operator manifests --image registry.example/headrace:1.0 | kubectl apply -f -

        headrace operator manifests --runtimes | kubectl apply -f -
    """
    from headrace.fleet import documents
    from headrace.fleet.cluster.manifests import ManifestSettings
    from headrace.fleet.cluster.manifests import manifests as made_of
    from headrace.fleet.explaining import shipped_runtimes

    settings = ManifestSettings(namespace, image or ManifestSettings.image, replicas)
    typer.echo(documents.write(shipped_runtimes() if runtimes else made_of(settings)), nl=False)
