# SPDX-License-Identifier: Apache-2.0
"""`headrace infer`: try a model of a running server from the command line."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from headrace.cli.checks import told
from headrace.cli.results import Json

if TYPE_CHECKING:
    from headrace.cli.infer_run import Wish

_URL = "http://127.0.0.1:8000"


def infer(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Name of the model.")],
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
            help="Ask for this output only, and write it to a .npy file. Repeatable.",
        ),
    ] = None,
    classes: Annotated[int, typer.Option(metavar="N", min=0, help="Show the N largest values with their labels.")] = 0,
    random: Annotated[bool, typer.Option("--random", help="Fill inputs that are not given.")] = False,
    stream: Annotated[bool, typer.Option("--stream", help="Show any number of results as they come.")] = False,
    repeat: Annotated[int, typer.Option(metavar="N", min=1, help="Send it so often, and tell how long it takes.")] = 1,
    version: Annotated[str, typer.Option(metavar="NUMBER", help="One version; the newest unless told.")] = "",
    url: Annotated[str, typer.Option(metavar="URL", help="The server: http://, https://, grpc:// or grpcs://.")] = _URL,
    timeout: Annotated[float, typer.Option(metavar="SECONDS", help="For each request.")] = 60.0,
    headers: Annotated[
        list[str] | None, typer.Option("--header", metavar="NAME:VALUE", help="Send this header field. Repeatable.")
    ] = None,
    ca: Annotated[str, typer.Option(metavar="FILE", help="PEM file with the authority of the server.")] = "",
    cert: Annotated[str, typer.Option(metavar="FILE", help="PEM file with a certificate of our own.")] = "",
    key: Annotated[str, typer.Option(metavar="FILE", help="PEM file with its key.")] = "",
    as_json: Json = False,
) -> None:
    """Send a request to a model and show what it answers.

    Inputs are checked against what the model wants first: numbers become the model's type where nothing is lost, and a
    batch dimension that is missing is added. The exit code is 1 if the server refuses, 2 if nothing could be asked.

    Examples:

        headrace infer identity --input INPUT0=[[1,2,3]]

        headrace infer resnet50 --input images=@photos.npy --classes 5

        headrace infer resnet50 --input pixels=@image.raw:UINT8:224,224,3 --output scores=@scores.npy

        headrace infer resnet50 --random --repeat 100 --url grpc://127.0.0.1:8001

        headrace infer story --input "text=Once upon a time" --stream
    """
    with told():
        from headrace.cli.infer_run import Wish, run_wish

        wish: Wish = Wish(
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
        run_wish(wish)
