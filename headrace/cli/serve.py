# SPDX-License-Identifier: Apache-2.0
"""`headrace serve`: options to settings, and the bars on the terminal while models load."""

from __future__ import annotations

import typer

from headrace.cli import options as opt


def serve(
    models: opt.Folders = None,
    model_repository: opt.ModelRepository = None,
    model_control_mode: opt.ModelControlMode = "poll",
    repository_poll_secs: opt.RepositoryPollSecs = 15,
    load_model: opt.LoadModel = None,
    strict_model_config: opt.StrictModelConfig = "false",
    strict_readiness: opt.StrictReadiness = "true",
    exit_on_error: opt.ExitOnError = "false",
    model_load_thread_count: opt.ModelLoadThreadCount = 4,
    response_cache_byte_size: opt.ResponseCacheByteSize = 64 * 1024 * 1024,
    rate_limit_resource: opt.RateLimitResource = None,
    host: opt.Host = "127.0.0.1",
    http_port: opt.HttpPort = 8000,
    grpc_port: opt.GrpcPort = 8001,
    http_socket: opt.HttpSocket = "",
    grpc_socket: opt.GrpcSocket = "",
    tls_certificate: opt.TlsCertificate = "",
    tls_key: opt.TlsKey = "",
    tls_client_ca: opt.TlsClientCa = "",
    processes: opt.Processes = 1,
    max_body_bytes: opt.MaxBodyBytes = 64 * 1024 * 1024,
    grace_seconds: opt.GraceSeconds = 30.0,
    log_level: opt.LogLevel = "info",
    log_format: opt.LogFormatText = "auto",
    trace_endpoint: opt.TraceEndpoint = "",
    access_log: opt.AccessLog = False,
) -> None:
    """Serve models over HTTP and gRPC.

    MODELS are folders with a folder for each model. Without any, the built-in models `identity` and `first1000` are
    served.

    Examples:

        headrace serve models

        headrace serve models --repository-poll-secs 5 --strict-readiness=false

        headrace serve models --model-control-mode explicit --load-model resnet50

        headrace serve models --processes 2 --access-log

        headrace serve --tls-certificate server.pem --tls-key server.key
    """
    from headrace.apps.server import ServerSettings, run_server
    from headrace.cli.checks import address_of, flag_of, log_format_of, or_exit, tls_of
    from headrace.cli.progress import logging_beside_bars
    from headrace.cli.repositories import engine_settings
    from headrace.core.limits import Limits

    # Several processes would paint over each other's bars.
    with or_exit(), logging_beside_bars(log_level, log_format_of(log_format), bars=processes == 1) as progress:
        engine = engine_settings(
            [*(models or ()), *(model_repository or ())],
            mode=model_control_mode,
            poll_seconds=repository_poll_secs,
            load_models=load_model or (),
            strict_model_config=flag_of("--strict-model-config", strict_model_config),
            strict_readiness=flag_of("--strict-readiness", strict_readiness),
            exit_on_error=flag_of("--exit-on-error", exit_on_error),
            load_threads=model_load_thread_count,
            cache_bytes=response_cache_byte_size,
            resources=rate_limit_resource or (),
            processes=processes,
        )
        settings = ServerSettings(
            http=address_of(host, http_port, http_socket),
            grpc=address_of(host, grpc_port, grpc_socket),
            tls=tls_of(tls_certificate, tls_key, tls_client_ca),
            processes=processes,
            grace_seconds=grace_seconds,
            access_log=access_log,
            trace_endpoint=trace_endpoint,
            limits=Limits(body_bytes=max_body_bytes, message_bytes=max_body_bytes),
            engine=engine,
            progress=progress,
        )
        code = run_server(settings)
    raise typer.Exit(code)
