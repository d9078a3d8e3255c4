# SPDX-License-Identifier: Apache-2.0
"""`headrace models`: inspect, load, unload, and put to sleep the models of a server; create, convert, check folders."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from headrace.cli.checks import FAILED, report_errors
from headrace.cli.common_options import SERVER_URL, Json, ModelName, ServerUrl, print_json, print_result

models = typer.Typer(
    name="models", help="Inspect, load and unload models; create and check their folders.", no_args_is_help=True
)


@models.command("list")
def list_models(url: ServerUrl = SERVER_URL, as_json: Json = False) -> None:
    """List the models of a server, with their states and statistics.

    Examples:

        headrace models list

        headrace models list --url http://10.0.0.7:8000 --json
    """
    from headrace.cli.client import ServerClient
    from headrace.cli.models_view import list_rows, show_list

    with report_errors():
        server = ServerClient(url)
        rows = list_rows(server.post("/v2/repository/index", {}), server.get("/v2/models/stats"))
    if as_json:
        print_json(rows)
    else:
        show_list(rows)


@models.command()
def show(
    model: ModelName,
    version: Annotated[str, typer.Option(metavar="NUMBER", help="Model version (default: the newest).")] = "",
    url: ServerUrl = SERVER_URL,
    as_json: Json = False,
) -> None:
    """Show a model: inputs and outputs, instances, scheduling, statistics, and why its batches have their size.

    Examples:

        headrace models show resnet50

        headrace models show resnet50 --version 3 --json
    """
    from headrace.cli.client import ServerClient
    from headrace.cli.models_view import fetch_model, show_model

    with report_errors():
        details = fetch_model(ServerClient(url), model, version)
    if as_json:
        print_json(details)
    else:
        show_model(details)
    if "metadata" not in details:
        raise typer.Exit(FAILED)


@models.command()
def load(model: ModelName, url: ServerUrl = SERVER_URL, as_json: Json = False) -> None:
    """Load or reload a model of the repository. The server must run with --model-control-mode explicit.

    Example:

        headrace models load resnet50
    """
    _control(model, "load", {}, url, as_json)


@models.command()
def unload(
    model: ModelName,
    dependents: Annotated[
        bool, typer.Option("--dependents", help="Also unload the models of an ensemble, unless others use them.")
    ] = False,
    url: ServerUrl = SERVER_URL,
    as_json: Json = False,
) -> None:
    """Stop serving a model and free its memory. The server must run with --model-control-mode explicit.

    Example:

        headrace models unload resnet50
    """
    _control(model, "unload", {"parameters": {"unload_dependents": dependents}}, url, as_json)


@models.command()
def sleep(
    model: ModelName,
    level: Annotated[
        int, typer.Option(min=1, max=2, help="1: weights stay in host memory. 2: weights are dropped and read again.")
    ] = 1,
    url: ServerUrl = SERVER_URL,
    as_json: Json = False,
) -> None:
    """Put a model to sleep: it gives its memory back, and the next request wakes it.

    Language models and PyTorch models can sleep. Requests in flight are finished first. The KV cache is released at both
    levels.

    Examples:

        headrace models sleep llama

        headrace models sleep llama --level 2
    """
    _rest(model, "sleep", {"level": level}, url, as_json)


@models.command()
def wake(model: ModelName, url: ServerUrl = SERVER_URL, as_json: Json = False) -> None:
    """Wake a model that sleeps, before a request does.

    Example:

        headrace models wake llama
    """
    _rest(model, "wake", {}, url, as_json)


@models.command()
def check(
    paths: Annotated[list[str], typer.Argument(metavar="PATH", help="Model repositories.")],
    gpus: Annotated[
        int | None,
        typer.Option(min=0, help="Number of GPUs of the machine that will serve them (default: this machine's)."),
    ] = None,
    load: Annotated[
        bool, typer.Option("--load/--no-load", help="Load each model, as the server does; it runs a model's own code.")
    ] = True,
    as_json: Json = False,
) -> None:
    """Check model repositories without serving them: every error with its file, line and fix.

    Models are loaded one after the other and freed again, so that the check finds what a server would find at its start.
    The exit code is 1 if a model could not be served, 0 otherwise.

    Examples:

        headrace models check models

        headrace models check models --no-load
    """
    from headrace.backends.devices import visible_gpus
    from headrace.cli.models_view import report_json, show_report
    from headrace.engine.engine import try_load
    from headrace.engine.repository.check import check_repository

    with report_errors():
        gpu_count = visible_gpus() if gpus is None else gpus
        report = check_repository(*paths, gpus=gpu_count, load=try_load if load else None)
    if as_json:
        print_json(report_json(report))
    else:
        show_report(report)
    if report.problems:
        raise typer.Exit(FAILED)


@models.command()
def init(
    path: Annotated[
        str, typer.Argument(metavar="PATH", help="A model file or folder, or a model folder without a configuration.")
    ],
    repository: Annotated[str, typer.Option(metavar="DIR", help="Model repository to add it to.")] = "models",
    name: Annotated[str, typer.Option(metavar="NAME", help="Name of the model (default: that of the file).")] = "",
    version: Annotated[str, typer.Option(metavar="NUMBER", help="Version number.")] = "1",
    move: Annotated[bool, typer.Option("--move", help="Move the file instead of copying it.")] = False,
    as_json: Json = False,
) -> None:
    """Add a model file to a repository: detect its format, copy it, and write its configuration.

    The format is detected from the file's content. If its backend is not installed, the output says how to install it,
    and the configuration has only what is known.

    Examples:

        headrace models init resnet50.onnx

        headrace models init export/saved_model --repository models --name flowers --version 2

        headrace models init models/flowers
    """
    from pathlib import Path

    from headrace.cli.init import init_model
    from headrace.cli.models_view import result_json, show_result

    with report_errors():
        result = init_model(Path(path), Path(repository), name, version, move=move)
    if as_json:
        print_json(result_json(result))
    else:
        show_result(result)


@models.command()
def convert(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="Caffe2 model: the file of its net, or its folder.")],
    target: Annotated[str, typer.Argument(metavar="TARGET", help="The ONNX file to write.")],
    inputs: Annotated[
        list[str] | None,
        typer.Option("--input", metavar="NAME=SIZES", help="Shape of an input, such as data=-1,3,224,224. Repeatable."),
    ] = None,
    outputs: Annotated[
        list[str] | None, typer.Option("--output", metavar="NAME", help="Keep this output only. Repeatable.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace TARGET if it exists.")] = False,
    as_json: Json = False,
) -> None:
    """Convert a Caffe2 model (NetDef) to ONNX.

    Input types and shapes come from --input, or from the model's configuration.

    Examples:

        headrace models convert squeezenet squeezenet.onnx

        headrace models convert predict_net.pb net.onnx --input data=-1,3,224,224 --input ids=INT64:-1,16
    """
    from pathlib import Path

    from headrace.cli.convert import convert_netdef

    with report_errors():
        converted = convert_netdef(
            Path(source), Path(target), inputs=inputs or (), outputs=outputs or (), overwrite=overwrite
        )
    tensors = f"{', '.join(converted.inputs)} -> {', '.join(converted.outputs)}"
    text = f"wrote {converted.target}: {converted.nodes} nodes, {tensors}, {converted.size_bytes} bytes"
    print_result(converted.as_json(), text, as_json)


def _rest(model: str, command: str, document: dict[str, Any], url: str, as_json: bool) -> None:
    from urllib.parse import quote

    from headrace.cli.client import LOAD_SECONDS, ServerClient
    from headrace.cli.models_view import sleep_lines

    with report_errors():
        path = f"/v1/models/{quote(model, safe='')}/{command}"
        report = ServerClient(url).post(path, document, seconds=LOAD_SECONDS)
    print_result(report, "\n".join(sleep_lines(report)), as_json)


def _control(model: str, command: str, document: dict[str, Any], url: str, as_json: bool) -> None:
    from urllib.parse import quote

    from headrace.cli.client import LOAD_SECONDS, Refused, ServerClient, explain_control_mode

    with report_errors():
        server = ServerClient(url)
        try:
            server.post(f"/v2/repository/models/{quote(model, safe='')}/{command}", document, seconds=LOAD_SECONDS)
        except Refused as error:
            raise explain_control_mode(error) from None
    print_result({"name": model, "done": command}, f"{model}: {command}ed", as_json)
