# SPDX-License-Identifier: Apache-2.0
"""Load on OpenAI's API: what is asked, what is read of answers good and bad, and the report. The server is a few lines."""

from __future__ import annotations

import asyncio
import io
import json
import random
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.core.errors import HeadraceError, InvalidArgument
from headrace.fleet.benchmarks.scenarios import parse_scenario
from headrace.programs.loadtest.chat.report import Chart, check_output, report, svg, write_results
from headrace.programs.loadtest.chat.requests import Prompts, read_dataset
from headrace.programs.loadtest.chat.runner import ChatRun, ChatTest, Limits

Handler = Callable[[str, dict[str, Any]], list[bytes] | None]
"""From path and body to the pieces of an answer; None cuts the connection."""


def events(*documents: Any) -> list[bytes]:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    pieces = [f"data: {json.dumps(document)}\n\n".encode() for document in documents] + [b"data: [DONE]\n\n"]
    return [head, *(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces), b"0\r\n\r\n"]


def whole(document: Any, status: str = "200 OK") -> list[bytes]:
    body = json.dumps(document).encode()
    return [
        f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body
    ]


def delta_event(text: str) -> dict[str, Any]:
    return {"choices": [{"delta": {"content": text}}]}


def usage(prompt: int, answer: int) -> dict[str, Any]:
    return {"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": answer}}


class Server:
    """Notes what it is asked."""

    def __init__(self, handle: Handler) -> None:
        self._handle = handle
        self.asked: list[dict[str, Any]] = []

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                length = next((int(x.split(":")[1]) for x in head.split("\r\n") if x.startswith("content-length")), 0)
                body = json.loads(await reader.readexactly(length)) if length else {}
                self.asked.append(body)
                pieces = self._handle(head.split()[1], body)
                for piece in pieces or ():
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0.002)
                if pieces is None:
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


def measured(
    server: Server, said: str = "D(40,3)", *, model: str = "m", task: str = "text-to-text", count: int = 4, **more: Any
) -> ChatRun:
    async def run() -> ChatRun:
        async with await asyncio.start_server(server, "127.0.0.1", 0) as listening:
            port = listening.sockets[0].getsockname()[1]
            test = ChatTest(f"http://127.0.0.1:{port}/prefix", model, task=task, seed=1, **more)
            await test.prepare(5)
            return await test.run(parse_scenario(said, task), 2, Limits(30, count, 0.5))

    return asyncio.run(run())


def count_words(body: dict[str, Any]) -> int:
    return len(body["messages"][0]["content"].split()) if "messages" in body else 0


def test_tokens_times_and_sizes() -> None:
    # This server counts two tokens for a word, and ten for its template.
    server = Server(
        lambda path, body: events(delta_event("a"), delta_event("b"), {}, usage(10 + 2 * count_words(body), 3))
    )
    run = measured(server)
    reported = run.document()
    assert reported["answered"] == 4 and not reported["errors"]
    assert reported["answer_tokens"] == 3 and reported["prompt_tokens"] == 40, "it learned how the server counts"
    assert reported["first_token_ms"]["p50"] > 0
    assert reported["latency_ms"]["min"] > reported["first_token_ms"]["min"]
    assert reported["gap_ms"]["p50"] > 0 and reported["token_ms"]["p50"] > 0
    assert server.asked[-1]["ignore_eos"] and server.asked[-1]["max_tokens"] == 3 and server.asked[-1]["stream"]
    prompts = [request["messages"][0]["content"] for request in server.asked]
    assert len({prompt[:6] for prompt in prompts}) == len(prompts), "no two begin alike"


def test_a_server_that_takes_none_of_our_extras_and_counts_nothing() -> None:
    def strict(path: str, body: dict[str, Any]) -> list[bytes]:
        if "ignore_eos" in body or "stream_options" in body:
            return whole({"error": {"message": "unknown field"}}, "400 Bad Request")
        return events(delta_event("a"), delta_event("b"), delta_event("c"))

    run = measured(Server(strict), parameters={"temperature": 0})
    assert run.document()["answer_tokens"] == 3 and "estimates" in run.warnings()[0]


def test_the_only_model_is_found_and_others_must_be_named() -> None:
    def listing(*names: str) -> Handler:
        return lambda path, body: (
            whole({"data": [{"id": name} for name in names]})
            if path.endswith("/v1/models")
            else events(delta_event("a"))
        )

    server = Server(listing("llama"))
    measured(server, model="")
    assert server.asked[-1]["model"] == "llama"
    with pytest.raises(HeadraceError, match="has 2 models: give the name of one, such as a"):
        measured(Server(listing("a", "b")), model="")
    with pytest.raises(HeadraceError, match="lists no model"):
        measured(Server(listing()), model="")


@pytest.mark.parametrize(
    ("answer", "kind", "text"),
    [
        (lambda: whole({"error": {"message": "too busy"}}, "503 Service Unavailable"), "HTTP 503", "too busy"),
        (
            lambda: events(delta_event("a"), {"error": {"message": "lost its GPU"}}),
            "error in the stream",
            "lost its GPU",
        ),
        (lambda: None, "connection lost", "ended before"),
        (lambda: [b"SSH-2.0 hello\r\n\r\n"], "no HTTP", "HTTP/1.1"),
        (lambda: [b"HTTP/1.1 200 OK\r\ncontent-length: 99\r\n\r\n"], "timeout", "in time"),
    ],
)
def test_failures_are_counted_by_kind(answer: Callable[[], Any], kind: str, text: str) -> None:
    asked = 0

    def after_a_while(path: str, body: dict[str, Any]) -> list[bytes] | None:
        nonlocal asked
        asked += 1
        return events(delta_event("a")) if asked == 1 else answer()

    run = measured(Server(after_a_while), count=2)
    assert dict(run.errors) == {kind: 2} and text in run.examples[kind]
    assert kind in report("t", {}, [run])


def test_a_server_that_always_fails_is_reported_before_the_load() -> None:
    with pytest.raises(HeadraceError, match="does not answer for model 'm': HTTP 404: no such model"):
        measured(Server(lambda path, body: whole({"error": {"message": "no such model"}}, "404 Not Found")))


def test_embeddings_and_pictures() -> None:
    server = Server(lambda path, body: whole({"data": [], "usage": {"prompt_tokens": 9}}))
    run = measured(server, "E(9)", task="text-to-embeddings")
    assert run.document()["prompt_tokens"] == 9 and run.prompt_tokens_per_second > 0
    assert isinstance(server.asked[-1]["input"][0], str)
    assert "requests/s" in report("t", {}, [run])
    pictured = Server(lambda path, body: events(delta_event("a")))
    measured(pictured, "I(8,4,2)", task="image-to-text")
    kinds = [part["type"] for part in pictured.asked[-1]["messages"][0]["content"]]
    assert kinds == ["text", "image_url", "image_url"]


def test_a_picture_is_one() -> None:
    import base64

    from PIL import Image

    url = Prompts(random.Random(1)).image(5, 3)
    image = Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2])))
    image.load()
    assert image.size == (5, 3)


def test_prompts_of_files(tmp_path: Path) -> None:
    for name, content in {
        "a.jsonl": '{"prompt": "one"}\n\n{"conversations": [{"from": "human", "value": "two"}]}\n',
        "b.json": '{"rows": [{"text": "three"}, "four", 5]}',
        "c.csv": 'id,question\n1,"five, and more"\n',
        "d.txt": "six\n\nseven\n",
        "e.bin": "\0",
    }.items():
        (tmp_path / name).write_text(content)
    assert read_dataset(tmp_path) == ["one", "two", "three", "four", "five, and more", "six", "seven"]
    text = Prompts(random.Random(1), ["alpha beta"]).text(13)
    assert text.split()[1:5] == ["alpha", "beta", "alpha", "beta"]
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(InvalidArgument, match=r"bad\.json: cannot be read as \.json"):
        read_dataset(tmp_path / "bad.json")
    (tmp_path / "nothing").mkdir()
    with pytest.raises(InvalidArgument, match="has no prompts"):
        read_dataset(tmp_path / "nothing")


def test_pictures_are_pictures_whatever_was_measured() -> None:
    one = Chart("<a & b>", "x", "y", {"D(1,1)": [(1, 5, "1"), (2, float("nan"), "2"), (4, 9.5, "4")], "E": []})
    assert len(ET.fromstring(svg(one)).findall("{*}circle")) == 2
    assert "nothing was measured" in svg(Chart("t", "x", "y", {}))
    ET.fromstring(svg(Chart("t", "x", "y", {"a": [(0, 0, "0")]})))


def test_where_results_are_kept(tmp_path: Path) -> None:
    place = str(tmp_path / "new" / "folder")
    check_output(place)
    assert list((tmp_path / "new" / "folder").iterdir()) == []
    write_results(place, {"results.json": b"{}"})
    assert (tmp_path / "new" / "folder" / "results.json").read_bytes() == b"{}"
    with pytest.raises(InvalidArgument, match="give a folder, s3://"):
        check_output("https://example.com/x")
