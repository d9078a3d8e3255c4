# SPDX-License-Identifier: Apache-2.0
"""`headrace operator`: run the controller of InferenceServices on Kubernetes, and print its manifests."""

from __future__ import annotations

from typing import Annotated

import typer

from headrace.cli.common_options import (
    CLUSTER,
    OWN_NAMESPACE,
    Context,
    Kubeconfig,
    LogLevel,
    LogStyle,
    MetricsAddress,
    Namespace,
    program,
)

operator = typer.Typer(
    name="operator", help="Run InferenceServices on Kubernetes: the controller and its manifests.", no_args_is_help=True
)

_WEBHOOKS, _FLEET = "Webhooks", "Services"
_WHAT, _AGENT, _NETWORK = "What to print", "Model agent", "Network policies"

ClientNamespaces = Annotated[
    list[str] | None,
    typer.Option(
        "--client-namespace",
        metavar="NAME",
        help="Namespace that may connect to all services, such as that of an ingress or of Prometheus. Repeatable.",
        rich_help_panel=_NETWORK,
    ),
]


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
    listen: MetricsAddress = "",
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
    isolate_services: Annotated[
        bool,
        typer.Option(
            "--isolate-services",
            help="Write NetworkPolicies: services accept connections from their own namespace alone.",
            rich_help_panel=_FLEET,
        ),
    ] = False,
    client_namespaces: ClientNamespaces = None,
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
    from headrace.core.errors import InvalidArgument
    from headrace.fleet.cluster.webhooks.settings import WebhookSettings
    from headrace.fleet.documents import FleetSettings
    from headrace.programs.operator import OperatorSettings, run_operator

    with program(log_level, log_format):
        if node_pinning not in ("required", "preferred", "none"):
            raise InvalidArgument(f"--node-pinning {node_pinning}: write required, preferred or none")
        fleet = FleetSettings(
            upstream_selection=upstream_selection,
            node_pinning=node_pinning,  # type: ignore[arg-type]
            image=image or FleetSettings.image,
            isolate_services=isolate_services,
            client_namespaces=tuple(client_namespaces or ()),
            own_namespace=namespace,
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


@operator.command()
def activator(
    kubeconfig: Kubeconfig = "",
    context: Context = "",
    host: Annotated[
        str,
        typer.Option(
            metavar="ADDRESS",
            help="Address of the services' ports (default: loopback; 0.0.0.0 accepts other machines).",
        ),
    ] = "127.0.0.1",
    listen: MetricsAddress = "",
    grace_seconds: Annotated[
        float,
        typer.Option(min=0, metavar="SECONDS", help="How long open and held requests may take after SIGTERM."),
    ] = 600.0,
    log_level: LogLevel = "info",
    log_format: LogStyle = "auto",
) -> None:
    """Hold the requests of services that are scaled to zero, and start their pods, until SIGTERM.

    One activator serves all services: the operator gives each a port of its own from 20000 to 29999, and sends its
    requests there while it has no pods. It runs as a Deployment of any size; see `headrace operator manifests`.

    Examples:

        headrace operator activator --kubeconfig ~/.kube/config --listen 127.0.0.1:8080
    """
    from headrace.programs.activator import ActivatorSettings, run_activator

    with program(log_level, log_format):
        code = run_activator(ActivatorSettings(kubeconfig, context, host, listen, grace_seconds))
    raise typer.Exit(code)


@operator.command()
def manifests(
    namespace: Annotated[
        str, typer.Option("--namespace", "-n", metavar="NAME", help="Namespace for Headrace's own components.")
    ] = OWN_NAMESPACE,
    image: Annotated[
        str,
        typer.Option(
            metavar="IMAGE", help="Headrace's image (default: headrace:VERSION, which you must push to a registry)."
        ),
    ] = "",
    full_image: Annotated[
        str,
        typer.Option(
            metavar="IMAGE", help="Image with all formats, for --runtimes (default: --image with the suffix -full)."
        ),
    ] = "",
    pull_secret: Annotated[str, typer.Option(metavar="NAME", help="Image pull Secret in that namespace.")] = "",
    replicas: Annotated[int, typer.Option(min=0, max=9, help="Operator replicas; one is the leader.")] = 1,
    activator_replicas: Annotated[
        int, typer.Option(min=1, max=20, help="Replicas of the activator, which holds requests of services at zero.")
    ] = 2,
    network_policies: Annotated[
        bool,
        typer.Option(
            "--network-policies",
            help="Add NetworkPolicies for Headrace's own programs (Kubernetes 1.25).",
            rich_help_panel=_NETWORK,
        ),
    ] = False,
    isolate_services: Annotated[
        bool,
        typer.Option(
            "--isolate-services",
            help="Have the operator write NetworkPolicies for services.",
            rich_help_panel=_NETWORK,
        ),
    ] = False,
    client_namespaces: ClientNamespaces = None,
    models_path: Annotated[
        str, typer.Option(metavar="FOLDER", help="Folder for models on the nodes.", rich_help_panel=_AGENT)
    ] = "/mnt/models",
    agent_secret: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Secret in that namespace with credentials for model downloads. Repeatable.",
            rich_help_panel=_AGENT,
        ),
    ] = None,
    without: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PART",
            help="Leave out crds, namespace, config, webhook, agent or activator. Repeatable.",
            rich_help_panel=_WHAT,
        ),
    ] = None,
    runtimes: Annotated[
        bool,
        typer.Option(
            "--runtimes",
            help="Print the runtimes that come with Headrace instead; apply them after the CRDs.",
            rich_help_panel=_WHAT,
        ),
    ] = False,
    sample: Annotated[
        str,
        typer.Option(
            metavar="NAME", help="Print a sample instead: raw, cpu, scale-to-zero, ...", rich_help_panel=_WHAT
        ),
    ] = "",
) -> None:
    """Print the manifests of Headrace: CRDs, namespace, RBAC, the operator, the activator and the model agent.

    Examples:

        headrace operator manifests --image registry.example/headrace:1.0 | kubectl apply -f -

        headrace operator manifests --image registry.example/headrace:1.0 --runtimes | kubectl apply -f -

        headrace operator manifests --without agent --without webhook

        headrace operator manifests --sample cpu > digits.yaml
    """
    from headrace.cli.checks import exit_on_error
    from headrace.fleet import yaml_documents
    from headrace.fleet.explain import shipped_runtimes
    from headrace.fleet.install import samples
    from headrace.fleet.install.manifests import ManifestSettings
    from headrace.fleet.install.manifests import manifests as build_manifests
    from headrace.fleet.install.samples import with_image

    with exit_on_error():
        if sample:
            typer.echo(samples.sample(sample, image, full_image), nl=False)
            return
        settings = ManifestSettings(
            namespace=namespace,
            image=image or ManifestSettings.image,
            replicas=replicas,
            activator_replicas=activator_replicas,
            without=frozenset(without or ()),
            models_path=models_path,
            agent_secrets=tuple(agent_secret or ()),
            pull_secret=pull_secret,
            network_policies=network_policies,
            isolate_services=isolate_services,
            client_namespaces=tuple(client_namespaces or ()),
        )
    documents = with_image(shipped_runtimes(), settings.image, full_image) if runtimes else build_manifests(settings)
    typer.echo(yaml_documents.write(documents), nl=False)
