# SPDX-License-Identifier: Apache-2.0
"""A request as a choice sees it. Made by `flows` and `explaining`; what the body means is worked out when first asked."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import orjson

if TYPE_CHECKING:
    from headrace.net.http.exchange import Buffer
    from headrace.net.http.heads import RequestHead

LONGEST_PROMPT = 1 << 17
"""Characters of a prompt that are looked at."""
_PROMPTS = ("prompt", "text", "text_input", "input", "inputs")
"""Where a prompt may be if there are no messages: completions, `/generate` of several servers, embeddings."""
_UNREAD: Any = object()


class Request:
    """See the module."""

    __slots__ = ("_document", "_prompt", "body", "head", "session")

    def __init__(self, head: RequestHead, body: Buffer = b"") -> None:
        self.head = head
        self.body = body
        self.session = b""
        """Its session's key, where it was given one just now."""
        self._document: Any = _UNREAD
        self._prompt: str | None = None

    @property
    def document(self) -> Any:
        """The body as JSON; None if it is none."""
        if self._document is _UNREAD:
            self._document = None
            if self.body[:1] in (b"{", b" ", b"\n", b"\r", b"\t"):
                try:
                    self._document = orjson.loads(self.body)
                except orjson.JSONDecodeError:
                    pass
        return self._document

    @property
    def prompt(self) -> str:
        """What a model would read, from its beginning; the body's bytes where it is no prompt; "" without a body."""
        if self._prompt is None:
            self._prompt = self._read_prompt()[:LONGEST_PROMPT]
        return self._prompt

    def _read_prompt(self) -> str:
        document = self.document
        if isinstance(document, dict):
            text = _messages(document.get("messages"))
            for name in _PROMPTS:
                text = text or _text(document.get(name))
            if text:
                # A cache belongs to one model.
                model = document.get("model")
                return f"{model}\n{text}" if isinstance(model, str) else text
        return bytes(self.body[:LONGEST_PROMPT]).decode("latin-1")


def _messages(messages: Any) -> str:
    if not isinstance(messages, list):
        return ""
    said = (each for each in messages if isinstance(each, dict))
    return "\n".join(f"{each.get('role')}: {_text(each.get('content'))}" for each in said)


def _text(value: Any) -> str:
    """Of a text, of a list of texts or of parts of a message, or of the numbers of tokens."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        return ""
    if value and isinstance(value[0], dict):
        texts = [each.get("text") or each.get("content") for each in value if isinstance(each, dict)]
        return "\n".join(each for each in texts if isinstance(each, str)) or orjson.dumps(value).decode()
    return "\n".join(value) if all(isinstance(each, str) for each in value) else orjson.dumps(value).decode()
