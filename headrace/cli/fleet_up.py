# SPDX-License-Identifier: Apache-2.0
"""`headrace up`: run the local fleet until Ctrl-C."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from headrace.cli.common_options import PORT_FLAGS, LogLevel, LogStyle, program

if TYPE_CHECKING:
    from headrace.net.server import HttpServer
    from headrace.programs.fleet_daemon import Daemon

_CONSOLE = "127.0.0.1:8079"

StateDir = Annotated[
    str,
    typer.Option(
        "--state-dir",
        envvar="HEADRACE_STATE_DIR",
        metavar="DIR",
        help="State directory of the local fleet (default: ~/.local/state/headrace/fleet).",
        show_default=False,
    ),
]


def up(
    folder: StateDir = "",
    port: Annotated[
        int,
        typer.Option(
            *PORT_FLAGS, min=1, max=65000, help="Port of the first service; later services take the next free ports."
        ),
    ] = 8080,
    models_root: Annotated[
        str,
        typer.Option(
            "--models-root",
            metavar="DIR",
            help="Local folder to use as /mnt/models; models found there are not downloaded.",
            show_default=False,
        ),
    ] = "",
    driver: Annotated[
        str,
        typer.Option("--driver", metavar="NAME", help="process: run services as processes; docker: run their images."),
    ] = "process",
    max_processes: Annotated[
        int,
        typer.Option("--max-processes", min=0, help="Maximum processes and threads per container (0: unlimited)."),
    ] = 0,
    ephemeral: Annotated[
        bool, typer.Option("--ephemeral", help="Stop all services on exit; keep their definitions.")
    ] = False,
    trace_endpoint: Annotated[
        str,
        typer.Option(
            metavar="URL",
            help="Send traces of cold starts to this OTLP/HTTP collector.",
            show_default=False,
        ),
    ] = "",
    console: Annotated[
        str,
        typer.Option(
            "--console",
            metavar="HOST:PORT",
            help=f"Address of the fleet's web page (default: {_CONSOLE}, or a free port).",
            show_default=False,
        ),
    ] = "",
    no_console: Annotated[bool, typer.Option("--no-console", help="Do not serve the web page.")] = False,
    log_level: LogLevel = "info",
    log_format: LogStyle = "auto",
) -> None:
    """Run InferenceServices on this machine: the same files as on Kubernetes, as processes or containers.

    Control it with `headrace apply`, `get`, `describe`, `logs`, `scale` and `delete`. Services keep running when it
    stops or is killed; the next `headrace up` adopts them. Open the printed address to see the fleet in a browser.

    Examples:

        headrace up

        headrace up --state-dir /var/lib/headrace --port 9000

        headrace up --driver docker --max-processes 2000

        headrace up --console 127.0.0.1:9079
    """
    from pathlib import Path

    from headrace.cli.checks import collector_of
    from headrace.core.errors import InvalidArgument
    from headrace.fleet.local.settings import LocalSettings, state_dir
    from headrace.programs.console.fleet import ConsoleListener, parse_loopback
    from headrace.programs.fleet_daemon import run_local

    with program(log_level, log_format):
        root = Path(models_root).expanduser().absolute() if models_root else None
        if driver not in ("process", "docker"):
            raise InvalidArgument(f"--driver must be process or docker, not {driver[:64]!a}")
        settings = LocalSettings(
            state_dir(folder),
            port,
            models_root=root,
            driver="docker" if driver == "docker" else "process",
            max_processes=max_processes,
            ephemeral=ephemeral,
            trace_endpoint=collector_of(trace_endpoint),
        )
        console_server = (
            None if no_console else ConsoleListener(parse_loopback(console or _CONSOLE), fixed=bool(console))
        )

        async def start_console(daemon: Daemon) -> HttpServer | None:
            return None if console_server is None else await console_server.open(daemon.api, settings.root)

        def show(daemon: Daemon) -> None:
            where = daemon.settings.root
            typer.echo(f"local fleet running, state in {where}; add a service: headrace apply -f FILE")
            if console_server is not None:
                typer.echo(f"web page, with its key: {console_server.url}")

        code = run_local(settings, show, start_console)
    raise typer.Exit(code)
