# SPDX-License-Identifier: Apache-2.0
"""`headrace models`: look at the models of a running server, load and unload them; make, convert and check their folders."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from headrace.cli.checks import FAILED, told
from headrace.cli.results import Json, print_json, print_result

models = typer.Typer(
    name="models", help="Look at models, load and unload them, make and check their folders.", no_args_is_help=True
)

Url = Annotated[str, typer.Option(metavar="URL", help="Address of the server's HTTP port.")]
Model = Annotated[str, typer.Argument(metavar="MODEL", help="Name of the model.")]

_URL = "http://127.0.0.1:8000"


@models.command("list")
def list_models(url: Url = _URL, as_json: Json = False) -> None:
    """List the models of a server, with their states and what they have done.

    Examples:

        headrace models list

        headrace models list --url http://10.0.0.7:8000 --json
    """
    from headrace.cli.client import ServerClient
    from headrace.cli.model_list import list_rows, show_list

    with told():
        server = ServerClient(url)
        rows = list_rows(server.post("/v2/repository/index", {}), server.get("/v2/models/stats"))
    if as_json:
        print_json(rows)
    else:
        show_list(rows)


@models.command()
def show(
    model: Model,
    version: Annotated[str, typer.Option(metavar="NUMBER", help="One version; the newest unless told.")] = "",
    url: Url = _URL,
    as_json: Json = False,
) -> None:
    """Show a model: inputs and outputs, instances, scheduling, statistics, and why its batches have their size.

    Examples:

        headrace models show resnet50

        headrace models show resnet50 --version 3 --json
    """
    from headrace.cli.client import ServerClient
    from headrace.cli.model_view import ask_model, show_model

    with told():
        seen = ask_model(ServerClient(url), model, version)
    if as_json:
        print_json(seen)
    else:
        show_model(seen)
    if "metadata" not in seen:
        raise typer.Exit(FAILED)


@models.command()
def load(model: Model, url: Url = _URL, as_json: Json = False) -> None:
    """Load a model of the repository, or load it anew. The server must run with --model-control-mode=explicit.

    Example:

        headrace models load resnet50
    """
    _control(model, "load", {}, url, as_json)


@models.command()
def unload(
    model: Model,
    dependents: Annotated[
        bool, typer.Option("--dependents", help="Also the models that an ensemble uses, unless others use them.")
    ] = False,
    url: Url = _URL,
    as_json: Json = False,
) -> None:
    """Stop serving a model and free its memory. The server must run with --model-control-mode=explicit.

    Example:

        headrace models unload resnet50
    """
    _control(model, "unload", {"parameters": {"unload_dependents": dependents}}, url, as_json)


@models.command()
def check(
    paths: Annotated[list[str], typer.Argument(metavar="PATH", help="Folders of models.")],
    gpus: Annotated[int, typer.Option(min=0, help="GPUs of the machine that will serve them.")] = 0,
    as_json: Json = False,
) -> None:
    """Check folders of models without serving them: every mistake with its file, line and remedy.

    The exit code is 1 if a model could not be served, 0 otherwise.

    Example:

        headrace models check models
    """
    from headrace.cli.check_view import report_json, show_report
    from headrace.engine.repository.check import check_repository

    with told():
        report = check_repository(*paths, gpus=gpus)
    if as_json:
        print_json(report_json(report))
    else:
        show_report(report)
    if report.problems:
        raise typer.Exit(FAILED)


@models.command()
def init(
    path: Annotated[str, typer.Argument(metavar="PATH", help="A model's file or folder, or a model without a config.")],
    repository: Annotated[str, typer.Option(metavar="DIR", help="The folder of models to put it into.")] = "models",
    name: Annotated[str, typer.Option(metavar="NAME", help="Name of the model; that of the file unless told.")] = "",
    version: Annotated[str, typer.Option(metavar="NUMBER", help="Number of the version.")] = "1",
    move: Annotated[bool, typer.Option("--move", help="Move the file instead of copying it.")] = False,
    as_json: Json = False,
) -> None:
    """Make a model of a file: say what it is, put it into a folder of models, write its configuration.

    The format is told by the file's content. If its backend is not installed, the message says how to install it, and
    the configuration has only what is known.

    Examples:

        headrace models init resnet50.onnx

        headrace models init export/saved_model --repository models --name flowers --version 2

        headrace models init models/flowers
    """
    from pathlib import Path

    from headrace.cli.init import init_model
    from headrace.cli.init_view import made_json, show_made

    with told():
        made = init_model(Path(path), Path(repository), name, version, move=move)
    if as_json:
        print_json(made_json(made))
    else:
        show_made(made)


@models.command()
def convert(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="A Caffe2 model: its network's file, or its folder.")],
    target: Annotated[str, typer.Argument(metavar="TARGET", help="The ONNX file to write.")],
    inputs: Annotated[
        list[str] | None,
        typer.Option("--input", metavar="NAME=SIZES", help="Shape of an input, such as data=-1,3,224,224. Repeatable."),
    ] = None,
    outputs: Annotated[
        list[str] | None, typer.Option("--output", metavar="NAME", help="Keep this output only. Repeatable.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace TARGET if it is there.")] = False,
    as_json: Json = False,
) -> None:
    """Convert a Caffe2 model (NetDef) to ONNX.

    Types and shapes of its inputs are those of the model's configuration, if it has one, or those given here.

    Examples:

        headrace models convert squeezenet squeezenet.onnx

        headrace models convert predict_net.pb net.onnx --input data=-1,3,224,224 --input ids=INT64:-1,16
    """
    from pathlib import Path

    from headrace.cli.convert import convert_netdef

    with told():
        made = convert_netdef(
            Path(source), Path(target), inputs=inputs or (), outputs=outputs or (), overwrite=overwrite
        )
    ends = f"{', '.join(made.inputs)} -> {', '.join(made.outputs)}"
    said = f"wrote {made.target}: {made.nodes} nodes, {ends}, {made.size_bytes} bytes"
    print_result(made.as_json(), said, as_json)


def _control(model: str, verb: str, document: dict[str, Any], url: str, as_json: bool) -> None:
    from urllib.parse import quote

    from headrace.cli.client import LOAD_SECONDS, ServerClient

    with told():
        server = ServerClient(url)
        server.post(f"/v2/repository/models/{quote(model, safe='')}/{verb}", document, seconds=LOAD_SECONDS)
    print_result({"name": model, "done": verb}, f"{model}: {verb}ed", as_json)
