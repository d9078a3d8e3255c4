# SPDX-License-Identifier: Apache-2.0
"""Rerank and score requests as Jina's, Cohere's and vLLM's clients send them, over a socket, with tiny models."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from openai import OpenAI
from tiny_model_server import served

from support.llm_models import tiny_encoder, tiny_llama
from support.serving import Serving

CONFIG = 'backend: "llm"\ninstance_group [ { kind: KIND_CPU } ]\n'
QUERY = "what turns the mill"
DOCUMENTS = ["the river runs to the sea", "a mill grinds corn", "numbers 0123456789", "fast water to a turbine"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("models")
    tiny_encoder(made / "ranker" / "1", "Bert", "ForSequenceClassification")
    tiny_encoder(made / "embedder" / "1", "Bert")
    tiny_llama(made / "writer" / "1")
    for name in ("ranker", "embedder", "writer"):
        (made / name / "config.pbtxt").write_text(CONFIG)
    return made


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Serving]:
    with served(folder) as running:
        yield running


def ask(server: Serving, path: str, body: Any, method: str = "POST") -> tuple[int, Any]:
    with closing(HTTPConnection("127.0.0.1", server.port, timeout=60)) as connection:
        connection.request(method, path, body if isinstance(body, bytes) else json.dumps(body))
        response = connection.getresponse()
        return response.status, json.loads(response.read())


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[float]:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    path = folder / "ranker" / "1"
    model, tokenizer = (
        AutoModelForSequenceClassification.from_pretrained(path).eval(),
        AutoTokenizer.from_pretrained(path),
    )
    with torch.inference_mode():
        inputs = [tokenizer(QUERY, document, return_tensors="pt") for document in DOCUMENTS]
        return [float(model(**one).logits.sigmoid()) for one in inputs]


@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank", "/v2/rerank"])
def test_documents_are_sorted_by_their_scores(server: Serving, expected: list[float], path: str) -> None:
    documents = [*DOCUMENTS[:2], *({"text": text} for text in DOCUMENTS[2:])]
    status, answer = ask(server, path, {"model": "ranker", "query": QUERY, "documents": documents})
    assert status == 200, answer
    order = sorted(range(4), key=lambda index: -expected[index])
    assert [result["index"] for result in answer["results"]] == order
    scores = [result["relevance_score"] for result in answer["results"]]
    assert scores == pytest.approx([expected[index] for index in order], abs=1e-5)
    assert answer["model"] == "ranker"
    assert answer["id"].startswith("rerank-")
    assert answer["usage"]["total_tokens"] == answer["usage"]["prompt_tokens"] > 4 * 4
    if path == "/v2/rerank":  # as Cohere's client reads it
        assert "document" not in answer["results"][0]
        assert answer["meta"] == {"api_version": {"version": "2"}, "billed_units": {"search_units": 1}}
    else:  # as Jina's and vLLM's do
        assert [result["document"]["text"] for result in answer["results"]] == [DOCUMENTS[index] for index in order]


def test_top_n_and_return_documents(server: Serving, expected: list[float]) -> None:
    sent = {"model": "ranker", "query": QUERY, "documents": DOCUMENTS, "return_documents": False}
    best = max(range(4), key=lambda index: expected[index])
    for top_n, count in ((1, 1), (3, 3), (0, 4), (None, 4), (99, 4)):
        _, answer = ask(server, "/v1/rerank", {**sent, "top_n": top_n})
        assert len(answer["results"]) == count
        assert answer["results"][0]["index"] == best
        assert set(answer["results"][0]) == {"index", "relevance_score"}
    _, answer = ask(server, "/v2/rerank", {**sent, "return_documents": True, "top_n": 1})
    assert answer["results"][0]["document"] == {"text": DOCUMENTS[best]}


@pytest.mark.parametrize("names", [("text_1", "text_2"), ("queries", "documents"), ("data_1", "data_2")])
def test_pairs_are_scored_in_their_order(server: Serving, expected: list[float], names: tuple[str, str]) -> None:
    left, right = names
    for path, first, second, scores in (
        ("/score", QUERY, DOCUMENTS[1], expected[1:2]),
        ("/v1/score", QUERY, DOCUMENTS, expected),
        ("/v1/score", [QUERY], DOCUMENTS, expected),
        ("/v1/score", [QUERY] * 4, DOCUMENTS, expected),
    ):
        status, answer = ask(server, path, {"model": "ranker", left: first, right: second})
        assert status == 200, answer
        assert answer["object"] == "list"
        assert [item["index"] for item in answer["data"]] == list(range(len(scores)))
        assert {item["object"] for item in answer["data"]} == {"score"}
        assert [item["score"] for item in answer["data"]] == pytest.approx(scores, abs=1e-5)


def test_an_embedding_model_scores_by_the_cosine(server: Serving) -> None:
    with OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0) as client:
        made = client.embeddings.create(model="embedder", input=[QUERY, *DOCUMENTS])
    vectors = np.array([entry.embedding for entry in made.data])
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    cosines = (vectors[1:] @ vectors[0]).tolist()
    status, answer = ask(server, "/v1/score", {"model": "embedder", "text_1": QUERY, "text_2": [*DOCUMENTS, QUERY]})
    assert status == 200, answer
    assert [item["score"] for item in answer["data"]] == pytest.approx([*cosines, 1.0], abs=1e-5)
    assert answer["usage"]["prompt_tokens"] == made.usage.prompt_tokens
    _, ranked = ask(server, "/v1/rerank", {"model": "embedder", "query": QUERY, "documents": DOCUMENTS, "top_n": 2})
    assert [result["index"] for result in ranked["results"]] == sorted(range(4), key=lambda index: -cosines[index])[:2]


def test_the_pairs_of_a_request_are_computed_in_batches(server: Serving) -> None:
    def counts() -> tuple[int, int]:
        statistics = ask(server, "/v2/models/ranker/stats", b"", "GET")[1]["model_stats"][0]
        return statistics["inference_count"], statistics["execution_count"]

    before = counts()
    status, answer = ask(
        server, "/v1/score", {"model": "ranker", "text_1": QUERY, "text_2": [f"text {n}" for n in range(200)]}
    )
    assert (status, len(answer["data"])) == (200, 200)
    items, batches = (later - earlier for later, earlier in zip(counts(), before, strict=True))
    assert items == 200
    assert batches < 60


def test_the_models_are_listed_and_know_their_routes(server: Serving) -> None:
    _, listed = ask(server, "/v1/models", b"", "GET")
    assert {model["id"] for model in listed["data"]} == {"ranker", "embedder", "writer"}
    status, answer = ask(server, "/v1/completions", {"model": "ranker", "prompt": "x"})
    assert (status, "/v1/rerank" in answer["error"]["message"]) == (400, True)
    status, answer = ask(server, "/v1/embeddings", {"model": "ranker", "input": "x"})
    assert (status, answer["error"]["param"]) == (400, "model")


def test_the_same_model_through_v2(server: Serving, expected: list[float]) -> None:
    inputs = [
        {"name": name, "datatype": "BYTES", "shape": [4, 1], "data": texts}
        for name, texts in (("query", [QUERY] * 4), ("document", DOCUMENTS))
    ]
    status, answer = ask(server, "/v2/models/ranker/infer", {"inputs": inputs})
    assert status == 200, answer
    scores = next(output for output in answer["outputs"] if output["name"] == "score")
    assert scores["data"] == pytest.approx(expected, abs=1e-5)


LONG = "the river runs " * 200
RERANK: dict[str, Any] = {"model": "ranker", "query": "q", "documents": ["a", "b"]}
SCORE: dict[str, Any] = {"model": "ranker", "text_1": "q", "text_2": ["a", "b"]}


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/v1/rerank", {**RERANK, "model": None}, 400, "model"),
        ("/v1/rerank", {**RERANK, "model": "nobody"}, 404, "model"),
        ("/v1/rerank", {**RERANK, "model": "writer"}, 400, "model"),
        ("/v1/rerank", {**RERANK, "query": None}, 400, "query"),
        ("/v1/rerank", {**RERANK, "query": ["q"]}, 400, "query"),
        ("/v1/rerank", {**RERANK, "query": ""}, 400, "query"),
        ("/v1/rerank", {**RERANK, "query": LONG}, 400, "documents[0]"),
        ("/v1/rerank", {**RERANK, "documents": []}, 400, "documents"),
        ("/v1/rerank", {**RERANK, "documents": 3}, 400, "documents"),
        ("/v1/rerank", {**RERANK, "documents": ["a"] * 2049}, 400, "documents"),
        ("/v1/rerank", {**RERANK, "documents": ["a", 3]}, 400, "documents[1]"),
        ("/v1/rerank", {**RERANK, "documents": ["a", {"title": "x"}]}, 400, "documents[1]"),
        ("/v1/rerank", {**RERANK, "documents": ["a", LONG]}, 400, "documents[1]"),
        ("/v2/rerank", {**RERANK, "model": "embedder", "documents": ["a", LONG]}, 400, "documents[1]"),
        ("/rerank", {**RERANK, "top_n": -1}, 400, "top_n"),
        ("/rerank", {**RERANK, "return_documents": "yes"}, 400, "return_documents"),
        ("/v2/rerank", {**RERANK, "max_tokens_per_doc": 9}, 400, "max_tokens_per_doc"),
        ("/v1/score", {**SCORE, "text_1": None}, 400, "text_1"),
        ("/v1/score", {**SCORE, "text_2": []}, 400, "text_2"),
        ("/v1/score", {**SCORE, "text_1": ["a", "b", "c"]}, 400, "text_2"),
        ("/v1/score", {**SCORE, "text_2": ["a", LONG]}, 400, "text_2[1]"),
        ("/score", {"model": "ranker", "queries": "q", "documents": ["a", 1]}, 400, "documents[1]"),
        ("/score", b"{", 400, None),
    ],
)
def test_wrong_requests_name_the_member(server: Serving, path: str, body: Any, status: int, param: str | None) -> None:
    found, answer = ask(server, path, body)
    assert (found, answer["error"]["param"]) == (status, param)
    assert ask(server, "/v1/rerank", RERANK)[0] == 200


def test_a_wrong_method_is_refused(server: Serving) -> None:
    for path in ("/v1/rerank", "/v1/score"):
        status, answer = ask(server, path, b"", "GET")
        assert (status, "use POST" in answer["error"]["message"]) == (405, True)
