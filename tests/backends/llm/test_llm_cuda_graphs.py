# SPDX-License-Identifier: Apache-2.0
"""The inputs that `CudaGraphRunner` passes to the device, without a GPU: attention in PyTorch, graphs that recompute.

The kernels and real graphs need a GPU: `bench/scenarios/llm_gpu.py` compares their answers with those of transformers.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from llm_scheduling import Guess
from llm_tokenizers import tokenizer

from headrace.backends.contract import SleepLevel
from headrace.backends.cuda_memory import PinnedMemory, StableMemory
from headrace.backends.llm.adapter_fit import AdapterReader
from headrace.backends.llm.lora import LoraAdapters, open_slots
from headrace.backends.llm.model_runner import cuda_attention, cuda_graphs, fused_experts
from headrace.backends.llm.model_runner.attention import PagedAttention
from headrace.backends.llm.model_runner.kv_cache import KVCache
from headrace.backends.llm.model_runner.model_loader import place_weights
from headrace.backends.llm.page_pool import PagePool
from headrace.backends.llm.sampling.prompt_logprobs import PromptLogprobs
from headrace.backends.llm.scheduler import Drafter, Scheduler, Sequence
from headrace.backends.llm.speculation.draft_model import DraftModel
from headrace.models.adapters import AdapterSource
from support.adapters import SETTINGS as ADAPTERS
from support.adapters import merged_answers, save_adapters
from support.architectures import Architecture, covered
from support.fake_cuda_memory import FakeCudaDriver
from support.fused_experts import plain_products
from support.llm_models import tiny_llama, tiny_mistral
from support.llm_steps import check_company
from support.paged_attention import plain_attention

PAGE, SEATS, LENGTH = 8, 5, 160


class RecomputedGraph:
    """In place of a graph: computes the step again, into the tensors of the first time."""

    def __init__(self, step: Callable[[], Any], results: Any) -> None:
        self._step = step
        self._results = results

    def replay(self) -> None:
        for result, new in zip(self._results, self._step(), strict=True):
            result.copy_(new)

    def pool(self) -> None:
        return None


class Event:
    def __init__(self, blocking: bool) -> None:
        pass

    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        pass


@pytest.fixture
def no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def recorded(step: Callable[[], Any], pool: Any) -> Any:
        results = step()
        return RecomputedGraph(step, results), results

    cuda_attention.register().register_kernel("cpu")(plain_attention)
    fused_experts.register()[1].register_kernel("cpu")(plain_products)
    monkeypatch.setattr(cuda_graphs, "capture", recorded)
    monkeypatch.setattr(cuda_graphs, "pinned_tensor", lambda count, dtype: torch.zeros(count, dtype=dtype))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    # Replays compute, so the model must stay as it is while graphs are captured.
    monkeypatch.setattr(cuda_graphs.CudaGraphs, "_prepared", _prepared_for_good)


def _prepared_for_good(self: Any, compiled: bool, **options: Any) -> Any:
    self.model.config._attn_implementation = cuda_attention.ATTENTION
    for module in self._modules:
        cuda_attention.attach(module, self.split)
    for module in fused_experts.expert_modules(self.model):
        module.config._experts_implementation = fused_experts.EXPERTS
    return nullcontext()


def opened(
    folder: Path,
    pages: int = 200,
    step_tokens: int = 64,
    slots: int = 0,
    memory: StableMemory | None = None,
    fixed_rows: int = 0,
) -> tuple[Any, cuda_graphs.CudaGraphRunner]:
    """A model as transformers has it, and a runner of another one with the same weights, perhaps with slots for adapters."""
    from transformers import AutoModelForCausalLM

    theirs, ours = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
        for _ in range(2)
    )
    if slots:
        open_slots(ours, {}, slots, max_rank=8)
    placed = place_weights(ours, memory)
    attention = PagedAttention(ours)
    shapes = attention.probe(ours)
    cache = KVCache(shapes, pages, PAGE, torch.float32, torch.device("cpu"), memory.driver if memory else None)
    attention.attach(cache)
    runner = cuda_graphs.CudaGraphRunner(
        ours,
        attention,
        cache,
        page_size=PAGE,
        max_running=SEATS,
        max_length=LENGTH,
        max_step_tokens=step_tokens,
        compiled=False,
        placed=placed,
        fixed_rows=fixed_rows,
    )
    return theirs, runner


def wanted(model: Any, prompt: list[int], count: int) -> list[int]:
    ids = torch.tensor([prompt])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, min_new_tokens=count, do_sample=False,
        eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return list(out[0, len(prompt) :].tolist())


def generated(
    runner: cuda_graphs.CudaGraphRunner,
    requests: list[tuple[list[int], int]],
    *,
    greedy: bool = True,
    sample: Any = None,
    step_tokens: int = 64,
    receivers: list[PromptLogprobs | None] | None = None,
    drafter: Drafter | None = None,
) -> list[list[int]]:
    """With the real scheduler; where it is greedy, a step is launched before the last one is read."""
    return scheduled(runner, requests, greedy, sample, step_tokens, receivers, drafter)[0]


def scheduled(
    runner: cuda_graphs.CudaGraphRunner,
    requests: list[tuple[list[int], int]],
    greedy: bool = True,
    sample: Any = None,
    step_tokens: int = 64,
    receivers: list[PromptLogprobs | None] | None = None,
    drafter: Drafter | None = None,
    adapters: list[str] | None = None,
) -> tuple[list[list[int]], Scheduler]:
    pool = PagePool(runner.cache.pages, PAGE, prefix_cache=True)
    scheduler = Scheduler(pool, max_running=SEATS, max_step_tokens=step_tokens)
    sequences = [
        Sequence(
            list(prompt),
            len(prompt) + count,
            prompt_logprobs=receiver,
            speculates=True,
            adapter=adapter,
            cache_salt=adapter.encode(),
        )
        for (prompt, count), receiver, adapter in zip(
            requests, receivers or [None] * len(requests), adapters or [""] * len(requests), strict=True
        )
    ]
    scheduler.drafter, scheduler.max_draft_rows = (drafter, runner.graphs.max_running) if drafter else (None, 0)
    for sequence in sequences:
        scheduler.add(sequence)
    flights: list[tuple[Any, Any]] = []
    while not scheduler.idle:
        plan = scheduler.schedule()
        if plan:
            flights.append((plan, runner.launch(plan, greedy=greedy and sample is None, sample=sample)))
        if flights and (not greedy or not plan or len(flights) > 1):
            plan, step = flights.pop(0)
            tokens = step.tokens() if greedy else step.logits.argmax(-1).tolist()
            grown = scheduler.commit(plan, tokens)
            scheduler.finish({sequence for _, sequence in grown if len(sequence.tokens) == sequence.limit})
    while flights:
        scheduler.commit(flights[0][0], flights.pop(0)[1].tokens())
    assert pool.used == 0
    return [sequence.tokens[sequence.prompt_length :] for sequence in sequences], scheduler


def mixture(count: int = 14) -> list[tuple[list[int], int]]:
    random.seed(4)
    shared = [random.randrange(8, 500) for _ in range(20)]
    lengths = [random.choice([1, 2, 5, 17, 40, 90]) for _ in range(count)]
    prompts = [
        [*(shared if number % 3 else []), *random.choices(range(8, 500), k=n)] for number, n in enumerate(lengths)
    ]
    return [(prompt, random.randrange(1, 30)) for prompt in prompts]


@pytest.mark.parametrize("greedy", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_steps_of_graphs_generate_what_transformers_does(no_device: None, tmp_path: Path, greedy: bool) -> None:
    theirs, runner = opened(tiny_llama(tmp_path / "llama"))
    requests = mixture()
    assert generated(runner, requests, greedy=greedy) == [wanted(theirs, *request) for request in requests]


class Known(Guess):
    """Drafts the answers of transformers, with a wrong token now and then."""

    def __init__(self, answers: dict[tuple[int, ...], list[int]]) -> None:
        super().__init__()
        self.answers = answers

    def draft(self, wanted: list[tuple[Sequence, int]], room: int) -> list[list[int]]:
        drafts = []
        for sequence, most in wanted:
            length, known = sequence.prompt_length, len(sequence.tokens)
            rest = self.answers[tuple(sequence.tokens[:length])][known - length :][: min(most, known % 5)]
            drafts.append([token if (known + i) % 4 else token - 1 for i, token in enumerate(rest)])
        return drafts

    def waits(self, sequence: Sequence) -> bool:
        return len(sequence.tokens) % 3 > 0


def test_adapters_in_slots_are_computed_in_graphs(
    no_device: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts and decode rows of three adapters and of none in one replay; then another adapter in one of the slots."""
    base = tiny_llama(tmp_path / "llama")
    trained = save_adapters(base, tmp_path / "adapters")
    folders = {name: trained / name for name in ADAPTERS}
    _, runner = opened(base, slots=3)
    monkeypatch.setattr(runner, "_launch_others", None)  # kernel by kernel
    slots: LoraAdapters = runner.model.headrace_adapters
    reader = AdapterReader(runner.model, 8, lambda: False)
    requests = mixture(12)
    right = merged_answers(base, folders, [prompt for prompt, _ in requests], 30)

    def place(slot: int, name: str, replaced: str = "") -> None:
        slots.place(slot, name, reader(AdapterSource(name, folders[name])).weights, replaced)

    def answers(names: list[str]) -> None:
        asked = [names[number % len(names)] for number in range(len(requests))]
        found, _ = scheduled(runner, requests, adapters=asked)
        assert found == [
            right[name, number][:count] for number, (name, (_, count)) in enumerate(zip(asked, requests, strict=True))
        ]

    for slot, name in enumerate(("anna", "bert", "carl")):
        place(slot, name)
    answers(["bert", "", "anna", "carl"])
    place(0, "dora", "anna")  # of a smaller rank: what anna had beyond it is gone
    answers(["dora", "carl", ""])
    answers([""])
    assert any(graph.current for graph in runner.graphs.adapter_batches)


def test_drafts_are_verified_in_the_rows_of_graphs(no_device: None, tmp_path: Path) -> None:
    theirs, runner = opened(tiny_llama(tmp_path / "llama"))
    requests = mixture()
    answers = [wanted(theirs, *request) for request in requests]
    drafter = Known({tuple(prompt): answer for (prompt, _), answer in zip(requests, answers, strict=True)})
    assert generated(runner, requests, drafter=drafter) == answers
    assert drafter.accepted > 10 and drafter.rejected > 5


@pytest.mark.parametrize("step_tokens", [64, 32])
def test_a_draft_model_is_ahead_of_its_tokens(no_device: None, tmp_path: Path, step_tokens: int) -> None:
    """Its steps are launched before the last one is read; here it is the model itself, so that all drafts are right."""
    theirs, runner = opened(tiny_llama(tmp_path / "llama"))
    requests = [(prompt, 29) for prompt, _ in mixture()][4:10:2]
    _, drafting = opened(tiny_llama(tmp_path / "llama"))
    drafter = DraftModel(
        drafting,
        tokens=4,
        token_cost=0.05,
        max_running=SEATS,
        max_step_tokens=step_tokens,
        max_length=LENGTH,
        vocabulary=512,
        prefix_cache=True,
    )
    unknown: list[bool] = []
    launch = drafting.launch

    def recorded(chunks: Any, **named: Any) -> Any:
        unknown.extend(not chunk.known for chunk in chunks)
        return launch(chunks, **named)

    drafting.launch = recorded  # type: ignore[method-assign]
    for together in (requests[:1], requests[1:2], requests[1:]):
        answers, scheduler = scheduled(runner, together, drafter=drafter)
        assert answers == [wanted(theirs, *request) for request in together]
        assert sum(scheduler.accepted_tokens) == scheduler.draft_tokens > 10
    assert sum(unknown) > 10
    assert drafter._pool.used == 0 and len(drafter._free_indices) == SEATS


def _compute_kernel_by_kernel_as_usual(runner: Any) -> None:
    """Outside of graphs the model has its paged attention, which `_prepared_for_good` replaces."""
    forward, config = runner.forward, runner.model.config

    def usual(model_input: Any) -> torch.Tensor:
        replaced, config._attn_implementation = config._attn_implementation, runner.attention.name
        try:
            return forward(model_input)
        finally:
            config._attn_implementation = replaced

    runner.forward = usual


def test_prompts_whose_logprobs_are_wanted_change_no_other(no_device: None, tmp_path: Path) -> None:
    theirs, runner = opened(tiny_llama(tmp_path / "llama"))
    _compute_kernel_by_kernel_as_usual(runner)
    requests = mixture(8)
    collected = [PromptLogprobs(prompt, 1) if index % 2 else None for index, (prompt, _) in enumerate(requests)]
    assert generated(runner, requests, receivers=collected) == [wanted(theirs, *request) for request in requests]
    words = tokenizer("bytes")
    for (prompt, _), logprobs in zip(requests, collected, strict=True):
        if logprobs is None:
            continue
        with torch.inference_mode():
            expected = theirs(torch.tensor([prompt])).logits[0].log_softmax(-1)
        found = [entry["logprob"] for entry in json.loads(logprobs.to_json(words))[1:]]
        assert found == pytest.approx([float(expected[i, t]) for i, t in enumerate(prompt[1:])], abs=1e-3)


def test_the_next_step_continues_from_sampled_tokens(no_device: None, tmp_path: Path) -> None:
    """Each step samples on the device and is launched before the last one is read; here, always the second likeliest."""
    _, runner = opened(tiny_llama(tmp_path / "llama"))
    requests = mixture(6)

    def second(chunks: Any, logits: torch.Tensor) -> torch.Tensor:
        assert len(logits) == len(chunks) and all(chunk.samples for chunk in chunks)
        return logits.topk(2).indices[:, 1]

    ahead = generated(runner, requests, sample=second)
    alone = [generated(opened(tiny_llama(tmp_path / "llama"))[1], [request], sample=second)[0] for request in requests]
    assert ahead == alone != generated(opened(tiny_llama(tmp_path / "llama"))[1], requests)


@pytest.mark.slow  # quick: test_more_changes_of_pages_than_a_step_carries; without graphs, test_llm_model_runner.py
def test_a_window_and_few_pages(no_device: None, tmp_path: Path) -> None:
    """Sequences give way to others here, and come back to other seats and pages."""
    theirs, runner = opened(tiny_mistral(tmp_path / "mistral", sliding_window=12), pages=24, step_tokens=32)
    requests = mixture(10)
    assert generated(runner, requests, step_tokens=32) == [wanted(theirs, *request) for request in requests]


def test_long_sequences_decode_apart_from_prompts(
    no_device: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_graphs, "_MIXED_CONTEXT", 12)
    theirs, runner = opened(tiny_llama(tmp_path / "llama"))
    launched: list[int] = []
    monkeypatch.setattr(runner, "_launch_mixed", _recording(runner._launch_mixed, launched))
    requests = mixture(8)
    assert generated(runner, requests) == [wanted(theirs, *request) for request in requests]
    assert 0 in launched and max(launched) > 0  # replays of prompts alone, and of prompts with decode rows


def _recording(launch: Any, launched: list[int]) -> Any:
    def recorded(step: Any, rows: list[int], *more: Any) -> Any:
        launched.append(len(rows))
        return launch(step, rows, *more)

    return recorded


def test_more_changes_of_pages_than_a_step_carries(
    no_device: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_graphs, "TABLE_UPDATES", 3)
    theirs, runner = opened(tiny_llama(tmp_path / "llama"))
    requests = mixture(6)
    assert generated(runner, requests) == [wanted(theirs, *request) for request in requests]


def test_sizes() -> None:
    assert cuda_graphs.batch_sizes(1) == [1]
    assert cuda_graphs.batch_sizes(64)[-2:] == [56, 64]
    assert cuda_graphs.batch_sizes(200)[-3:] == [144, 176, 200]
    assert cuda_graphs.mixed_sizes(2048)[-2:] == [1536, 2048]
    assert cuda_graphs.mixed_sizes(40) == [40]
    assert [cuda_attention.tile_tokens(group) for group in (1, 3, 4, 71)] == [64, 21, 16, 1]


@pytest.mark.parametrize("architecture", covered("captured"))
def test_graphs_of_each_architecture_generate_what_transformers_does(
    no_device: None, architecture: Architecture, tmp_path: Path
) -> None:
    """Caps, sinks, windows, values of another size and experts arrive at the operators; the kernels need a GPU."""
    theirs, runner = opened(architecture.make(tmp_path / "model"))
    requests = mixture(5)
    assert generated(runner, requests) == [wanted(theirs, *request) for request in requests]


@pytest.mark.parametrize("level", [1, 2])
def test_graphs_outlast_sleep_if_addresses_stay(no_device: None, tmp_path: Path, level: SleepLevel) -> None:
    driver = FakeCudaDriver()
    memory = StableMemory(driver, PinnedMemory(1 << 30, pin=False))
    folder = tiny_llama(tmp_path)
    theirs, runner = opened(folder, memory=memory)
    requests = [(list(range(3 + number, 20 + 3 * number)), 6) for number in range(4)]
    answers = [wanted(theirs, *request) for request in requests]
    assert generated(runner, requests) == answers
    graphs, used = runner.graphs, driver.used
    captured = [graph.graph for graph in (*graphs.mixed, *graphs.batches)]
    for _ in range(3):
        runner.sleep(level)
        assert driver.used == 0
        runner.wake(opened(folder)[0] if level == 2 else None)
        assert driver.used == used
        assert runner.graphs is graphs
        assert [graph.graph for graph in (*graphs.mixed, *graphs.batches)] == captured
        assert generated(runner, requests) == answers
    runner.close()
    assert driver.used == 0
    assert not driver.reserved


def test_graphs_are_captured_again_if_addresses_change(no_device: None, tmp_path: Path) -> None:
    theirs, runner = opened(tiny_llama(tmp_path))
    requests = [(list(range(3, 20)), 6)]
    graphs = runner.graphs
    assert generated(runner, requests) == [wanted(theirs, *requests[0])]
    runner.sleep(1)
    runner.wake(None)
    assert runner.graphs is not graphs
    assert generated(runner, requests) == [wanted(theirs, *requests[0])]


@pytest.mark.parametrize(("make", "rows"), [(tiny_llama, 16), (tiny_mistral, 3)])
def test_graphs_of_fixed_rows_compute_the_same_in_any_company(
    no_device: None, tmp_path: Path, make: Callable[[Path], Path], rows: int
) -> None:
    theirs, runner = opened(make(tmp_path / "model"), fixed_rows=rows)
    assert [graph.size for graph in runner.graphs.mixed] == [runner.block_rows]
    assert runner.graphs.batches == []
    requests = mixture(8)
    assert generated(runner, requests) == [wanted(theirs, *request) for request in requests]
    check_company(runner, others=SEATS - 3)


def test_prompts_with_logprobs_go_beside_graphs_of_fixed_rows(no_device: None, tmp_path: Path) -> None:
    theirs, runner = opened(tiny_llama(tmp_path / "llama"), fixed_rows=8)
    _compute_kernel_by_kernel_as_usual(runner)
    requests = mixture(6)
    receivers = [PromptLogprobs(prompt, 2) if number % 2 else None for number, (prompt, _) in enumerate(requests)]
    found = generated(runner, requests, receivers=receivers)
    assert found == [wanted(theirs, *request) for request in requests]


def test_blocks_become_smaller_until_equal_rows_are_alike(
    no_device: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cuda_graphs, "are_alike", lambda logits: len(logits) < cuda_graphs.MAX_PROMPTS + 5)
    _, runner = opened(tiny_llama(tmp_path / "llama"), fixed_rows=16)
    assert runner.block_rows == 4
    assert caplog.text.count("trying smaller blocks") == 2
