# SPDX-License-Identifier: Apache-2.0
"""`headrace model-agent`: the models of one node of a cluster, downloaded, kept and told of."""

from __future__ import annotations

from typing import Annotated

import typer

from headrace.cli.cluster_options import CLUSTER, OWN_NAMESPACE, Context, Kubeconfig, Namespace
from headrace.cli.log_options import LogLevel, LogStyle

_MODELS = "Models"


def model_agent(
    node: Annotated[
        str, typer.Option(envvar="NODE_NAME", metavar="NAME", help="This node.", rich_help_panel=CLUSTER)
    ] = "",
    namespace: Namespace = OWN_NAMESPACE,
    kubeconfig: Kubeconfig = "",
    context: Context = "",
    models_root: Annotated[
        str,
        typer.Option(
            metavar="FOLDER",
            help="Where models are on the node; spec.storage.path is below it.",
            rich_help_panel=_MODELS,
        ),
    ] = "/mnt/models",
    download_concurrency: Annotated[
        int, typer.Option(min=1, max=64, help="Models downloaded at once.", rich_help_panel=_MODELS)
    ] = 2,
    keep_free: Annotated[
        str, typer.Option(metavar="SIZE", help="What downloads leave free on the disk.", rich_help_panel=_MODELS)
    ] = "1GB",
    private_host: Annotated[
        list[str] | None,
        typer.Option(
            "--private-host",
            metavar="HOST",
            help="A host or network at a private address that http:// models may come from. Repeatable.",
            rich_help_panel=_MODELS,
        ),
    ] = None,
    progress_seconds: Annotated[
        float, typer.Option(min=0.1, metavar="SECONDS", help="How often progress is told.", rich_help_panel=_MODELS)
    ] = 5.0,
    retry_seconds: Annotated[
        float,
        typer.Option(min=0.1, metavar="SECONDS", help="The longest wait before another try.", rich_help_panel=_MODELS),
    ] = 300.0,
    look_seconds: Annotated[
        float,
        typer.Option(
            min=0.1, metavar="SECONDS", help="How often to look at the node and its files.", rich_help_panel=CLUSTER
        ),
    ] = 30.0,
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Where /metrics and /healthz are. Nowhere unless told.")
    ] = "",
    log_level: LogLevel = "info",
    log_format: LogStyle = "auto",
) -> None:
    """Keep the BaseModels of this node on its disk, until SIGTERM.

    Downloads those that are for the node, labels it, and tells how far they are in a ConfigMap named after it. May be killed
    at any time: what has come is not downloaded again. Runs as a DaemonSet; `headrace operator manifests` has it.

    Examples:

        headrace model-agent --node worker-1 --models-root /mnt/models

        headrace model-agent --download-concurrency 4 --keep-free 100GB
    """
    from pathlib import Path
    from typing import cast

    from headrace.cli.checks import or_exit
    from headrace.core.errors import InvalidArgument
    from headrace.core.telemetry.logs import LogFormat, configure_logging
    from headrace.fleet.agent.settings import AgentSettings
    from headrace.models.storage.bringing import BringSettings
    from headrace.programs.model_agent import run_agent

    with or_exit():
        configure_logging(log_level, cast("LogFormat", log_format))
        if not node:
            raise InvalidArgument("which node is this? Set NODE_NAME, in a pod by fieldRef spec.nodeName, or --node")
        if not models_root.startswith("/"):
            raise InvalidArgument(f"--models-root {models_root}: write an absolute path")
        settings = AgentSettings(
            node,
            Path(models_root),
            namespace,
            kubeconfig,
            context,
            listen,
            download_concurrency,
            _bytes(keep_free),
            progress_seconds,
            look_seconds,
            retry_seconds=retry_seconds,
            bring=BringSettings(private_hosts=tuple(private_host or ())),
        )
        code = run_agent(settings)
    raise typer.Exit(code)


def _bytes(said: str) -> int:
    """10GB, 500MiB, 0."""
    import re

    from headrace.core.errors import InvalidArgument

    units = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
    units |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
    found = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", said)
    if found is None or found[2].upper() not in units:
        raise InvalidArgument(f"--keep-free {said}: write a size, such as 10GB or 500MiB")
    return int(float(found[1]) * units[found[2].upper()])
