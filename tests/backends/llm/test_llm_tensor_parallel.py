# SPDX-License-Identifier: Apache-2.0
"""A sharded model answers as the whole one: shards, steps and refusals; the other ranks are threads of this process."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from llm_instances import Served, Services, served
from rank_threads import FakeProcess, served_by_threads

from headrace.backends.contract import ModelFiles, Placement
from headrace.backends.llm.backend import LlmBackend
from headrace.backends.llm.model_runner.model_loader import check_folder, load_model
from headrace.backends.llm.model_runner.runner import RunnerLost
from headrace.backends.llm.page_pool import PagePool
from headrace.backends.llm.scheduler import Chunk, Scheduler, Sequence
from headrace.backends.llm.settings import LlmSettings
from headrace.backends.llm.tensor_parallel import rank
from headrace.backends.llm.tensor_parallel.communicator import Peers, communicator_of, file_store
from headrace.backends.llm.tensor_parallel.group import rank_devices
from headrace.backends.llm.tensor_parallel.link import Kind, Link, LinkClosed, LinkTimeout
from headrace.backends.llm.tensor_parallel.loading import check_shardable, load_shard
from headrace.backends.llm.tensor_parallel.shard_reader import folder_fingerprint
from headrace.backends.llm.tensor_parallel.step_codec import StepDecoder, StepEncoder
from headrace.backends.torch_import import run_once
from headrace.core.errors import FailedPrecondition, HeadraceError, InvalidArgument, Unavailable, Unimplemented
from headrace.core.generation import Generation, Sampling
from headrace.core.kv_transfer import KvTransferSettings
from headrace.engine.repository.load_plan import read_load_plan
from headrace.models.config.types import InstanceGroup, ModelConfig, OutputSpec
from support import llm_models

CPU = torch.device("cpu")
KINDS: dict[str, Callable[..., Path]] = {
    "llama": llm_models.tiny_llama,
    "qwen2": llm_models.tiny_qwen2,
    "qwen3": llm_models.tiny_qwen3,
    "mistral": llm_models.tiny_mistral,
    "gemma3": llm_models.tiny_gemma3,
    "mixtral": llm_models.tiny_mixtral,
    "qwen3_moe": llm_models.tiny_qwen3_moe,
}
PROMPTS = [("the quick brown fox jumps over Grüße " * 4)[number : 3 + 9 * number] for number in range(1, 9)]
GREEDY = Sampling(temperature=0.0, max_tokens=10)


def shards(folder: Path, degree: int) -> list[Any]:
    """The models of all ranks, not connected."""
    settings = LlmSettings(folder, tensor_parallel=degree)
    return [load_shard(check_folder(settings), settings, CPU, Peers(rank, degree)) for rank in range(degree)]


def whole(folder: Path) -> Any:
    settings = LlmSettings(folder)
    return load_model(check_folder(settings), settings, CPU)


def logits_of_ranks(folder: Path, degree: int, ids: torch.Tensor, place: Path) -> list[torch.Tensor]:
    """What each rank computes, in a thread, connected by gloo."""
    settings = LlmSettings(folder, tensor_parallel=degree)
    found: dict[int, torch.Tensor] = {}

    def compute(number: int) -> None:
        peers = Peers(number, degree)
        model = load_shard(check_folder(settings), settings, CPU, peers)
        store = file_store(place / f"store-{degree}", degree)
        peers.connect(communicator_of(store, number, degree, CPU, timeout_seconds=60))
        with torch.inference_mode():
            found[number] = model(input_ids=ids).logits
        peers.disconnect()

    threads = [threading.Thread(target=compute, args=(number,)) for number in range(degree)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[number] for number in range(degree)]


def test_threads_that_load_models_at_once_register_an_operator_once() -> None:
    calls: list[int] = []
    together = threading.Barrier(4)

    @run_once
    def register() -> int:
        calls.append(1)
        time.sleep(0.05)  # long enough for the other threads to come
        return 7

    def load() -> None:
        together.wait()
        results.append(register())

    results: list[int] = []
    threads = [threading.Thread(target=load) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (calls, results) == ([1], [7] * 4)


@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_ranks_compute_the_logits_of_the_whole_model(kind: str, degree: int, tmp_path: Path) -> None:
    """With degree 4, two ranks have the same key-value head."""
    folder = KINDS[kind](tmp_path / "model")
    ids = torch.arange(3, 41)[None] * 13 % 512
    with torch.inference_mode():
        expected = whole(folder)(input_ids=ids).logits
    first, *_ = logits_of_ranks(folder, degree, ids, tmp_path)
    torch.testing.assert_close(first, expected, atol=1e-3, rtol=1e-3)
    assert torch.equal(first.argmax(-1), expected.argmax(-1))


def test_tied_embeddings_biases_and_an_odd_vocabulary_are_sharded(tmp_path: Path) -> None:
    folder = llm_models.tiny_llama(
        tmp_path / "model", tie_word_embeddings=True, attention_bias=True, mlp_bias=True, vocab_size=511
    )
    ids = torch.arange(511)[None]
    with torch.inference_mode():
        expected = whole(folder)(input_ids=ids).logits
    first, *_ = logits_of_ranks(folder, 4, ids, tmp_path)
    assert first.shape == expected.shape
    torch.testing.assert_close(first, expected, atol=1e-3, rtol=1e-3)
    for model in shards(folder, 4):
        assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


@pytest.mark.parametrize("kind", ["llama", "mixtral", "qwen3_moe"])
def test_shards_together_are_the_whole_model(kind: str, tmp_path: Path) -> None:
    folder = KINDS[kind](tmp_path / "model")
    full = dict(whole(folder).named_parameters())
    pieces = [
        {name.replace(".embedding.", ".").replace("lm_head.head.", "lm_head."): value for name, value in each}
        for each in (model.named_parameters() for model in shards(folder, 2))
    ]
    pieces = [{name.replace("experts.experts", "experts"): value for name, value in piece.items()} for piece in pieces]
    assert set(pieces[0]) == full.keys()
    for name, expected in full.items():
        parts = [piece[name] for piece in pieces]
        if parts[0].shape == expected.shape:
            assert all(torch.equal(part, expected) for part in parts), name
            continue
        (dimension,) = (at for at, size in enumerate(expected.shape) if parts[0].shape[at] != size)
        if name.endswith("gate_up_proj"):
            gates, ups = zip(*(part.chunk(2, 1) for part in parts), strict=True)
            joined = torch.cat([*gates, *ups], 1)
        else:
            joined = torch.cat(parts, dimension)
        assert torch.equal(joined, expected), name
    share = sum(value.numel() for value in pieces[0].values()) / sum(value.numel() for value in full.values())
    assert share < 0.52


def test_experts_may_be_stored_as_one_tensor(tmp_path: Path) -> None:
    """As transformers names them in memory."""
    from safetensors.torch import load_file, save_file

    folder = llm_models.tiny_mixtral(tmp_path / "model")
    expected = [dict(model.named_parameters()) for model in shards(folder, 2)]
    stored = load_file(folder / "model.safetensors")
    for layer in range(2):
        old, new = f"model.layers.{layer}.block_sparse_moe", f"model.layers.{layer}.mlp"
        w1, w2, w3 = (
            torch.stack([stored.pop(f"{old}.experts.{expert}.w{number}.weight") for expert in range(4)])
            for number in (1, 2, 3)
        )
        stored[f"{new}.experts.gate_up_proj"] = torch.cat([w1, w3], 1)
        stored[f"{new}.experts.down_proj"] = w2
        stored[f"{new}.gate.weight"] = stored.pop(f"{old}.gate.weight")
    (folder / "model.safetensors").unlink()
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    for before, model in zip(expected, shards(folder, 2), strict=True):
        for name, value in model.named_parameters():
            assert torch.equal(value, before[name]), name


# Steps


class Wanted:
    """Receives logits of a prompt from its fifth token on."""

    def rows_of(self, start: int, end: int) -> int:
        return max(0, min(end, 20) - max(start, 5))

    def add(self, start: int, logits: Any) -> None:
        raise AssertionError("this rank computes nothing")


@pytest.mark.parametrize("seed", range(5))
def test_a_decoded_step_is_the_step_that_was_scheduled(seed: int) -> None:
    """Over preemptions, shared prefixes, chunked prompts, adapters and batch indices that are used again."""
    order = random.Random(seed)
    scheduler = Scheduler(PagePool(24, 4, prefix_cache=True), max_running=5, max_step_tokens=24)
    encoder, decoder = StepEncoder(("red", "blue")), StepDecoder(("red", "blue"))
    limit, steps = 60, 0
    while steps < 150:
        if order.random() < 0.2:
            tokens = [order.choice((1, 1, 1, 2)) for _ in range(order.randint(1, 30))]
            receiver = Wanted() if order.random() < 0.2 else None
            adapter = order.choice(("", "red", "blue"))
            scheduler.add(
                Sequence(tokens, limit, adapter=adapter, prompt_logprobs=receiver, cache_salt=adapter.encode())
            )
        chunks = scheduler.schedule()
        if not chunks:
            continue
        steps += 1
        greedy, sampled = order.random() < 0.5, order.random() < 0.5
        copies, *flags = decoder.decode(encoder.encode(chunks, greedy=greedy, sampled=sampled))
        assert flags == [greedy, sampled]
        assert list(map(described, copies)) == list(map(described, chunks))
        scheduler.commit(chunks, [order.randrange(500) for chunk in chunks if chunk.samples])
        for sequence in tuple(scheduler.running):
            if sequence.length >= sequence.limit or order.random() < 0.05:
                scheduler.finish((sequence,))
    assert scheduler.preemptions or scheduler.prefix_hits


def described(chunk: Chunk) -> tuple[Any, ...]:
    """Everything that a rank's runner reads of a chunk."""
    sequence, receiver = chunk.sequence, chunk.sequence.prompt_logprobs
    return (
        (chunk.start, chunk.count, chunk.samples, chunk.known),
        (sequence.batch_index, sequence.pages[: (chunk.end - 1) // 4 + 1], sequence.adapter, sequence.prompt_length),
        sequence.tokens[chunk.start : chunk.end],
        None if receiver is None else receiver.rows_of(chunk.start, chunk.end),
    )


def test_a_token_that_only_the_device_knows_is_not_sent() -> None:
    sequence = Sequence([7, 8, 9], 20)
    sequence.batch_index, sequence.pages = 3, [5]
    encoder, decoder = StepEncoder(()), StepDecoder(())
    decoder.decode(encoder.encode([Chunk(sequence, 0, 3, True)], greedy=True, sampled=False))
    for start in (3, 4):
        ((chunk,), *_) = decoder.decode(
            encoder.encode([Chunk(sequence, start, 1, True, known=False)], greedy=True, sampled=False)
        )
        assert (chunk.known, chunk.start, len(chunk.sequence.tokens)) == (False, start, start)
    sequence.tokens += [30, 31, 32]
    ((chunk,), *_) = decoder.decode(encoder.encode([Chunk(sequence, 5, 1, True)], greedy=True, sampled=False))
    assert chunk.sequence.tokens[5] == 32


@pytest.fixture
def link() -> Iterator[tuple[Link, socket.socket]]:
    ours, theirs = socket.socketpair()
    with theirs:
        made = Link(ours)
        yield made, theirs
        made.close()


@pytest.mark.parametrize(
    "sent",
    [b"\xff\xff\xff\xff\x06", b"\x00\x00\x00\x00\x63", b"\x03\x00\x00\x00\x01[]"],
    ids=["a frame of 4 GiB", "an unknown kind", "the half of a frame"],
)
def test_a_link_that_gets_nonsense_is_closed(link: tuple[Link, socket.socket], sent: bytes) -> None:
    link[1].sendall(sent)
    link[1].shutdown(socket.SHUT_WR)
    with pytest.raises(LinkClosed):
        link[0].receive(10)


def test_a_link_waits_no_longer_than_its_timeout(link: tuple[Link, socket.socket]) -> None:
    with pytest.raises(LinkTimeout):
        link[0].receive(0.0)
    link[1].sendall(b"\x02\x00\x00\x00\x06hi")
    assert link[0].receive(10) == (Kind.STEP, b"hi")


# Generation


def adapter_folder(folder: Path, **more: Any) -> Path:
    """A LoRA adapter of every projection of a tiny Llama, with matrices that change a lot."""
    from safetensors.torch import save_file

    torch.manual_seed(5)
    tensors = {}
    sizes = {"q_proj": (64, 64), "k_proj": (32, 64), "v_proj": (32, 64), "o_proj": (64, 64), "down_proj": (64, 128)}
    sizes |= {"gate_proj": (128, 64), "up_proj": (128, 64)}
    for layer in range(2):
        for name, (outputs, inputs) in sizes.items():
            part = "self_attn" if name[0] in "qkvo" else "mlp"
            base = f"base_model.model.model.layers.{layer}.{part}.{name}"
            tensors[f"{base}.lora_A.weight"] = torch.randn(4, inputs) * 0.3
            tensors[f"{base}.lora_B.weight"] = torch.randn(outputs, 4) * 0.3
    for name, shape in more.items():
        tensors[f"base_model.model.{name.replace('__', '.')}"] = torch.randn(*shape)
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "modules_to_save": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


async def answers(tiny: Served, adapter: str = "") -> list[str]:
    """To all prompts at once."""
    callers = [tiny.ask(Generation(prompt=prompt, sampling=GREEDY, adapter=adapter)) for prompt in PROMPTS]
    return [caller.text for caller in await asyncio.gather(*callers)]


SMALL = {"max_running": "3", "max_step_tokens": "12", "page_size": "4", "kv_cache_bytes": str(512 * 200)}
"""Prompts are computed in chunks, and wait for each other."""


def test_prompts_in_chunks_prefix_hits_and_adapters_are_as_in_one_process(tmp_path: Path) -> None:
    folder, adapter = llm_models.tiny_llama(tmp_path / "tiny" / "1"), adapter_folder(tmp_path / "red")
    parameters = {**SMALL, "adapters": f"red={adapter}"}

    async def compare() -> None:
        async with served(folder, **parameters) as one:
            plain, red = await answers(one), await answers(one, "red")
        assert plain != red
        async with served_by_threads(folder, **parameters) as two:
            assert await answers(two) == plain
            hits = two.engine.scheduler.prefix_hits
            assert await answers(two) == plain
            assert two.engine.scheduler.prefix_hits > hits
            assert await answers(two, "red") == red
            assert two.engine.runner.cache.layers[0].keys.shape[1] == 1  # of 2 key-value heads
            assert two.engine.scheduler.pool.used == 0

    asyncio.run(compare())


def test_streams_samples_and_logprobs_are_as_in_one_process(tmp_path: Path) -> None:
    folder = llm_models.tiny_llama(tmp_path / "tiny" / "1")
    sampled = Sampling(temperature=0.8, top_p=0.9, seed=3, max_tokens=12, n=2)
    scored = Sampling(temperature=0.0, max_tokens=4, logprobs=2, prompt_logprobs=1)

    async def ask(tiny: Served) -> tuple[Any, ...]:
        streamed = await tiny.ask(Generation(prompt=PROMPTS[3], sampling=GREEDY, stream=True))
        assert len(streamed.answers) > 1  # on a busy machine, several tokens may come at once
        several = await tiny.ask(Generation(prompt=PROMPTS[4], sampling=sampled))
        with_scores = await tiny.ask(Generation(prompt=PROMPTS[5], sampling=scored))
        prompt_scores = json.loads(with_scores.answers[0][1]["prompt_logprobs"])
        return streamed.text, several.texts(), with_scores.text, len(prompt_scores)

    async def compare() -> None:
        async with served(folder, page_size="4") as one:
            expected = await ask(one)
        async with served_by_threads(folder, page_size="4", tensor_parallel="4") as four:
            assert await ask(four) == expected

    asyncio.run(compare())


# Ranks that end


LONG = Sampling(temperature=0.0, max_tokens=1500, ignore_eos=True)


def test_a_rank_that_ends_fails_running_requests_and_the_next_are_answered(tmp_path: Path) -> None:
    folder = llm_models.tiny_llama(tmp_path / "tiny" / "1")

    async def lose() -> None:
        async with served_by_threads(folder, tensor_parallel="4", max_running="2") as tiny:
            expected = await answers(tiny)
            for number in range(3):
                running = [tiny.begin(Generation(prompt="the", sampling=LONG, stream=True)) for _ in range(2)]
                for caller in running:
                    await asyncio.wait_for(caller.came.wait(), 60)
                waiting = [tiny.begin(Generation(prompt=prompt, sampling=GREEDY)) for prompt in PROMPTS]
                tiny.ranks.taken[number].kill()
                for caller in (*running, *waiting):
                    await asyncio.wait_for(caller.ended.wait(), 60)
                for caller in running:
                    assert isinstance(caller.error, Unavailable)
                    assert f"rank {number + 1} (fake process) has ended (signal 9: killed)" in str(caller.error)
                assert [caller.text for caller in waiting] == expected
                assert tiny.engine.scheduler.pool.used == 0
            assert tiny.ranks.starts == 4

    asyncio.run(lose())


def test_a_loss_that_is_noticed_twice_is_handled_once(tmp_path: Path) -> None:
    folder = llm_models.tiny_llama(tmp_path / "tiny" / "1")

    async def notice() -> None:
        async with served_by_threads(folder) as tiny:
            caller = tiny.begin(Generation(prompt="the", sampling=replace(LONG, max_tokens=60), stream=True))
            await asyncio.wait_for(caller.came.wait(), 60)
            tiny.engine._inbox.put(RunnerLost("noticed late"))
            await asyncio.wait_for(caller.ended.wait(), 60)
            assert caller.error is None
            assert tiny.ranks.starts == 1

    asyncio.run(notice())


def test_ranks_of_an_idle_model_are_started_again_at_once(tmp_path: Path) -> None:
    folder = llm_models.tiny_llama(tmp_path / "tiny" / "1")

    async def lose() -> None:
        async with served_by_threads(folder) as tiny:
            tiny.ranks.taken[0].kill()
            while tiny.ranks.starts < 2 or tiny.engine.runner._group.is_lost:  # type: ignore[attr-defined]
                await asyncio.sleep(0.01)
            assert (await tiny.ask(Generation(prompt="the", sampling=GREEDY))).text

    asyncio.run(asyncio.wait_for(lose(), 60))


def test_requests_are_refused_while_ranks_cannot_be_started_and_answered_afterwards(tmp_path: Path) -> None:
    folder = llm_models.tiny_llama(tmp_path / "tiny" / "1")
    hello = {"versions": rank.versions()}

    async def lose() -> None:
        async with served_by_threads(folder, lambda: FakeProcess(hello)) as tiny:
            hello["versions"] = {**rank.versions(), "torch": "1.0"}
            tiny.ranks.taken[0].kill()
            with pytest.raises((Unavailable, FailedPrecondition)):
                while True:
                    await tiny.ask(Generation(prompt="the", sampling=GREEDY))
            with pytest.raises(FailedPrecondition, match=r"rank 1 of model 'tiny' runs torch 1\.0"):
                await tiny.ask(Generation(prompt="the", sampling=GREEDY))
            hello["versions"] = rank.versions()
            while True:
                try:
                    await tiny.ask(Generation(prompt="the", sampling=GREEDY))
                except FailedPrecondition:
                    continue
                break

    asyncio.run(asyncio.wait_for(lose(), 60))


def test_a_model_is_closed_while_its_ranks_do_not_come_back(tmp_path: Path) -> None:
    folder = llm_models.tiny_llama(tmp_path / "tiny" / "1")
    silent = threading.Event()

    class Silent(FakeProcess):
        def _main(self) -> None:
            if not silent.is_set():
                super()._main()

    async def close() -> None:
        async with served_by_threads(folder, lambda: Silent({"versions": rank.versions()})) as tiny:
            silent.set()
            tiny.ranks.taken[0].kill()
            while tiny.ranks.starts < 2:
                await asyncio.sleep(0.01)
            waiting = tiny.begin(Generation(prompt="the", sampling=GREEDY))
        assert isinstance(waiting.error, Unavailable)

    asyncio.run(asyncio.wait_for(close(), 60))


# Refusals


def opened(folder: Path, process: Callable[[], Any] | None = None, **parameters: str) -> None:
    async def go() -> None:
        async with served_by_threads(folder, process, **parameters):
            pass

    asyncio.run(asyncio.wait_for(go(), 60))


def test_a_rank_that_never_comes_is_named_in_time(tmp_path: Path) -> None:
    class Silent(FakeProcess):
        def _main(self) -> None:
            """Says nothing."""

    with pytest.raises(Unavailable, match=r"rank 1 of model 'tiny' \(fake process\) was not ready within 1 seconds"):
        opened(llm_models.tiny_llama(tmp_path / "tiny" / "1"), lambda: Silent({}), rank_timeout_seconds="1")


def test_a_rank_that_ends_while_it_starts_is_named(tmp_path: Path) -> None:
    class Dead(FakeProcess):
        def _main(self) -> None:
            self.signal = "exit code 3"
            self._theirs.close()

    with pytest.raises(Unavailable, match=r"rank 1 of model 'tiny' ended while it started \(exit code 3\)"):
        opened(llm_models.tiny_llama(tmp_path / "tiny" / "1"), lambda: Dead({}))


@pytest.mark.parametrize("name", ["headrace", "torch", "transformers", "python"])
def test_ranks_with_other_versions_are_refused(name: str, tmp_path: Path) -> None:
    versions = {**rank.versions(), name: "0.1"}
    with pytest.raises(FailedPrecondition, match=rf"rank 1 of model 'tiny' runs {name} 0\.1, and rank 0 "):
        opened(llm_models.tiny_llama(tmp_path / "tiny" / "1"), lambda: FakeProcess({"versions": versions}))


def test_ranks_with_other_weights_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = llm_models.tiny_llama(tmp_path / "tiny" / "1")
    monkeypatch.setattr(rank, "folder_fingerprint", lambda *_folders: "another")
    with pytest.raises(FailedPrecondition, match="rank 1 of model 'tiny' has other weights than rank 0"):
        opened(folder)


def test_other_weights_and_adapters_have_other_fingerprints(tmp_path: Path) -> None:
    one, other = (llm_models.tiny_llama(tmp_path / f"seed{seed}", seed=seed) for seed in (1, 2))
    red, blue = adapter_folder(tmp_path / "red"), adapter_folder(tmp_path / "blue", model__norm__weight=[64])
    prints = [folder_fingerprint(one, {}), folder_fingerprint(other, {})]
    prints += [
        folder_fingerprint(one, {"a": red}),
        folder_fingerprint(one, {"b": red}),
        folder_fingerprint(one, {"a": blue}),
    ]
    assert len(set(prints)) == len(prints)
    assert folder_fingerprint(one, {}) == prints[0]


@pytest.mark.parametrize(
    ("degree", "model", "text"),
    [
        (3, {}, "tensor_parallel is 3, which does not divide the model's 4 attention heads.*: use 2 or 4$"),
        (
            2,
            {"num_attention_heads": 3, "num_key_value_heads": 1, "hidden_size": 48},
            "3 attention heads.*: no number does",
        ),
        (8, {}, "does not divide the model's 4 attention heads"),
        (
            4,
            {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 4, "intermediate_size": 126},
            "126 values",
        ),
        (
            3,
            {"num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 96, "intermediate_size": 96},
            "2 key-value",
        ),
        (4, {"intermediate_size": 102}, r"102 values between the layers of its MLP \(intermediate_size\)"),
    ],
)
def test_a_degree_that_does_not_divide_the_model_is_refused(
    degree: int, model: dict[str, int], text: str, tmp_path: Path
) -> None:
    folder = llm_models.tiny_llama(tmp_path / "tiny" / "1", **model)
    with pytest.raises(InvalidArgument, match=text):
        opened(folder, tensor_parallel=str(degree))


def test_experts_that_cannot_be_divided_are_refused(tmp_path: Path) -> None:
    folder = llm_models.tiny_qwen3_moe(tmp_path / "tiny" / "1", moe_intermediate_size=30)
    with pytest.raises(InvalidArgument, match=r"30 values inside an expert \(moe_intermediate_size\)"):
        opened(folder, tensor_parallel="4")


def test_another_architecture_is_refused_by_name(tmp_path: Path) -> None:
    folder = llm_models.tiny_llama(tmp_path / "tiny" / "1")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["PhiForCausalLM"]}))
    with pytest.raises(
        Unimplemented, match="models of class PhiForCausalLM cannot be sharded; this server shards Llama"
    ):
        opened(folder)


def test_quantised_weights_are_refused(tmp_path: Path) -> None:
    with pytest.raises(Unimplemented, match="quantised weights are not sharded"):
        opened(llm_models.tiny_llama(tmp_path / "tiny" / "1"), quantization="fp8")


def test_a_rank_gets_the_settings_of_the_first() -> None:
    settings = LlmSettings(Path("/models/one"), max_running=7, adapters={"red": Path("/red")}, dtype="bfloat16")
    assert rank.settings_from_json(json.loads(json.dumps(rank.settings_as_json(settings)))) == settings


@pytest.mark.parametrize("number", ["0", "65", "two"])
def test_the_degree_is_a_whole_number(number: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="parameter tensor_parallel is"):
        opened(llm_models.tiny_llama(tmp_path / "tiny" / "1"), tensor_parallel=number)


def test_more_ranks_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.backends.llm.tensor_parallel.group.gpu_count", lambda: 2)
    place, settings = Placement("tiny_0_model", "model"), LlmSettings(Path(), tensor_parallel=4)
    with pytest.raises(FailedPrecondition, match="tensor_parallel is 4, and PyTorch sees 2 GPUs here"):
        rank_devices(settings, place)
    assert [str(device) for device in rank_devices(LlmSettings(Path(), tensor_parallel=2), place)] == [
        "cuda:0",
        "cuda:1",
    ]
    assert rank_devices(settings, Placement("tiny_0_cpu", "cpu")) == [CPU] * 4


@pytest.mark.parametrize(
    ("more", "text"),
    [
        (
            {"lm_head__lora_A__weight": (4, 64), "lm_head__lora_B__weight": (512, 4)},
            "'lm_head', which is sharded by tokens",
        ),
        ({"model__layers__0__self_attn__q_proj__weight": (64, 64)}, "which is sharded here"),
    ],
    ids=["of the head", "that replaces a layer"],
)
def test_an_adapter_that_cannot_be_sharded_is_refused(more: dict[str, Any], text: str, tmp_path: Path) -> None:
    folder, adapter = llm_models.tiny_llama(tmp_path / "tiny" / "1"), adapter_folder(tmp_path / "red", **more)
    with pytest.raises(Unimplemented, match=text):
        opened(folder, adapters=f"red={adapter}")


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            lambda tensors: tensors.pop("model.norm.weight"),
            "lack 1 tensors of LlamaForCausalLM, such as 'model.norm.weight'",
        ),
        (
            lambda tensors: tensors.update({"lm_head.weight": torch.zeros(512, 63)}),
            r"has shape \[512, 63\] in the weights",
        ),
    ],
)
def test_damaged_weights_are_refused(change: Callable[[Any], Any], text: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = llm_models.tiny_llama(tmp_path / "model")
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    path.unlink()
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(HeadraceError, match=text):
        shards(folder, 2)


@pytest.mark.parametrize("offsets", [None, [-8, 100], ["0", "100"], [1 << 40, 2 << 40]])
def test_weights_whose_place_in_the_file_is_wrong_are_refused(offsets: Any, tmp_path: Path) -> None:
    folder = llm_models.tiny_llama(tmp_path / "model")
    path = folder / "model.safetensors"
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    header["lm_head.weight"]["data_offsets"] = offsets
    changed = json.dumps(header).encode()
    path.unlink()
    path.write_bytes(len(changed).to_bytes(8, "little") + changed + content[8 + size :])
    with pytest.raises(FailedPrecondition, match="is damaged: copy the model again"):
        shards(folder, 2)


def test_the_group_of_a_prefill_server_is_refused(tmp_path: Path) -> None:
    folder = llm_models.tiny_llama(tmp_path / "tiny" / "1")

    async def go() -> None:
        async with served(folder, KvTransferSettings(role="prefill"), tensor_parallel="2"):
            pass

    with pytest.raises(Unimplemented, match="start the server without --role"):
        asyncio.run(go())


def test_a_model_without_instance_group_has_one_instance_for_all_gpus(tmp_path: Path) -> None:
    """Not one on each GPU, as other models have."""
    folder = llm_models.tiny_llama(tmp_path / "tiny" / "1")
    text = 'backend: "llm"\nparameters { key: "tensor_parallel" value { string_value: "2" } }\n'
    (folder.parent / "config.pbtxt").write_text(text)
    plan = read_load_plan(folder.parent, None, 4)
    (group,) = plan.complete(ModelFiles(folder.parent, 1, folder)).instance_groups
    assert (group.kind, group.count) == ("model", 1)


def test_gpus_of_an_instance_group_are_refused(tmp_path: Path) -> None:
    folder = llm_models.tiny_llama(tmp_path / "tiny" / "1")
    settings = LlmSettings(folder, tensor_parallel=2)
    check_shardable(check_folder(settings), settings)
    groups = (InstanceGroup("tiny", "gpu", gpus=(0, 1)),)
    config = ModelConfig("tiny", "llm", outputs=(OutputSpec("text_output", None, None),), decoupled=True)
    config = replace(config, instance_groups=groups, parameters={"tensor_parallel": "2"})

    async def go() -> None:
        LlmBackend().load(config, ModelFiles(folder.parent, 1, folder), Services())  # type: ignore[arg-type]

    with pytest.raises(InvalidArgument, match="takes the GPUs from 0 on"):
        asyncio.run(go())
