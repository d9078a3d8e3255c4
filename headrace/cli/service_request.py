# SPDX-License-Identifier: Apache-2.0
"""`headrace service request`: choose a service, send a chat request, and print the response."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.cli.common_options import Json, print_json
from headrace.cli.service_options import (
    REGISTRY,
    Architectures,
    RegistryFile,
    StateDir,
    non_empty,
    pairs,
    refuse,
    report_service_errors,
    with_launcher,
)

if TYPE_CHECKING:
    from headrace.platforms.catalogue import Architecture
    from headrace.platforms.launcher import Launcher, Service
    from headrace.platforms.registry import Entry
    from headrace.platforms.service_client import ChatAnswer

_MOST_BODY = 1 << 30
_ASKED, _SAMPLING = "Request", "Sampling"


def request(
    job_id: Annotated[str, typer.Option("--job-id", metavar="JOB", help="Job id of the service.")] = "",
    arch: Annotated[str, typer.Option("--arch", metavar="NAME", help="Architecture of the service.")] = "",
    body: Annotated[
        str,
        typer.Option(
            "--body", metavar="JSON", help="Request body; @FILE reads a file, - standard input.", rich_help_panel=_ASKED
        ),
    ] = "",
    prompt: Annotated[
        str, typer.Option(metavar="TEXT", help="Prompt, instead of a body.", rich_help_panel=_ASKED)
    ] = "",
    system: Annotated[str, typer.Option(metavar="TEXT", help="System message.", rich_help_panel=_ASKED)] = "",
    image: Annotated[
        list[str] | None,
        typer.Option(metavar="FILE|URL", help="Image; files are uploaded. Repeatable.", rich_help_panel=_ASKED),
    ] = None,
    video: Annotated[
        list[str] | None,
        typer.Option(metavar="FILE|URL", help="Video; files are uploaded. Repeatable.", rich_help_panel=_ASKED),
    ] = None,
    stream: Annotated[
        bool,
        typer.Option("--stream", help="Stream the response and print it as it arrives.", rich_help_panel=_ASKED),
    ] = False,
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="Use defaults for missing parameters.", rich_help_panel=_SAMPLING)
    ] = False,
    max_tokens: Annotated[str, typer.Option("--max-tokens", metavar="N", rich_help_panel=_SAMPLING)] = "",
    temperature: Annotated[str, typer.Option(metavar="NUMBER", rich_help_panel=_SAMPLING)] = "",
    top_p: Annotated[str, typer.Option("--top-p", metavar="NUMBER", rich_help_panel=_SAMPLING)] = "",
    param: Annotated[
        list[str] | None,
        typer.Option(
            "--param",
            metavar="NAME=VALUE",
            help="Any other parameter: seed=1, guidance=7. Repeatable.",
            rich_help_panel=_SAMPLING,
        ),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Send a request that looks like one for another architecture.")
    ] = False,
    no_wait: Annotated[bool, typer.Option("--no-wait", help="Do not wait until the model is ready.")] = False,
    ready_timeout: Annotated[
        float, typer.Option("--ready-timeout", min=0, metavar="SECONDS", help="Maximum time to wait for the model.")
    ] = 600.0,
    timeout: Annotated[
        float, typer.Option("--timeout", min=1, metavar="SECONDS", help="Timeout of the request.")
    ] = 3600.0,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write the response, or its video, to a file.")
    ] = None,
    architectures: Architectures = None,
    registry: RegistryFile = REGISTRY,
    state_dir: StateDir = None,
    as_json: Json = False,
) -> None:
    """Send a chat request to a service and print the response.

    Without --job-id and --arch there must be only one service. On a terminal, missing sampling parameters are prompted
    for.

    Exit codes: 1 failed or no answer, 2 invalid request, 3 not ready yet, 4 the service has failed permanently.

    Examples:

        headrace service request --prompt "What is in it?" --image ./mug.jpg --yes

        headrace service request --arch tao-dataservices --body '{"messages": [{"role": "user", "content": "Hi"}]}' --yes

        headrace service request --job-id 8d0a2a3e-4a5b-4f8e-9f57-0f1d6a1b2c3d --body @request.json --param seed=7 --yes
    """
    given_body = _read_body(body, prompt)
    sampling = pairs(param, "--param") | non_empty(
        {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p}
    )

    async def list_services(launcher: Launcher) -> tuple[list[Service], Mapping[str, Architecture]]:
        return await launcher.list(), launcher.architectures()

    services, architectures_ = with_launcher(registry, state_dir, list_services, architectures=architectures)
    from headrace.core.telemetry.logs import one_line

    # Outside the event loop, so that Ctrl-C ends a prompt.
    with report_service_errors():
        from headrace.platforms.catalogue import find

        entry = _target(services, job_id, arch)
        if given_body is not None and entry.network_arch.lower() not in architectures_:
            # Another tool started it: its parameters are unknown.
            prepared = {**given_body, **sampling}
        else:
            kind = find(architectures_, entry.network_arch)
            document = given_body or _from_prompt(kind, prompt, system, image or [], video or [])
            prepared = _prepared(document, kind, architectures_, _sampling(kind, sampling), yes, force)
        if stream:
            prepared["stream"] = True
    message = f"sending to job_id={entry.job_id} arch={entry.network_arch} url={entry.host_url}"
    # Other tools write the registry too: its values may contain escape sequences.
    typer.echo(one_line(message), err=True)

    async def work(launcher: Launcher) -> ChatAnswer:
        from headrace.platforms.launcher import WaitPolicy

        if not no_wait:
            await launcher.wait_ready(entry.job_id, WaitPolicy(ready_timeout))
        pieces = None if as_json or output else _print_piece
        return await launcher.send_chat(entry.job_id, prepared, seconds=timeout, on_piece=pieces)

    answer = with_launcher(registry, state_dir, work)
    _show(answer, output, as_json)


def _read_body(text: str, prompt: str) -> dict[str, Any] | None:
    if bool(text) == bool(prompt):
        raise refuse("the request is missing: give either --body JSON, or --prompt TEXT with --image and --video")
    if prompt:
        return None
    try:
        if text == "-":
            text = sys.stdin.read(_MOST_BODY)
        elif text.startswith("@"):
            text = Path(text[1:]).expanduser().read_text()
        document = json.loads(text)
    except OSError as error:
        raise refuse(f"--body {text[:200]}: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise refuse("--body is not JSON: quote it once for the shell, as in --body '{\"messages\": [...]}'") from None
    if not isinstance(document, dict):
        raise refuse('--body is not a JSON object: write {"messages": [...]}')
    return document


def _from_prompt(kind: Architecture, prompt: str, system: str, images: list[str], videos: list[str]) -> dict[str, Any]:
    from headrace.platforms.chat_requests import build_messages

    return {"messages": build_messages(prompt, kind, system=system, images=images, videos=videos)}


def _target(services: list[Service], job_id: str, arch: str) -> Entry:
    from headrace.cli.service_view import choose, is_interactive
    from headrace.core.errors import FailedPrecondition, NotFound
    from headrace.platforms.services import ENDED_STATES, Ambiguous, NoTarget, request_target

    for service in services:
        if service.entry.job_id == job_id and service.state in ENDED_STATES:
            raise FailedPrecondition(
                f"service {job_id} is {service.state} ({service.reason}): remove it with "
                "`headrace service prune` and start another"
            )
    target = request_target(
        {service.entry.job_id: service.entry for service in services if service.state not in ENDED_STATES}, job_id, arch
    )
    if isinstance(target, NoTarget):
        raise NotFound(target.text)
    if isinstance(target, Ambiguous):
        if is_interactive():
            return choose(target.text, target.candidates, target.shown)
        listed = "; ".join(" ".join(str(getattr(entry, name)) for name in target.shown) for entry in target.candidates)
        raise refuse(f"{target.text}, with --job-id: {listed}")
    return target.entry


def _sampling(kind: Architecture, parameters: Mapping[str, str]) -> dict[str, Any]:
    """Convert parameters to the types of the architecture's fields; others are JSON, else strings."""
    from headrace.platforms.chat_requests import parse_value

    fields = {field.name: field for field in kind.fields}
    result: dict[str, Any] = {}
    for name, text in parameters.items():
        if name in fields:
            result[name] = parse_value(fields[name], text)
            continue
        try:
            result[name] = json.loads(text)
        except ValueError:
            result[name] = text
    return result


def _prepared(
    document: Mapping[str, Any],
    kind: Architecture,
    catalogue: Mapping[str, Architecture],
    sampling: Mapping[str, Any],
    yes: bool,
    force: bool,
) -> dict[str, Any]:
    from headrace.cli.service_view import ask_fields, default_of, is_interactive
    from headrace.platforms.chat_requests import check_no_secret, field_type, fields_to_ask, mismatches, prepare

    check_no_secret(document, os.environ)
    body = {**document, **sampling}
    doubts = mismatches(body, kind, catalogue)
    if doubts and not force:
        if not is_interactive():
            raise refuse(f"{'; '.join(doubts)}. Choose another service, or add --force to send it anyway")
        typer.echo("\n".join(doubts), err=True)
        typer.confirm("Send it anyway?", abort=True, err=True)
    open_fields = fields_to_ask(body, kind)
    answers: dict[str, Any] = dict(sampling)
    if open_fields and not yes:
        if not is_interactive():
            listed = ", ".join(f"{field.name} ({field_type(field)}; {default_of(field)})" for field in open_fields)
            raise refuse(
                f"there is no terminal to ask for sampling parameters: add --yes for the defaults, or "
                f"--param NAME=VALUE: {listed}"
            )
        answers |= ask_fields(open_fields)
    prepared = prepare(document, kind, answers)
    for remark in prepared.remarks:
        typer.echo(f"note: {remark}", err=True)
    return prepared.body


def _print_piece(text: str) -> None:
    typer.echo(text, nl=False)


def _show(answer: ChatAnswer, output: Path | None, as_json: bool) -> None:
    if output is not None:
        with report_service_errors():
            content = _content(answer.text)
        try:
            output.write_bytes(content)
        except OSError as error:
            raise refuse(f"--output {output}: {error.strerror}") from None
        typer.echo(f"wrote {len(content)} bytes to {output}", err=True)
    if as_json:
        print_json({**answer.body, **({"text": answer.text} if answer.streamed else {})})
    elif answer.streamed:
        typer.echo("")
    elif output is None:
        # A base64 video is unreadable on a terminal, but useful in a pipe.
        if answer.text.startswith("data:") and sys.stdout.isatty():
            typer.echo(
                f"the response is a file of about {len(answer.text) * 3 // 4} bytes: add --output FILE to save it"
            )
        else:
            typer.echo(answer.text)


def _content(text: str) -> bytes:
    """Return the decoded content of a data: URL; any other response as bytes."""
    from headrace.models.media.decoding import decode_content, parse_data_url

    return decode_content(parse_data_url(text), _MOST_BODY) if text.startswith("data:") else text.encode()
