# SPDX-License-Identifier: Apache-2.0
"""`headrace ab`: split a model's traffic between versions and compare their results."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.cli.checks import report_errors
from headrace.cli.common_options import SERVER_URL, Json, ModelName, ServerUrl, print_json, print_result

if TYPE_CHECKING:
    from headrace.cli.ab_report import AdminClient

ab = typer.Typer(
    name="ab", help="Split a model's traffic between versions and compare their results.", no_args_is_help=True
)


@ab.command("list")
def list_splits(url: ServerUrl = SERVER_URL, as_json: Json = False) -> None:
    """List the models with a traffic split.

    Example:

        headrace ab list
    """
    from headrace.cli.ab_report import show_splits

    with _server(url) as server:
        splits = server.get("/admin/traffic")["splits"]
    if as_json:
        print_json(splits)
    else:
        show_splits(splits)


@ab.command("set")
def set_split(
    model: ModelName,
    weights: Annotated[
        list[str],
        typer.Argument(metavar="VERSION=WEIGHT...", help="Weights that sum to 1, or percentages that sum to 100."),
    ],
    sticky_header: Annotated[
        str, typer.Option(metavar="NAME", help="Send requests with the same value of this header to the same version.")
    ] = "",
    sticky_cookie: Annotated[str, typer.Option(metavar="NAME", help="Same, by a cookie.")] = "",
    sticky_field: Annotated[
        str,
        typer.Option(metavar="NAME", help="Same, by a field of /predict, or by a parameter of other protocols."),
    ] = "",
    shadow: Annotated[
        list[str] | None,
        typer.Option(
            metavar="VERSION=SHARE",
            help="Mirror this share of requests (0 to 1) to a version and compare its responses. Repeatable.",
        ),
    ] = None,
    tolerance: Annotated[
        float | None, typer.Option(metavar="NUMBER", help="Tolerance when comparing numbers (default: 1e-5).")
    ] = None,
    baseline: Annotated[
        str,
        typer.Option(
            metavar="VERSION",
            help="Version that takes over the traffic after a rollback (default: the largest weight).",
        ),
    ] = "",
    rollback_error_rate: Annotated[
        float | None, typer.Option(metavar="RATE", help="Roll a version back above this error rate.")
    ] = None,
    rollback_p99_ms: Annotated[
        float | None, typer.Option(metavar="MS", help="Roll a version back above this p99 latency.")
    ] = None,
    rollback_least: Annotated[
        int | None, typer.Option(metavar="COUNT", help="Minimum requests before a rollback (default: 50).")
    ] = None,
    rollback_window: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="Time window of the rollback rules (default: 60).")
    ] = None,
    url: ServerUrl = SERVER_URL,
    as_json: Json = False,
) -> None:
    """Split a model's traffic between versions. Statistics are reset, and rolled-back versions get their traffic again.

    Examples:

        headrace ab set resnet50 1=0.9 2=0.1 --sticky-header x-user-id

        headrace ab set resnet50 1=95 2=5 --rollback-error-rate 0.05 --rollback-p99-ms 200

        headrace ab set resnet50 1=1 --shadow 2=0.25
    """
    from headrace.cli.ab_report import show_state

    sticky = {"header": sticky_header, "cookie": sticky_cookie, "field": sticky_field}
    rollback = {
        "error_rate": rollback_error_rate,
        "p99_ms": rollback_p99_ms,
        "least_requests": rollback_least,
        "window_seconds": rollback_window,
    }
    document = {
        "weights": _shares(weights, "1=0.9 2=0.1"),
        "sticky": {name: value for name, value in sticky.items() if value},
        "shadows": _shares(shadow or [], "--shadow 2=0.25"),
        "tolerance": tolerance,
        "baseline": baseline,
        "rollback": {name: value for name, value in rollback.items() if value is not None},
    }
    with _server(url) as server:
        state = server.post(
            _path(model), {key: value for key, value in document.items() if value not in ({}, "", None)}
        )
    if as_json:
        print_json(state)
    else:
        show_state(state)


@ab.command()
def clear(model: ModelName, url: ServerUrl = SERVER_URL, as_json: Json = False) -> None:
    """Remove a traffic split: all traffic goes to the newest version.

    Example:

        headrace ab clear resnet50
    """
    with _server(url) as server:
        result = server.delete(_path(model))
    print_result(result, f"{model}: all traffic goes to the newest version", as_json)


@ab.command()
def rollback(
    model: ModelName,
    version: Annotated[str, typer.Argument(metavar="VERSION", help="Number or label, as in the split.")],
    reason: Annotated[str, typer.Option(metavar="TEXT", help="Reason, for the log and the report.")] = "by hand",
    url: ServerUrl = SERVER_URL,
    as_json: Json = False,
) -> None:
    """Move a version's traffic to the baseline at once. Set the split again to undo it.

    Example:

        headrace ab rollback resnet50 2 --reason "complaints"
    """
    from headrace.cli.ab_report import show_state

    with _server(url) as server:
        state = server.post(f"{_path(model)}/rollback", {"version": version, "reason": reason})
    if as_json:
        print_json(state)
    else:
        show_state(state)


@ab.command()
def report(
    model: ModelName,
    plot: Annotated[str, typer.Option(metavar="FILE.png", help="Also plot the latencies to a file.")] = "",
    url: ServerUrl = SERVER_URL,
    as_json: Json = False,
) -> None:
    """Compare the versions: requests, errors, latencies, agreement, and whether differences are significant.

    Examples:

        headrace ab report resnet50

        headrace ab report resnet50 --plot resnet50.png --json
    """
    from headrace.cli.ab_report import draw, show_report

    with _server(url) as server:
        results = server.get(f"{_path(model)}/report")
        if plot:
            draw(results, plot)
    if as_json:
        print_json(results)
    else:
        show_report(results)
        if plot:
            typer.echo(f"wrote {plot}")


def _shares(pairs: list[str], example: str) -> dict[str, float]:
    shares: dict[str, float] = {}
    for pair in pairs:
        version, _, text = pair.rpartition("=")
        try:
            share = float(text)
        except ValueError:
            version = ""
        if not version:
            raise typer.BadParameter(f"{pair!r} is not VERSION=NUMBER: write for example {example}")
        if version in shares:
            raise typer.BadParameter(f"version {version!r} is given twice")
        shares[version] = share
    return shares


def _path(model: str) -> str:
    from urllib.parse import quote

    return f"/admin/traffic/{quote(model, safe='')}"


@contextmanager
def _server(url: str) -> Iterator[AdminClient]:
    """Yield a client of the server, and report its errors."""
    from headrace.cli.ab_report import AdminClient

    with report_errors():
        yield AdminClient(url)
