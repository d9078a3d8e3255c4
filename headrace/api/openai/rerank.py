# SPDX-License-Identifier: Apache-2.0
"""Rank documents by their relevance to a query, and score pairs of texts.

`/v1/rerank`, `/rerank` and `/v2/rerank` are as in Jina's, Cohere's and vLLM's API, `/v1/score` and `/score` as in vLLM's. A
cross-encoder scores each pair of texts. An embedding model embeds each distinct text once, and the score of a pair is the
cosine of its vectors.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import orjson

from headrace.api.openai.errors import BadRequest
from headrace.api.openai.fields import Fields
from headrace.api.openai.item_calls import ItemCalls, embedding_of, score_of, text_request, token_count
from headrace.api.openai.models import Models, Target, ranks
from headrace.api.openai.proxy import parse_or_forward
from headrace.api.openai.settings import OpenAiSettings
from headrace.core.errors import InvalidArgument
from headrace.core.generation import DOCUMENT, QUERY, SCORE, TEXT_INPUT
from headrace.core.requests import InferRequest, InferResponse
from headrace.engine.dataplane import DataPlane
from headrace.net.http.exchange import Exchange

COHERE_PATH = "/v2/rerank"
_TEXT_CHARACTERS = 8_000_000
_UNSUPPORTED = {
    "truncate_prompt_tokens": "texts are truncated if the model's parameter truncate is true: leave this out",
    "max_tokens_per_doc": "texts are truncated if the model's parameter truncate is true: leave this out",
    "rank_fields": "send documents as texts, or as {'text': ...}",
}
_PAIR_NAMES = (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2"))
"""The two members of a score request, in vLLM's older and newer words."""


@dataclass(frozen=True, slots=True)
class _Text:
    """A text of a request, and where it is in it."""

    text: str
    param: str


Pair = tuple[_Text, _Text]


class Rerank:
    """Handlers over one data plane."""

    def __init__(self, plane: DataPlane, settings: OpenAiSettings, models: Models) -> None:
        self._plane = plane
        self._settings = settings
        self._models = models

    def rerank(self, exchange: Exchange) -> None:
        """Handle one rerank request."""
        parsed = parse_or_forward(self._plane, exchange, self._models.ranking_model, self._settings)
        if parsed is None:
            return
        fields, target = parsed
        fields.reject(_UNSUPPORTED)
        query = _text(fields.get("query"), fields.param("query"))
        documents = self._texts(fields, "documents")
        top_n = fields.integer("top_n", 0, 1 << 31) or len(documents)
        is_cohere = exchange.head.path == COHERE_PATH.encode()
        with_documents = fields.boolean("return_documents", default=not is_cohere)

        def write(scores: Sequence[float], tokens: int) -> bytes:
            order = sorted(range(len(scores)), key=lambda index: -scores[index])[:top_n]
            results: list[dict[str, Any]] = []
            for index in order:
                result: dict[str, Any] = {"index": index, "relevance_score": scores[index]}
                if with_documents:
                    result["document"] = {"text": documents[index].text}
                results.append(result)
            document: dict[str, Any] = {"id": f"rerank-{secrets.token_hex(16)}", "model": target.requested_name}
            document["results"] = results
            if is_cohere:
                document["meta"] = {"api_version": {"version": "2"}, "billed_units": {"search_units": 1}}
            return orjson.dumps({**document, "usage": _usage(tokens)})

        self._score(exchange, target, [(query, document) for document in documents], write)

    def score(self, exchange: Exchange) -> None:
        """Handle one score request."""
        parsed = parse_or_forward(self._plane, exchange, self._models.ranking_model, self._settings)
        if parsed is None:
            return
        fields, target = parsed
        fields.reject(_UNSUPPORTED)
        pairs = self._pairs(fields)

        def write(scores: Sequence[float], tokens: int) -> bytes:
            data = [{"index": index, "object": "score", "score": score} for index, score in enumerate(scores)]
            document = {
                "id": f"score-{secrets.token_hex(16)}",
                "object": "list",
                "created": int(time.time()),
                "model": target.requested_name,
                "data": data,
                "usage": _usage(tokens),
            }
            return orjson.dumps(document)

        self._score(exchange, target, pairs, write)

    def _score(
        self, exchange: Exchange, target: Target, pairs: Sequence[Pair], write: Callable[[Sequence[float], int], bytes]
    ) -> None:
        if ranks(target.config):
            requests = [
                text_request(target.config, {QUERY: query.text, DOCUMENT: document.text}) for query, document in pairs
            ]
            self._begin(
                exchange,
                requests,
                lambda responses: write([score_of(response, SCORE) for response in responses], token_count(responses)),
                partial(_pair_error, pairs),
            )
            return
        texts = {text.text: text for pair in pairs for text in pair}
        places = {text: place for place, text in enumerate(texts)}
        self._begin(
            exchange,
            [text_request(target.config, {TEXT_INPUT: text}) for text in texts],
            lambda responses: write(_cosines(pairs, places, responses), token_count(responses)),
            partial(_text_error, list(texts.values())),
        )

    def _begin(
        self,
        exchange: Exchange,
        requests: Sequence[InferRequest],
        write: Callable[[Sequence[InferResponse]], bytes],
        rename_error: Callable[[int, InvalidArgument], BadRequest],
    ) -> None:
        ItemCalls(self._plane, exchange, requests, self._settings.texts_at_once, write, rename_error).begin()

    def _pairs(self, fields: Fields) -> list[Pair]:
        names = next((names for names in _PAIR_NAMES if all(name in fields.members for name in names)), _PAIR_NAMES[0])
        left, right = (self._texts(fields, name) for name in names)
        if len(left) == 1:
            left = left * len(right)
        if len(left) != len(right):
            raise fields.error(
                names[1], f"has {len(right)} texts for {len(left)} of '{names[0]}': send one and any number, or as many"
            )
        return list(zip(left, right, strict=True))

    def _texts(self, fields: Fields, name: str) -> list[_Text]:
        value, param = fields.get(name), fields.param(name)
        if isinstance(value, str | dict):
            return [_text(value, param)]
        if not isinstance(value, list) or not 0 < len(value) <= self._settings.texts:
            raise fields.error(name, f"must be a list of 1 to {self._settings.texts} texts")
        return [_text(item, f"{param}[{index}]") for index, item in enumerate(value)]


def _text(value: object, param: str) -> _Text:
    """Read a text, or an object with a text as Jina's and Cohere's clients send it."""
    text = value.get("text") if isinstance(value, dict) else value
    if not isinstance(text, str) or not 0 < len(text) <= _TEXT_CHARACTERS:
        raise BadRequest(param, "must be a non-empty string, or an object with such a 'text'")
    return _Text(text, param)


def _cosines(pairs: Sequence[Pair], places: dict[str, int], responses: Sequence[InferResponse]) -> list[float]:
    vectors = [embedding_of(response).astype(np.float64) for response in responses]
    lengths = [float(np.linalg.norm(vector)) for vector in vectors]
    scores = []
    for left, right in pairs:
        one, other = places[left.text], places[right.text]
        product = lengths[one] * lengths[other]
        scores.append(float(vectors[one] @ vectors[other]) / product if product else 0.0)
    return scores


def _pair_error(pairs: Sequence[Pair], index: int, error: InvalidArgument) -> BadRequest:
    """Return a model's error about a pair with the client's name of the text."""
    query, document = pairs[index]
    name = f"input '{QUERY}' "
    if error.message.startswith(name):
        return BadRequest(query.param, error.message.removeprefix(name))
    return BadRequest(document.param, error.message.removeprefix(f"input '{DOCUMENT}' "))


def _text_error(texts: Sequence[_Text], index: int, error: InvalidArgument) -> BadRequest:
    return BadRequest(texts[index].param, error.message.removeprefix(f"input '{TEXT_INPUT}' "))


def _usage(tokens: int) -> dict[str, int]:
    return {"prompt_tokens": tokens, "total_tokens": tokens}
