# SPDX-License-Identifier: Apache-2.0
"""`headrace microservice`: parse the command line and serve one model."""

from __future__ import annotations

from typing import Annotated

import typer

from headrace.cli.common_options import LISTENING, AccessLog, GraceSeconds, LogLevel, LogStyle, ModelTask, Port, program

_MODEL, _IDLE, _VIDEO, _MEDIA = "Model", "Idle timeout", "cosmos-predict2.5", "Media"


def microservice(
    action: Annotated[str, typer.Argument(metavar="[start]", help="Accepted for compatibility; optional.")] = "start",
    job: Annotated[
        str, typer.Option(metavar="JSON", help="TAO's job: job_id, specs.model_path, neural_network_name.")
    ] = "",
    docker_env_vars: Annotated[
        str,
        typer.Option(
            "--docker_env_vars",
            "--docker-env-vars",
            metavar="JSON",
            help="Environment variables to set. Do not pass secrets here.",
        ),
    ] = "",
    model_path: Annotated[
        str,
        typer.Option(
            "--model-path",
            "--model_path",
            metavar="PATH",
            help="File, folder, hf_model://ORG/NAME, or URL of a bucket.",
            rich_help_panel=_MODEL,
        ),
    ] = "",
    network_arch: Annotated[
        str,
        typer.Option(
            "--network-arch",
            "--network_arch",
            metavar="NAME",
            help="cosmos-rl, cosmos-predict2.5, tao-dataservices, or another architecture.",
            rich_help_panel=_MODEL,
        ),
    ] = "",
    task: ModelTask = "",
    job_id: Annotated[
        str,
        typer.Option(
            "--job-id", "--job_id", metavar="ID", help="Job id (default: a new UUID).", rich_help_panel=_MODEL
        ),
    ] = "",
    models_dir: Annotated[
        str,
        typer.Option(
            "--models-dir",
            metavar="FOLDER",
            help="Folder for downloads and the state file (default: as the original, under /tmp).",
            rich_help_panel=_MODEL,
        ),
    ] = "",
    host: Annotated[
        str,
        typer.Option(
            metavar="ADDRESS",
            help="Address to listen on (default: loopback; 0.0.0.0 with --job).",
            rich_help_panel=LISTENING,
        ),
    ] = "",
    port: Port = 8080,
    max_body_mib: Annotated[
        int,
        typer.Option(
            "--max-body-mib",
            min=0,
            max=4096,
            help="Maximum request size in MiB (default: 704).",
            rich_help_panel=LISTENING,
        ),
    ] = 0,
    grace_seconds: GraceSeconds = 30.0,
    idle_timeout_minutes: Annotated[
        float | None,
        typer.Option(
            "--idle-timeout-minutes",
            "--idle_timeout_minutes",
            min=0,
            help="Minutes without a request until the service is idle (default: 30).",
            rich_help_panel=_IDLE,
        ),
    ] = None,
    disable_auto_deletion: Annotated[
        bool,
        typer.Option(
            "--disable_auto_deletion",
            "--disable-auto-deletion",
            help="Neither exit nor request deletion when idle.",
            rich_help_panel=_IDLE,
        ),
    ] = False,
    exit_when_idle: Annotated[
        bool, typer.Option("--exit-when-idle", help="Exit when idle.", rich_help_panel=_IDLE)
    ] = False,
    checkpoint_path: Annotated[
        str, typer.Option("--checkpoint-path", metavar="PATH", help="Path of the weights.", rich_help_panel=_VIDEO)
    ] = "",
    model: Annotated[
        str, typer.Option(metavar="KEY", help="Name of weights known to the pipeline.", rich_help_panel=_VIDEO)
    ] = "",
    output_dir: Annotated[
        str,
        typer.Option("--output-dir", metavar="FOLDER", help="Folder for the pipeline's files.", rich_help_panel=_VIDEO),
    ] = "",
    pipeline: Annotated[
        str,
        typer.Option(
            metavar="MODULE:FUNCTION",
            help="Function that creates the video pipeline; see the guide.",
            rich_help_panel=_VIDEO,
        ),
    ] = "",
    context_parallel_size: Annotated[
        int | None, typer.Option("--context-parallel-size", min=1, rich_help_panel=_VIDEO)
    ] = None,
    disable_guardrails: Annotated[bool, typer.Option("--disable-guardrails", rich_help_panel=_VIDEO)] = False,
    offload_guardrail_models: Annotated[
        bool, typer.Option("--offload-guardrail-models", rich_help_panel=_VIDEO)
    ] = False,
    offload_diffusion_model: Annotated[bool, typer.Option("--offload-diffusion-model", rich_help_panel=_VIDEO)] = False,
    pid_file: Annotated[str, typer.Option("--pid-file", metavar="FILE", rich_help_panel=_VIDEO)] = "",
    media_private_host: Annotated[
        list[str] | None,
        typer.Option(
            "--media-private-host",
            metavar="HOST",
            help="Private host or network that media may be downloaded from. Repeatable.",
            rich_help_panel=_MEDIA,
        ),
    ] = None,
    media_folder: Annotated[
        list[str] | None,
        typer.Option(
            "--media-folder",
            metavar="FOLDER",
            help="Folder whose files requests may use. Repeatable.",
            rich_help_panel=_MEDIA,
        ),
    ] = None,
    access_log: AccessLog = False,
    log_level: LogLevel = "info",
    log_format: LogStyle = "auto",
) -> None:
    """Serve one model with the API of TAO's inference microservice; it reports its status while the model loads.

    Examples:

        headrace microservice --model-path ./my-model

        headrace microservice --model-path hf_model://Qwen/Qwen2.5-0.5B-Instruct --port 8081

        headrace microservice --job '{"job_id": "...", "specs": {"model_path": "/models/m"}}' --docker_env_vars '{}'

        curl -s http://127.0.0.1:8080/api/v1/status
    """
    import os
    import sys

    from headrace.jobs.microservice.command_line import CommandLine, parse_settings
    from headrace.programs.microservice import end_process, run_microservice

    command_line = CommandLine(
        job,
        docker_env_vars,
        model_path,
        network_arch,
        job_id,
        host,
        port,
        task,
        models_dir,
        idle_timeout_minutes,
        disable_auto_deletion,
        exit_when_idle,
        checkpoint_path,
        model,
        output_dir,
        context_parallel_size,
        {
            "disable_guardrails": disable_guardrails,
            "offload_guardrail_models": offload_guardrail_models,
            "offload_diffusion_model": offload_diffusion_model,
        },
        pipeline,
        pid_file,
        tuple(media_private_host or ()),
        tuple(media_folder or ()),
        max_body_mib,
        grace_seconds,
        access_log,
    )
    with program(log_level, log_format):
        if action != "start":
            raise ValueError(f"unknown action {action[:32]!a}: write start or nothing; SIGTERM stops a service")
        settings = parse_settings(command_line, os.environ)
        if pipeline:
            sys.path.insert(0, os.getcwd())
        code = run_microservice(settings)
    end_process(code)
    raise typer.Exit(code)
