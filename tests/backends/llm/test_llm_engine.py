# SPDX-License-Identifier: Apache-2.0
"""An instance of the backend `llm` from request to replies: real tiny models, the real engine thread, a real loop."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from llm_instances import AsyncLauncher, Caller, Services, runs, served

from headrace.backends.contract import ModelFiles
from headrace.backends.llm.backend import LlmBackend
from headrace.core.errors import (
    FailedPrecondition,
    Internal,
    InvalidArgument,
    NotFound,
    Unavailable,
)
from headrace.core.generation import (
    Generation,
    GenerationRequest,
    OutputFormat,
    PromptImage,
    Sampling,
    in_background,
)
from headrace.core.requests import InferRequest
from headrace.core.telemetry.metrics import Registry
from headrace.core.tensors import Tensor
from headrace.engine.engine import EngineSettings, open_engine
from headrace.models.config.types import ModelConfig, OutputSpec
from support import llm_models

PROMPTS = [("the quick brown fox jumps over Grüße " * 3)[number : 3 + 5 * number] for number in range(20)]
NEW = 12
GREEDY = Sampling(temperature=0.0, max_tokens=NEW)


@cache
def expected() -> list[tuple[list[int], str]]:
    """Tokens and text that transformers generates greedily, for each prompt."""
    with TemporaryDirectory() as place:
        folder = llm_models.tiny_llama(Path(place) / "model")
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        model = transformers.AutoModelForCausalLM.from_pretrained(folder)
        told = []
        for prompt in PROMPTS:
            ids = tokenizer(prompt).input_ids
            tokens = model.generate(torch.tensor([ids]), max_new_tokens=NEW, do_sample=False)[0].tolist()[len(ids) :]
            told.append((tokens, tokenizer.decode(tokens, skip_special_tokens=True)))
        return told


def test_the_log_names_the_model_and_its_version(caplog: pytest.LogCaptureFixture) -> None:
    async def serve() -> None:
        async with served(quantization="fp8"):
            pass

    with caplog.at_level(logging.INFO, "headrace.backends"):
        asyncio.run(serve())
    lines = [record.getMessage() for record in caplog.records]
    assert [line for line in lines if line.startswith("model 'tiny' version 1: at most 32 running sequences")], lines
    assert [line for line in lines if line.startswith("model 'tiny' version 1: ") and "quantised" in line], lines


@runs
async def test_greedy_texts_are_those_of_transformers_alone_together_and_streamed() -> None:
    wanted = [text for _, text in expected()]
    async with served() as tiny:
        alone = [await tiny.ask(Generation(prompt=prompt, sampling=GREEDY)) for prompt in PROMPTS]
        assert [caller.text for caller in alone] == wanted
        assert all(len(caller.answers) == 1 for caller in alone)
        counts = [caller.last["completion_tokens"] for caller in alone]
        assert counts == [len(tokens) for tokens, _ in expected()]
        stream = [tiny.begin(Generation(prompt=prompt, sampling=GREEDY, stream=True)) for prompt in PROMPTS]
        for caller in stream:
            await asyncio.wait_for(caller.ended.wait(), 60)
        assert [caller.text for caller in stream] == wanted
        assert max(len(caller.answers) for caller in stream) > 1
        assert tiny.engine.scheduler.pool.used == 0


@runs
async def test_greedy_texts_stay_with_a_small_cache_small_chunks_and_no_prefixes() -> None:
    wanted = [text for _, text in expected()]
    # A token takes 512 bytes: 20 pages of 4 tokens.
    parameters = {"kv_cache_bytes": str(512 * 80), "page_size": "4", "max_running": "6", "max_step_tokens": "5"}
    for prefix_cache in ("true", "false"):
        async with served(**parameters, prefix_cache=prefix_cache) as tiny:
            callers = [tiny.begin(Generation(prompt=prompt, sampling=GREEDY)) for prompt in PROMPTS]
            for caller in callers:
                await asyncio.wait_for(caller.ended.wait(), 60)
            assert [caller.text for caller in callers] == wanted
            assert tiny.value("headrace_llm_preemptions_total") > 0
            assert tiny.engine.scheduler.pool.used == 0


@runs
async def test_a_request_takes_the_place_of_one_in_the_background() -> None:
    """By order, not by time: it is answered before all that wait behind, and what it preempted goes on as if alone."""
    async with served(max_running="1") as tiny:
        long = Sampling(temperature=0.0, max_tokens=150, ignore_eos=True)
        requests = [GenerationRequest("tiny", Generation(prompt=prompt, sampling=long)) for prompt in PROMPTS[8:10]]
        alone = [(await tiny.ask(request)).text for request in requests]
        behind = [tiny.begin(in_background(request)) for request in requests]
        live = [tiny.begin(Generation(prompt=prompt, sampling=GREEDY)) for prompt in PROMPTS[:4]]
        for caller in live:
            await asyncio.wait_for(caller.ended.wait(), 60)
        assert not behind[-1].ended.is_set()
        for caller in behind:
            await asyncio.wait_for(caller.ended.wait(), 60)
        assert [caller.text for caller in behind] == alone
        assert tiny.engine.scheduler.pool.used == 0


@runs
async def test_a_repeated_prompt_hits_the_cache_and_the_usage_says_so() -> None:
    async with served(page_size="2") as tiny:
        first = await tiny.ask(Generation(prompt=PROMPTS[9], sampling=GREEDY))
        second = await tiny.ask(Generation(prompt=PROMPTS[9], sampling=GREEDY))
        assert first.last["cached_tokens"] == 0
        assert second.last["cached_tokens"] == (second.last["prompt_tokens"] - 1) // 2 * 2 > 0
        assert second.text == first.text
        assert tiny.value("headrace_llm_prefix_cache_hit_tokens_total") == second.last["cached_tokens"]


@runs
async def test_choices_differ_by_themselves_and_repeat_with_their_seed() -> None:
    async with served() as tiny:
        sampling = Sampling(temperature=1.5, max_tokens=8, n=3, seed=5, ignore_eos=True)
        whole = await tiny.ask(Generation(prompt="the quick", sampling=sampling))
        streamed = await tiny.ask(Generation(prompt="the quick", sampling=sampling, stream=True))
        assert len(whole.answers) == 3
        assert whole.texts() == streamed.texts()
        assert len(set(whole.texts().values())) == 3
        assert sorted(whole.texts()) == [0, 1, 2]
        finals = [parameters for _, parameters in streamed.answers if "finish_reason" in parameters]
        assert [parameters["completion_tokens"] for parameters in finals] == [8, 8, 8]


@runs
async def test_a_request_of_v2_gets_one_answer_or_a_stream() -> None:
    def request(**parameters: Any) -> InferRequest:
        tensor = Tensor.of("text_input", np.array([PROMPTS[9].encode()], object))
        return InferRequest("tiny", [tensor], parameters={"temperature": 0.0, "max_tokens": NEW, **parameters})

    async with served() as tiny:
        one = await tiny.ask(request())
        assert [text for text, _ in one.answers] == [expected()[9][1]]
        assert one.last == {
            "finish_reason": "length",
            "prompt_tokens": one.last["prompt_tokens"],
            "cached_tokens": 0,
            "completion_tokens": NEW,
        }
        three = await tiny.ask(request(n=3))
        assert [text.split("\n") for text, _ in three.answers] == [[expected()[9][1]] * 3]
        assert three.last["completion_tokens"] == 3 * NEW
        stream = await tiny.ask(request(stream=True))
        assert len(stream.answers) > 1
        assert stream.text == expected()[9][1]
        with pytest.raises(InvalidArgument, match="temprature"):
            await tiny.ask(request(temprature=1.0))


@runs
async def test_what_ends_a_choice() -> None:
    tokens, text = expected()[9]
    async with served() as tiny:
        cut = text[4:7]
        stopped = await tiny.ask(
            Generation(prompt=PROMPTS[9], sampling=Sampling(temperature=0, max_tokens=NEW, stop=(cut,)), stream=True)
        )
        assert stopped.text == text[: text.index(cut)]
        assert (stopped.last["finish_reason"], stopped.last["matched_stop"]) == ("stop", cut)
        by_token = await tiny.ask(
            Generation(prompt=PROMPTS[9], sampling=Sampling(temperature=0, max_tokens=NEW, stop_token_ids=(tokens[3],)))
        )
        assert by_token.last["finish_reason"] == "stop" and "matched_stop" not in by_token.last
        assert by_token.last["completion_tokens"] == tokens.index(tokens[3]) + 1
        by_length = await tiny.ask(Generation(prompt=PROMPTS[9], sampling=Sampling(temperature=0, max_tokens=3)))
        assert (by_length.last["finish_reason"], by_length.last["completion_tokens"]) == ("length", 3)


@runs
async def test_output_in_a_format_ends_when_the_format_does() -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"enum": ["x", "y"]}},
        "required": ["a"],
        "additionalProperties": False,
    }
    async with served() as tiny:
        caller = await tiny.ask(
            Generation(
                messages=({"role": "user", "content": "say"},),
                sampling=Sampling(temperature=1.0, max_tokens=60, n=2, seed=3),
                output_format=OutputFormat("json_schema", schema),
            )
        )
        for text, parameters in caller.answers:
            assert json.loads(text)["a"] in ("x", "y")
            assert parameters["finish_reason"] == "stop"


@runs
async def test_logprobs_are_returned_for_every_token_streamed_or_not() -> None:
    async with served() as tiny:
        sampling = Sampling(temperature=0, max_tokens=NEW, logprobs=2)
        for stream in (True, False):
            caller = await tiny.ask(Generation(prompt=PROMPTS[9], sampling=sampling, stream=stream))
            logprobs = [
                entry for _, parameters in caller.answers for entry in json.loads(parameters.get("logprobs", "[]"))
            ]
            assert len(logprobs) == NEW
            assert all(entry["logprob"] == entry["top_logprobs"][0]["logprob"] for entry in logprobs)
            assert b"".join(bytes(entry["bytes"]) for entry in logprobs).decode(errors="replace") == caller.text


@runs
async def test_200_callers_who_leave_leave_no_page_in_use() -> None:
    async with served(max_running="16", page_size="4", max_step_tokens="64") as tiny:
        endless = Sampling(temperature=1.0, max_tokens=1500, ignore_eos=True, n=2)
        callers = [
            tiny.begin(Generation(prompt=PROMPTS[number % 20], sampling=endless, stream=True)) for number in range(200)
        ]
        await asyncio.wait_for(callers[0].came.wait(), 60)
        for number, caller in enumerate(callers):
            caller.cancelled = True
            if number % 20 == 0:
                await asyncio.sleep(0.01)  # some while they run, some while they wait
        for caller in callers:
            await asyncio.wait_for(caller.ended.wait(), 60)
        await tiny.quiet()
        scheduler = tiny.engine.scheduler
        assert (scheduler.pool.used, len(scheduler.running), len(scheduler.waiting)) == (0, 0, 0)
        assert tiny.value("headrace_llm_kv_cache_usage_ratio") == 0
        after = await tiny.ask(Generation(prompt=PROMPTS[9], sampling=GREEDY))
        assert after.text == expected()[9][1]


@runs
async def test_a_newcomer_does_not_wait_for_long_answers() -> None:
    async with served() as tiny:
        endless = Sampling(temperature=0, max_tokens=1500, ignore_eos=True)
        long = [tiny.begin(Generation(prompt=prompt, sampling=endless, stream=True)) for prompt in PROMPTS[:4]]
        for caller in long:
            await asyncio.wait_for(caller.came.wait(), 60)
        newcomer = await tiny.ask(Generation(prompt=PROMPTS[9], sampling=GREEDY))
        assert newcomer.text == expected()[9][1]
        assert not any(caller.ended.is_set() for caller in long)
        for caller in long:
            caller.cancelled = True


@runs
async def test_requests_beyond_the_queue_are_refused_immediately() -> None:
    async with served(max_running="1", max_queue="2") as tiny:
        endless = Sampling(temperature=0, max_tokens=1500, ignore_eos=True)
        callers = [tiny.begin(Generation(prompt="the", sampling=endless)) for _ in range(5)]
        assert [caller.ended.is_set() for caller in callers] == [False, False, False, True, True]
        assert isinstance(callers[4].error, Unavailable)
        assert callers[4].error.retry_after_seconds
        for caller in callers[:3]:
            caller.cancelled = True
        for caller in callers:
            await asyncio.wait_for(caller.ended.wait(), 60)
        await tiny.ask(Generation(prompt="the", sampling=GREEDY))


@runs
async def test_an_invalid_request_is_reported_and_does_not_affect_others() -> None:
    picture = PromptImage(np.zeros((4, 4, 3), np.uint8))
    messages = ({"role": "user", "content": [{"type": "image"}]},)
    async with served(max_model_len="64") as tiny:
        for generation, error, words in (
            (Generation(prompt="the " * 100), InvalidArgument, "context is 64 tokens"),
            (Generation(prompt=""), InvalidArgument, "empty"),
            (Generation(prompt="the", adapter="none"), NotFound, "adapter 'none'"),
            (Generation(messages=messages, media=(picture,)), InvalidArgument, "text only"),
            (Generation(messages=({"role": "pirate", "content": "x"},)), InvalidArgument, "role"),
            (Generation(prompt="the", sampling=Sampling(n=0)), InvalidArgument, "n"),
        ):
            with pytest.raises(error, match=words):
                await tiny.ask(generation)
        fits = await tiny.ask(Generation(prompt="the", sampling=Sampling(temperature=0, ignore_eos=True)))
        assert fits.last["prompt_tokens"] + fits.last["completion_tokens"] == 64
        assert tiny.instance._open_requests == 0


@runs
async def test_a_failed_step_fails_its_requests_and_the_engine_continues() -> None:
    async with served() as tiny:
        runner, launch = tiny.engine.runner, tiny.engine.runner.launch

        def fails(*arguments: Any, **named: Any) -> Any:
            runner.launch = launch  # type: ignore[method-assign]
            raise ValueError("secret words")

        runner.launch = fails  # type: ignore[method-assign]
        with pytest.raises(Internal) as raised:
            await tiny.ask(Generation(prompt="the", sampling=GREEDY))
        assert "secret" not in str(raised.value)
        after = await tiny.ask(Generation(prompt=PROMPTS[9], sampling=GREEDY))
        assert after.text == expected()[9][1]
        assert tiny.engine.scheduler.pool.used == 0


@runs
async def test_a_step_without_enough_memory_is_made_smaller() -> None:
    async with served(max_running="4", max_step_tokens="256") as tiny:
        runner, launch = tiny.engine.runner, tiny.engine.runner.launch
        sizes: list[int] = []

        def limited(chunks: Any, **named: Any) -> Any:
            sizes.append(sum(chunk.count for chunk in chunks))
            if sizes[-1] > 70:
                raise torch.OutOfMemoryError("out of memory")
            return launch(chunks, **named)

        runner.launch = limited  # type: ignore[method-assign]
        prompt = [9] * 200
        callers = [tiny.begin(Generation(prompt=prompt, sampling=GREEDY)) for _ in range(3)]
        for caller in callers:
            await asyncio.wait_for(caller.ended.wait(), 60)
        assert max(sizes) > 70
        assert len({caller.text for caller in callers}) == 1
        assert callers[0].text

        def never(chunks: Any, **named: Any) -> Any:
            raise torch.OutOfMemoryError("out of memory")

        runner.launch = never  # type: ignore[method-assign]
        with pytest.raises(Unavailable, match="not enough memory"):
            await tiny.ask(Generation(prompt=prompt, sampling=GREEDY))
        assert tiny.engine.scheduler.pool.used == 0


@runs
async def test_closing_fails_waiting_requests() -> None:
    endless = Sampling(temperature=0, max_tokens=1500, ignore_eos=True)
    async with served() as tiny:
        caller = tiny.begin(Generation(prompt="the", sampling=endless, stream=True))
        await asyncio.wait_for(caller.came.wait(), 60)
    await asyncio.wait_for(caller.ended.wait(), 30)
    assert isinstance(caller.error, Unavailable)
    assert not tiny.engine._thread.is_alive()
    late = tiny.begin(Generation(prompt="the", sampling=GREEDY))
    assert isinstance(late.error, Unavailable)


@runs
async def test_steps_ahead_give_the_same_texts() -> None:
    wanted = [text for _, text in expected()]
    async with served(max_running="6", page_size="4", kv_cache_bytes=str(512 * 120)) as tiny:
        ahead = AsyncLauncher(tiny.engine.runner)
        callers = [tiny.begin(Generation(prompt=prompt, sampling=GREEDY)) for prompt in PROMPTS]
        mixed = tiny.begin(Generation(prompt="the", sampling=Sampling(temperature=1.0, max_tokens=6, seed=1)))
        for caller in (*callers, mixed):
            await asyncio.wait_for(caller.ended.wait(), 60)
        assert [caller.text for caller in callers] == wanted
        assert ahead.unknown > 20
        assert tiny.engine.scheduler.pool.used == 0


SAMPLED = [
    Sampling(temperature=1.0, max_tokens=12, seed=1),
    Sampling(temperature=0.7, top_p=0.9, max_tokens=9, seed=2, min_tokens=4),
    Sampling(temperature=1.3, top_k=20, max_tokens=15, seed=3, logit_bias={7: 2.0}),
    Sampling(temperature=1.0, max_tokens=10, seed=4, n=2),
    Sampling(temperature=1.0, min_p=0.05, max_tokens=11, seed=5),
]
DEPENDENT = Sampling(temperature=1.0, frequency_penalty=0.5, max_tokens=8, seed=6)


@runs
async def test_sampled_steps_ahead_give_the_same_texts() -> None:
    texts: list[list[str]] = []
    for runs_ahead in (False, True):
        async with served(max_running="6", page_size="4", kv_cache_bytes=str(512 * 120)) as tiny:
            ahead = AsyncLauncher(tiny.engine.runner) if runs_ahead else None
            asked = [*SAMPLED, GREEDY] * 2
            callers = [
                tiny.begin(Generation(prompt=prompt, sampling=one)) for prompt, one in zip(PROMPTS, asked, strict=False)
            ]
            for caller in callers:
                await asyncio.wait_for(caller.ended.wait(), 60)
            unknown = ahead.unknown if ahead else 0
            # One whose next token depends on its last one: nobody is ahead of it.
            callers += [tiny.begin(Generation(prompt="the", sampling=one)) for one in (*SAMPLED, DEPENDENT)]
            for caller in callers:
                await asyncio.wait_for(caller.ended.wait(), 60)
            texts.append([caller.text for caller in callers])
            assert (unknown > 40) is runs_ahead
            assert tiny.engine.scheduler.pool.used == 0
    assert texts[0] == texts[1]


@runs
async def test_a_step_that_cannot_be_read_fails_the_requests_that_depended_on_it() -> None:
    async with served() as tiny:
        ahead = AsyncLauncher(tiny.engine.runner)
        ahead.fails_at = 5
        caller = tiny.begin(Generation(prompt=PROMPTS[9], sampling=GREEDY, stream=True))
        await asyncio.wait_for(caller.ended.wait(), 60)
        assert isinstance(caller.error, Internal)
        assert expected()[9][1].startswith(caller.text)
        assert ahead.steps == 6, "one was launched before it was read"
        after = await tiny.ask(Generation(prompt=PROMPTS[9], sampling=GREEDY))
        assert after.text == expected()[9][1]
        assert tiny.engine.scheduler.pool.used == 0


def load(folder: Path, **parameters: str) -> None:
    async def tried() -> None:
        async with served(folder, **parameters):
            pass

    asyncio.run(tried())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("page_size", "0"),
        ("max_model_len", "many"),
        ("kv_cache_bytes", "-1"),
        ("kv_cache_share", "2"),
        ("kv_cache_share", "nan"),
        ("max_running", "0"),
        ("max_queue", "1e9"),
        ("dtype", "int8"),
        ("prefix_cache", "perhaps"),
        ("trust_remote_code", "yes"),
        ("adapters", "a=b,a=c"),
        ("adapters", "a"),
        ("chat_template", "nowhere.jinja"),
        ("max_modell_len", "64"),
    ],
)
def test_a_bad_parameter_is_named(name: str, value: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=name):
        load(llm_models.tiny_llama(tmp_path / "1"), **{name: value})


def test_models_loaded_together_share_their_metrics(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    version = llm_models.tiny_llama(tmp_path / "tiny" / "1")
    config = ModelConfig("tiny", "llm", outputs=(OutputSpec("text_output", None, None),), decoupled=True)
    declared = Registry.histogram

    def slowly(*arguments: Any, **more: Any) -> Any:
        time.sleep(0.05)  # the others come meanwhile
        return declared(*arguments, **more)

    async def load() -> None:
        backend, services, files = LlmBackend(), Services(), ModelFiles(version.parent, 1, version)
        loading = [asyncio.to_thread(backend.load, config, files, services) for _ in range(3)]  # type: ignore[arg-type]
        for model in await asyncio.gather(*loading):
            model.close()

    monkeypatch.setattr(Registry, "histogram", slowly)
    asyncio.run(load())


def test_a_model_path_leads_elsewhere(tmp_path: Path) -> None:
    folder = llm_models.tiny_llama(tmp_path / "elsewhere")
    (tmp_path / "1").mkdir()
    load(tmp_path / "1", model_path="../elsewhere")
    load(tmp_path / "1", model_path=str(folder))
    with pytest.raises(FailedPrecondition, match="model_path"):
        load(tmp_path / "1", model_path="../nowhere")


def test_a_server_needs_a_folder_and_the_name_of_the_backend(tmp_path: Path) -> None:
    for name in ("one", "two"):  # loaded at once
        llm_models.tiny_llama(tmp_path / name / "1")
        (tmp_path / name / "config.pbtxt").write_text('backend: "llm"\n')

    async def tried() -> None:
        engine = open_engine(EngineSettings(repositories=(tmp_path,)))
        callers: list[Caller] = []
        await engine.start()
        try:
            for name in ("one", "two"):
                caller = Caller(GenerationRequest(name, Generation(prompt=PROMPTS[9], sampling=GREEDY, stream=True)))

                def answered(answer: Any, final: bool, caller: Caller = caller) -> None:
                    if isinstance(answer, BaseException):
                        raise answer
                    caller.reply(answer.outputs, final=final, parameters=answer.parameters)

                engine.plane.infer_stream(caller.request, answered)
                await asyncio.wait_for(caller.came.wait(), 60)
                callers.append(caller)
        finally:
            await engine.close(30)
        assert all(caller.ended.is_set() for caller in callers), "what was begun is answered before the end"
        assert [caller.text for caller in callers] == [expected()[9][1]] * 2

    asyncio.run(tried())
