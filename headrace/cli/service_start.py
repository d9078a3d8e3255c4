# SPDX-License-Identifier: Apache-2.0
"""`headrace service start`: build a `StartRequest` from the options and start the service."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.cli.common_options import Json, print_json
from headrace.cli.service_options import (
    REGISTRY,
    Architectures,
    Platform,
    RegistryFile,
    Settings,
    StateDir,
    non_empty,
    pairs,
    refuse,
    with_launcher,
)

if TYPE_CHECKING:
    from headrace.platforms.catalogue import Architecture
    from headrace.platforms.launcher import Launcher
    from headrace.platforms.registry import Entry

_PLATFORM, _IMAGE = "Platforms", "Containers"


def start(
    arch: Annotated[
        str,
        typer.Option(
            "--arch", metavar="NAME", help="cosmos-predict2.5, cosmos-rl, tao-dataservices, or one of --architectures."
        ),
    ],
    model_path: Annotated[
        str,
        typer.Option("--model-path", metavar="PATH", help="hf_model://ORG/NAME, or a path that the service can read."),
    ],
    platform: Platform = "process",
    num_gpus: Annotated[
        int,
        typer.Option("--num-gpus", metavar="N", help="Number of GPUs; process ignores it on a machine without GPUs."),
    ] = 1,
    nodes: Annotated[
        int,
        typer.Option(
            "--nodes", min=1, metavar="N", help="slurm: nodes that share the model, each with --num-gpus GPUs."
        ),
    ] = 1,
    no_wait: Annotated[bool, typer.Option("--no-wait", help="Do not wait until the model is ready.")] = False,
    no_preflight: Annotated[
        bool, typer.Option("--no-preflight", help="Skip the check of what the platform needs.")
    ] = False,
    timeout: Annotated[
        float, typer.Option("--timeout", min=0, metavar="SECONDS", help="Maximum time to wait.")
    ] = 600.0,
    model_key: Annotated[
        str,
        typer.Option("--model-key", metavar="KEY", help="Name of a Hub model in cosmos-predict2.5, such as base-2b."),
    ] = "",
    option: Annotated[
        list[str] | None,
        typer.Option("--option", metavar="NAME=VALUE", help="Service option: idle_timeout_minutes=30. Repeatable."),
    ] = None,
    job_id: Annotated[str, typer.Option("--job-id", metavar="UUID", help="Job id (default: a new one).")] = "",
    image: Annotated[
        str,
        typer.Option(
            metavar="IMAGE",
            help="headrace, a key of versions.yaml, or an image (default: TAO's).",
            rich_help_panel=_IMAGE,
        ),
    ] = "",
    mount: Annotated[
        list[str] | None,
        typer.Option(
            metavar="HOST[:INSIDE]", help="Folder to mount into the container. Repeatable.", rich_help_panel=_IMAGE
        ),
    ] = None,
    config_dir: Annotated[
        list[Path] | None,
        typer.Option(
            "--config-dir",
            metavar="FOLDER",
            help="Folder with ARCH.config.json. Repeatable.",
            rich_help_panel=_IMAGE,
        ),
    ] = None,
    versions: Annotated[
        Path | None,
        typer.Option("--versions", metavar="FILE", help="Path of versions.yaml.", rich_help_panel=_IMAGE),
    ] = None,
    partition: Annotated[str, typer.Option(metavar="NAME", help="slurm", rich_help_panel=_PLATFORM)] = "",
    account: Annotated[str, typer.Option(metavar="NAME", help="slurm", rich_help_panel=_PLATFORM)] = "",
    namespace: Annotated[str, typer.Option(metavar="NAME", help="kubernetes", rich_help_panel=_PLATFORM)] = "",
    image_pull_secret: Annotated[
        str, typer.Option("--image-pull-secret", metavar="NAME", help="kubernetes", rich_help_panel=_PLATFORM)
    ] = "",
    instance_id: Annotated[
        str, typer.Option("--instance-id", metavar="NAME", help="brev", rich_help_panel=_PLATFORM)
    ] = "",
    cloud_cred_id: Annotated[
        str, typer.Option("--cloud-cred-id", metavar="ID", help="brev", rich_help_panel=_PLATFORM)
    ] = "",
    workspace_group_id: Annotated[
        str, typer.Option("--workspace-group-id", metavar="ID", help="brev", rich_help_panel=_PLATFORM)
    ] = "",
    resource_shape: Annotated[
        str, typer.Option("--resource-shape", metavar="SHAPE", help="lepton", rich_help_panel=_PLATFORM)
    ] = "",
    dedicated_node_group: Annotated[
        str, typer.Option("--dedicated-node-group", metavar="NAME", help="lepton", rich_help_panel=_PLATFORM)
    ] = "",
    setting: Settings = None,
    architectures: Architectures = None,
    registry: RegistryFile = REGISTRY,
    state_dir: StateDir = None,
    as_json: Json = False,
) -> None:
    """Start a service and wait until its model is ready.

    Secrets such as HF_TOKEN are read from the environment only. A failed start is rolled back.

    Examples:

        headrace service start --arch tao-dataservices --model-path ./my-model

        headrace service start --arch cosmos-rl --model-path hf_model://nvidia/Cosmos-Reason1-7B --platform local-docker

        headrace service start --arch tao-dataservices --model-path /models/m --platform slurm --partition gpu --no-wait
    """
    from headrace.platforms.launcher import StartRequest, WaitPolicy

    settings = pairs(setting, "--setting") | non_empty(
        {
            "partition": partition,
            "account": account,
            "namespace": namespace,
            "image_pull_secret": image_pull_secret,
            "instance_id": instance_id,
            "cloud_cred_id": cloud_cred_id,
            "workspace_group_id": workspace_group_id,
            "resource_shape": resource_shape,
            "dedicated_node_group": dedicated_node_group,
        }
    )
    started_at = time.monotonic()

    async def work(launcher: Launcher) -> Entry:
        from headrace.platforms.launch_plan import parse_mount

        start_request = StartRequest(
            arch,
            model_path,
            platform,
            num_gpus,
            job_id,
            image,
            model_key,
            _options(launcher.architectures(), arch, pairs(option, "--option")),
            settings,
            tuple(parse_mount(text) for text in mount or []),
            nodes,
        )
        return await launcher.start(
            start_request, wait=not no_wait, wait_policy=WaitPolicy(timeout), preflight=not no_preflight
        )

    entry = with_launcher(
        registry,
        state_dir,
        work,
        platform=platform,
        architectures=architectures,
        config_folders=tuple(config_dir or ()),
        versions_file=versions,
    )
    _show(entry, not no_wait, time.monotonic() - started_at, as_json)


def _options(catalogue: Mapping[str, Architecture], arch: str, texts: Mapping[str, str]) -> dict[str, Any]:
    """Convert options to the types of the architecture; unknown options are rejected later."""
    options = catalogue[arch].options if arch in catalogue else {}
    result: dict[str, Any] = {}
    for name, text in texts.items():
        kind = options[name].type if name in options else "str"
        try:
            result[name] = _READERS[kind](text)
        except ValueError:
            raise refuse(
                f"--option {name}: {text[:64]!a} is not {'true or false' if kind == 'flag' else f'a valid {kind}'}"
            ) from None
    return result


def _flag(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ValueError(text)
    return text.lower() == "true"


_READERS: Mapping[str, Callable[[str], Any]] = {"int": int, "float": float, "str": str, "flag": _flag}


def _show(entry: Entry, ready: bool, seconds: float, as_json: bool) -> None:
    if as_json:
        print_json({**entry.as_json(), "ready": ready})
        return
    typer.echo(f"service {'ready' if ready else 'started'} after {seconds:.1f} s")
    typer.echo(f"  Job ID : {entry.job_id}")
    typer.echo(f"  Arch   : {entry.network_arch}")
    if entry.more.get("num_gpus") == 0:
        typer.echo("  Device : CPU (0 GPUs)")
    typer.echo(f"  URL    : {entry.host_url}/v1/chat/completions" if entry.host_url else "  URL    : not known yet")
    if not ready:
        typer.echo(f"check progress: headrace service status {entry.job_id}")
