# SPDX-License-Identifier: Apache-2.0
"""`headrace explain`: what would become of an InferenceService on Kubernetes, and why. No cluster is asked."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.cli.checks import FAILED, or_exit
from headrace.cli.fleet_options import read_files
from headrace.cli.results import Json, print_json

if TYPE_CHECKING:
    from headrace.fleet.explaining import Explanation, Question
    from headrace.fleet.words import Document, FleetSettings

_OUTPUTS = ("text", "json", "yaml")


def explain(
    files: Annotated[
        list[str],
        typer.Option(
            "-f",
            "--filename",
            metavar="FILE",
            help="The service: a file, a folder, or - for standard input. Repeatable.",
        ),
    ],
    beside: Annotated[
        list[str] | None,
        typer.Option(
            "--with",
            metavar="DIR",
            help="Runtimes, models, weights and accelerator classes: a folder or a file. Repeatable.",
        ),
    ] = None,
    without: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="What the cluster lacks: knative, lws, keda, gateway, ray, istio. Repeatable; it has all unless told.",
        ),
    ] = None,
    config: Annotated[
        str,
        typer.Option(
            metavar="FILE",
            help="What the operator is told for all services: a file with the ConfigMap inferenceservice-config.",
        ),
    ] = "",
    output: Annotated[
        str, typer.Option("-o", "--output", metavar="FORMAT", help="text; json; or yaml: the objects alone.")
    ] = "text",
    as_json: Json = False,
) -> None:
    """Explain a service before it is applied: the runtime and why no other, modes, pods, objects, and what is wrong.

    The runtimes that come with Headrace are always there. The exit code is 1 if something is wrong.

    Examples:

        headrace explain -f isvc.yaml --with models/ --with runtimes/

        headrace explain -f isvc.yaml --with cluster/ --config inferenceservice-config.yaml -o json

        headrace explain -f isvc.yaml --with cluster/ -o yaml | kubectl apply --dry-run=server -f -
    """
    from headrace.cli.explain_view import show
    from headrace.fleet.documents import read, write
    from headrace.fleet.explaining import explain as explained
    from headrace.fleet.explaining import question

    with or_exit():
        shape = "json" if as_json else output
        lacking = _checked(shape, without or [])
        settings = _settings(config)
    around = read([Path(each) for each in beside or []])
    asked = question(read_files(files), around, settings=settings, lacking=lacking)
    found = [explained(each, asked) for each in asked.services]
    if shape == "json":
        print_json(_as_json(found, asked))
    elif shape == "yaml":
        typer.echo(write(_unowned(each) for one in found for each in one.objects), nl=False)
        for each in [*asked.errors, *(error for one in found for error in one.errors)]:
            typer.secho(f"headrace: {each}", fg="red", err=True)
    else:
        show(found, asked.errors)
    if asked.errors or any(each.errors for each in found):
        raise typer.Exit(FAILED)


def _as_json(found: list[Explanation], asked: Question) -> Any:
    """One object for one service; several in a list, each with its name."""
    from headrace.fleet.explaining import errors_json
    from headrace.fleet.words import name_of

    errors = errors_json(asked.errors)
    if not found:
        runtime: dict[str, Any] = {"name": None, "reason": "", "rejected": []}
        return {"runtime": runtime, "components": {}, "objects": [], "errors": errors}
    shown = [each.as_json() for each in found]
    for each in shown:
        each["errors"] = [*errors, *each["errors"]]
    if len(found) == 1:
        return shown[0]
    return [{"service": name_of(one.service), **each} for one, each in zip(found, shown, strict=True)]


def _unowned(made: Document) -> Document:
    """Without an owner that has no uid: what came from a file has none, and an API server would refuse it."""
    from headrace.fleet.words import items, part, text

    metadata = part(made, "metadata")
    owners = [each for each in items(metadata, "ownerReferences") if text(each, "uid")]
    rest = {name: each for name, each in metadata.items() if name != "ownerReferences"}
    return {**made, "metadata": {**rest, **({"ownerReferences": owners} if owners else {})}}


def _settings(config: str) -> FleetSettings | None:
    """Of a ConfigMap, alone in its file or among others."""
    if not config:
        return None
    from headrace.core.errors import InvalidArgument
    from headrace.fleet.cluster.configuration import CONFIG_MAP, configured
    from headrace.fleet.documents import read
    from headrace.fleet.words import FleetSettings, kind_of, name_of

    found = read([Path(config)])
    if found.problems:
        raise InvalidArgument(f"--config {config}: {found.problems[0]}")
    maps = [each for each in found.documents if kind_of(each) == "ConfigMap"]
    chosen = [each for each in maps if name_of(each) == CONFIG_MAP] or maps
    if len(chosen) != 1:
        raise InvalidArgument(
            f"--config {config}: it has {len(chosen)} ConfigMaps; give a file with {CONFIG_MAP} alone"
        )
    return configured(FleetSettings(), chosen[0])


def _checked(output: str, without: list[str]) -> list[str]:
    from headrace.core.errors import InvalidArgument
    from headrace.fleet.words import CAPABILITIES

    if output not in _OUTPUTS:
        raise InvalidArgument(f"-o {output}: there are {', '.join(_OUTPUTS)}")
    for each in without:
        if each not in CAPABILITIES:
            raise InvalidArgument(f"--without {each}: there are {', '.join(sorted(CAPABILITIES))}")
    return without
