# SPDX-License-Identifier: Apache-2.0
"""The options of `headrace serve`, by topic: names, aliases, help. Read by `serve` alone.

Names are Triton's where Triton has the option; aliases are those of its first releases.
"""

from __future__ import annotations

from typing import Annotated

import typer

MODELS, LISTENING, LIMITS, LOGS = "Models", "Listening", "Processes and limits", "Logs and traces"


Folders = Annotated[
    list[str] | None, typer.Argument(metavar="MODELS", help="Folders of models; none for the built-in ones.")
]
ModelRepository = Annotated[
    list[str] | None,
    typer.Option(
        "--model-repository", "--model-store", metavar="FOLDER", help="The same as MODELS.", rich_help_panel=MODELS
    ),
]
ModelControlMode = Annotated[
    str,
    typer.Option(
        metavar="MODE",
        help="none: load all once. poll: follow the folders. explicit: load what is asked for.",
        rich_help_panel=MODELS,
    ),
]
RepositoryPollSecs = Annotated[
    float,
    typer.Option(
        "--repository-poll-secs",
        "--file-system-poll-secs",
        min=0,
        metavar="SECONDS",
        help="From one look at the folders to the next; 0 for none.",
        rich_help_panel=MODELS,
    ),
]
LoadModel = Annotated[
    list[str] | None,
    typer.Option(metavar="MODEL", help="With explicit: load this at the start; * for all.", rich_help_panel=MODELS),
]
StrictModelConfig = Annotated[
    str,
    typer.Option(
        metavar="true|false",
        help="Refuse models whose configuration leaves something to their files.",
        rich_help_panel=MODELS,
    ),
]
StrictReadiness = Annotated[
    str,
    typer.Option(
        metavar="true|false",
        help="Ready only when every model is; false: as soon as the server answers.",
        rich_help_panel=MODELS,
    ),
]
ExitOnError = Annotated[
    str,
    typer.Option(metavar="true|false", help="Exit if a model fails at the start.", rich_help_panel=MODELS),
]
ModelLoadThreadCount = Annotated[
    int,
    typer.Option(
        metavar="COUNT", min=1, max=256, help="Versions that are loaded at the same time.", rich_help_panel=MODELS
    ),
]
ResponseCacheByteSize = Annotated[
    int,
    typer.Option(
        metavar="BYTES",
        min=0,
        help="Memory for answers of models with response_cache; 0 for none.",
        rich_help_panel=MODELS,
    ),
]
RateLimitResource = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME:COUNT", help="How much there is of a rate_limiter's resource.", rich_help_panel=MODELS),
]

Host = Annotated[
    str, typer.Option(metavar="ADDRESS", help="Address to listen on. Loopback unless told.", rich_help_panel=LISTENING)
]
HttpPort = Annotated[
    int,
    typer.Option(metavar="PORT", min=0, max=65535, help="HTTP port; 0 takes a free one.", rich_help_panel=LISTENING),
]
GrpcPort = Annotated[
    int,
    typer.Option(metavar="PORT", min=0, max=65535, help="gRPC port; 0 takes a free one.", rich_help_panel=LISTENING),
]
HttpSocket = Annotated[
    str,
    typer.Option(metavar="PATH", help="Serve HTTP on this UNIX socket instead of a port.", rich_help_panel=LISTENING),
]
GrpcSocket = Annotated[
    str,
    typer.Option(metavar="PATH", help="Serve gRPC on this UNIX socket instead of a port.", rich_help_panel=LISTENING),
]
TlsCertificate = Annotated[
    str,
    typer.Option(metavar="FILE", help="PEM file with the certificate chain; turns TLS on.", rich_help_panel=LISTENING),
]
TlsKey = Annotated[
    str, typer.Option(metavar="FILE", help="PEM file with the certificate's key.", rich_help_panel=LISTENING)
]
TlsClientCa = Annotated[
    str,
    typer.Option(
        metavar="FILE", help="PEM file: clients must show a certificate it signed.", rich_help_panel=LISTENING
    ),
]

Processes = Annotated[
    int, typer.Option(metavar="COUNT", min=1, max=256, help="Processes that share the ports.", rich_help_panel=LIMITS)
]
MaxBodyBytes = Annotated[
    int, typer.Option(metavar="BYTES", min=1, help="Largest HTTP body and gRPC message.", rich_help_panel=LIMITS)
]
GraceSeconds = Annotated[
    float,
    typer.Option(metavar="SECONDS", min=0, help="Time for requests in flight after SIGTERM.", rich_help_panel=LIMITS),
]

LogLevel = Annotated[str, typer.Option(metavar="LEVEL", help="debug, info, warning or error.", rich_help_panel=LOGS)]
LogFormatText = Annotated[
    str, typer.Option(metavar="FORMAT", help="auto, json or text; auto is text on a terminal.", rich_help_panel=LOGS)
]
TraceEndpoint = Annotated[
    str, typer.Option(metavar="URL", help="Send OpenTelemetry spans to this OTLP/HTTP collector.", rich_help_panel=LOGS)
]
AccessLog = Annotated[bool, typer.Option("--access-log", help="Log one line per request.", rich_help_panel=LOGS)]
