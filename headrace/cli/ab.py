# SPDX-License-Identifier: Apache-2.0
"""`headrace ab`: let versions of a model share its traffic, and see how they compare."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.cli.checks import told
from headrace.cli.results import Json, print_json, print_result

if TYPE_CHECKING:
    from headrace.cli.ab_client import AdminClient

ab = typer.Typer(
    name="ab", help="Let versions of a model share its traffic, and see how they compare.", no_args_is_help=True
)

Url = Annotated[str, typer.Option(metavar="URL", help="Address of the server's HTTP port.")]
Model = Annotated[str, typer.Argument(metavar="MODEL", help="Name of the model.")]

_URL = "http://127.0.0.1:8000"


@ab.command("list")
def list_splits(url: Url = _URL, as_json: Json = False) -> None:
    """List the models whose versions share their traffic.

    Example:

        headrace ab list
    """
    from headrace.cli.ab_view import show_splits

    with _server(url) as server:
        splits = server.get("/admin/traffic")["splits"]
    if as_json:
        print_json(splits)
    else:
        show_splits(splits)


@ab.command("set")
def set_split(
    model: Model,
    weights: Annotated[
        list[str],
        typer.Argument(metavar="VERSION=WEIGHT...", help="Shares that sum to 1, or percentages that sum to 100."),
    ],
    sticky_header: Annotated[
        str, typer.Option(metavar="NAME", help="Requests with the same value of this header see one version.")
    ] = "",
    sticky_cookie: Annotated[str, typer.Option(metavar="NAME", help="The same by a cookie.")] = "",
    sticky_field: Annotated[
        str, typer.Option(metavar="NAME", help="The same by a field of /predict, or a parameter of other protocols.")
    ] = "",
    shadow: Annotated[
        list[str] | None,
        typer.Option(
            metavar="VERSION=SHARE",
            help="Copy this share of the requests to a version, from 0 to 1, and compare its answers. Repeatable.",
        ),
    ] = None,
    tolerance: Annotated[
        float | None, typer.Option(metavar="NUMBER", help="How far apart numbers may be and still agree; 1e-5.")
    ] = None,
    baseline: Annotated[
        str, typer.Option(metavar="VERSION", help="Gets the share of one that is rolled back; the largest unless told.")
    ] = "",
    rollback_error_rate: Annotated[
        float | None, typer.Option(metavar="RATE", help="Roll a version back over so many errors per request.")
    ] = None,
    rollback_p99_ms: Annotated[
        float | None, typer.Option(metavar="MS", help="Roll a version back when 1 in 100 requests takes longer.")
    ] = None,
    rollback_least: Annotated[
        int | None, typer.Option(metavar="COUNT", help="Requests before it is judged; 50.")
    ] = None,
    rollback_window: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="How far back is looked; 60.")
    ] = None,
    url: Url = _URL,
    as_json: Json = False,
) -> None:
    """Share a model's traffic between versions. Counts begin anew, and versions that were rolled back get their share again.

    Examples:

        headrace ab set resnet50 1=0.9 2=0.1 --sticky-header x-user-id

        headrace ab set resnet50 1=95 2=5 --rollback-error-rate 0.05 --rollback-p99-ms 200

        headrace ab set resnet50 1=1 --shadow 2=0.25
    """
    from headrace.cli.ab_view import show_state

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
def clear(model: Model, url: Url = _URL, as_json: Json = False) -> None:
    """Give all traffic of a model to its newest version again.

    Example:

        headrace ab clear resnet50
    """
    with _server(url) as server:
        done = server.delete(_path(model))
    print_result(done, f"{model}: all traffic goes to the newest version", as_json)


@ab.command()
def rollback(
    model: Model,
    version: Annotated[str, typer.Argument(metavar="VERSION", help="Number or label, as in the split.")],
    reason: Annotated[str, typer.Option(metavar="TEXT", help="For the log and the report.")] = "by hand",
    url: Url = _URL,
    as_json: Json = False,
) -> None:
    """Take a version's traffic away and give it to the baseline, at once. Setting the split again undoes it.

    Example:

        headrace ab rollback resnet50 2 --reason "complaints"
    """
    from headrace.cli.ab_view import show_state

    with _server(url) as server:
        state = server.post(f"{_path(model)}/rollback", {"version": version, "reason": reason})
    if as_json:
        print_json(state)
    else:
        show_state(state)


@ab.command()
def report(
    model: Model,
    plot: Annotated[str, typer.Option(metavar="FILE.png", help="Draw the latencies into a file too.")] = "",
    url: Url = _URL,
    as_json: Json = False,
) -> None:
    """Show what each version did: requests, errors, latencies, agreement, and whether they differ by more than chance.

    Examples:

        headrace ab report resnet50

        headrace ab report resnet50 --plot resnet50.png --json
    """
    from headrace.cli.ab_plot import draw
    from headrace.cli.ab_view import show_report

    with _server(url) as server:
        seen = server.get(f"{_path(model)}/report")
        if plot:
            draw(seen, plot)
    if as_json:
        print_json(seen)
    else:
        show_report(seen)
        if plot:
            typer.echo(f"wrote {plot}")


def _shares(pairs: list[str], example: str) -> dict[str, float]:
    made: dict[str, float] = {}
    for pair in pairs:
        version, _, text = pair.rpartition("=")
        try:
            share = float(text)
        except ValueError:
            version = ""
        if not version:
            raise typer.BadParameter(f"{pair!r} is no VERSION=NUMBER: write for example {example}")
        if version in made:
            raise typer.BadParameter(f"version {version!r} is there twice")
        made[version] = share
    return made


def _path(model: str) -> str:
    from urllib.parse import quote

    return f"/admin/traffic/{quote(model, safe='')}"


@contextmanager
def _server(url: str) -> Iterator[AdminClient]:
    """A server to ask, and its errors in words."""
    from headrace.cli.ab_client import AdminClient

    with told():
        yield AdminClient(url)
