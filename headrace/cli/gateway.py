# SPDX-License-Identifier: Apache-2.0
"""`headrace gateway`: parse the command line and run the job API."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from headrace.cli.checks import FAILED, address_of, report_errors, tls_of
from headrace.cli.common_options import LISTENING, AccessLog, GraceSeconds, LogLevel, LogStyle, Port, program

if TYPE_CHECKING:
    from headrace.net.sockets import Address
    from headrace.programs.gateway import GatewaySettings, GatewayState

T = TypeVar("T")
_SERVICES, _PLATFORM = "Services", "Where services run"
DATA_DIR = Path("~/.local/share/headrace")

DataDir = Annotated[
    Path,
    typer.Option(
        "--data-dir",
        envvar="HEADRACE_DATA_DIR",
        metavar="DIR",
        help="Folder for the database, keys, logs and downloads.",
    ),
]
DatabaseUrl = Annotated[
    str,
    typer.Option(
        "--database-url",
        envvar="HEADRACE_DATABASE_URL",
        metavar="URL",
        help="postgresql://... (default: SQLite in the data directory). It has a password: prefer the environment variable.",
    ),
]


def gateway(
    context: typer.Context,
    port: Port = 8090,
    data_dir: DataDir = DATA_DIR,
    host: Annotated[
        str,
        typer.Option(
            metavar="ADDRESS",
            help="Address to listen on; 0.0.0.0 accepts other machines and needs TLS.",
            rich_help_panel=LISTENING,
        ),
    ] = "127.0.0.1",
    tls_certificate: Annotated[
        str,
        typer.Option(
            "--tls-certificate", metavar="FILE", help="PEM file with the certificate.", rich_help_panel=LISTENING
        ),
    ] = "",
    tls_key: Annotated[
        str,
        typer.Option(
            "--tls-key", metavar="FILE", help="PEM file with the key of the certificate.", rich_help_panel=LISTENING
        ),
    ] = "",
    insecure: Annotated[
        bool,
        typer.Option(
            "--insecure",
            help="Accept other machines without TLS, behind a proxy that terminates TLS.",
            rich_help_panel=LISTENING,
        ),
    ] = False,
    database_url: DatabaseUrl = "",
    token_key: Annotated[
        Path | None,
        typer.Option(
            "--token-key",
            metavar="FILE",
            help="PEM key that signs tokens: RSA or Ed25519 (default: a key in the data directory).",
        ),
    ] = None,
    secrets_key: Annotated[
        Path | None,
        typer.Option(
            "--secrets-key",
            metavar="FILE",
            help="Key that encrypts the credentials of workspaces; gateways of one database share it.",
        ),
    ] = None,
    models_dir: Annotated[
        list[Path] | None,
        typer.Option(
            "--models-dir",
            metavar="DIR",
            help="Local folder whose models users may serve. Repeatable.",
            rich_help_panel=_SERVICES,
        ),
    ] = None,
    idle_timeout_minutes: Annotated[
        float,
        typer.Option(
            min=0, help="Stop a service after so long without a request (0: never).", rich_help_panel=_SERVICES
        ),
    ] = 30.0,
    inference_timeout: Annotated[
        float,
        typer.Option(min=1, metavar="SECONDS", help="Timeout of a request to a service.", rich_help_panel=_SERVICES),
    ] = 300.0,
    concurrency: Annotated[
        int, typer.Option(min=1, help="Maximum concurrent requests per service.", rich_help_panel=_SERVICES)
    ] = 256,
    max_batches: Annotated[
        int, typer.Option(min=1, help="Maximum concurrent batch jobs.", rich_help_panel=_SERVICES)
    ] = 2,
    trust_remote_code: Annotated[
        bool,
        typer.Option("--trust-remote-code", help="Run Python code that comes with models.", rich_help_panel=_SERVICES),
    ] = False,
    stop_services: Annotated[
        bool,
        typer.Option(
            "--stop-services",
            help="Stop services when the gateway stops (default: they keep running).",
            rich_help_panel=_SERVICES,
        ),
    ] = False,
    platform: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Platform of services: process (this machine), local-docker, kubernetes or slurm.",
            rich_help_panel=_PLATFORM,
        ),
    ] = "process",
    platform_setting: Annotated[
        list[str] | None,
        typer.Option(
            "--platform-setting",
            metavar="NAME=VALUE",
            help="Setting of the platform: namespace, partition, network and so on. Repeatable.",
            rich_help_panel=_PLATFORM,
        ),
    ] = None,
    image: Annotated[
        str,
        typer.Option(
            metavar="IMAGE",
            help="Image of services (default: headrace's own; tao: that of each architecture).",
            rich_help_panel=_PLATFORM,
        ),
    ] = "",
    callback_url: Annotated[
        str,
        typer.Option(
            "--callback-url",
            metavar="URL",
            help="URL at which services reach this gateway; without it, idle services are not stopped.",
            rich_help_panel=_PLATFORM,
        ),
    ] = "",
    no_gpus: Annotated[bool, typer.Option("--no-gpus", help="Request no GPUs.", rich_help_panel=_PLATFORM)] = False,
    grace_seconds: GraceSeconds = 30.0,
    access_log: AccessLog = False,
    no_console: Annotated[
        bool, typer.Option("--no-console", help="Do not serve the web page at /console.", rich_help_panel=LISTENING)
    ] = False,
    log_level: LogLevel = "info",
    log_format: LogStyle = "auto",
) -> None:
    """Serve the job API: log in, start models as inference microservices, send requests, stop them.

    The first start prints the administrator's key, once. Services outlive the gateway; the next start adopts them.

    Examples:

        headrace gateway --port 8090 --data-dir ./gateway

        headrace users add alice --org acme --data-dir ./gateway

        headrace jobs register ./model.onnx --org acme --arch classification --data-dir ./gateway

        headrace gateway --host 0.0.0.0 --tls-certificate cert.pem --tls-key key.pem

        headrace gateway --platform kubernetes --platform-setting namespace=models --callback-url http://gateway.models:8090
    """
    if context.invoked_subcommand is not None:
        return
    from headrace.jobs.settings import JobsApiSettings
    from headrace.programs.gateway import GatewaySettings, PlatformSettings, run_gateway

    with program(log_level, log_format):
        settings = GatewaySettings(
            address_of(host, port, ""),
            data_dir.expanduser(),
            database_url,
            tls_of(tls_certificate, tls_key, ""),
            insecure,
            stop_services,
            tuple(folder.expanduser().absolute() for folder in models_dir or ()),
            idle_timeout_minutes,
            token_key,
            secrets_key,
            trust_remote_code,
            grace_seconds,
            access_log=access_log,
            console=not no_console,
            max_batches=max_batches,
            platform=PlatformSettings(platform, _pairs(platform_setting or []), image, callback_url, not no_gpus),
            api=JobsApiSettings(inference_seconds=inference_timeout, concurrency=concurrency),
        )
        code = run_gateway(settings, lambda address, key: _show(settings, address, key))
    raise typer.Exit(code)


gateway_group = typer.Typer(name="gateway", invoke_without_command=True, no_args_is_help=False)
gateway_group.callback()(gateway)


@gateway_group.command()
def manifests(
    namespace: Annotated[
        str, typer.Option("--namespace", "-n", metavar="NAME", help="Namespace of the gateway.")
    ] = "headrace-jobs",
    services_namespace: Annotated[
        str, typer.Option(metavar="NAME", help="Namespace of the services; it must exist (default: the gateway's).")
    ] = "",
    image: Annotated[
        str,
        typer.Option(
            metavar="IMAGE",
            help="Image with the extras jobs, kubernetes and postgresql (default: headrace:VERSION-gateway, which you "
            "must build and push).",
        ),
    ] = "",
    services_image: Annotated[
        str, typer.Option(metavar="IMAGE", help="Image of services (default: headrace:VERSION-full).")
    ] = "",
    database: Annotated[
        str,
        typer.Option(
            metavar="NAME", help="sqlite: one gateway with a volume. postgresql: gateways that share a database."
        ),
    ] = "sqlite",
    database_secret: Annotated[
        str, typer.Option(metavar="NAME", help="Secret with the key url: postgresql://USER:PASSWORD@HOST/NAME.")
    ] = "",
    keys_secret: Annotated[
        str, typer.Option(metavar="NAME", help="Secret with secrets.key and token.pem, which all gateways share.")
    ] = "",
    replicas: Annotated[int, typer.Option(min=1, max=20, help="Gateways that share a PostgreSQL database.")] = 2,
    storage: Annotated[str, typer.Option(metavar="SIZE", help="Size of the volume with SQLite.")] = "10Gi",
    storage_class: Annotated[
        str, typer.Option(metavar="NAME", help="Class of that volume (default: the cluster's).")
    ] = "",
    pull_secret: Annotated[str, typer.Option(metavar="NAME", help="Image pull Secret in both namespaces.")] = "",
    without_namespace: Annotated[bool, typer.Option("--without-namespace", help="Leave out the namespace.")] = False,
) -> None:
    """Print the manifests of the gateway: its database, its permissions, and the Service that clients use.

    Services are StatefulSets that the gateway creates. TLS ends at an ingress of yours.

    Examples:

        headrace gateway manifests --image registry.example/headrace:1.0-gateway | kubectl apply -f -

        headrace gateway manifests --database postgresql --database-secret jobs-database --keys-secret jobs-keys
    """
    from dataclasses import fields

    from headrace.cli.checks import exit_on_error
    from headrace.fleet import yaml_documents
    from headrace.jobs.manifests import GatewayManifestSettings, gateway_manifests

    defaults = {field.name: field.default for field in fields(GatewayManifestSettings)}
    with exit_on_error():
        settings = GatewayManifestSettings(
            namespace=namespace,
            services_namespace=services_namespace,
            image=image or str(defaults["image"]),
            services_image=services_image or str(defaults["services_image"]),
            database=database,
            database_secret=database_secret,
            keys_secret=keys_secret,
            replicas=replicas,
            storage=storage,
            storage_class=storage_class,
            pull_secret=pull_secret,
            create_namespace=not without_namespace,
        )
    typer.echo(yaml_documents.write(gateway_manifests(settings)), nl=False)


def with_gateway(data_dir: Path, database_url: str, work: Callable[[GatewayState], Awaitable[T]]) -> T:
    """Run a function with the jobs and users of a data directory; report errors with their exit code."""
    import asyncio

    from headrace.jobs.settings import JobSettings
    from headrace.programs.gateway import open_gateway

    settings = JobSettings(data_dir.expanduser(), database_url=database_url)

    async def run() -> T:
        async with open_gateway(settings) as opened:
            return await work(opened)

    with report_errors(FAILED):
        return asyncio.run(run())


def _pairs(texts: list[str]) -> dict[str, str]:
    settings = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise ValueError(f"--platform-setting {text[:64]!a}: write NAME=VALUE")
        settings[name.strip().replace("-", "_")] = value
    return settings


def service() -> None:
    """Run `headrace microservice` alone, without importing the other commands. The gateway starts this."""
    from headrace.cli.microservice import microservice

    typer.run(microservice)


def _show(settings: GatewaySettings, address: Address, admin_key: str | None) -> None:
    scheme = "https" if settings.tls is not None else "http"
    typer.echo(f"gateway: {scheme}://{address}/api/v1, data in {settings.data_dir}")
    if settings.console:
        typer.echo(f"console: {scheme}://{address}/console")
    if admin_key is not None:
        typer.echo(f"administrator's key (not shown again): {admin_key}")
