# SPDX-License-Identifier: Apache-2.0
"""`headrace chat`: chat with a language model in the terminal or in a pipe."""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.cli.checks import report_errors
from headrace.cli.common_options import SERVER_URL, Json, print_json_line

if TYPE_CHECKING:
    from headrace.cli.chat_client import ChatClient
    from headrace.cli.chat_session import Conversation

_INTERRUPTED = 130
"""The exit code after Ctrl-C, as that of other commands: 128 and the number of SIGINT."""


def chat(
    model: Annotated[
        str,
        typer.Argument(
            metavar="[MODEL]", help="Name of the model, or its folder (default: the server's only chat model)."
        ),
    ] = "",
    url: Annotated[str, typer.Option(metavar="URL", help="Server URL: http:// or https://.")] = SERVER_URL,
    serve: Annotated[
        str, typer.Option(metavar="PATH", help="Start a server for this path, and stop it when the chat ends.")
    ] = "",
    system: Annotated[str, typer.Option(metavar="TEXT", help="System prompt.")] = "",
    images: Annotated[
        list[str] | None,
        typer.Option("--image", metavar="FILE", help="Add an image to the first message. Repeatable."),
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Longest answer, in tokens (default: the server's).")
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(metavar="T", min=0, help="Sampling temperature; 0 is greedy (default: the server's)."),
    ] = None,
    api_key: Annotated[
        str,
        typer.Option(
            metavar="KEY",
            envvar="HEADRACE_API_KEY",
            show_default=False,
            help="API key of the server. Other users of this machine can see a key on the command line.",
        ),
    ] = "",
    timeout: Annotated[
        float, typer.Option(metavar="SECONDS", min=0.1, help="Longest wait for the next token.")
    ] = 300.0,
    as_json: Json = False,
) -> None:
    """Chat with a language model in the terminal; answers are printed as they are generated.

    If MODEL is not on the server but is a folder, or with `--serve`, a server is started for the chat on a free port of this
    machine. In the chat, `/help` lists the commands and `/stats` shows the speed of the answers. Ctrl-C stops an answer,
    Ctrl-D ends the chat.

    Outside a terminal, or with `--json`, standard input is one message and only the answer is printed. The exit code is 1 if
    the server returns an error, 2 if no request could be sent.

    Examples:

        headrace chat

        headrace chat qwen --url http://127.0.0.1:8000 --system "Answer in one sentence."

        headrace chat ./Qwen2.5-0.5B-Instruct

        headrace chat --serve models --max-tokens 200 --temperature 0

        echo "What is in this image?" | headrace chat qwen-vl --image photo.jpg
    """
    with report_errors():
        from headrace.cli.chat_client import ChatClient
        from headrace.cli.chat_session import Conversation, Terminal, read_image
        from headrace.core.errors import InvalidArgument

        if serve and url != SERVER_URL:
            raise InvalidArgument("--serve starts a server of its own: leave out --url, or --serve")
        sampling: dict[str, Any] = {"max_tokens": max_tokens, "temperature": temperature}
        sampling = {name: value for name, value in sampling.items() if value is not None}
        data_urls = [read_image(path) for path in images or ()]
        with ExitStack() as running:
            client = ChatClient(url, api_key, seconds=timeout)
            folder = serve or _folder(model, client)
            if folder:
                from headrace.cli.chat_server import serve_for_chat

                server_url = running.enter_context(serve_for_chat(folder))
                client = ChatClient(server_url, api_key, seconds=timeout, title=folder)
                model = model if serve else ""
            conversation = Conversation(client, client.find_model(model), system, sampling, images=data_urls)
            if sys.stdin.isatty() and sys.stdout.isatty() and not as_json:
                Terminal(conversation).run()
            else:
                _answer_input(conversation, as_json=as_json)


def _folder(model: str, client: ChatClient) -> str:
    """Return MODEL if it is a folder to serve; "" if it is a model of the server."""
    if not model or not os.path.isdir(model):
        return ""
    # `headrace serve qwen` gives a model the name of its folder: that server is meant, if it runs.
    is_path = os.sep in model or model.startswith(".")
    return model if is_path or not client.has_model(model) else ""


def _answer_input(conversation: Conversation, *, as_json: bool) -> None:
    """Send standard input as one message and print the answer."""
    from headrace.cli.chat_session import cut_note, show_piece
    from headrace.core.errors import InvalidArgument

    text = sys.stdin.buffer.read().decode(errors="replace").strip()
    if not text and not conversation.images:
        raise InvalidArgument("standard input is empty: write the message to it, or run this in a terminal")
    answer = conversation.ask(text, _discard if as_json else show_piece)
    if answer.stopped:
        raise typer.Exit(_INTERRUPTED)
    if as_json:
        print_json_line(
            {
                "model": conversation.model,
                "content": answer.text,
                "finish_reason": answer.finish_reason,
                "prompt_tokens": answer.prompt_tokens,
                "cached_tokens": answer.cached_tokens,
                "completion_tokens": answer.completion_tokens,
                "first_token_seconds": round(answer.first_token_seconds, 6),
                "generation_seconds": round(answer.generation_seconds, 6),
            }
        )
    else:
        typer.echo()
        if note := cut_note(answer):
            typer.echo(f"note: {note.strip('()')}", err=True)


def _discard(_: str) -> None: ...
