# SPDX-License-Identifier: Apache-2.0
"""`headrace ray`: run InferenceServices on a Ray cluster, by Ray Serve."""

from __future__ import annotations

from typing import Annotated

import typer

from headrace.cli.checks import FAILED
from headrace.cli.common_options import PORT_FLAGS, Json, print_json
from headrace.cli.fleet_options import Progress, print_problems, read_files, report_fleet_errors

ray = typer.Typer(name="ray", help="Run InferenceServices on a Ray cluster.", no_args_is_help=True)

Address = Annotated[
    str,
    typer.Option(
        "--address",
        envvar="RAY_ADDRESS",
        metavar="ADDRESS",
        help="HOST:6379 from a node of the cluster, ray://HOST:10001 from elsewhere (default: the cluster of this machine).",
        show_default=False,
    ),
]


@ray.command()
def deploy(
    files: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE...", help="Services, models and runtimes: files, folders, or - for standard input."
        ),
    ],
    address: Address = "",
    route: Annotated[
        str,
        typer.Option(
            "--route-prefix",
            metavar="PATH",
            help="Path of the service (default: /NAME). / is for a cluster with one service.",
        ),
    ] = "",
    host: Annotated[
        str, typer.Option("--host", metavar="HOST", help="Address that Ray Serve's proxies listen on, on every node.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(*PORT_FLAGS, min=1, max=65535, help="Port of Ray Serve's proxies.")] = 8000,
    timeout: Annotated[
        float, typer.Option("--timeout", min=0, metavar="SECONDS", help="Maximum time until a service is ready.")
    ] = 900.0,
    as_json: Json = False,
) -> None:
    """Deploy InferenceServices to a Ray cluster, or update them, and wait until they are ready.

    The same files as for `headrace up` and Kubernetes. Every node needs Headrace with the packages of the model's format,
    and the model's files, unless they are downloaded. A field that Ray does not support is reported by name, before anything
    changes. `--host` and `--port` have an effect when Ray Serve starts on the cluster; later services use the same proxies.

    Examples:

        headrace ray deploy digits.yaml

        headrace ray deploy service.yaml models/ runtimes/ --address 10.0.0.7:6379

        headrace ray deploy digits.yaml --host 0.0.0.0 --port 8000 --route-prefix /
    """
    from headrace.core.errors import InvalidArgument
    from headrace.fleet.ray_serve.cluster import HttpEndpoint, connected
    from headrace.fleet.ray_serve.translation import read_services

    services = read_services(read_files(files))
    print_problems(services.errors, services.warnings)
    if services.errors:
        raise typer.Exit(FAILED)
    with report_fleet_errors():
        if route and len(services.specs) > 1:
            raise InvalidArgument(f"--route-prefix is for one service, and the files have {len(services.specs)}")
        if route and not route.startswith("/"):
            raise InvalidArgument(f"--route-prefix {route[:64]!a} has to begin with /")
        progress = Progress(silent=as_json)
        deployed: list[dict[str, str]] = []
        with connected(address) as cluster:
            for spec in services.specs:
                path = route or f"/{spec.name}"
                with progress:
                    url = cluster.deploy(spec, path, HttpEndpoint(host, port), timeout, progress)
                deployed.append({"name": spec.name, "route_prefix": path, "url": url})
                if not as_json:
                    address_text = url or f"path {path} of Ray Serve's proxies, which ran before"
                    typer.echo(f"{spec.name} is ready: {address_text}")
        if as_json:
            print_json(deployed)


@ray.command()
def status(address: Address = "", as_json: Json = False) -> None:
    """List the services that Headrace has deployed to a Ray cluster: state, replicas, and what is wrong.

    Examples:

        headrace ray status

        headrace ray status --address 10.0.0.7:6379 --json
    """
    from headrace.cli.tables import open_console, state_cell, table
    from headrace.fleet.ray_serve.cluster import connected

    with report_fleet_errors(), connected(address) as cluster:
        services = cluster.services()
    if as_json:
        print_json(
            [
                {"name": item.name, "state": item.state, "replicas": dict(item.replicas), "message": item.message}
                for item in services
            ]
        )
        return
    if not services:
        typer.echo("no services; add one: headrace ray deploy FILE")
        return
    rows = [
        (
            item.name,
            state_cell(item.state),
            ", ".join(f"{count} {state.lower()}" for state, count in sorted(item.replicas.items())) or "none",
            item.message,
        )
        for item in services
    ]
    open_console().print(table(("NAME", "STATE", "REPLICAS", "MESSAGE"), rows))


@ray.command()
def delete(
    names: Annotated[list[str], typer.Argument(metavar="NAME...", help="InferenceServices that were deployed.")],
    address: Address = "",
    timeout: Annotated[
        float, typer.Option("--timeout", min=0, metavar="SECONDS", help="Maximum time until a service is gone.")
    ] = 900.0,
    as_json: Json = False,
) -> None:
    """Delete services from a Ray cluster; open requests are answered first.

    Examples:

        headrace ray delete digits
    """
    from headrace.fleet.ray_serve.cluster import connected

    with report_fleet_errors(), connected(address) as cluster:
        for name in names:
            cluster.delete(name, timeout)
            if not as_json:
                typer.echo(f"{name} deleted")
    if as_json:
        print_json([{"name": name, "deleted": True} for name in names])
