# SPDX-License-Identifier: Apache-2.0
"""Models that talk and see: cosmos-rl in REST mode with the seed's bodies, language models, embeddings, and chat."""

from __future__ import annotations

import json
import shutil
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from picture_models import data_url, png
from service_process import Answer, HttpTarget, LocalService, local_service, settings_for
from store_stub import SECRET, StoreStub
from vl_model import mp4, tiny_qwen_vl

from support.llm_models import tiny_llama, tiny_tokenizer
from support.model_cache import copy_of
from support.waiting import eventually

CHAT = "/v1/chat/completions"


def chat_of(running: HttpTarget, content: Any, **more: Any) -> Answer:
    return running.post(CHAT, {"messages": [{"role": "user", "content": content}], **more})


def chat_refused(running: HttpTarget, content: Any, **more: Any) -> str:
    answer = chat_of(running, content, **more)
    assert (answer.status, answer.body["error"]["type"]) == (400, "invalid_request"), answer.text
    return str(answer.body["error"]["message"])


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalService]:
    folder = tmp_path_factory.mktemp("language")
    model = tiny_llama(folder / "llama", eos_token_id=None)
    with local_service(settings_for(model, folder, "tao-dataservices")) as running:
        running.until("model_loaded")
        yield running


def test_a_prompt_is_answered(llama: LocalService) -> None:
    results = llama.infer(prompt="the quick brown fox", max_new_tokens=6, temperature=0, conv_mode="auto")
    assert (results["output_tokens"], results["is_vlm"], results["model_type"]) == (6, False, "llm")
    assert results["input_tokens"] > 4 and results["response"]
    same = llama.infer(text="the quick brown fox", max_tokens=6, temperature=0, prompt=None)
    assert same["response"] == results["response"]


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"max_new_tokens": 5}, "'prompt' (or 'text') is required"),
        ({"prompt": 5}, "'prompt' is 5: use a string"),
        ({"prompt": "a", "text": "b"}, "'prompt' and 'text' are aliases and differ"),
        ({"prompt": "a", "max_new_tokens": 0}, "'max_new_tokens' is 0"),
        ({"prompt": "a", "max_new_tokens": 1.5}, "'max_new_tokens' is 1.5"),
        ({"prompt": "a", "temperature": 3}, "'temperature' is 3"),
        ({"prompt": "a", "media": "x.png"}, "'media' is not a parameter"),
        ({"prompt": "a", "stop": ["x"] * 17}, "'stop' has 17"),
        ({"prompt": "a " * 5000, "max_new_tokens": 1}, "context"),
    ],
)
def test_wrong_prompts_are_named(llama: LocalService, body: dict[str, Any], text: str) -> None:
    assert text in llama.refused(**body)


def test_a_chat_takes_the_first_user_message_and_the_last_text(llama: LocalService) -> None:
    def chat(*messages: dict[str, Any]) -> Any:
        answer = llama.post(CHAT, {"messages": messages, "max_tokens": 6, "temperature": 0, "model": "whatever"})
        assert answer.status == 200, answer.text
        return answer.body

    system, user = {"role": "system", "content": "be short"}, {"role": "user", "content": "two"}
    texts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    plain = chat(system, user)
    assert plain["object"] == "chat.completion" and plain["id"].startswith("chatcmpl-")
    assert plain["model"] == "llama" and isinstance(plain["created"], int)
    choice = plain["choices"][0]
    assert (choice["index"], choice["finish_reason"], choice["message"]["role"]) == (0, "length", "assistant")
    assert plain["usage"]["completion_tokens"] == 6
    more = chat(system, {"role": "user", "content": texts}, {"role": "user", "content": "three"})
    assert more["choices"][0]["message"] == choice["message"]
    assert more["usage"] == plain["usage"]
    assert chat(user)["usage"]["prompt_tokens"] < plain["usage"]["prompt_tokens"]


def test_wrong_chats_are_named(llama: LocalService) -> None:
    assert "'messages' is required" in llama.post(CHAT, {"max_tokens": 5}).body["error"]["message"]
    assert "no user message" in llama.post(CHAT, {"messages": [{"role": "system", "content": "x"}]}).text
    assert "messages[0]" in llama.post(CHAT, {"messages": [{"role": "king", "content": "x"}]}).text
    assert "messages[0].content[0].type" in chat_refused(llama, [{"type": "input_audio"}])
    assert "messages[0].content" in chat_refused(llama, 7)
    assert "messages[0].content[0].image_url" in chat_refused(llama, [{"type": "image_url", "image_url": {}}])
    picture = {"type": "image_url", "image_url": {"url": data_url(png())}}
    assert "messages[0].content[0].image_url: this model only reads text" in chat_refused(llama, [picture])
    assert "'guidance' is not a parameter" in chat_refused(llama, "x", guidance=7)
    assert "'temperature' is 'hot'" in chat_refused(llama, "x", temperature="hot")


def test_many_concurrent_requests_are_scheduled(llama: LocalService) -> None:
    prompts = [f"number {number} of the river" for number in range(8)]

    def asked(prompt: str) -> str:
        return str(llama.infer(prompt=prompt, max_new_tokens=8, temperature=0)["response"])

    alone = [asked(prompt) for prompt in prompts]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(asked, prompts)) == alone


def test_a_client_that_hangs_up_is_forgotten(llama: LocalService) -> None:
    def in_flight() -> int:
        engine = llama.made._startup.engine
        assert engine is not None
        return sum(version.statistics.in_flight for version in engine.plane.statistics())

    body = json.dumps({"prompt": "on and on", "max_new_tokens": 1500, "ignore_eos": True}).encode()
    with socket.create_connection(("127.0.0.1", llama.port)) as client:
        client.sendall(
            b"POST /api/v1/inference HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
        )
        eventually(lambda: llama.server.call(in_flight))
    eventually(lambda: not llama.server.call(in_flight))
    assert llama.status()["idle_time_minutes"] < 1


def test_a_model_without_a_chat_template_continues_the_text(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path / "plain")
    plain = tmp_path / "no-template"
    shutil.copytree(folder, plain)
    tiny_tokenizer(plain, chat=False)
    (plain / "chat_template.jinja").unlink(missing_ok=True)
    with local_service(settings_for(plain, tmp_path)) as running:
        running.until("model_loaded")
        assert running.infer(prompt="the quick", max_new_tokens=3, temperature=0)["output_tokens"] == 3


def write_adapter(folder: Path) -> None:
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    base = tiny_llama(folder / "base")
    torch.manual_seed(9)
    changed = get_peft_model(
        AutoModelForCausalLM.from_pretrained(base),
        LoraConfig(r=4, lora_alpha=64, target_modules=["q_proj", "v_proj"], init_lora_weights=False),
    )
    changed.save_pretrained(folder)
    shutil.rmtree(base)


def test_a_lora_adapter_of_a_job(tmp_path: Path) -> None:
    base = tiny_llama(tmp_path / "base")
    copy_of(tmp_path / "adapter", write_adapter)
    specs = {"enable_lora": True, "base_model_path": str(base)}
    body = {"prompt": "the quick brown fox", "max_new_tokens": 8, "temperature": 0}
    with local_service(settings_for(base, tmp_path)) as running:
        running.until("model_loaded")
        without = running.infer(**body)["response"]
    settings = settings_for(tmp_path / "adapter", tmp_path, specs=specs, base_model_path=str(base))
    with local_service(settings) as running:
        running.until("model_loaded")
        assert running.infer(**body)["response"] != without
    with local_service(settings_for(tmp_path / "adapter", tmp_path)) as running:
        assert "is a LoRA adapter without its base model" in running.until("model_load_error")["model_load_error"]


def test_the_openai_client(llama: LocalService) -> None:
    import openai

    client = openai.OpenAI(base_url=f"http://127.0.0.1:{llama.port}/v1", api_key="none", max_retries=0)
    with client:
        (model,) = client.models.list().data
        created = client.chat.completions.create(
            model=model.id, messages=[{"role": "user", "content": "hello"}], max_tokens=3, temperature=0
        )
        assert created.choices[0].finish_reason == "length" and created.model == model.id == "llama"
        with pytest.raises(openai.BadRequestError, match="unknown|not a parameter"):
            client.chat.completions.create(
                model="m", messages=[{"role": "user", "content": "x"}], extra_body={"num_steps": 3}
            )


def test_cosmos_rl_in_rest_mode_answers_the_seeds_bodies(tmp_path: Path, open_service: Callable[..., Any]) -> None:
    model = tiny_qwen_vl(tmp_path / "qwen-vl")
    objects = {"videos/sample.mp4": mp4(), "images/img1.png": png(seed=1), "images/img2.png": png(seed=2)}
    with StoreStub({"my-bucket": objects}) as store:
        job = {
            "job_id": "7a1e",
            "specs": {"model_path": str(model), "enable_lora": False},
            "neural_network_name": "cosmos-rl",
            "cloud_metadata": store.metadata("my-bucket"),
        }
        # Written as Python writes it, which the public server expects.
        arguments = ("--job", repr(job), "--docker_env_vars", repr({"CLOUD_BASED": "True"}), "--host", "127.0.0.1")
        with open_service(*arguments, folder=tmp_path) as running:
            running.until("model_loaded")
            video = running.infer(
                media="s3://my-bucket/videos/sample.mp4",
                text="What action is happening in this video?",
                conv_mode="auto",
                max_new_tokens=5,
            )
            assert (video["has_video"], video["total_files"], video["fps_used"]) == (True, 1, 4)
            assert (video["total_pixels_used"], video["model_type"]) == (6422528, "vlm")
            pictures = [f"s3://my-bucket/images/img{number}.png" for number in (1, 2)]
            both = running.infer(media=pictures, text="Compare these two images", conv_mode="auto", max_new_tokens=5)
            assert (both["has_video"], both["total_files"]) == (False, 2)
            alone = running.infer(media=pictures[:1], max_new_tokens=5)
            assert alone["input_tokens"] < both["input_tokens"]
            for body, text in (
                ({"text": "x"}, "Cosmos requires 'media' parameter"),
                ({"media": "s3://my-bucket/a.exe"}, "One or more input files have unsupported extensions"),
                ({"media": "s3://my-bucket/images/none.png"}, "media[0]"),
                ({"media": "s3://other/images/img1.png"}, "credentials"),
                ({"media": pictures, "fps": 0}, "'fps' is 0"),
                ({"media": {"url": "x"}}, "'media' is an object"),
                ({"media": pictures, "mediaa": 1}, "'mediaa' is not a parameter"),
            ):
                assert text in running.refused(**body)
            item = {"type": "image_url", "image_url": {"url": data_url(png(seed=1))}}
            answer = chat_of(running, [item, {"type": "text", "text": "what is it?"}], max_tokens=4, temperature=0)
            assert answer.status == 200, answer.text
            assert answer.body["choices"][0]["message"]["content"] and answer.body["model"] == "qwen-vl"
            clip = {"type": "video_url", "video_url": {"url": data_url(mp4(), "video/mp4")}}
            assert chat_of(running, [clip], max_tokens=2).status == 200
            assert "Cosmos requires 'media' parameter" in chat_refused(running, "no picture")
            swapped = {"type": "video_url", "video_url": {"url": data_url(png())}}
            assert "messages[0].content[0].video_url" in chat_refused(running, [swapped])
            assert running.stop() == 0
            state = json.dumps(running.log)
            assert SECRET not in state


def write_bert(folder: Path) -> None:
    import torch
    from transformers import BertConfig, BertModel

    torch.manual_seed(4)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    BertModel(BertConfig(vocab_size=512, **sizes)).save_pretrained(folder)
    tiny_tokenizer(folder, chat=False)


def test_an_embedding_model(tmp_path: Path) -> None:
    folder = copy_of(tmp_path / "bert", write_bert)
    with local_service(settings_for(folder, tmp_path)) as running:
        running.until("model_loaded")
        results = running.infer(input=["the river", "the mill"])
        assert (results["dimensions"], results["total_texts"], results["model_type"]) == (32, 2, "embedding")
        assert results["embeddings"][0] == pytest.approx(running.infer(text="the river")["embeddings"][0], abs=1e-5)
        assert "'input' (or 'text') is required" in running.refused(input=[""])
        assert "embeds texts" in chat_refused(running, "hello")
