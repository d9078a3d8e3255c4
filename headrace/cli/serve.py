# SPDX-License-Identifier: Apache-2.0
"""`headrace serve`: turn the command line into settings, and show progress bars while models load.

The table in `commands` names `serve` and its `ServeCommand`. Its options are those of
`headrace.programs.configuration.option_table`.
"""

from __future__ import annotations

import inspect
import os
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from headrace.programs.configuration.option import Option
from headrace.programs.configuration.option_table import FLAGS, PANELS
from headrace.version import __version__

if TYPE_CHECKING:
    from headrace.programs.serve.settings import StartReport

EXAMPLES = """Serve models over HTTP and gRPC.

MODELS are model repositories (folders with one folder per model), model files (.onnx, .pt2, .ubj, .txt, model.py), folders
of one model, Hugging Face folders, or models of the Hugging Face Hub. Without any, the built-in models `identity` and
`first1000` are served.

Write options as `--option value` or `--option=value`; options of Triton that have no effect here only log a warning.

Examples:

    headrace serve models

    headrace serve --model-repository=/models --http-address 0.0.0.0 --grpc-address 0.0.0.0

    headrace serve models --repository-poll-secs 5 --strict-readiness=false

    headrace serve models --model-control-mode explicit --load-model resnet50

    headrace serve models --workers 2 --access-log

    headrace serve --tls-certificate server.pem --tls-key server.key

    headrace serve --config config/inference.yaml

    headrace serve --model-path models/production --model-version v1.2.0 --device cpu

    headrace serve flowers.onnx

    headrace serve Qwen/Qwen2.5-0.5B-Instruct
"""

_WARNINGS = "headrace.warnings"


class ServeCommand(TyperCommand):
    """Parse the command line in every form that `serve_arguments` knows."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Normalise the arguments before Typer parses them."""
        from headrace.cli.checks import exit_on_error
        from headrace.cli.serve_arguments import parse_arguments

        if ctx.resilient_parsing:  # the shell completes an unfinished line
            return super().parse_args(ctx, args)
        with exit_on_error():
            arguments = parse_arguments(args)
        ctx.meta[_WARNINGS] = arguments.warnings
        return super().parse_args(ctx, arguments.normalised())


def serve(ctx: typer.Context, models: list[str] | None = None, **texts: Any) -> None:
    """Serve models. The help text is `EXAMPLES`."""
    from headrace.cli.checks import exit_on_error
    from headrace.cli.progress import logging_beside_bars
    from headrace.cli.serve_settings import log_settings, open_log, open_settings, warn
    from headrace.programs.configuration.resolution import configure
    from headrace.programs.serve.server import run_server

    with exit_on_error():
        options = {flag: texts.get(flag.replace("-", "_")) for flag in FLAGS}
        values = configure(options, models or (), os.environ)
        logs = log_settings(values)
        # Several processes would draw over each other's bars.
        bars = values.int("workers") == 1 and not logs.file
        with (
            open_log(logs.file) as stream,
            logging_beside_bars(logs.level, logs.format, bars=bars, stream=stream) as progress,
        ):
            warn((*ctx.meta.get(_WARNINGS, ()), *values.warnings))
            with open_settings(values, progress) as settings:
                on_terminal = logs.format != "json" and not logs.file and sys.stderr.isatty()
                code = run_server(replace(settings, on_start=_print_block) if on_terminal else settings)
    raise typer.Exit(code)


_NAMED_MODELS = 8
"""More models are counted rather than named."""


def _print_block(report: StartReport) -> None:
    typer.echo(start_block(report), err=True)


def start_block(report: StartReport) -> str:
    """Return the block that is printed on a terminal when the server is ready: addresses, and which models serve."""
    from headrace.core.telemetry.logs import one_line

    count = len(report.ready)
    names = ", ".join(report.ready[:_NAMED_MODELS]) + (
        f" and {count - _NAMED_MODELS} more" if count > _NAMED_MODELS else ""
    )
    rows = {
        "HTTP": report.http,
        "gRPC": report.grpc,
        "metrics": report.metrics,
        "console": report.console,
        "API": report.documentation,
        "models": names or "none",
    }
    lines = [f"  {label:<9}{value}" for label, value in rows.items() if value]
    lines += [f"  failed   {name}: {one_line(reason)}" for name, reason in sorted(report.failed.items())]
    return "\n".join([f"Headrace {__version__} serves {count} model{'s' * (count != 1)}. Ctrl-C stops it.", *lines])


def _signature() -> inspect.Signature:
    """Return the signature that Typer reads the options from: one parameter per row of the table."""
    keyword = inspect.Parameter.KEYWORD_ONLY
    folders = typer.Argument(
        metavar="MODELS", help="Model repositories, model files or folders, or hub ids (default: built-in models)."
    )
    first = [
        inspect.Parameter("ctx", keyword, annotation=typer.Context),
        inspect.Parameter("models", keyword, default=None, annotation=Annotated[list[str] | None, folders]),
    ]
    options = [_parameter(option, panel) for panel, group in PANELS.items() for option in group if option.flag]
    return inspect.Signature([*first, *options])


def _parameter(option: Option, panel: str) -> inspect.Parameter:
    info = typer.Option(
        f"--{option.flag}",  # `serve_arguments` has replaced the other names
        metavar=option.placeholder,
        help=option.help_text,
        rich_help_panel=panel,
        show_default=False,
        hidden=option.deprecated,
    )
    values = list[str] | None if option.many else str | None
    return inspect.Parameter(
        option.flag.replace("-", "_"), inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[values, info]
    )


serve.__signature__ = _signature()  # type: ignore[attr-defined]
serve.__doc__ = EXAMPLES
