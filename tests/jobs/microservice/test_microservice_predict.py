# SPDX-License-Identifier: Apache-2.0
"""cosmos-predict2.5 with a stand-in for its pipeline: flags, parameters, media, and the video that comes back."""

from __future__ import annotations

import base64
import io
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import av
import pytest
from picture_models import data_url, png
from service_process import Answer, HttpTarget, local_service, settings_for
from vl_model import mp4

from headrace.jobs.microservice.settings import PipelineChoice

ARCH = "cosmos-predict2.5"
CHAT = "/v1/chat/completions"
HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def predict(tmp_path_factory: pytest.TempPathFactory, open_service: Callable[..., Any]) -> Iterator[HttpTarget]:
    folder = tmp_path_factory.mktemp("predict")
    (folder / "checkpoint").mkdir()
    arguments = (
        "start",
        "--checkpoint-path",
        folder / "checkpoint",
        "--output-dir",
        folder / "out",
        "--disable-guardrails",
    )
    path = os.pathsep.join(filter(None, (str(HERE), os.environ.get("PYTHONPATH", ""))))
    more = ("--pipeline", "stand_in_pipeline:open_pipeline", "--pid-file", folder / "pid")
    with open_service(*arguments, *more, folder=folder, env={"PYTHONPATH": path}) as running:
        running.until("model_loaded")
        assert (folder / "out").is_dir()
        assert int((folder / "pid").read_text()) == running.pid
        yield running
        assert running.stop() == 0
        assert not (folder / "pid").exists()


def chat(running: HttpTarget, content: Any, **more: Any) -> Answer:
    return running.post(CHAT, {"messages": [{"role": "user", "content": content}], **more})


def frames_of(url: str) -> int:
    kind, _, payload = url.partition(",")
    assert kind == "data:video/mp4;base64"
    with av.open(io.BytesIO(base64.b64decode(payload))) as container:
        return sum(1 for _ in container.decode(video=0))


def test_a_chat_gives_a_video(predict: HttpTarget) -> None:
    created = chat(predict, "a river", max_tokens=5, guidance=3, num_steps=2, seed=4, negative_prompt="blur")
    assert created.status == 200, created.text
    (choice,) = created.body["choices"]
    assert (frames_of(choice["message"]["content"]), choice["finish_reason"]) == (5, "stop")
    other = chat(predict, "a mill", max_tokens=5, seed=4)
    assert other.body["choices"][0]["message"]["content"] != choice["message"]["content"]
    assert frames_of(chat(predict, "a river").body["choices"][0]["message"]["content"]) == 77
    picture = {"type": "image_url", "image_url": {"url": data_url(png())}}
    text = {"type": "text", "text": "a river"}
    assert chat(predict, [picture, text], max_tokens=2, inference_type="image2world").status == 200


def test_inference_derives_the_missing_arguments(predict: HttpTarget) -> None:
    for media, kind in (
        (None, "text2world"),
        (data_url(png()), "image2world"),
        (data_url(mp4(), "video/mp4"), "video2world"),
    ):
        results = predict.infer(prompt="a river", media=media, num_output_frames=2)
        assert (results["inference_type"], results["model_type"]) == (kind, "video")
        assert frames_of(results["response"]) == 2


def test_wrong_requests_are_named(predict: HttpTarget) -> None:
    for more, text in (
        ({"temperature": 0.7}, "'temperature' is not a parameter"),
        ({"top_p": 0.7}, "'top_p' is not a parameter"),
        ({"guidance": 8}, "'guidance' is 8: use an integer from 0 to 7"),
        ({"inference_type": "image2world"}, "make it text2world"),
        ({"inference_type": "dream"}, "'inference_type'"),
        ({"max_tokens": "many"}, "'max_tokens' is 'many'"),
        ({"stream": True}, "'stream' is true, but this model does not stream"),
    ):
        answer = chat(predict, "a river", **more)
        assert (answer.status, answer.body["error"]["type"]) == (400, "invalid_request")
        assert text in answer.body["error"]["message"]
    picture = data_url(png())
    assert "at most one image or video" in predict.refused(prompt="x", media=[picture, picture])
    assert "unsupported extensions" in predict.refused(prompt="x", media="https://example.com/a.gif")
    assert "the guardrails refuse" in predict.refused(prompt="refuse")


def test_a_failing_pipeline_does_not_expose_its_text(predict: HttpTarget) -> None:
    for prompt in ("crash", "no video"):
        answer = chat(predict, prompt)
        assert (answer.status, answer.body["error"]["type"]) == (500, "internal_error")
        assert "secret" not in answer.text
        assert predict.post("/api/v1/inference", {"prompt": prompt}).status == 500


def test_videos_are_made_one_after_the_other(predict: HttpTarget) -> None:
    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda number: chat(predict, f"river {number}", max_tokens=1).status, range(6)))
    assert answers == [200] * 6


@pytest.mark.parametrize(
    ("choice", "text"),
    [
        (PipelineChoice(), "no pipeline for cosmos-predict2.5 is installed"),
        (PipelineChoice("no_such_module:function"), "module 'no_such_module' not found"),
        (PipelineChoice("os:nothing"), "os has no nothing"),
        (PipelineChoice("os:sep"), "is not a function"),
        (PipelineChoice("os"), "write module:function"),
        (PipelineChoice("/nowhere/p.py:open_pipeline"), "does not exist"),
        (PipelineChoice(f"{HERE}/stand_in_pipeline.py:open_pipeline", "base-99b"), "'base-99b' is not registered"),
    ],
)
def test_a_load_without_a_pipeline_gives_advice(tmp_path: Path, choice: PipelineChoice, text: str) -> None:
    settings = replace(settings_for(tmp_path, tmp_path, ARCH, pipeline=choice), model_path="")
    with local_service(settings) as running:
        assert text in running.until("model_load_error")["model_load_error"]


def test_weights_by_the_pipelines_own_key(tmp_path: Path) -> None:
    choice = PipelineChoice(f"{HERE}/stand_in_pipeline.py:open_pipeline", "base-2b")
    with local_service(replace(settings_for(tmp_path, tmp_path, ARCH, pipeline=choice), model_path="")) as running:
        running.until("model_loaded")
        assert chat(running, "a river", max_tokens=1).body["model"] == "base-2b"
