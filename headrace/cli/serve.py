# SPDX-License-Identifier: Apache-2.0
"""`headrace serve`: a command line of ours or of Triton's to settings, and the bars on the terminal while models load.

The table in `verbs` names `serve` and its `ServeCommand`. Its options are the table in `options`.
"""

from __future__ import annotations

import inspect
import os
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from headrace.cli.flags import Flag
from headrace.cli.options import BY_NAME, FLAGS

EXAMPLES = """Serve models over HTTP and gRPC.

MODELS are folders with a folder for each model, or the one folder of a Hugging Face model. Without any, the built-in
models `identity` and `first1000` are served.

Options may be written `--option value` or `--option=value`; those of Triton that mean nothing here are taken with a
warning.

Examples:

    headrace serve models

    headrace serve --model-repository=/models --http-address 0.0.0.0 --grpc-address 0.0.0.0

    headrace serve models --repository-poll-secs 5 --strict-readiness=false

    headrace serve models --model-control-mode explicit --load-model resnet50

    headrace serve models --workers 2 --access-log

    headrace serve --tls-certificate server.pem --tls-key server.key

    headrace serve --config config/inference.yaml

    headrace serve --model-path models/production --model-version v1.2.0 --device cpu

    headrace serve Qwen2.5-0.5B-Instruct
"""

_WARNINGS = "headrace.warnings"


class ServeCommand(TyperCommand):
    """Reads the command line in every form that `serve_arguments` knows."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Called by Typer with what stands behind `serve`."""
        from headrace.cli.checks import or_exit
        from headrace.cli.serve_arguments import normalise

        if ctx.resilient_parsing:  # the shell completes a line that is not whole yet
            return super().parse_args(ctx, args)
        with or_exit():
            arguments, ctx.meta[_WARNINGS] = normalise(args)
        return super().parse_args(ctx, arguments)


def serve(ctx: typer.Context, models: list[str] | None = None, **texts: Any) -> None:
    """Serve models. The help is `EXAMPLES`."""
    from headrace.cli.checks import or_exit
    from headrace.cli.progress import logging_beside_bars
    from headrace.cli.serve_configuration import configure
    from headrace.cli.serve_logs import log_settings, open_log, warn
    from headrace.cli.serve_settings import open_settings
    from headrace.programs.serve.server import run_server

    with or_exit():
        options = {name: texts.get(name.replace("-", "_")) for name in BY_NAME}
        configured = configure(options, models or (), os.environ)
        logs = log_settings(configured.given)
        # Several processes would paint over each other's bars.
        bars = configured.given.whole("workers") == 1 and not logs.file
        with (
            open_log(logs.file) as stream,
            logging_beside_bars(logs.level, logs.format, bars=bars, stream=stream) as progress,
        ):
            warn((*ctx.meta.get(_WARNINGS, ()), *configured.configuration.warnings))
            with open_settings(configured, progress) as settings:
                code = run_server(settings)
    raise typer.Exit(code)


def _signature() -> inspect.Signature:
    """What Typer reads the options from: one parameter for each row of the table."""
    keyword = inspect.Parameter.KEYWORD_ONLY
    folders = typer.Argument(metavar="MODELS", help="Folders of models; none for the built-in ones.")
    first = [
        inspect.Parameter("ctx", keyword, annotation=typer.Context),
        inspect.Parameter("models", keyword, default=None, annotation=Annotated[list[str] | None, folders]),
    ]
    return inspect.Signature([*first, *(_parameter(flag) for flag in FLAGS)])


def _parameter(flag: Flag) -> inspect.Parameter:
    option = typer.Option(
        f"--{flag.name}",  # the other names are gone when Typer sees the command line
        metavar=flag.shown,
        help=flag.explained,
        rich_help_panel=flag.panel,
        show_default=False,
        hidden=flag.old,
    )
    kind = list[str] | None if flag.many else str | None
    return inspect.Parameter(
        flag.name.replace("-", "_"), inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind, option]
    )


serve.__signature__ = _signature()  # type: ignore[attr-defined]
serve.__doc__ = EXAMPLES
