# SPDX-License-Identifier: Apache-2.0
"""`headrace doctor`: check this machine and print a fix for every problem."""

from __future__ import annotations

from typing import Annotated

import typer

from headrace.cli.common_options import PORT_FLAGS, SERVER_URL, Json, print_json

_ELSEWHERE = "Elsewhere"


def doctor(
    repository: Annotated[
        str, typer.Option(metavar="DIR", help="Model repository (default: ./models if it exists).", show_default=False)
    ] = "",
    host: Annotated[str, typer.Option(metavar="ADDRESS", help="Address the server will listen on.")] = "127.0.0.1",
    http_port: Annotated[
        int, typer.Option(*PORT_FLAGS[::-1], min=1, max=65535, metavar="PORT", help="The HTTP port.")
    ] = 8000,
    grpc_port: Annotated[int, typer.Option(min=1, max=65535, metavar="PORT", help="The gRPC port.")] = 8001,
    metrics_port: Annotated[int, typer.Option(min=1, max=65535, metavar="PORT", help="The metrics port.")] = 8002,
    url: Annotated[
        list[str] | None,
        typer.Option(metavar="URL", help="Check a running server. Repeatable.", rich_help_panel=_ELSEWHERE),
    ] = None,
    gateway: Annotated[
        list[str] | None,
        typer.Option(metavar="URL", help="Check a running gateway. Repeatable.", rich_help_panel=_ELSEWHERE),
    ] = None,
    kube: Annotated[
        bool, typer.Option("--kube", help="Check the cluster of your kubeconfig.", rich_help_panel=_ELSEWHERE)
    ] = False,
    platform: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Check a platform for services: local-docker, slurm, kubernetes, lepton, brev. Repeatable.",
            rich_help_panel=_ELSEWHERE,
        ),
    ] = None,
    as_json: Json = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Show only warnings and problems.")] = False,
) -> None:
    """Check this machine: ports, GPUs, folders, disk, memory, limits, packages, servers, platforms.

    Nothing is changed, and only machines named by an option are contacted. Every problem comes with a command that
    fixes it. The exit code is 1 if there is a problem, 0 otherwise; warnings do not count.

    Examples:

        headrace doctor

        headrace doctor --repository models --http-port 9000

        headrace doctor --url http://10.0.0.7:8000 --gateway http://10.0.0.7:8090

        headrace doctor --kube --json
    """
    import os
    from pathlib import Path

    from headrace.cli.checks import FAILED, exit_on_error
    from headrace.cli.doctor_view import as_document, show_findings
    from headrace.platforms.drivers import check_platform
    from headrace.programs.doctor.checks import DoctorOptions, heading_of, list_checks
    from headrace.programs.doctor.finding import diagnose
    from headrace.programs.doctor.platforms import KUBERNETES
    from headrace.programs.doctor.servers import Port

    with exit_on_error():
        platform_names = [*map(check_platform, platform or ()), *([KUBERNETES] if kube else [])]
        options = DoctorOptions(
            os.environ,
            host,
            (
                Port(http_port, "http-port"),
                Port(grpc_port, "grpc-port"),
                Port(metrics_port, "metrics-port", optional=True),
            ),
            Path(repository) if repository else Path("models") if Path("models").is_dir() else None,
            tuple(server_url(text) for text in url or ()),
            tuple(server_url(text) for text in gateway or ()),
            tuple(dict.fromkeys(platform_names)),
        )
    findings = diagnose(list_checks(options), options.seconds, heading_of)
    if as_json:
        print_json(as_document(findings))
    else:
        show_findings(findings, quiet=quiet)
    if any(finding.state == "problem" for finding in findings):
        raise typer.Exit(FAILED)


def server_url(text: str) -> str:
    """Return a server URL with its scheme. Raise InvalidArgument if it is invalid."""
    from headrace.core.errors import InvalidArgument
    from headrace.core.names import is_http_url

    url = (text if "://" in text else f"http://{text}").rstrip("/")
    if not is_http_url(url):
        raise InvalidArgument(f"{text} is not a server URL: write {SERVER_URL}")
    return url
