# SPDX-License-Identifier: Apache-2.0
"""The conversation of `headrace chat`: history, images, statistics, and the loop of prompt, commands and answers."""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import typer

from headrace.cli.chat_client import Answer, ChatClient
from headrace.cli.checks import print_error
from headrace.core.errors import HeadraceError, InvalidArgument
from headrace.core.limits import MIB
from headrace.core.telemetry.logs import one_line

_PROMPT, _MORE = "> ", "... "
_ENDS = ("/exit", "/quit", "/bye")
_QUOTES = '"""'
_MAX_IMAGE_BYTES = 64 * MIB
_CONTROL = {code: None for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}
"""Removed from what a terminal shows: a model must not move the cursor or change settings."""

_HELP = """\
/help          show this help
/stats         time to first token, tokens per second and token counts, of the last answer and of the session
/system TEXT   set the system prompt; without TEXT, remove it
/image FILE    add an image to the next message
/clear         forget the conversation; the system prompt stays
/save FILE     write the conversation to FILE as JSON
/exit          end the chat; so do /quit, /bye and Ctrl-D

Several lines: end a line with \\, or put the message between \"\"\" and \"\"\".
Ctrl-C stops the answer."""


@dataclass(slots=True)
class Conversation:
    """The messages so far, and the settings of the next request."""

    client: ChatClient
    model: str
    system: str = ""
    sampling: dict[str, Any] = field(default_factory=dict)
    """`max_tokens` and `temperature`, where they are set."""
    messages: list[dict[str, Any]] = field(default_factory=list)
    images: list[str] = field(default_factory=list)
    """Data URLs for the next message."""
    answers: list[Answer] = field(default_factory=list)

    def ask(self, text: str, show: Callable[[str], None]) -> Answer:
        """Send a message and call `show` with each piece of the answer. Ctrl-C stops the answer, and what came is kept.

        A message that fails is not part of the conversation. Raises HeadraceError.
        """
        question = _user_message(text, self.images)
        self.images = []
        answer = Answer()
        body = {"model": self.model, "messages": [*self._system(), *self.messages, question], **self.sampling}
        try:
            with closing(self.client.stream(body, answer)) as pieces:
                for piece in pieces:
                    show(piece)
        except KeyboardInterrupt:
            answer.stopped = True
        if answer.text or not answer.stopped:
            self.messages += [question, {"role": "assistant", "content": answer.text}]
            self.answers.append(answer)
        return answer

    def clear(self) -> None:
        """Forget all messages and images."""
        self.messages, self.images = [], []

    def to_json(self) -> dict[str, Any]:
        """Return the conversation as a chat request."""
        return {"model": self.model, "messages": [*self._system(), *self.messages], **self.sampling}

    def _system(self) -> list[dict[str, Any]]:
        return [{"role": "system", "content": self.system}] if self.system else []


def read_image(path: str) -> str:
    """Return an image file as a data URL. Raises InvalidArgument."""
    from headrace.models.media.decoding import HEAD_BYTES, IMAGES, sniff

    try:
        if not Path(path).is_file():
            reason = "is a folder" if Path(path).is_dir() else "no such file"
            raise InvalidArgument(f"{path}: {reason}; give the path of an image")
        with open(path, "rb") as file:
            content = file.read(_MAX_IMAGE_BYTES + 1)
    except OSError as error:
        raise InvalidArgument(f"{path}: {error.strerror}") from None
    if len(content) > _MAX_IMAGE_BYTES:
        raise InvalidArgument(f"{path} has more than {_MAX_IMAGE_BYTES // MIB} MiB; scale the image down")
    media_format = sniff(content[:HEAD_BYTES])
    if media_format is None or media_format.kind != "image":
        raise InvalidArgument(f"{path} is not an image; use {IMAGES}")
    return f"data:image/{media_format.decoder.lower()};base64,{base64.b64encode(content).decode()}"


def describe(answers: Sequence[Answer]) -> str:
    """Return the statistics of answers in one line: averages of the times, sums of the tokens."""
    first = [answer.first_token_seconds for answer in answers if answer.text]
    parts = [f"time to first token {sum(first) / len(first):.3f} s" if first else "no token"]
    # The first token ends the prefill: the rate is that of the tokens after it.
    timed = [answer for answer in answers if answer.completion_tokens > 1 and answer.generation_seconds > 0]
    if timed:
        tokens = sum(answer.completion_tokens - 1 for answer in timed)
        parts.append(f"{tokens / sum(answer.generation_seconds for answer in timed):.1f} tokens/s")
    cached = sum(answer.cached_tokens for answer in answers)
    parts.append(
        f"{sum(answer.prompt_tokens for answer in answers)} prompt tokens" + (f" ({cached} cached)" if cached else "")
    )
    parts.append(f"{sum(answer.completion_tokens for answer in answers)} completion tokens")
    if stopped := sum(answer.stopped for answer in answers):
        # The server reports token counts at the end of an answer only.
        parts.append(f"{stopped} stopped: counted without prompt tokens")
    return ", ".join(parts)


def show_piece(text: str) -> None:
    """Print a piece of an answer; on a terminal without control characters."""
    sys.stdout.write(text.translate(_CONTROL) if sys.stdout.isatty() else text)
    sys.stdout.flush()


class Terminal:
    """The interactive chat. Errors are printed, and the chat goes on."""

    def __init__(self, conversation: Conversation) -> None:
        self._conversation = conversation
        self._commands: dict[str, Callable[[str], None]] = {
            "/help": lambda _: typer.echo(_HELP),
            "/stats": lambda _: self._stats(),
            "/system": self._set_system,
            "/image": self._add_image,
            "/clear": lambda _: self._clear(),
            "/save": self._save,
        }

    def run(self) -> None:
        """Read messages and commands until Ctrl-D or `/exit`."""
        _set_up_readline([*self._commands, *_ENDS])
        typer.echo(f"Chatting with {self._conversation.model}. /help lists the commands; Ctrl-D ends the chat.")
        while True:
            try:
                text = _read_message()
                if text in _ENDS:
                    return
                self._handle(text)
            except EOFError:
                typer.echo()
                return
            except KeyboardInterrupt:
                typer.echo("\nCtrl-D or /exit ends the chat.")
            except HeadraceError as error:
                print_error(one_line(error.message))

    def _handle(self, text: str) -> None:
        name, _, argument = text.partition(" ")
        if not text.startswith("/") or not name[1:].isalpha():  # a message may begin with a path: /etc/hosts
            if text.strip():
                self._ask(text)
            return
        command = self._commands.get(name)
        if command is None:
            raise InvalidArgument(f"there is no command {name[:64]}; /help lists the commands")
        command(argument.strip())

    def _ask(self, text: str) -> None:
        shown = False

        def show(piece: str) -> None:
            nonlocal shown
            shown = True
            show_piece(piece)

        try:
            answer = self._conversation.ask(text, show)
        except HeadraceError:
            if shown:
                typer.echo()
            raise
        typer.echo(" (stopped)" if answer.stopped else "")
        if note := cut_note(answer):
            typer.echo(note)

    def _stats(self) -> None:
        answers = self._conversation.answers
        if not answers:
            raise InvalidArgument("there is no answer yet: send a message first")
        typer.echo(f"last answer: {describe(answers[-1:])}")
        typer.echo(f"session: {len(answers)} answer{'s' * (len(answers) > 1)}, {describe(answers)}")

    def _set_system(self, text: str) -> None:
        self._conversation.system = text
        typer.echo("System prompt set." if text else "System prompt removed.")

    def _add_image(self, path: str) -> None:
        if not path:
            raise InvalidArgument("write /image FILE")
        self._conversation.images.append(read_image(path))
        count = len(self._conversation.images)
        typer.echo(f"The next message has {count} image{'s' * (count > 1)}.")

    def _clear(self) -> None:
        self._conversation.clear()
        typer.echo("Conversation cleared.")

    def _save(self, path: str) -> None:
        if not path:
            raise InvalidArgument("write /save FILE")
        content = json.dumps(self._conversation.to_json(), indent=2, ensure_ascii=False) + "\n"
        try:
            Path(path).write_text(content, encoding="utf-8", errors="replace")
        except OSError as error:
            raise InvalidArgument(f"{path}: {error.strerror}; choose another file") from None
        typer.echo(f"Saved {len(self._conversation.messages)} messages to {path}.")


def cut_note(answer: Answer) -> str:
    """Return a note for an answer that reached its token limit; "" for others."""
    if answer.finish_reason != "length":
        return ""
    return f"(cut at {answer.completion_tokens} tokens: raise --max-tokens, or /clear a long conversation)"


def _read_message() -> str:
    """Read one message, of one or more lines. Raises EOFError at Ctrl-D."""
    line = input(_PROMPT)
    if line.startswith(_QUOTES):
        lines = [line[len(_QUOTES) :]]
        while not lines[-1].rstrip().endswith(_QUOTES):
            lines.append(input(_MORE))
        lines[-1] = lines[-1].rstrip().removesuffix(_QUOTES)
        return "\n".join(lines).strip("\n")
    lines = [line]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1][:-1]
        lines.append(input(_MORE))
    return "\n".join(lines)


def _set_up_readline(commands: Iterable[str]) -> None:
    """Add editing, history and completion of commands to `input`."""
    try:
        import readline
    except ImportError:  # Python can be built without it
        return
    names = sorted(commands)

    def complete(text: str, state: int) -> str | None:
        matches = [name for name in names if text.startswith("/") and name.startswith(text)]
        return matches[state] if state < len(matches) else None

    readline.set_completer_delims(" ")
    readline.set_completer(complete)
    readline.parse_and_bind("tab: complete")


def _user_message(text: str, images: Sequence[str]) -> dict[str, Any]:
    if not images:
        return {"role": "user", "content": text}
    items: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": url}} for url in images]
    return {"role": "user", "content": [*items, {"type": "text", "text": text}]}
