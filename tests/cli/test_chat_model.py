# SPDX-License-Identifier: Apache-2.0
"""`headrace chat` with tiny real language models: served in this process, and by a server that the chat starts itself."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image
from terminals import CTRL_C, CTRL_D, Terminal

from support.llm_models import tiny_llama
from support.ports import free_port
from support.programs import run, run_process
from support.servers import ThreadServer, serve_in_thread
from support.waiting import eventually


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ThreadServer]:
    with serve_in_thread(tiny_llama(tmp_path_factory.mktemp("models") / "tiny")) as started:
        yield started


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    Image.new("RGB", (16, 16), "red").save(tmp_path / "picture.png")
    return tmp_path / "picture.png"


def servers_started_by(process: int) -> list[int]:
    """The processes that have this one as their parent."""
    children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    return [int(child) for child in children]


def test_an_answer_of_the_only_model(server: ThreadServer) -> None:
    arguments = ("chat", "--url", server.url, "--max-tokens", "8", "--temperature", "0")
    done = run(*arguments, "--json", input="the quick brown fox")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert (document["model"], document["finish_reason"], document["completion_tokens"]) == ("tiny", "length", 8)
    assert document["prompt_tokens"] > 4
    assert document["first_token_seconds"] > 0
    again = run(*arguments, input="the quick brown fox")
    assert again.stdout == document["content"] + "\n"


def test_images_for_a_model_that_does_not_see(server: ThreadServer, picture: Path) -> None:
    done = run("chat", "tiny", "--url", server.url, "--image", picture, input="what is it?")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "error: messages: the model accepts text only: leave out images and videos\n"


def test_the_chat_continues_after_a_refused_image(server: ThreadServer, picture: Path) -> None:
    arguments = ("--url", server.url, "--max-tokens", "4", "--image", picture)
    with Terminal("chat", *arguments) as terminal:
        terminal.read_until("\n> ")
        terminal.type("what is it?\n")
        assert "the model accepts text only" in terminal.read_until("\n> ")
        terminal.type("hello\n")
        assert "(cut at 4 tokens: raise --max-tokens" in terminal.read_until("\n> ")
        terminal.type("/stats\n")
        shown = terminal.read_until("\n> ")
        assert re.search(r"last answer: time to first token \d+\.\d{3} s, \d+\.\d tokens/s, \d+ prompt tokens", shown)
        assert "4 completion tokens\nsession: 1 answer, " in shown
        terminal.type(CTRL_D)
        assert terminal.wait() == 0


@pytest.mark.slow  # quick, with a server that runs: above
def test_a_chat_with_a_folder_starts_a_server_and_stops_it(tmp_path: Path) -> None:
    tiny_llama(tmp_path / "tiny")
    with Terminal("chat", "./tiny", "--max-tokens", "4", cwd=tmp_path) as terminal:
        assert "Starting a server for ./tiny ... " in terminal.read_until("\n> ")
        (child,) = servers_started_by(terminal.process.pid)
        assert os.getsid(child) == child, "Ctrl-C of this terminal would reach the server"
        terminal.type("the quick brown fox\n")
        shown = terminal.read_until("\n> ")
        assert "headrace:" not in shown
        assert "\n(cut at 4 tokens" in shown
        terminal.type(CTRL_D)
        assert terminal.wait() == 0
    assert not Path(f"/proc/{child}").exists()


@pytest.mark.slow
def test_ctrl_c_stops_a_server_that_is_still_starting(tmp_path: Path) -> None:
    model = tmp_path / "models" / "sleeper" / "1" / "model.py"  # the server never becomes ready
    model.parent.mkdir(parents=True)
    model.write_text("import time\n\ntime.sleep(600)\n")
    with Terminal("chat", "--serve", "./models", cwd=tmp_path) as terminal:
        terminal.read_until("Starting a server for ./models ... ")
        (child,) = servers_started_by(terminal.process.pid)
        terminal.type(CTRL_C)
        assert terminal.wait() == 130
    assert not Path(f"/proc/{child}").exists()


@pytest.mark.slow
def test_the_server_ends_with_a_chat_that_is_killed(tmp_path: Path) -> None:
    tiny_llama(tmp_path / "tiny")
    with Terminal("chat", "--serve", "tiny", cwd=tmp_path) as terminal:
        terminal.read_until("\n> ")
        (child,) = servers_started_by(terminal.process.pid)
        os.kill(terminal.process.pid, signal.SIGKILL)
        eventually(lambda: not Path(f"/proc/{child}").exists() or "Z" in Path(f"/proc/{child}/stat").read_text())


@pytest.mark.slow
def test_a_vision_language_model_sees_an_image(tmp_path: Path, picture: Path) -> None:
    from vl_model import tiny_qwen_vl

    tiny_qwen_vl(tmp_path / "seer")
    arguments = ("chat", "--serve", tmp_path / "seer", "--max-tokens", "4", "--json")
    plain = run_process(*arguments, input="what is it?")
    assert plain.returncode == 0, plain.stderr
    seen = run_process(*arguments, "--image", picture, input="what is it?")
    assert seen.returncode == 0, seen.stderr
    assert seen.stderr == f"Starting a server for {tmp_path / 'seer'} ...\n"
    assert json.loads(seen.stdout)["prompt_tokens"] > json.loads(plain.stdout)["prompt_tokens"]


@pytest.mark.slow
def test_a_folder_that_cannot_be_served(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    tiny_llama(tmp_path / "broken")
    (tmp_path / "broken" / "model.safetensors").write_bytes(b"not weights")
    nowhere = f"http://127.0.0.1:{free_port()}"
    for name, code, text in (
        ("./broken", 2, "the server for ./broken did not start: 1 of 1 models failed to load: broken: "),
        ("empty", 1, "empty has no chat model; a language model is a Hugging Face folder with config.json,"),
    ):
        done = run_process("chat", name, "--url", nowhere, input="hello", cwd=tmp_path)
        assert (done.returncode, done.stdout) == (code, "")
        started, said = done.stderr.splitlines()
        assert started == f"Starting a server for {name} ..."
        assert said.startswith(f"error: {text}")
    done = run_process("chat", "--serve", "none", input="hello", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "error: the server for none did not start: " in done.stderr
