# SPDX-License-Identifier: Apache-2.0
"""`headrace chat` against a real server with a fake model that repeats what it is told: pipes, a terminal, and errors."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from openai_server import OpenAiServer, openai_server_with_models
from PIL import Image
from terminals import CTRL_C, CTRL_D, Terminal

from headrace.cli.chat_client import Answer, ChatClient
from headrace.cli.chat_session import describe, show_piece
from headrace.core.errors import HeadraceError
from headrace.models.media.reader import MediaReader
from headrace.models.media.settings import MediaSettings
from headrace.net.http.exchange import Exchange
from headrace.net.http.heads import OK_PLAIN
from headrace.net.http.routes import Routes
from headrace.net.site import Site
from support.ports import free_port
from support.programs import HEADRACE, Finished, run, run_process
from support.serving import serving
from support.waiting import eventually


@pytest.fixture(scope="module")
def openai_server() -> Iterator[OpenAiServer]:
    reader = MediaReader(MediaSettings())
    with openai_server_with_models(reader=reader) as server:
        yield server
    reader.close()


@pytest.fixture
def url(openai_server: OpenAiServer) -> str:
    return f"http://127.0.0.1:{openai_server.port}"


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    path = tmp_path / "picture.jpg"
    content = BytesIO()
    Image.new("RGB", (8, 6), "red").save(content, "PNG")
    path.write_bytes(content.getvalue())  # a PNG with the name of a JPEG
    return path


def error_line(done: Finished, code: int) -> str:
    assert (done.returncode, done.stdout) == (code, ""), done
    lines = [line for line in done.stderr.splitlines() if not line.startswith("  try: ")]
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("error: ")
    return lines[0]


def test_standard_input_is_one_message_and_only_the_answer_is_printed(openai_server: OpenAiServer, url: str) -> None:
    done = run("chat", "repeater", "--url", url, "--system", "be brief", input="one two\nthree /stats\n")
    assert (done.returncode, done.stdout, done.stderr) == (0, "one two\nthree /stats\n", "")
    generation = openai_server.repeater.received[-1]
    assert [dict(message) for message in generation.messages] == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "one two\nthree /stats"},
    ]
    assert (generation.stream, generation.sampling.max_tokens) == (True, None)


def test_sampling_options_are_sent_and_a_truncated_answer_is_reported(openai_server: OpenAiServer, url: str) -> None:
    done = run("chat", "repeater", "--url", url, "--max-tokens", "2", "--temperature", "0.5", input="one two three")
    assert (done.returncode, done.stdout) == (0, "one two\n")
    assert done.stderr.startswith("note: cut at 2 tokens: raise --max-tokens")
    assert openai_server.repeater.received[-1].sampling.temperature == 0.5


def test_json_has_the_answer_and_its_measurements(url: str) -> None:
    done = run("chat", "repeater", "--url", url, "--json", input="one two three")
    document = json.loads(done.stdout)
    assert document.pop("first_token_seconds") > 0
    assert document.pop("generation_seconds") >= 0
    assert document == {
        "model": "repeater",
        "content": "one two three",
        "finish_reason": "stop",
        "prompt_tokens": 3,
        "cached_tokens": 1,
        "completion_tokens": 3,
    }


def test_a_url_may_lack_its_scheme_or_end_in_v1(url: str) -> None:
    for written in (url.removeprefix("http://"), f"{url}/v1", f"{url}/v1/"):
        assert run("chat", "repeater", "--url", written, input="hello").stdout == "hello\n"


def test_an_adapter_is_a_model(openai_server: OpenAiServer, url: str) -> None:
    assert run("chat", "pirate", "--url", url, input="hello").stdout == "hello\n"
    assert openai_server.repeater.received[-1].adapter == "pirate"


def test_a_model_of_the_server_comes_before_a_folder_of_its_name(url: str, tmp_path: Path) -> None:
    """`headrace serve repeater` in this folder gives the model that name."""
    (tmp_path / "repeater").mkdir()
    done = run("chat", "repeater", "--url", url, input="hello", cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "hello\n", "")


def test_an_image_is_sent_with_the_type_of_its_content(url: str, picture: Path) -> None:
    done = run("chat", "repeater", "--url", url, "--image", picture, "--image", picture, input="what is it?")
    assert done.stdout == "<promptimage 6x8x3> <promptimage 6x8x3> what is it?\n", done.stderr


def test_a_model_must_be_named_where_there_are_several(url: str) -> None:
    output = error_line(run("chat", "--url", url, input="hello"), 2)
    assert output.endswith(
        "has several chat models; name one of them: elsewhere, llama, mistral, odd, repeater, thinker"
    )


def test_the_only_chat_model_is_the_default() -> None:
    """Models that do not chat, and adapters, are listed beside it."""
    requests: list[str] = []

    def answer(document: Any) -> Any:
        return lambda exchange: exchange.respond(OK_PLAIN, json.dumps(document).encode())

    def record(exchange: Exchange) -> None:
        requests.append(json.loads(bytes(exchange.body))["model"])
        exchange.respond(OK_PLAIN, b'data: {"choices": [{"delta": {"content": "hi"}}]}\n\ndata: [DONE]\n\n')

    listed = {
        "data": [
            {"id": "base"},
            {"id": "pirate", "parent": "base"},
            {"id": "embedder"},
            {"id": "ranker"},
            {"id": "whisper"},
        ]
    }
    routes = Routes()
    routes.add("GET", "/v1/models", answer(listed))
    routes.add("GET", "/v2/models/base", answer({"outputs": [{"name": "text_output"}]}))
    routes.add("GET", "/v2/models/embedder", answer({"outputs": [{"name": "embedding"}]}))
    routes.add("GET", "/v2/models/ranker", answer({"outputs": [{"name": "score"}]}))
    routes.add("GET", "/v2/models/whisper", answer({"outputs": [{"name": "text"}, {"name": "transcript"}]}))
    routes.add("POST", "/v1/chat/completions", record)
    with serving(lambda: Site(routes)) as server:
        done = run("chat", "--url", f"http://127.0.0.1:{server.port}", input="hello")
    assert (done.stdout, requests) == ("hi\n", ["base"])


def test_unknown_models_and_models_that_do_not_generate(url: str) -> None:
    output = error_line(run("chat", "repeter", "--url", url, input="hello"), 1)
    assert "has no model 'repeter' (did you mean 'repeater'?); choose one of: pirate, poet, elsewhere, " in output
    assert "elsewhere, llama, mistral, odd, repeater" in output
    assert "letters" not in output
    output = error_line(run("chat", "letters", "--url", url, input="hello"), 1)
    assert "'letters' does not generate text; choose one of: pirate," in output


def test_no_server(tmp_path: Path) -> None:
    done = run("chat", "--url", f"http://127.0.0.1:{free_port()}", input="hello")
    assert "no answer from http://127.0.0.1:" in error_line(done, 2)
    assert "  try: headrace serve FOLDER" in done.stderr
    assert "not a server URL" in error_line(run("chat", "--url", "ftp://127.0.0.1", input="hello"), 2)


def test_a_server_of_another_kind() -> None:
    with serving(lambda: Site(Routes())) as server:
        done = run("chat", "--url", f"http://127.0.0.1:{server.port}", input="hello")
    assert "has no /v1/models: is it a server with OpenAI's protocol? Set --url" in error_line(done, 1)


def test_bad_input_is_reported_before_anything_is_sent(url: str, tmp_path: Path) -> None:
    (tmp_path / "note.png").write_text("not an image")
    for words, text in (
        (("--image", tmp_path / "none.png"), "none.png: no such file"),
        (("--image", tmp_path), "is a folder"),
        (("--image", tmp_path / "note.png"), "note.png is not an image; use PNG, JPEG"),
        (("--serve", "models"), "--serve starts a server of its own"),
        (("--api-key", "schlüssel"), "--api-key"),
    ):
        assert text in error_line(run("chat", "repeater", "--url", url, *words, input="hello"), 2)
    assert "standard input is empty" in error_line(run("chat", "repeater", "--url", url, input=" \n"), 2)


def test_what_the_server_refuses_is_one_line(url: str) -> None:
    assert error_line(run("chat", "repeater", "--url", url, input="REFUSE"), 1) == "error: no"
    output = error_line(run("chat", "repeater", "--url", url, "--temperature", "9", input="hello"), 1)
    assert "temperature" in output


def test_reasoning_is_shown_and_is_not_part_of_the_answer(url: str) -> None:
    done = run("chat", "thinker", "--url", url, input="<think> A plan. </think> The answer.")
    assert (done.returncode, done.stdout.rstrip("\n")) == (0, "A plan.\n\nThe answer.")
    answer = Answer()
    body = {"model": "thinker", "messages": [{"role": "user", "content": "<think> A plan. </think> Yes, so."}]}
    list(ChatClient(url).stream(body, answer))
    assert (answer.reasoning, answer.text) == ("A plan.", "Yes, so.")


def test_a_stream_that_breaks_is_an_error(url: str) -> None:
    done = run("chat", "repeater", "--url", url, input="one two BREAK")
    assert (done.returncode, done.stdout) == (1, "one two")
    assert "error: the model broke" in done.stderr
    answer = Answer()
    with serving(lambda: Site(_cut_routes())) as server:
        client = ChatClient(f"http://127.0.0.1:{server.port}")
        with pytest.raises(HeadraceError, match="closed the connection in the middle of the answer"):
            list(client.stream({"messages": []}, answer))
    assert answer.text == "half"


def _cut_routes() -> Routes:
    def cut(exchange: Exchange) -> None:
        exchange.start(OK_PLAIN)
        exchange.send(b'data: {"choices": [{"delta": {"content": "half"}}]}\n\n')
        exchange.finish()

    routes = Routes()
    routes.add("POST", "/v1/chat/completions", cut)
    return routes


def test_an_api_key_comes_from_the_option_or_the_environment() -> None:
    seen: list[bytes | None] = []

    def refuse(exchange: Exchange) -> None:
        seen.append(exchange.head.get(b"authorization"))
        exchange.respond(OK_PLAIN, b'{"data": []}')

    routes = Routes()
    routes.add("GET", "/v1/models", refuse)
    with serving(lambda: Site(routes)) as server:
        arguments = ("chat", "--url", f"http://127.0.0.1:{server.port}")
        assert "has no chat model" in error_line(run(*arguments, env={"HEADRACE_API_KEY": "one"}, input="x"), 1)
        run(*arguments, "--api-key", "two", env={"HEADRACE_API_KEY": "one"}, input="x")
        run(*arguments, env={"HEADRACE_API_KEY": ""}, input="x")
    assert seen == [b"Bearer one", b"Bearer two", None]


def test_the_program_works_in_a_pipe(url: str) -> None:
    done = run_process("chat", "repeater", "--url", url, input="Grüße 🙂\n")
    assert (done.returncode, done.stdout, done.stderr) == (0, "Grüße 🙂\n", "")


def test_an_interrupt_in_a_pipe_stops_the_answer(openai_server: OpenAiServer, url: str) -> None:
    cancelled = openai_server.repeater.cancelled
    arguments = [HEADRACE, "chat", "repeater", "--url", url]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        process.stdin.write(b"go FOREVER")
        process.stdin.close()
        assert process.stdout.read(20).startswith(b"go FOREVER")
        process.send_signal(signal.SIGINT)
        process.stdout.read()
        assert (process.wait(60), process.stderr.read()) == (130, b"")
    eventually(lambda: openai_server.repeater.cancelled == cancelled + 1)


def test_a_terminal(openai_server: OpenAiServer, url: str, tmp_path: Path, picture: Path) -> None:
    saved = tmp_path / "saved.json"
    with Terminal("chat", "repeater", "--url", url, "--system", "be brief", cwd=tmp_path) as terminal:
        assert "Chatting with repeater." in terminal.read_until("\n> ")
        terminal.type("/stats\n")
        assert "error: there is no answer yet" in terminal.read_until("\n> ")
        terminal.type("hello there\n")
        assert terminal.read_until("\n> ").endswith("\nhello there\n> ")
        terminal.type("two \\\nlines\n")
        assert terminal.read_until("\n> ").endswith("\ntwo \nlines\n> ")
        terminal.type('"""a\n\nb"""\n')
        assert terminal.read_until("\n> ").endswith("\na\n\nb\n> ")
        terminal.type("/stats\n")
        shown = terminal.read_until("\n> ")
        assert "\nlast answer: time to first token 0." in shown
        assert "2 prompt tokens (1 cached), 2 completion tokens\n" in shown
        assert "\nsession: 3 answers, time to first token 0." in shown
        assert "6 prompt tokens (3 cached), 6 completion tokens\n" in shown
        terminal.type(f"/image {picture}\n")
        assert "The next message has 1 image." in terminal.read_until("\n> ")
        terminal.type("look\n")
        assert "\n<promptimage 6x8x3> look\n" in terminal.read_until("\n> ")
        terminal.type(f"/save {saved}\n")
        assert f"Saved 8 messages to {saved}." in terminal.read_until("\n> ")
        terminal.type("/clear\n")
        terminal.read_until("cleared.\n> ")
        terminal.type("/system be long\n")
        terminal.read_until("prompt set.\n> ")
        terminal.type("/etc/hosts?\n")
        assert terminal.read_until("\n> ").endswith("\n/etc/hosts?\n> ")
        assert [dict(message)["content"] for message in openai_server.repeater.received[-1].messages] == [
            "be long",
            "/etc/hosts?",
        ]
        terminal.type("/quit\n")
        assert terminal.wait() == 0
    document = json.loads(saved.read_text())
    assert document["model"] == "repeater"
    assert [message["role"] for message in document["messages"]] == ["system", *["user", "assistant"] * 4]
    assert document["messages"][2] == {"role": "assistant", "content": "hello there"}
    assert document["messages"][7]["content"][0]["image_url"]["url"].startswith("data:image/png;base64,")


def test_ctrl_c_stops_the_answer_and_ctrl_d_ends_the_chat(openai_server: OpenAiServer, url: str) -> None:
    cancelled = openai_server.repeater.cancelled
    with Terminal("chat", "repeater", "--url", url) as terminal:
        terminal.read_until("\n> ")
        terminal.type("go FOREVER\n")
        terminal.read_until(" FOREVER FOREVER")
        terminal.type(CTRL_C)
        terminal.read_until(" (stopped)\n> ")
        eventually(lambda: openai_server.repeater.cancelled == cancelled + 1)
        terminal.type("half a line")
        terminal.read_until("half a line")
        eventually(terminal.waits)
        terminal.type(CTRL_C)
        assert "Ctrl-D or /exit ends the chat." in terminal.read_until("\n> ")
        terminal.type("and on\n")
        assert terminal.read_until("\n> ").endswith("\nand on\n> ")
        question, answer, last = (dict(message)["content"] for message in openai_server.repeater.received[-1].messages)
        assert (question, last) == ("go FOREVER", "and on")
        assert answer.startswith("go FOREVER FOREVER")
        terminal.type("/stats\n")
        assert "1 stopped" in terminal.read_until("\n> ")
        terminal.type(CTRL_D)
        assert terminal.wait() == 0


def test_errors_in_a_terminal_are_lines_and_the_chat_continues(
    openai_server: OpenAiServer, url: str, tmp_path: Path
) -> None:
    with Terminal("chat", "repeater", "--url", url) as terminal:
        terminal.read_until("\n> ")
        for typed, text in (
            ("REFUSE", "\nerror: no\n"),
            ("one BREAK", "\none\nerror: the model broke\n"),
            ("/nothing", "error: there is no command /nothing; /help lists the commands\n"),
            ("/image", "error: write /image FILE\n"),
            (f"/image {tmp_path}/none.png", "none.png: no such file"),
            ("/save", "error: write /save FILE\n"),
            (f"/save {tmp_path}/none/x.json", "x.json: No such file or directory; choose another file\n"),
            ("/help", "\n/exit          end the chat; so do /quit, /bye and Ctrl-D\n"),
            ("", "> "),
        ):
            terminal.type(f"{typed}\n")
            assert text in terminal.read_until("> "), typed
        terminal.type("well\n")
        assert terminal.read_until("\n> ").endswith("\nwell\n> ")
        assert [dict(message)["content"] for message in openai_server.repeater.received[-1].messages] == ["well"]


def test_the_first_token_and_the_tokens_after_it_are_timed_apart() -> None:
    answer = Answer()
    for text, seconds in (("a", 0.25), (" b", 0.5), (" c", 1.0)):
        answer.add(text, seconds)
    assert (answer.text, answer.completion_tokens) == ("a b c", 3)
    assert (answer.first_token_seconds, answer.generation_seconds) == (0.25, 0.75)


def test_statistics_are_averages_and_sums() -> None:
    quick = Answer(
        "a b c",
        prompt_tokens=10,
        completion_tokens=3,
        first_token_seconds=0.25,
        generation_seconds=0.5,
        cached_tokens=8,
    )
    slow = Answer("d", prompt_tokens=20, completion_tokens=1, first_token_seconds=0.75)
    assert describe([quick]) == (
        "time to first token 0.250 s, 4.0 tokens/s, 10 prompt tokens (8 cached), 3 completion tokens"
    )
    assert describe([quick, slow]) == (
        "time to first token 0.500 s, 4.0 tokens/s, 30 prompt tokens (8 cached), 4 completion tokens"
    )
    assert describe([Answer()]) == "no token, 0 prompt tokens, 0 completion tokens"


def test_control_characters_of_a_model_do_not_reach_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "a\x1b[2J\x9b1m\tb\r\n\x07é"
    show_piece(text)
    assert capsys.readouterr().out == text
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    show_piece(text)
    assert capsys.readouterr().out == "a[2J1m\tb\né"
