# SPDX-License-Identifier: Apache-2.0
"""What the launcher starts as a process: `headrace microservice` with the words that `launch.planning` writes.

A fifth of a second of each start would go to Typer and what it brings along, for words that no person types; so they are
read here by argparse. Words that are not known here, an option of somebody's own architecture, are left to the verb.
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
    found = read_words(sys.argv[1:])
    if found is None:
        from headrace.cli.gateway import service

        service()
        return
    from headrace.core.errors import HeadraceError
    from headrace.core.exit_codes import BAD_CONFIGURATION
    from headrace.core.telemetry.logs import configure_logging
    from headrace.jobs.microservice.launching import Given, launch_settings
    from headrace.programs.microservice import end_process, run_microservice

    options = {name: bool(found.pop(name)) for name in _FLAGS}
    configure_logging("info", "auto")
    try:
        settings = launch_settings(Given(**found, pipeline_options=options), os.environ)
    except (HeadraceError, ValueError) as error:
        print(f"headrace: {error}", file=sys.stderr, flush=True)
        sys.exit(BAD_CONFIGURATION)
    code = run_microservice(settings)
    end_process(code)
    sys.exit(code)


def read_words(words: Sequence[str]) -> dict[str, Any] | None:
    """The fields of a `Given`, and the pipeline's flags; None where a word is not known here."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("action", nargs="?", choices=("start",))
    for flag, field in _TEXTS.items():
        parser.add_argument(flag, dest=field, default="")
    parser.add_argument("--port", type=int, default=8080)
    parser.add_argument("--context-parallel-size", type=int, default=None)
    parser.add_argument("--grace-seconds", type=float, default=30.0)
    parser.add_argument("--idle-timeout-minutes", "--idle_timeout_minutes", type=float, default=None)
    parser.add_argument("--disable_auto_deletion", action="store_true")
    parser.add_argument("--exit-when-idle", action="store_true")
    for name in _FLAGS:
        parser.add_argument(f"--{name.replace('_', '-')}", action="store_true")
    try:
        found, others = parser.parse_known_args(list(words))
    except (argparse.ArgumentError, SystemExit):
        return None
    if others:
        return None
    fields = vars(found)
    del fields["action"]
    return fields
