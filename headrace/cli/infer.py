# SPDX-License-Identifier: Apache-2.0
"""`headrace infer`: send a request to a model of a running server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from headrace.cli.checks import report_errors
from headrace.cli.common_options import SERVER_URL, CaFile, CertFile, Headers, Json, KeyFile, ModelName, RequestTimeout

if TYPE_CHECKING:
    from headrace.cli.infer_run import InferOptions


def infer(
    model: ModelName,
    inputs: Annotated[
        list[str] | None,
        typer.Option(
            "--input",
            "-i",
            metavar="NAME=VALUE",
            help="JSON, text, @file.npy, @file.json, @file:TYPE:SIZES for raw numbers, or random[:SIZES]. Repeatable.",
        ),
    ] = None,
    outputs: Annotated[
        list[str] | None,
        typer.Option(
            "--output",
            "-o",
            metavar="NAME[=@FILE]",
            help="Request this output only, and optionally write it to a .npy file. Repeatable.",
        ),
    ] = None,
    classes: Annotated[int, typer.Option(metavar="N", min=0, help="Show the N largest values with their labels.")] = 0,
    random: Annotated[bool, typer.Option("--random", help="Fill missing inputs with random values.")] = False,
    stream: Annotated[
        bool, typer.Option("--stream", help="Print results as they arrive (default for decoupled models).")
    ] = False,
    repeat: Annotated[int, typer.Option(metavar="N", min=1, help="Send the request N times and print latencies.")] = 1,
    version: Annotated[str, typer.Option(metavar="NUMBER", help="Model version (default: the newest).")] = "",
    url: Annotated[
        str, typer.Option(metavar="URL", help="Server URL: http://, https://, grpc:// or grpcs://.")
    ] = SERVER_URL,
    timeout: RequestTimeout = 60.0,
    headers: Headers = None,
    ca: CaFile = "",
    cert: CertFile = "",
    key: KeyFile = "",
    as_json: Json = False,
) -> None:
    """Send a request to a model and print the response.

    Inputs are checked against the model's metadata first: numbers are converted to the model's type if nothing is lost,
    and a missing batch dimension is added. The exit code is 1 if the server returns an error, 2 if no request could be
    sent. The results of a decoupled model are printed as they arrive.

    Examples:

        headrace infer identity --input INPUT0=[[1,2,3]]

        headrace infer resnet50 --input images=@photos.npy --classes 5

        headrace infer resnet50 --input pixels=@image.raw:UINT8:224,224,3 --output scores=@scores.npy

        headrace infer resnet50 --random --repeat 100 --url grpc://127.0.0.1:8001

        headrace infer story --input "text=Once upon a time"
    """
    with report_errors():
        from headrace.cli.infer_run import InferOptions, run_infer

        options: InferOptions = InferOptions(
            model=model,
            inputs=tuple(inputs or ()),
            outputs=tuple(outputs or ()),
            classes=classes,
            random=random,
            stream=stream,
            repeat=repeat,
            version=version,
            url=url,
            timeout=timeout,
            headers=tuple(headers or ()),
            ca=ca,
            cert=cert,
            key=key,
            as_json=as_json,
        )
        run_infer(options)
