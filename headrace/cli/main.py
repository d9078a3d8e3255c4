# SPDX-License-Identifier: Apache-2.0
"""The `headrace` command and its verbs."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from headrace.cli.ab import ab
from headrace.cli.batch import batch
from headrace.cli.bench import bench
from headrace.cli.completion import VARIABLE, add_values, completion
from headrace.cli.config import config
from headrace.cli.doctor import doctor
from headrace.cli.explain import explain
from headrace.cli.fleet_local import logs, scale
from headrace.cli.fleet_up import up
from headrace.cli.fleet_verbs import add_fleet_verbs
from headrace.cli.gateway import gateway
from headrace.cli.infer import infer
from headrace.cli.jobs import jobs
from headrace.cli.keys import keys
from headrace.cli.microservice import microservice
from headrace.cli.model_agent import model_agent
from headrace.cli.models import models
from headrace.cli.operator import operator
from headrace.cli.router_explain import router_group
from headrace.cli.serve import ServeCommand, serve
from headrace.cli.service import service
from headrace.cli.top import top
from headrace.cli.tune import tune
from headrace.cli.users import users
from headrace.version import __version__

app = typer.Typer(
    name="headrace",
    help="Serve machine-learning models: from a folder on a laptop to a fleet on Kubernetes.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
app.command(cls=ServeCommand)(serve)
app.command()(infer)
app.add_typer(router_group)
app.command()(microservice)
app.command()(gateway)
app.command()(batch)
app.command()(bench)
app.command()(tune)
app.command()(explain)
app.command()(up)
add_fleet_verbs(app)
app.command()(logs)
app.command()(scale)
app.command()(top)
app.command()(doctor)
app.command()(completion)
app.add_typer(models)
app.add_typer(config)
app.add_typer(keys)
app.add_typer(users)
app.add_typer(jobs)
app.add_typer(service)
app.add_typer(operator)
app.command(name="model-agent")(model_agent)
app.add_typer(ab)


def main() -> None:
    """Entry point of the console script."""
    if VARIABLE in os.environ:
        add_values(app)
    app()


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"headrace {__version__} (Python {sys.version.split()[0]})")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Serve machine-learning models: from a folder on a laptop to a fleet on Kubernetes."""
