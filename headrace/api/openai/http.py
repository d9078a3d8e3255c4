# SPDX-License-Identifier: Apache-2.0
"""The routes of OpenAI's protocol and of Anthropic's Messages API.

Every error under `/v1` has OpenAI's shape, also for an unknown path; under `/v1/messages` it has Anthropic's.
"""

from __future__ import annotations

from headrace.api.model_waits import waiting_http
from headrace.api.openai.adapters import LOAD_PATH, UNLOAD_PATH, Adapters
from headrace.api.openai.batch_store import ENDPOINTS
from headrace.api.openai.batches import allowed_methods
from headrace.api.openai.chat import Chat, MediaReader
from headrace.api.openai.completions import Completions
from headrace.api.openai.continuation import Continuation, trackable
from headrace.api.openai.embeddings import Embeddings
from headrace.api.openai.errors import OpenAiHandler, error_json, fail
from headrace.api.openai.message_errors import error_json as message_error_json
from headrace.api.openai.message_errors import fail as fail_message
from headrace.api.openai.message_errors import message_request_id
from headrace.api.openai.messages import Messages
from headrace.api.openai.models import Models
from headrace.api.openai.prefill import Prefill
from headrace.api.openai.rerank import COHERE_PATH, Rerank
from headrace.api.openai.response_store import ResponseStore
from headrace.api.openai.responses_api import Responses
from headrace.api.openai.settings import OpenAiSettings
from headrace.api.openai.stored_responses import StoredResponses
from headrace.api.openai.tokenize import Tokenize
from headrace.api.openai.transcriptions import Transcriptions
from headrace.core.continuation import CONTINUE_PATH
from headrace.core.errors import NotFound
from headrace.core.kv_transfer import PREFILL_PATH, KvTransferSettings
from headrace.core.telemetry.metrics import Counter, Family, Registry
from headrace.engine.dataplane import DataPlane
from headrace.net.http.exchange import Exchange, Handler
from headrace.net.http.heads import CONTENT_TYPE, JSON, ResponseHead
from headrace.net.http.routes import Routes

_MODEL = "/v1/models/"
_MESSAGES = "/v1/messages"
_RESPONSE = "/v1/responses/"


class OpenAiHttp:
    """Handlers over one data plane.

    Without a media reader, conversations with images and videos are refused. Without a store, no response is kept.
    """

    def __init__(
        self,
        plane: DataPlane,
        settings: OpenAiSettings | None = None,
        media_reader: MediaReader | None = None,
        kv_transfer: KvTransferSettings | None = None,
        responses: ResponseStore | None = None,
        metrics: Registry | None = None,
    ) -> None:
        settings = settings or OpenAiSettings()
        self._plane = plane
        self._models = Models(plane)
        malformed_calls: Family[Counter] | None = None
        if metrics is not None:
            malformed_calls = metrics.counter(
                "headrace_openai_malformed_tool_calls_total",
                "Tool calls of a model that could not be read and became text, or whose arguments are not JSON",
                ["model"],
            )
        chat = Chat(plane, settings, self._models, media_reader, malformed_calls)
        completions = Completions(plane, settings, self._models)
        messages = Messages(plane, settings, self._models, chat)
        created = Responses(plane, settings, self._models, chat, responses)
        self._stored_responses = StoredResponses(responses, created.cancel_running)
        tokenizer = Tokenize(plane, settings, self._models)
        ranking = Rerank(plane, settings, self._models)
        speech = Transcriptions(plane, settings, self._models)
        self._posts = {
            "/v1/chat/completions": trackable(chat.handle),
            "/v1/completions": trackable(completions.handle),
            "/v1/responses": trackable(created.create),
            "/v1/responses/input_tokens": created.count_tokens,
            _MESSAGES: trackable(messages.handle),
            f"{_MESSAGES}/count_tokens": messages.count_tokens,
            "/v1/embeddings": Embeddings(plane, settings, self._models).handle,
            "/v1/rerank": ranking.rerank,
            "/rerank": ranking.rerank,
            COHERE_PATH: ranking.rerank,
            "/v1/score": ranking.score,
            "/score": ranking.score,
            "/v1/audio/transcriptions": speech.transcribe,
            "/v1/audio/translations": speech.translate,
            "/tokenize": tokenizer.tokenize,
            "/detokenize": tokenizer.detokenize,
        }
        adapters = Adapters(self._models)
        self._adapter_posts = {LOAD_PATH: adapters.load, UNLOAD_PATH: adapters.unload}
        self._continuation = Continuation(self._posts, settings.continuation_key)
        if kv_transfer is not None and kv_transfer.role == "prefill":
            self._posts[PREFILL_PATH] = Prefill(chat.begin, completions.begin, kv_transfer).handle

    def add_to(self, routes: Routes) -> None:
        """Register the routes."""
        for path, handler in self._posts.items():
            respond_error = fail_message if path.startswith(_MESSAGES) else fail
            waiting = waiting_http(self._plane, handler, respond_error)
            routes.add("POST", path, OpenAiHandler(waiting, respond_error), scope="infer")
        for path, handler in self._adapter_posts.items():
            waiting = waiting_http(self._plane, handler, fail)
            routes.add("POST", path, OpenAiHandler(waiting), scope="admin", workers="all")
        continuing = waiting_http(self._plane, self._continuation.handle, fail)
        routes.add("POST", CONTINUE_PATH, OpenAiHandler(continuing), scope="infer")
        # Clients list the models before they call one, so it needs the same scope.
        routes.add("GET", "/v1/models", OpenAiHandler(self._models.list), scope="infer")
        routes.add("GET", f"{_MODEL}{{model}}", OpenAiHandler(self._models.show), scope="infer")
        self._stored_responses.add_to(routes)
        routes.mount("/v1", OpenAiHandler(self.not_found), scope="infer")

    def line_handlers(self) -> dict[str, Handler]:
        """Return the handlers that answer the lines of batches, by endpoint."""
        return {path: OpenAiHandler(waiting_http(self._plane, self._posts[path], fail)) for path in ENDPOINTS}

    def not_found(self, exchange: Exchange) -> None:
        """Answer an unknown path or method."""
        path = exchange.head.path.decode("latin-1")
        allowed = self._allowed(path) or allowed_methods(path)
        if allowed and exchange.head.method not in allowed.split(b", "):
            error = NotFound(f"{path[:256]} does not have this method: use {allowed.decode()}")
            head = ResponseHead(405, [(CONTENT_TYPE, JSON), (b"allow", allowed)])
        else:
            error = NotFound(
                f"{path[:256]} is not a path of this server: it has {', '.join(self._posts)} and /v1/models"
            )
            head = ResponseHead(404, [(CONTENT_TYPE, JSON)])
        if path.startswith(_MESSAGES):
            body = message_error_json(error, message_request_id(exchange))[1]
        else:
            body = error_json(error)[1]
        exchange.respond(head, body)

    def _allowed(self, path: str) -> bytes:
        """Return the methods of a path; "" for an unknown path."""
        if path in self._posts or path in self._adapter_posts or path == CONTINUE_PATH:
            return b"POST"
        if path.startswith(_RESPONSE):
            below = path.removeprefix(_RESPONSE).partition("/")[2]
            return {"": b"GET, DELETE", "input_items": b"GET", "cancel": b"POST"}.get(below, b"")
        if path.startswith(_MODEL) and path.endswith(("/sleep", "/wake")):
            return b"POST"  # the routes of `api.v2.repository`
        return b"GET" if path == "/v1/models" or path.startswith(_MODEL) else b""
