# SPDX-License-Identifier: Apache-2.0
"""The process that the launcher starts: `headrace microservice` with the arguments that `platforms.launch_plan` makes.

These arguments are parsed with argparse, because importing Typer takes a fifth of a second. Arguments that are unknown
here, such as options of a custom architecture, are left to the full command.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any

_TEXTS = {
    "--job": "job",
    "--docker_env_vars": "docker_env_vars",
    "--model-path": "model_path",
    "--network-arch": "network_arch",
    "--job-id": "job_id",
    "--host": "host",
    "--models-dir": "folder",
    "--checkpoint-path": "checkpoint_path",
    "--model": "model",
    "--output-dir": "output_dir",
    "--pid-file": "pid_file",
}
_FLAGS = ("disable_guardrails", "offload_guardrail_models", "offload_diffusion_model")


def main() -> None:
    """Serve until a signal."""
    fields = parse_args(sys.argv[1:])
    if fields is None:
        from headrace.cli.gateway import service

        service()
        return
    from headrace.core.errors import BAD_CONFIGURATION, HeadraceError
    from headrace.core.telemetry.logs import configure_logging
    from headrace.jobs.microservice.command_line import CommandLine, parse_settings
    from headrace.programs.microservice import end_process, run_microservice

    options = {name: bool(fields.pop(name)) for name in _FLAGS}
    configure_logging("info", "auto")
    try:
        settings = parse_settings(CommandLine(**fields, pipeline_options=options), os.environ)
    except (HeadraceError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        sys.exit(BAD_CONFIGURATION)
    code = run_microservice(settings)
    end_process(code)
    sys.exit(code)


def parse_args(args: Sequence[str]) -> dict[str, Any] | None:
    """Return the fields of a `CommandLine` and the pipeline flags; None if an argument is unknown here."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("action", nargs="?", choices=("start",))
    for flag, field in _TEXTS.items():
        parser.add_argument(flag, dest=field, default="")
    parser.add_argument("--port", "--http-port", type=int, default=8080)
    parser.add_argument("--context-parallel-size", type=int, default=None)
    parser.add_argument("--grace-seconds", type=float, default=30.0)
    parser.add_argument("--idle-timeout-minutes", "--idle_timeout_minutes", type=float, default=None)
    parser.add_argument("--disable_auto_deletion", action="store_true")
    parser.add_argument("--exit-when-idle", action="store_true")
    for name in _FLAGS:
        parser.add_argument(f"--{name.replace('_', '-')}", action="store_true")
    try:
        parsed, unknown = parser.parse_known_args(list(args))
    except (argparse.ArgumentError, SystemExit):
        return None
    if unknown:
        return None
    fields = vars(parsed)
    del fields["action"]
    return fields
