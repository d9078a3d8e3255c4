# SPDX-License-Identifier: Apache-2.0
"""`headrace service request`: which service, what to ask it, and its answer."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.cli.results import Json, print_json
from headrace.cli.service_options import (
    REGISTRY,
    Architectures,
    RegistryFile,
    StateDir,
    or_sentence,
    pairs,
    refuse,
    told_only,
    with_launcher,
)

if TYPE_CHECKING:
    from headrace.platforms.asking import Answer
    from headrace.platforms.catalogue import Architecture
    from headrace.platforms.launcher import Launcher, Service
    from headrace.platforms.registry import Entry

_MOST_BODY = 1 << 30
_ASKED, _SAMPLING = "What is asked", "Sampling"


def request(
    job_id: Annotated[str, typer.Option("--job-id", metavar="JOB", help="Which service.")] = "",
    arch: Annotated[str, typer.Option("--arch", metavar="NAME", help="The service of this architecture.")] = "",
    body: Annotated[
        str,
        typer.Option(
            "--body", metavar="JSON", help="The request; @FILE reads one, - standard input.", rich_help_panel=_ASKED
        ),
    ] = "",
    prompt: Annotated[str, typer.Option(metavar="TEXT", help="Instead of a body.", rich_help_panel=_ASKED)] = "",
    system: Annotated[str, typer.Option(metavar="TEXT", help="The system message.", rich_help_panel=_ASKED)] = "",
    image: Annotated[
        list[str] | None,
        typer.Option(metavar="FILE|URL", help="A file is sent along. Repeatable.", rich_help_panel=_ASKED),
    ] = None,
    video: Annotated[
        list[str] | None, typer.Option(metavar="FILE|URL", help="The same. Repeatable.", rich_help_panel=_ASKED)
    ] = None,
    stream: Annotated[
        bool,
        typer.Option(
            "--stream", help="Ask for the answer in pieces, and print them as they come.", rich_help_panel=_ASKED
        ),
    ] = False,
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="Take the defaults of what is not given.", rich_help_panel=_SAMPLING)
    ] = False,
    max_tokens: Annotated[str, typer.Option("--max-tokens", metavar="N", rich_help_panel=_SAMPLING)] = "",
    temperature: Annotated[str, typer.Option(metavar="NUMBER", rich_help_panel=_SAMPLING)] = "",
    top_p: Annotated[str, typer.Option("--top-p", metavar="NUMBER", rich_help_panel=_SAMPLING)] = "",
    param: Annotated[
        list[str] | None,
        typer.Option(
            "--param",
            metavar="NAME=VALUE",
            help="Any other: seed=1, guidance=7. Repeatable.",
            rich_help_panel=_SAMPLING,
        ),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Send what seems to be meant for another architecture.")
    ] = False,
    no_wait: Annotated[bool, typer.Option("--no-wait", help="Do not wait until the model is ready.")] = False,
    ready_timeout: Annotated[
        float, typer.Option("--ready-timeout", min=0, metavar="SECONDS", help="How long to wait for that.")
    ] = 600.0,
    timeout: Annotated[float, typer.Option("--timeout", min=1, metavar="SECONDS", help="For the answer.")] = 3600.0,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="For the answer, or the video in it.")
    ] = None,
    architectures: Architectures = None,
    registry: RegistryFile = REGISTRY,
    state_dir: StateDir = None,
    as_json: Json = False,
) -> None:
    """Ask a service, and print its answer.

    Without --job-id and --arch there must be one service only: a request never goes to the latest of several by itself.
    Sampling parameters that are not given are asked for on a terminal.

    Exit codes: 1 it failed or does not answer, 2 the request is wrong, 3 not ready yet, 4 the service has failed for good.

    Examples:

        headrace service request --prompt "What is in it?" --image ./mug.jpg --yes

        headrace service request --arch tao-dataservices --body '{"messages": [{"role": "user", "content": "Hi"}]}' --yes

        headrace service request --job-id 8d0a2a3e-4a5b-4f8e-9f57-0f1d6a1b2c3d --body @request.json --param seed=7 --yes
    """
    asked = _read_body(body, prompt)
    sampling = pairs(param, "--param") | told_only(
        {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p}
    )

    async def look(launcher: Launcher) -> tuple[list[Service], Mapping[str, Architecture]]:
        return await launcher.list(), launcher.architectures()

    services, known = with_launcher(registry, state_dir, look, architectures=architectures)
    from headrace.core.telemetry.logs import one_line

    # Outside of the event loop: whoever is asked something can leave by Ctrl-C.
    with or_sentence():
        from headrace.platforms.catalogue import find

        entry = _target(services, job_id, arch)
        if asked is not None and entry.network_arch.lower() not in known:
            # Another tool started it: nothing is known of its parameters.
            ready = {**asked, **sampling}
        else:
            kind = find(known, entry.network_arch)
            document = asked or _from_prompt(kind, prompt, system, image or [], video or [])
            ready = _prepared(document, kind, known, _sampling(kind, sampling), yes, force)
        if stream:
            ready["stream"] = True
    shown = f"sending to job_id={entry.job_id} arch={entry.network_arch} url={entry.host_url}"
    # Other tools write the registry too.
    typer.echo(one_line(shown), err=True)

    async def work(launcher: Launcher) -> Answer:
        from headrace.platforms.launcher import Patience

        if not no_wait:
            await launcher.wait_ready(entry.job_id, Patience(ready_timeout))
        pieces = None if as_json or output else _print_piece
        return await launcher.ask(entry.job_id, ready, seconds=timeout, on_piece=pieces)

    answer = with_launcher(registry, state_dir, work)
    _show(answer, output, as_json)


def _read_body(text: str, prompt: str) -> dict[str, Any] | None:
    if bool(text) == bool(prompt):
        raise refuse("what is asked? Give --body JSON, or --prompt TEXT with --image and --video; one of the two")
    if prompt:
        return None
    try:
        if text == "-":
            text = sys.stdin.read(_MOST_BODY)
        elif text.startswith("@"):
            text = Path(text[1:]).expanduser().read_text()
        found = json.loads(text)
    except OSError as error:
        raise refuse(f"--body {text[:200]}: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise refuse("--body is no JSON: quote it once for the shell, as in --body '{\"messages\": [...]}'") from None
    if not isinstance(found, dict):
        raise refuse('--body is no object: write {"messages": [...]}')
    return found


def _from_prompt(kind: Architecture, prompt: str, system: str, images: list[str], videos: list[str]) -> dict[str, Any]:
    from headrace.platforms.chat_bodies import messages_of

    return {"messages": messages_of(prompt, kind, system=system, images=images, videos=videos)}


def _target(services: list[Service], job_id: str, arch: str) -> Entry:
    from headrace.cli.service_view import choose, is_interactive
    from headrace.core.errors import FailedPrecondition, NotFound
    from headrace.platforms.services import OVER
    from headrace.platforms.targets import Question, Refusal, request_target

    for each in services:
        if each.entry.job_id == job_id and each.state in OVER:
            raise FailedPrecondition(
                f"service {job_id} is {each.state} ({each.reason}): `headrace service prune` removes it; start another one"
            )
    found = request_target({each.entry.job_id: each.entry for each in services if each.state not in OVER}, job_id, arch)
    if isinstance(found, Refusal):
        raise NotFound(found.text)
    if isinstance(found, Question):
        if is_interactive():
            return choose(found.text, found.candidates, found.shown)
        listed = "; ".join(" ".join(str(getattr(each, name)) for name in found.shown) for each in found.candidates)
        raise refuse(f"{found.text}, with --job-id: {listed}")
    return found.entry


def _sampling(kind: Architecture, given: Mapping[str, str]) -> dict[str, Any]:
    """What was given, as the types of the architecture's fields; what it has no field for, as JSON or else as text."""
    from headrace.platforms.chat_bodies import read_value

    fields = {each.name: each for each in kind.fields}
    made: dict[str, Any] = {}
    for name, text in given.items():
        if name in fields:
            made[name] = read_value(fields[name], text)
            continue
        try:
            made[name] = json.loads(text)
        except ValueError:
            made[name] = text
    return made


def _prepared(
    document: Mapping[str, Any],
    kind: Architecture,
    known: Mapping[str, Architecture],
    sampling: Mapping[str, Any],
    yes: bool,
    force: bool,
) -> dict[str, Any]:
    from headrace.cli.service_view import ask_fields, default_of, is_interactive
    from headrace.platforms.chat_bodies import check_no_secret, fields_to_ask, kind_of, mismatches, prepare

    check_no_secret(document, os.environ)
    whole = {**document, **sampling}
    doubts = mismatches(whole, kind, known)
    if doubts and not force:
        if not is_interactive():
            raise refuse(f"{'; '.join(doubts)}. Choose another service, or give --force to send it anyway")
        typer.echo("\n".join(doubts), err=True)
        typer.confirm("Send it anyway?", abort=True, err=True)
    open_fields = fields_to_ask(whole, kind)
    answers: dict[str, Any] = dict(sampling)
    if open_fields and not yes:
        if not is_interactive():
            listed = ", ".join(f"{each.name} ({kind_of(each)}; {default_of(each)})" for each in open_fields)
            raise refuse(
                f"this is no terminal to ask for sampling parameters on: give --yes to take the defaults, or each by "
                f"--param NAME=VALUE: {listed}"
            )
        answers |= ask_fields(open_fields)
    ready = prepare(document, kind, answers)
    for remark in ready.remarks:
        typer.echo(f"note: {remark}", err=True)
    return ready.body


def _print_piece(text: str) -> None:
    typer.echo(text, nl=False)


def _show(answer: Answer, output: Path | None, as_json: bool) -> None:
    if output is not None:
        with or_sentence():
            content = _content(answer.text)
        try:
            output.write_bytes(content)
        except OSError as error:
            raise refuse(f"--output {output}: {error.strerror}") from None
        typer.echo(f"{len(content)} bytes are in {output}", err=True)
    if as_json:
        print_json({**answer.body, **({"text": answer.text} if answer.streamed else {})})
    elif answer.streamed:
        typer.echo("")
    elif output is None:
        # A video in base64 is nothing to read, but can be sent on.
        if answer.text.startswith("data:") and sys.stdout.isatty():
            typer.echo(f"the answer is a file of about {len(answer.text) * 3 // 4} bytes: give --output FILE for it")
        else:
            typer.echo(answer.text)


def _content(text: str) -> bytes:
    """The video of a data: URL; any other answer as it is."""
    from headrace.models.media.data_urls import content_of, parse_data_url

    return content_of(parse_data_url(text), _MOST_BODY) if text.startswith("data:") else text.encode()
