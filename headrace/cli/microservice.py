# SPDX-License-Identifier: Apache-2.0
"""`headrace microservice`: a command line to what `headrace.jobs.microservice.launching` reads."""

from __future__ import annotations

from typing import Annotated

import typer

from headrace.cli.log_options import LogLevel, LogStyle

_MODEL, _LISTENING, _IDLE, _VIDEO, _MEDIA, _LOGS = (
    "Model",
    "Listening",
    "When nobody asks",
    "cosmos-predict2.5",
    "Media",
    "Logs",
)


def microservice(
    action: Annotated[
        str, typer.Argument(metavar="[start]", help="As the originals are called; may be left out.")
    ] = "start",
    job: Annotated[
        str, typer.Option(metavar="JSON", help="TAO's job: job_id, specs.model_path, neural_network_name.")
    ] = "",
    docker_env_vars: Annotated[
        str,
        typer.Option(
            "--docker_env_vars",
            "--docker-env-vars",
            metavar="JSON",
            help="Variables to set. Secrets are better left out.",
        ),
    ] = "",
    model_path: Annotated[
        str,
        typer.Option(
            "--model-path",
            "--model_path",
            metavar="PATH",
            help="A file, a folder, hf_model://ORG/NAME; or a bucket's URL.",
            rich_help_panel=_MODEL,
        ),
    ] = "",
    network_arch: Annotated[
        str,
        typer.Option(
            "--network-arch",
            "--network_arch",
            metavar="NAME",
            help="cosmos-rl, cosmos-predict2.5, tao-dataservices, or any other.",
            rich_help_panel=_MODEL,
        ),
    ] = "",
    task: Annotated[
        str,
        typer.Option(
            metavar="KIND",
            help="Where the model's files do not tell: language, vision_language, classifier, detector, embedding, tensors.",
            rich_help_panel=_MODEL,
        ),
    ] = "",
    job_id: Annotated[
        str, typer.Option("--job-id", "--job_id", metavar="ID", help="Default: a new UUID.", rich_help_panel=_MODEL)
    ] = "",
    models_dir: Annotated[
        str,
        typer.Option(
            "--models-dir",
            metavar="FOLDER",
            help="For downloads and the state file. Default: as the original, under /tmp.",
            rich_help_panel=_MODEL,
        ),
    ] = "",
    host: Annotated[
        str,
        typer.Option(
            metavar="ADDRESS", help="Loopback; 0.0.0.0 with --job, as in a container.", rich_help_panel=_LISTENING
        ),
    ] = "",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.", rich_help_panel=_LISTENING)] = 8080,
    max_body_mib: Annotated[
        int,
        typer.Option("--max-body-mib", min=0, max=4096, help="One request. Default: 704.", rich_help_panel=_LISTENING),
    ] = 0,
    grace_seconds: Annotated[
        float,
        typer.Option(min=0, metavar="SECONDS", help="For what is in flight at SIGTERM.", rich_help_panel=_LISTENING),
    ] = 30.0,
    idle_timeout_minutes: Annotated[
        float | None,
        typer.Option(
            "--idle-timeout-minutes", "--idle_timeout_minutes", min=0, help="Default: 30.", rich_help_panel=_IDLE
        ),
    ] = None,
    disable_auto_deletion: Annotated[
        bool,
        typer.Option(
            "--disable_auto_deletion",
            "--disable-auto-deletion",
            help="Neither end nor ask to be deleted.",
            rich_help_panel=_IDLE,
        ),
    ] = False,
    exit_when_idle: Annotated[
        bool, typer.Option("--exit-when-idle", help="End the process then.", rich_help_panel=_IDLE)
    ] = False,
    checkpoint_path: Annotated[
        str, typer.Option("--checkpoint-path", metavar="PATH", help="Weights.", rich_help_panel=_VIDEO)
    ] = "",
    model: Annotated[
        str, typer.Option(metavar="KEY", help="Weights that the pipeline knows by name.", rich_help_panel=_VIDEO)
    ] = "",
    output_dir: Annotated[
        str, typer.Option("--output-dir", metavar="FOLDER", help="For the pipeline's files.", rich_help_panel=_VIDEO)
    ] = "",
    pipeline: Annotated[
        str,
        typer.Option(metavar="MODULE:FUNCTION", help="What makes the videos: see the guide.", rich_help_panel=_VIDEO),
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
            help="A host or network at a private address that media may come from. Repeatable.",
            rich_help_panel=_MEDIA,
        ),
    ] = None,
    media_folder: Annotated[
        list[str] | None,
        typer.Option(
            "--media-folder",
            metavar="FOLDER",
            help="A folder whose files requests may name. Repeatable.",
            rich_help_panel=_MEDIA,
        ),
    ] = None,
    access_log: Annotated[
        bool, typer.Option("--access-log", help="Log one line per request.", rich_help_panel=_LOGS)
    ] = False,
    log_level: LogLevel = "info",
    log_format: LogStyle = "auto",
) -> None:
    """Serve one model as TAO's inference microservice does: at once, with its state, while it downloads and loads.

    Examples:

        headrace microservice --model-path ./my-model

        headrace microservice --model-path hf_model://Qwen/Qwen2.5-0.5B-Instruct --port 8081

        headrace microservice --job '{"job_id": "...", "specs": {"model_path": "/models/m"}}' --docker_env_vars '{}'

        curl -s http://127.0.0.1:8080/api/v1/status
    """
    import os
    import sys
    from typing import cast

    from headrace.cli.checks import or_exit
    from headrace.core.telemetry.logs import LogFormat, configure_logging
    from headrace.jobs.microservice.launching import Given, launch_settings
    from headrace.programs.microservice import end_process, run_microservice

    given = Given(
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
    with or_exit():
        if action != "start":
            raise ValueError(f"{action[:32]!a} is not known: write start, or nothing; SIGTERM stops a service")
        configure_logging(log_level, cast("LogFormat", log_format))
        settings = launch_settings(given, os.environ)
        if pipeline:
            sys.path.insert(0, os.getcwd())
        code = run_microservice(settings)
    end_process(code)
    raise typer.Exit(code)
