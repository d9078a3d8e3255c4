# SPDX-License-Identifier: Apache-2.0
"""`headrace explain`: show what the operator would create for an InferenceService, and why. No cluster is needed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.cli.checks import FAILED, exit_on_error, print_error
from headrace.cli.common_options import Json, print_json
from headrace.cli.fleet_options import read_files

if TYPE_CHECKING:
    from headrace.fleet.documents import FleetSettings
    from headrace.fleet.explain import ExplainInput, Explanation
    from headrace.platforms.kubernetes_client.objects import Document

_OUTPUTS = ("text", "json", "yaml")


def explain(
    files: Annotated[
        list[str],
        typer.Option(
            "-f",
            "--filename",
            metavar="FILE",
            help="Service: a file, a folder, or - for standard input. Repeatable.",
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
            help="API the cluster lacks: knative, lws, keda, gateway, ray, istio (default: none). Repeatable.",
        ),
    ] = None,
    config: Annotated[
        str,
        typer.Option(
            metavar="FILE",
            help="File with the operator's ConfigMap inferenceservice-config.",
        ),
    ] = "",
    output: Annotated[
        str, typer.Option("-o", "--output", metavar="FORMAT", help="text; json; or yaml: the objects alone.")
    ] = "text",
    as_json: Json = False,
) -> None:
    """Explain a service before it is applied: the runtime and why, deployment modes, pods, objects, and errors.

    The runtimes that come with Headrace are always included. The exit code is 1 if there are errors.

    Examples:

        headrace explain -f isvc.yaml --with models/ --with runtimes/

        headrace explain -f isvc.yaml --with cluster/ --config inferenceservice-config.yaml -o json

        headrace explain -f isvc.yaml --with cluster/ -o yaml | kubectl apply --dry-run=server -f -
    """
    from headrace.cli.explain_view import show
    from headrace.fleet.explain import explain as explain_service
    from headrace.fleet.explain import prepare
    from headrace.fleet.yaml_documents import read, write

    with exit_on_error():
        format_name = "json" if as_json else output
        missing_apis = _checked(format_name, without or [])
        settings = _settings(config)
    context = read([Path(path) for path in beside or []])
    documents = prepare(read_files(files), context, settings=settings, lacking=missing_apis)
    explanations = [explain_service(service, documents) for service in documents.services]
    if format_name == "json":
        print_json(_as_json(explanations, documents))
    elif format_name == "yaml":
        objects = (
            _without_invalid_owners(document) for explanation in explanations for document in explanation.objects
        )
        typer.echo(write(objects), nl=False)
        for error in [*documents.errors, *(error for explanation in explanations for error in explanation.errors)]:
            print_error(str(error))
    else:
        show(explanations, documents.errors)
    if documents.errors or any(explanation.errors for explanation in explanations):
        raise typer.Exit(FAILED)


def _as_json(explanations: list[Explanation], documents: ExplainInput) -> Any:
    """Return one object for one service; a list with names for several."""
    from headrace.fleet.explain import errors_json
    from headrace.platforms.kubernetes_client.objects import name_of

    errors = errors_json(documents.errors)
    if not explanations:
        runtime: dict[str, Any] = {"name": None, "reason": "", "rejected": []}
        return {"runtime": runtime, "components": {}, "objects": [], "errors": errors}
    documents_json = [explanation.as_json() for explanation in explanations]
    for document in documents_json:
        document["errors"] = [*errors, *document["errors"]]
    if len(explanations) == 1:
        return documents_json[0]
    return [
        {"service": name_of(explanation.service), **document}
        for explanation, document in zip(explanations, documents_json, strict=True)
    ]


def _without_invalid_owners(document: Document) -> Document:
    """Remove owner references without a uid: an owner from a file has none, and the API server would reject them."""
    from headrace.platforms.kubernetes_client.objects import get_list, get_mapping, get_str

    metadata = get_mapping(document, "metadata")
    owners = [owner for owner in get_list(metadata, "ownerReferences") if get_str(owner, "uid")]
    rest = {name: value for name, value in metadata.items() if name != "ownerReferences"}
    return {**document, "metadata": {**rest, **({"ownerReferences": owners} if owners else {})}}


def _settings(config: str) -> FleetSettings | None:
    """Read the settings from a ConfigMap, alone in its file or among other documents."""
    if not config:
        return None
    from headrace.core.errors import InvalidArgument
    from headrace.fleet.cluster.configuration import CONFIG_MAP, settings_from
    from headrace.fleet.documents import FleetSettings
    from headrace.fleet.yaml_documents import read
    from headrace.platforms.kubernetes_client.objects import kind_of, name_of

    parsed = read([Path(config)])
    if parsed.problems:
        raise InvalidArgument(f"--config {config}: {parsed.problems[0]}")
    maps = [document for document in parsed.documents if kind_of(document) == "ConfigMap"]
    config_maps = [document for document in maps if name_of(document) == CONFIG_MAP] or maps
    if len(config_maps) != 1:
        raise InvalidArgument(
            f"--config {config}: it has {len(config_maps)} ConfigMaps; give a file with {CONFIG_MAP} alone"
        )
    return settings_from(FleetSettings(), config_maps[0])


def _checked(output: str, without: list[str]) -> list[str]:
    from headrace.core.errors import InvalidArgument
    from headrace.fleet.documents import CAPABILITIES

    if output not in _OUTPUTS:
        raise InvalidArgument(f"-o {output}: write one of {', '.join(_OUTPUTS)}")
    for name in without:
        if name not in CAPABILITIES:
            raise InvalidArgument(f"--without {name}: write one of {', '.join(sorted(CAPABILITIES))}")
    return without
