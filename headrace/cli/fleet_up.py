# SPDX-License-Identifier: Apache-2.0
"""`headrace up`: the fleet of this machine, until Ctrl-C."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from headrace.cli.log_options import LogLevel, LogStyle

if TYPE_CHECKING:
    from headrace.net.server import WireServer
    from headrace.programs.fleet_daemon import Daemon

_CONSOLE = "127.0.0.1:8079"

StateDir = Annotated[
    str,
    typer.Option(
        "--state-dir",
        envvar="HEADRACE_STATE_DIR",
        metavar="DIR",
        help="Where the fleet of this machine lies. ~/.local/state/headrace/fleet unless told.",
        show_default=False,
    ),
]


def up(
    folder: StateDir = "",
    port: Annotated[
        int, typer.Option(min=1, max=65000, help="Of the first service; the next gets the next that is free.")
    ] = 8080,
    models_root: Annotated[
        str,
        typer.Option(
            "--models-root",
            metavar="DIR",
            help="Stands for /mnt/models: models that are there need no download.",
            show_default=False,
        ),
    ] = "",
    driver: Annotated[
        str,
        typer.Option("--driver", metavar="NAME", help="What runs containers: process, or docker for their images."),
    ] = "process",
    max_processes: Annotated[
        int, typer.Option("--max-processes", min=0, help="Processes and threads of a container at most; 0: any number.")
    ] = 0,
    ephemeral: Annotated[
        bool, typer.Option("--ephemeral", help="End all services on the way out; their documents stay.")
    ] = False,
    trace_endpoint: Annotated[
        str,
        typer.Option(
            metavar="URL",
            help="Send the cold starts of services that sleep, in parts, to this OTLP/HTTP collector.",
            show_default=False,
        ),
    ] = "",
    console: Annotated[
        str,
        typer.Option(
            "--console",
            metavar="HOST:PORT",
            help=f"Where the page of this fleet is: {_CONSOLE}, or a free port, unless told.",
            show_default=False,
        ),
    ] = "",
    no_console: Annotated[bool, typer.Option("--no-console", help="Serve no page.")] = False,
    log_level: LogLevel = "info",
    log_format: LogStyle = "auto",
) -> None:
    """Run InferenceServices on this machine: the same files as on Kubernetes, as processes or containers.

    `headrace apply`, `get`, `describe`, `logs`, `scale` and `delete` speak with it. When it ends, or is killed, services go
    on, and the next `headrace up` finds them again. The address that it prints opens the fleet's page in a browser.

    Examples:

        headrace up

        headrace up --state-dir /var/lib/headrace --port 9000

        headrace up --driver docker --max-processes 2000

        headrace up --console 127.0.0.1:9079
    """
    from pathlib import Path
    from typing import cast

    from headrace.cli.checks import collector_of, or_exit
    from headrace.core.errors import InvalidArgument
    from headrace.core.telemetry.logs import LogFormat, configure_logging
    from headrace.fleet.local.settings import LocalSettings, state_dir
    from headrace.programs.console.fleet import FleetDoor, loopback
    from headrace.programs.fleet_daemon import run_local

    with or_exit():
        configure_logging(log_level, cast("LogFormat", log_format))
        root = Path(models_root).expanduser().absolute() if models_root else None
        if driver not in ("process", "docker"):
            raise InvalidArgument(f"--driver is process or docker, and not {driver[:64]!a}")
        settings = LocalSettings(
            state_dir(folder),
            port,
            models_root=root,
            driver="docker" if driver == "docker" else "process",
            max_processes=max_processes,
            ephemeral=ephemeral,
            trace_endpoint=collector_of(trace_endpoint),
        )
        door = None if no_console else FleetDoor(loopback(console or _CONSOLE), fixed=bool(console))

        async def beside(daemon: Daemon) -> WireServer | None:
            return None if door is None else await door.open(daemon.control, settings.root)

        def show(daemon: Daemon) -> None:
            where = daemon.settings.root
            typer.echo(f"the fleet of this machine is up, in {where}; give it a service: headrace apply -f FILE")
            if door is not None:
                typer.echo(f"its page, with its key: {door.url}")

        code = run_local(settings, show, beside)
    raise typer.Exit(code)
