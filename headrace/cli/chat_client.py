# SPDX-License-Identifier: Apache-2.0
"""The HTTP client of `headrace chat`: lists the chat models of a server and streams answers (`/v1/chat/completions`)."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from headrace.cli.client import model_path
from headrace.cli.infer_inputs import suggestion
from headrace.client.errors import http_error
from headrace.client.http1 import EventReader
from headrace.core.errors import DeadlineExceeded, HeadraceError, InvalidArgument, NotFound, Unavailable
from headrace.core.generation import EMBEDDING, SCORE, TEXT_OUTPUT
from headrace.core.limits import MIB
from headrace.core.transcription import TRANSCRIPT
from headrace.net.http_client import HttpCall, HttpResponse, error_text, parse_server_url, read

_CONTROL_SECONDS = 30.0
_MAX_BYTES = 64 * MIB
_READ_BYTES = 65536
_DONE = b"[DONE]"
_LANGUAGE_MODEL = "a language model is a Hugging Face folder with config.json, a tokenizer and .safetensors files"


@dataclass(slots=True)
class Answer:
    """One answer and its measurements. `ChatClient.stream` fills it while the answer arrives."""

    text: str = ""
    reasoning: str = ""
    """Reasoning: text that the model generated before the answer."""
    finish_reason: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens that the server found in its prefix cache."""
    completion_tokens: int = 0
    """As the server counts them; until it reports them, the number of pieces that arrived."""
    first_token_seconds: float = 0.0
    """From sending the request to the first token; 0 before that."""
    generation_seconds: float = 0.0
    """From the first token to the last."""
    stopped: bool = False
    """Whether the user stopped it."""

    def add(self, text: str, seconds: float, reasoning: str = "") -> None:
        """Add a piece of text or reasoning that arrived so many seconds after the request."""
        if not self.text and not self.reasoning:
            self.first_token_seconds = seconds
        self.text += text
        self.reasoning += reasoning
        self.completion_tokens += 1
        self.generation_seconds = seconds - self.first_token_seconds

    def count(self, usage: Mapping[str, Any]) -> None:
        """Take the token counts of the server."""
        details = usage.get("prompt_tokens_details")
        self.prompt_tokens = _number(usage.get("prompt_tokens"))
        self.completion_tokens = _number(usage.get("completion_tokens"))
        self.cached_tokens = _number(details.get("cached_tokens")) if isinstance(details, Mapping) else 0


class ChatClient:
    """A client of one server. Methods raise HeadraceError; its `status` is None if no server answered."""

    def __init__(self, url: str, api_key: str = "", *, seconds: float = 300.0, title: str = "") -> None:
        """Check the arguments. Raises InvalidArgument.

        Args:
            url: Address of the server; may end in `/v1`.
            api_key: Sent as `Authorization: Bearer`.
            seconds: Longest wait for the next token.
            title: Name of the server in error messages about models; the URL for "".
        """
        url = url if "://" in url else f"http://{url}"
        self.url = url.rstrip("/").removesuffix("/v1")
        self._title = title or self.url
        parse_server_url(self.url)
        try:
            api_key.encode("ascii")
        except UnicodeEncodeError:
            raise InvalidArgument("the API key has characters that HTTP cannot carry; check --api-key") from None
        self._headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._seconds = seconds

    def is_ready(self) -> bool:
        """Return whether the server is ready; False if none answers."""
        try:
            with self._call(_CONTROL_SECONDS) as call:
                return call.send("GET", "/v2/health/ready").status == 200
        except HeadraceError:
            return False

    def has_model(self, name: str) -> bool:
        """Return whether the server has a model or adapter of this name; False if it does not say."""
        try:
            return any(model["id"] == name for model in self._models())
        except HeadraceError:
            return False

    def find_model(self, name: str = "") -> str:
        """Return the name of the model to chat with: `name` if the server has it, or its only chat model for ""."""
        models = self._models()
        names: list[str] = [model["id"] for model in models]
        if name:
            if name not in names:
                self._explain_missing(name, names)
            if not self._generates(name):
                raise _not_found(f"model '{name}' does not generate text; {self._listed(names)}")
            return name
        # An adapter is a variant of its base model: a model with adapters is still one chat model.
        bases: list[str] = [model["id"] for model in models if not model.get("parent")]
        chat_models = [base for base in bases if self._generates(base)]
        if len(chat_models) == 1:
            return chat_models[0]
        if not chat_models:
            raise _not_found(f"{self._title} has no chat model; {_LANGUAGE_MODEL}")
        raise InvalidArgument(f"{self._title} has several chat models; name one of them: {', '.join(chat_models)}")

    def stream(self, body: Mapping[str, Any], answer: Answer) -> Generator[str, None, None]:
        """Send a chat request, fill `answer`, and yield the text in pieces as they arrive.

        Closing the generator closes the connection, and the server stops generating.
        """
        document = {**body, "stream": True, "stream_options": {"include_usage": True}}
        started_at = time.perf_counter()
        with self._call(self._seconds) as call:
            response = call.send("POST", "/v1/chat/completions", json.dumps(document).encode())
            if response.status != 200:
                raise self._error(read(response, _MAX_BYTES))
            for data in self._events(response):
                text, reasoning = _apply(data, answer)
                if text or reasoning:
                    follows = text and answer.reasoning and not answer.text
                    answer.add(text, time.perf_counter() - started_at, reasoning)
                    yield f"\n\n{text}" if follows else reasoning + text

    def _events(self, response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
        events = EventReader()
        while True:
            while (data := events.take()) is not None:
                if data == _DONE:
                    return
                yield self._object(data)
            try:
                piece = response.read1(_READ_BYTES)
            except http.client.IncompleteRead:
                piece = b""
            if not piece:
                raise Unavailable(f"{self.url} closed the connection in the middle of the answer; check its log")
            events.feed(piece)

    def _object(self, data: bytes) -> dict[str, Any]:
        try:
            document = json.loads(data)
        except (ValueError, RecursionError):
            document = None
        if not isinstance(document, dict):
            raise Unavailable(f"{self.url} did not stream JSON objects: is it a server with OpenAI's protocol?")
        if document.get("error"):
            raise http_error(500, _message(document), "")
        return document

    def _models(self) -> list[dict[str, Any]]:
        response = self._get("/v1/models")
        if response.status == 404:
            raise _not_found(f"{self.url} has no /v1/models: is it a server with OpenAI's protocol? Set --url")
        if response.status != 200:
            raise self._error(response)
        document = response.json()
        rows = document.get("data") if isinstance(document, dict) else None
        if not isinstance(rows, list):
            raise Unavailable(f"{self.url}/v1/models does not list models: is it a server with OpenAI's protocol?")
        return [row for row in rows if isinstance(row, dict) and isinstance(row.get("id"), str)]

    def _generates(self, name: str) -> bool:
        """Return False for an embedding, ranking or speech model. Other servers than Headrace do not say: True."""
        metadata = self._get(model_path(name)).json()
        outputs = metadata.get("outputs") if isinstance(metadata, dict) else None
        names = {tensor.get("name") for tensor in outputs or () if isinstance(tensor, dict)}
        return TEXT_OUTPUT in names or not names & {EMBEDDING, SCORE, TRANSCRIPT}

    def _explain_missing(self, name: str, names: list[str]) -> None:
        """Raise the error for a model that is not listed. The server lists one that is loading or failed to load."""
        response = self._get(f"/v1/models/{quote(name, safe='')}")
        if response.status not in (200, 404):
            raise self._error(response)
        raise _not_found(f"{self._title} has no model '{name}'{suggestion(name, names)}; {self._listed(names)}")

    def _listed(self, names: list[str]) -> str:
        chat_models = [name for name in names if self._generates(name)]
        return f"choose one of: {', '.join(chat_models)}" if chat_models else f"it has no chat model: {_LANGUAGE_MODEL}"

    def _get(self, path: str) -> HttpResponse:
        with self._call(_CONTROL_SECONDS) as call:
            return read(call.send("GET", path), _MAX_BYTES)

    @contextmanager
    def _call(self, seconds: float) -> Iterator[HttpCall]:
        """Yield a call; raise DeadlineExceeded or Unavailable if it fails."""
        try:
            with HttpCall(self.url, seconds, self._headers) as call:
                yield call
        except TimeoutError:
            raise DeadlineExceeded(
                f"{self.url} sent nothing for {seconds:g} s; check its log, or raise --timeout"
            ) from None
        except OSError as error:
            raise Unavailable(
                f"no answer from {self.url} ({error_text(error)}); start a server with 'headrace serve FOLDER', "
                "or set --url"
            ) from None

    def _error(self, response: HttpResponse) -> HeadraceError:
        document = response.json()
        text = _message(document) or f"{self.url} answered with status {response.status}"
        if response.status == 401:
            text += "; set --api-key or HEADRACE_API_KEY"
        return http_error(response.status, text, response.headers.get("x-request-id", ""))


def _apply(document: dict[str, Any], answer: Answer) -> tuple[str, str]:
    """Take the token counts and the finish reason of a chunk; return its text and its reasoning."""
    usage = document.get("usage")
    if isinstance(usage, dict):
        answer.count(usage)
    choices = document.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}
    answer.finish_reason = str(choice.get("finish_reason") or answer.finish_reason)
    delta = choice.get("delta")
    members = delta if isinstance(delta, dict) else {}
    return _shown(members.get("content")), _shown(members.get("reasoning_content"))


def _shown(text: Any) -> str:
    """Return a text without half surrogate pairs, which JSON may carry and no terminal can show."""
    return text.encode(errors="replace").decode() if isinstance(text, str) else ""


def _message(document: Any) -> str:
    """Return the text of an error: `{"error": {"message": ...}}` or `{"error": ...}`; "" if there is none."""
    error = document.get("error") if isinstance(document, dict) else None
    return str(error.get("message") or "") if isinstance(error, dict) else str(error or "")


def _not_found(text: str) -> HeadraceError:
    error = NotFound(text)
    error.status = 404
    return error


def _number(value: Any) -> int:
    return value if isinstance(value, int) else 0
