# SPDX-License-Identifier: Apache-2.0
"""`headrace model-agent`: download and keep the models of one Kubernetes node, and report their progress."""

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

_MODELS = "Models"


def model_agent(
    node: Annotated[
        str, typer.Option(envvar="NODE_NAME", metavar="NAME", help="Name of this node.", rich_help_panel=CLUSTER)
    ] = "",
    namespace: Namespace = OWN_NAMESPACE,
    kubeconfig: Kubeconfig = "",
    context: Context = "",
    models_root: Annotated[
        str,
        typer.Option(
            metavar="FOLDER",
            help="Folder for models on the node; spec.storage.path is relative to it.",
            rich_help_panel=_MODELS,
        ),
    ] = "/mnt/models",
    download_concurrency: Annotated[
        int, typer.Option(min=1, max=64, help="Maximum concurrent downloads.", rich_help_panel=_MODELS)
    ] = 2,
    keep_free: Annotated[
        str, typer.Option(metavar="SIZE", help="Disk space that downloads leave free.", rich_help_panel=_MODELS)
    ] = "1GB",
    private_host: Annotated[
        list[str] | None,
        typer.Option(
            "--private-host",
            metavar="HOST",
            help="Private host or network that http:// models may be downloaded from. Repeatable.",
            rich_help_panel=_MODELS,
        ),
    ] = None,
    progress_seconds: Annotated[
        float,
        typer.Option(min=0.1, metavar="SECONDS", help="Time between progress reports.", rich_help_panel=_MODELS),
    ] = 5.0,
    retry_seconds: Annotated[
        float,
        typer.Option(min=0.1, metavar="SECONDS", help="Maximum delay between retries.", rich_help_panel=_MODELS),
    ] = 300.0,
    look_seconds: Annotated[
        float,
        typer.Option(
            min=0.1, metavar="SECONDS", help="Time between checks of the node and its files.", rich_help_panel=CLUSTER
        ),
    ] = 30.0,
    listen: MetricsAddress = "",
    log_level: LogLevel = "info",
    log_format: LogStyle = "auto",
) -> None:
    """Download and keep the BaseModels of this node, until SIGTERM.

    Downloads the models that select the node, labels the node, and reports progress in a ConfigMap with the node's
    name. It may be killed at any time: finished downloads are kept. It runs as a DaemonSet; see `headrace operator
    manifests`.

    Examples:

        headrace model-agent --node worker-1 --models-root /mnt/models

        headrace model-agent --download-concurrency 4 --keep-free 100GB
    """
    from pathlib import Path

    from headrace.core.errors import InvalidArgument
    from headrace.fleet.agent.agent import AgentSettings
    from headrace.models.storage.fetch import FetchSettings
    from headrace.programs.model_agent import run_agent

    with program(log_level, log_format):
        if not node:
            raise InvalidArgument(
                "the node name is missing: set --node or NODE_NAME (in a pod: fieldRef spec.nodeName)"
            )
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
            _parse_bytes(keep_free),
            progress_seconds,
            look_seconds,
            retry_seconds=retry_seconds,
            fetch=FetchSettings(private_hosts=tuple(private_host or ())),
        )
        code = run_agent(settings)
    raise typer.Exit(code)


def _parse_bytes(text: str) -> int:
    """Parse a size such as 10GB, 500MiB or 0."""
    import re

    from headrace.core.errors import InvalidArgument

    units = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
    units |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2].upper() not in units:
        raise InvalidArgument(f"--keep-free {text}: write a size, such as 10GB or 500MiB")
    return int(float(match[1]) * units[match[2].upper()])
