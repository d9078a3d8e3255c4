# SPDX-License-Identifier: Apache-2.0
"""`headrace router explain`: asks a running router which backend a request would get, and shows why."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.cli.results import print_json
from headrace.cli.router import router

if TYPE_CHECKING:
    from rich.console import Console

router_group = typer.Typer(name="router", invoke_without_command=True, no_args_is_help=False)
router_group.callback()(router)

_MOST_BYTES = 1 << 20
_SECONDS = 10.0
_STYLES = {"up": "green", "starting": "yellow", "ejected": "yellow", "down": "red", "asleep": "blue"}


@router_group.command()
def explain(
    path: Annotated[str, typer.Argument(metavar="PATH", help="What the request asks for: /v1/chat/completions.")],
    url: Annotated[str, typer.Option(metavar="URL", help="The router.")] = "http://127.0.0.1:8070",
    method: Annotated[str, typer.Option("--method", "-X", help="POST with a body, else GET, unless given.")] = "",
    headers: Annotated[
        list[str] | None, typer.Option("--header", "-H", metavar="NAME:VALUE", help="A header. Repeatable.")
    ] = None,
    data: Annotated[
        str, typer.Option("--data", "-d", metavar="TEXT", help="The body; @FILE reads it from a file, @- from stdin.")
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="The router's answer as it is.")] = False,
) -> None:
    """Which backend would get a request, and why. Nothing is sent to a backend.

    Examples:

        headrace router explain /v1/chat/completions -d @request.json

        headrace router explain /hello -H 'cookie: session=abc' --url http://127.0.0.1:8070
    """
    from base64 import b64encode

    from headrace.cli.checks import or_exit
    from headrace.cli.tables import open_console

    with or_exit():
        body = _body(data)
        question = {
            "method": method or ("POST" if body else "GET"),
            "path": path,
            "headers": dict(_header(each) for each in headers or ()),
            "body_base64": b64encode(body).decode(),
        }
        told = _ask(url, question)
    if as_json:
        print_json(told)
    else:
        _show(told, open_console())
    if told["backend"] is None:
        raise typer.Exit(1)


def _header(text: str) -> tuple[str, str]:
    from headrace.core.errors import InvalidArgument

    name, colon, value = text.partition(":")
    if not colon or not name.strip():
        raise InvalidArgument(f"--header is NAME:VALUE, not {text!r}")
    return name.strip(), value.strip()


def _body(data: str) -> bytes:
    if not data.startswith("@"):
        return data.encode(errors="surrogateescape")
    import sys

    from headrace.core.errors import InvalidArgument

    try:
        if data == "@-":
            found = sys.stdin.buffer.read(_MOST_BYTES + 1)
        else:
            with open(data[1:], "rb") as stream:
                found = stream.read(_MOST_BYTES + 1)
    except OSError as error:
        raise InvalidArgument(f"--data {data}: {error.strerror}; name a file that can be read") from None
    if len(found) > _MOST_BYTES:
        raise InvalidArgument(f"--data {data}: over {_MOST_BYTES} bytes; a router does not look at so long a body")
    return found


def _ask(url: str, question: dict[str, Any]) -> dict[str, Any]:
    import http.client
    from urllib.parse import urlsplit

    from headrace.core.errors import FailedPrecondition, InvalidArgument, Unavailable

    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        made = {"http": http.client.HTTPConnection, "https": http.client.HTTPSConnection}[parts.scheme]
        connection = made(parts.hostname or "", parts.port, timeout=_SECONDS)
    except (KeyError, ValueError):
        raise InvalidArgument(f"--url is http://host:port of a router, not {url!r}") from None
    try:
        connection.request(
            "POST", "/router/explain", json.dumps(question).encode(), {"content-type": "application/json"}
        )
        answer = connection.getresponse()
        told = json.loads(answer.read())
    except (OSError, http.client.HTTPException):
        raise Unavailable(f"no router answers at {url}: start one, or name another by --url") from None
    except (ValueError, RecursionError):
        told = None
    finally:
        connection.close()
    if not isinstance(told, dict) or ("backend" not in told and "error" not in told):
        raise FailedPrecondition(f"what answers at {url} is no router of this version")
    if "error" in told:
        raise InvalidArgument(f"the router says: {told['error']}")
    return told


def _show(told: dict[str, Any], console: Console) -> None:
    from rich.text import Text

    from headrace.cli.tables import table

    console.print(f"{told['backend'] or 'nobody'} ({told['policy']}, {told['why']}): {told['because']}", markup=False)
    if "handing" in told["details"]:
        details = told["details"]
        console.print(f"{details.get('prefill', 'no prefill')}: {details['handing_because']}", markup=False)
    matched = told["details"].get("matched_characters", {})
    length = told["details"].get("prompt_characters", 0)
    rows = [
        (
            f"{each['url']} ({each['role']})" if each.get("role") else each["url"],
            Text(each["state"], _STYLES.get(each["state"], "")),
            str(each["outstanding"]),
            f"{matched[each['url']]} of {length}" if each["url"] in matched else "",
            each["reason"],
        )
        for each in told["backends"]
    ]
    console.print(table(("BACKEND", "STATE", "OUTSTANDING", "PROMPT KNOWN", "WHY"), rows, right=("OUTSTANDING",)))
    for name in ("session_order", "order"):
        if told["details"].get(name):
            console.print(f"in this order: {', '.join(told['details'][name])}", markup=False)
