# SPDX-License-Identifier: Apache-2.0
"""`headrace operator manifests`: print the manifests that install Headrace on Kubernetes."""

from __future__ import annotations

from typing import Annotated

import typer

_WHAT, _AGENT = "What to print", "Model agent"


def manifests(
    namespace: Annotated[
        str, typer.Option("--namespace", "-n", metavar="NAME", help="Namespace for Headrace's own components.")
    ] = "headrace-system",
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
            help="Leave out crds, namespace, config, webhook or agent. Repeatable.",
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
    """Print the manifests of Headrace: CRDs, namespace, RBAC, the operator and the model agent.

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
            without=frozenset(without or ()),
            models_path=models_path,
            agent_secrets=tuple(agent_secret or ()),
            pull_secret=pull_secret,
        )
    documents = with_image(shipped_runtimes(), settings.image, full_image) if runtimes else build_manifests(settings)
    typer.echo(yaml_documents.write(documents), nl=False)
