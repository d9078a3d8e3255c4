# SPDX-License-Identifier: Apache-2.0
"""`headrace operator manifests`: what Headrace is installed with on Kubernetes, to be passed on to kubectl."""

from __future__ import annotations

from typing import Annotated

import typer

_WHAT, _AGENT = "What to print", "Model agent"


def manifests(
    namespace: Annotated[
        str, typer.Option("--namespace", "-n", metavar="NAME", help="Where Headrace's own programs run.")
    ] = "headrace-system",
    image: Annotated[
        str, typer.Option(metavar="IMAGE", help="Headrace's. headrace:VERSION unless told, which no registry has.")
    ] = "",
    full_image: Annotated[
        str,
        typer.Option(
            metavar="IMAGE", help="The one with all formats, for --runtimes. --image with -full behind it unless told."
        ),
    ] = "",
    pull_secret: Annotated[
        str, typer.Option(metavar="NAME", help="The Secret that the image is pulled with, in that namespace.")
    ] = "",
    replicas: Annotated[int, typer.Option(min=0, max=9, help="Of the operator. One leads.")] = 1,
    models_path: Annotated[
        str, typer.Option(metavar="FOLDER", help="Where nodes keep models.", rich_help_panel=_AGENT)
    ] = "/mnt/models",
    agent_secret: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="A Secret of that namespace with credentials of models. Repeat for more.",
            rich_help_panel=_AGENT,
        ),
    ] = None,
    without: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PART",
            help="Leave out crds, namespace, config, webhook or agent. Repeat for more.",
            rich_help_panel=_WHAT,
        ),
    ] = None,
    runtimes: Annotated[
        bool,
        typer.Option(
            "--runtimes",
            help="The runtimes that come with Headrace instead; once the kinds are there.",
            rich_help_panel=_WHAT,
        ),
    ] = False,
    sample: Annotated[
        str,
        typer.Option(
            metavar="NAME", help="One of the samples instead: raw, cpu, scale-to-zero, ...", rich_help_panel=_WHAT
        ),
    ] = "",
) -> None:
    """Print what Headrace is installed with: kinds, namespace, rights, the operator and the model agent.

    Examples:

        headrace operator manifests --image registry.example/headrace:1.0 | kubectl apply -f -

        headrace operator manifests --image registry.example/headrace:1.0 --runtimes | kubectl apply -f -

        headrace operator manifests --without agent --without webhook

        headrace operator manifests --sample cpu > digits.yaml
    """
    from headrace.cli.checks import or_exit
    from headrace.fleet import documents
    from headrace.fleet.cluster.manifests import ManifestSettings
    from headrace.fleet.cluster.manifests import manifests as made_of
    from headrace.fleet.explaining import shipped_runtimes
    from headrace.fleet.installing import samples
    from headrace.fleet.installing.runtimes import with_image

    with or_exit():
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
    found = with_image(shipped_runtimes(), settings.image, full_image) if runtimes else made_of(settings)
    typer.echo(documents.write(found), nl=False)
