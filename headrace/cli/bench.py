# SPDX-License-Identifier: Apache-2.0
"""`headrace bench`: put a model of a running server under load, and show how long its answers take."""

from __future__ import annotations

from typing import Annotated

import typer

_URL = "http://127.0.0.1:8000"


def bench(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Name of the model.")],
    url: Annotated[str, typer.Option(metavar="URL", help="The server: http://, https://, grpc:// or grpcs://.")] = _URL,
    version: Annotated[str, typer.Option(metavar="VERSION", help="One version; the server's choice unless told.")] = "",
    protocol: Annotated[
        str, typer.Option(metavar="http|grpc|predict", help="What to speak; what the URL says unless told.")
    ] = "",
    concurrency: Annotated[
        str,
        typer.Option(
            metavar="N[,N...]", help="Closed loop: so many connections, each with one request. Several: a sweep."
        ),
    ] = "16",
    rate: Annotated[
        str,
        typer.Option(metavar="R[,R...]", help="Open loop: so many requests a second, whatever comes back."),
    ] = "",
    uniform: Annotated[
        bool, typer.Option("--uniform", help="Open loop: at even distances, not as chance (Poisson) has it.")
    ] = False,
    duration: Annotated[float, typer.Option(metavar="SECONDS", help="How long to measure.")] = 10.0,
    warm_up: Annotated[float, typer.Option(metavar="SECONDS", help="How long to send before that.")] = 2.0,
    rows: Annotated[int, typer.Option(metavar="N", min=1, help="Rows in each request.")] = 1,
    inputs: Annotated[
        list[str] | None,
        typer.Option(
            "--input",
            "-i",
            metavar="NAME=VALUE",
            help="A shape (3,224,224), file.npy, file.json, or what `headrace infer` takes. Repeatable.",
        ),
    ] = None,
    shape: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME:SIZES", help="Sizes of an input that the model leaves open. Repeatable."),
    ] = None,
    timeout: Annotated[float, typer.Option(metavar="SECONDS", help="A request that takes longer has failed.")] = 30.0,
    json_file: Annotated[
        str, typer.Option("--json", metavar="FILE", help="Write the numbers as JSON; - prints them instead of tables.")
    ] = "",
    plot: Annotated[str, typer.Option(metavar="FILE.png", help="Draw the latencies into a file (matplotlib).")] = "",
    headers: Annotated[
        list[str] | None, typer.Option("--header", metavar="NAME:VALUE", help="Send this header field. Repeatable.")
    ] = None,
    ca: Annotated[str, typer.Option(metavar="FILE", help="PEM file with the authority of the server.")] = "",
    cert: Annotated[str, typer.Option(metavar="FILE", help="PEM file with a certificate of our own.")] = "",
    key: Annotated[str, typer.Option(metavar="FILE", help="PEM file with its key.")] = "",
) -> None:
    """Put a model under load: requests per second, errors, latencies, and the server's own view of the same time.

    Inputs are random numbers in the shapes that the model takes. In an open loop, latency counts from when a request was
    due, so that what waits because the server stands still is counted. The exit code is 1 if no request was answered well.

    Examples:

        headrace bench resnet50

        headrace bench resnet50 --concurrency 1,4,16,64 --plot sweep.png

        headrace bench resnet50 --rate 500 --duration 30 --json numbers.json

        headrace bench bert --shape ids:128 --url grpc://localhost:8001

        headrace bench production --protocol predict --rows 8 --header x-api-key:secret
    """
    from headrace.cli.bench_run import BenchWish, run_bench
    from headrace.cli.checks import told

    with told():
        run_bench(
            BenchWish(
                model=model,
                url=url,
                version=version,
                protocol=protocol,
                concurrency=concurrency,
                rate=rate,
                uniform=uniform,
                duration=duration,
                warm_up=warm_up,
                rows=rows,
                inputs=tuple(inputs or ()),
                shapes=tuple(shape or ()),
                timeout=timeout,
                json_file=json_file,
                plot=plot,
                headers=tuple(headers or ()),
                ca=ca,
                cert=cert,
                key=key,
            )
        )
