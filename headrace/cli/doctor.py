# SPDX-License-Identifier: Apache-2.0
"""`headrace doctor`: what is missing or wrong on this machine, and what to type to mend it."""

from __future__ import annotations

from typing import Annotated

import typer

from headrace.cli.results import Json, print_json

_ELSEWHERE = "Elsewhere"


def doctor(
    repository: Annotated[
        str, typer.Option(metavar="DIR", help="The folder of models. ./models where that is there.", show_default=False)
    ] = "",
    host: Annotated[str, typer.Option(metavar="ADDRESS", help="Where ports are to be listened on.")] = "127.0.0.1",
    http_port: Annotated[int, typer.Option(min=1, max=65535, metavar="PORT", help="The HTTP port.")] = 8000,
    grpc_port: Annotated[int, typer.Option(min=1, max=65535, metavar="PORT", help="The gRPC port.")] = 8001,
    metrics_port: Annotated[int, typer.Option(min=1, max=65535, metavar="PORT", help="The metrics port.")] = 8002,
    url: Annotated[
        list[str] | None,
        typer.Option(metavar="URL", help="A running server to ask. Repeatable.", rich_help_panel=_ELSEWHERE),
    ] = None,
    gateway: Annotated[
        list[str] | None,
        typer.Option(metavar="URL", help="A running gateway to ask. Repeatable.", rich_help_panel=_ELSEWHERE),
    ] = None,
    kube: Annotated[
        bool, typer.Option("--kube", help="Ask the cluster of your kubeconfig.", rich_help_panel=_ELSEWHERE)
    ] = False,
    platform: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Ask a platform for services: local-docker, slurm, kubernetes, lepton, brev. Repeatable.",
            rich_help_panel=_ELSEWHERE,
        ),
    ] = None,
    as_json: Json = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Leave out what is well.")] = False,
) -> None:
    """Look for what is missing or wrong: ports, GPUs, folders, disk, memory, limits, packages, servers, platforms.

    Nothing is changed, and no other machine is asked unless it is named. Each finding comes with a line to type. The exit
    code is 1 if there is a problem, 0 otherwise; warnings are no problems.

    Examples:

        headrace doctor

        headrace doctor --repository models --http-port 9000

        headrace doctor --url http://10.0.0.7:8000 --gateway http://10.0.0.7:8090

        headrace doctor --kube --json
    """
    import os
    from pathlib import Path

    from headrace.cli.checks import FAILED, or_exit
    from headrace.cli.doctor_view import as_document, show_findings
    from headrace.platforms.drivers import check_platform
    from headrace.programs.doctor.all_checks import Wanted, checks_of
    from headrace.programs.doctor.platforms import KUBERNETES
    from headrace.programs.doctor.ports import Port
    from headrace.programs.doctor.running import diagnose

    with or_exit():
        named = [*map(check_platform, platform or ()), *([KUBERNETES] if kube else [])]
        wanted = Wanted(
            os.environ,
            host,
            (
                Port(http_port, "http-port"),
                Port(grpc_port, "grpc-port"),
                Port(metrics_port, "metrics-port", optional=True),
            ),
            Path(repository) if repository else Path("models") if Path("models").is_dir() else None,
            tuple(server_url(each) for each in url or ()),
            tuple(server_url(each) for each in gateway or ()),
            tuple(dict.fromkeys(named)),
        )
    findings = diagnose(checks_of(wanted), wanted.seconds)
    if as_json:
        print_json(as_document(findings))
    else:
        show_findings(findings, quiet=quiet)
    if any(each.state == "problem" for each in findings):
        raise typer.Exit(FAILED)


def server_url(text: str) -> str:
    """The address of a server as it is asked. Raises InvalidArgument for what is none."""
    from urllib.parse import urlsplit

    from headrace.core.errors import InvalidArgument

    whole = (text if "://" in text else f"http://{text}").rstrip("/")
    try:
        parts = urlsplit(whole)
        known = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        known = False
    if not known:
        raise InvalidArgument(f"{text} names no server: write http://127.0.0.1:8000")
    return whole
