# SPDX-License-Identifier: Apache-2.0
"""`headrace models`: look at the models of a running server, load and unload them, check a folder before it is served."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer

models = typer.Typer(
    name="models", help="Look at models, load and unload them, check their folders.", no_args_is_help=True
)

Url = Annotated[str, typer.Option(metavar="URL", help="Address of the server's HTTP port.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
Model = Annotated[str, typer.Argument(metavar="MODEL", help="Name of the model.")]

_URL = "http://127.0.0.1:8000"
FAILED = 1


@models.command("list")
def list_models(url: Url = _URL, as_json: Json = False) -> None:
    """List the models of a server, with their states and what they have done.

    Examples:

        headrace models list

        headrace models list --url http://10.0.0.7:8000 --json
    """
    from headrace.cli.client import ServerClient
    from headrace.cli.model_list import list_rows, show_list

    with _told():
        server = ServerClient(url)
        rows = list_rows(server.post("/v2/repository/index", {}), server.get("/v2/models/stats"))
    if as_json:
        _print_json(rows)
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

    with _told():
        seen = ask_model(ServerClient(url), model, version)
    if as_json:
        _print_json(seen)
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

    with _told():
        report = check_repository(*paths, gpus=gpus)
    if as_json:
        _print_json(report_json(report))
    else:
        show_report(report)
    if report.problems:
        raise typer.Exit(FAILED)


def _control(model: str, verb: str, document: dict[str, Any], url: str, as_json: bool) -> None:
    from urllib.parse import quote

    from headrace.cli.client import LOAD_SECONDS, ServerClient

    with _told():
        server = ServerClient(url)
        server.post(f"/v2/repository/models/{quote(model, safe='')}/{verb}", document, seconds=LOAD_SECONDS)
    if as_json:
        _print_json({"name": model, "done": verb})
    else:
        typer.echo(f"{model}: {verb}ed")


@contextmanager
def _told() -> Iterator[None]:
    """Turn an error into its text: exit code 1 for what a server refuses, 2 when nothing could be asked."""
    from headrace.cli.checks import BAD_USE
    from headrace.cli.client import Refused
    from headrace.core.errors import HeadraceError
    from headrace.telemetry.logs import one_line

    try:
        yield
    except HeadraceError as error:
        typer.secho(f"headrace: {one_line(error.message)}", fg="red", err=True)
        raise typer.Exit(FAILED if isinstance(error, Refused) else BAD_USE) from None


def _print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2))
