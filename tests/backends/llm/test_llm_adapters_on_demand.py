# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters that are loaded when a request names them: answers, slots, faults and bad adapters, with the real engine."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from llm_instances import AsyncLauncher, Caller, Served, served
from safetensors.torch import load_file, save_file

from headrace.backends.contract import SleepLevel
from headrace.backends.llm.adapter_files import WEIGHTS
from headrace.core.errors import (
    FailedPrecondition,
    HeadraceError,
    InvalidArgument,
    NotFound,
    Unavailable,
    Unimplemented,
)
from headrace.core.generation import Generation, Sampling
from headrace.models.adapters import AdapterSource
from support.adapters import SETTINGS, merged_answers, save_adapters
from support.llm_models import tiny_llama
from support.waiting import eventually

TOKENS = 8
PROMPTS = ([5, 9, 100, 33], [7, 300, 12, 13, 14, 250, 77], [400, 41])


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("base") / "tiny" / "1")


@pytest.fixture(scope="module")
def trained(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_adapters(base, tmp_path_factory.mktemp("adapters"))


@pytest.fixture(scope="module")
def expected(base: Path, trained: Path) -> dict[tuple[str, int], list[int]]:
    answers = merged_answers(base, {name: trained / name for name in SETTINGS}, PROMPTS, TOKENS)
    assert len({tuple(answers[name, 0]) for name in ("", *SETTINGS)}) == len(SETTINGS) + 1, (
        "the adapters change nothing"
    )
    return answers


@pytest.fixture
def folder(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "adapters"))


def asking(name: str, prompt: int = 0, tokens: int = TOKENS) -> Generation:
    sampling = Sampling(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    return Generation(prompt=PROMPTS[prompt], adapter=name, sampling=sampling, tracks_tokens=True)


def tokens_of(caller: Caller) -> list[int]:
    texts = [parameters["token_ids"] for _, parameters in caller.answers if parameters.get("token_ids")]
    return [int(token) for text in texts for token in text.split(",")]


async def answer(tiny: Served, name: str, prompt: int = 0) -> list[int]:
    return tokens_of(await tiny.ask(asking(name, prompt)))


@asynccontextmanager
async def serving(base: Path, folder: Path | None, **parameters: str) -> AsyncIterator[Served]:
    places = {} if folder is None else {"adapters_folder": str(folder)}
    async with served(base, **{"max_adapters": "2", **places, **parameters}) as tiny:
        yield tiny


def resident(tiny: Served) -> list[str]:
    slots = tiny.engine._components.adapter_slots
    assert slots is not None
    return slots.resident


@pytest.mark.parametrize("ahead", [False, True])
def test_more_adapters_than_slots_answer_as_merged_weights_do(
    base: Path, trained: Path, expected: Any, ahead: bool
) -> None:
    """Two adapters more than slots, asked concurrently in random order; with steps launched ahead as on a GPU, too."""

    async def main() -> None:
        async with serving(base, trained) as tiny:
            if ahead:
                AsyncLauncher(tiny.engine.runner)
            asked = [(name, number) for name in ("", *SETTINGS) for number in range(len(PROMPTS))] * 4
            random.Random(7).shuffle(asked)
            callers = await asyncio.gather(*(tiny.ask(asking(*each)) for each in asked))
            assert [tokens_of(caller) for caller in callers] == [expected[each] for each in asked]
            assert tiny.value("headrace_llm_adapter_loads_total") == 4
            assert tiny.value("headrace_llm_adapter_evictions_total") >= 2
            assert tiny.value("headrace_llm_adapters_resident") == 2
            assert tiny.value("headrace_llm_adapter_requests_waiting") == 0

    asyncio.run(main())


def test_adapters_of_one_step_are_in_their_slots(base: Path, trained: Path, expected: Any) -> None:
    async def main() -> None:
        async with serving(base, trained, max_adapters="4") as tiny:
            steps: list[set[str]] = []
            launch = tiny.engine.runner.launch

            def record(chunks: Any, **options: Any) -> Any:
                steps.append({chunk.sequence.adapter for chunk in chunks})
                return launch(chunks, **options)

            tiny.engine.runner.launch = record  # type: ignore[method-assign]
            for name in SETTINGS:
                await answer(tiny, name)
            names = ["", *SETTINGS]
            found = await asyncio.gather(*(answer(tiny, name, 1) for name in names))
            assert found == [expected[name, 1] for name in names]
            assert max(map(len, steps)) == 5

    asyncio.run(main())


def test_the_least_recently_used_idle_adapter_is_evicted(base: Path, trained: Path, expected: Any) -> None:
    async def main() -> None:
        async with serving(base, trained) as tiny:
            for name in ("anna", "bert", "anna", "carl"):
                assert await answer(tiny, name) == expected[name, 0]
            assert resident(tiny) == ["anna", "carl"]
            assert await answer(tiny, "bert") == expected["bert", 0]
            assert tiny.value("headrace_llm_adapter_loads_total") == 3, "from host memory, not from the disk"

    asyncio.run(main())


def test_an_adapter_in_use_is_never_evicted(base: Path, trained: Path, expected: Any) -> None:
    async def main() -> None:
        async with serving(base, trained, max_adapters="1") as tiny:
            long = tiny.begin(Generation(prompt=PROMPTS[0], adapter="anna", stream=True,
                                         sampling=Sampling(temperature=0.0, max_tokens=60, ignore_eos=True)))  # fmt: skip
            await long.came.wait()
            other = tiny.begin(asking("bert"))
            await asyncio.wait_for(other.ended.wait(), 60)
            assert long.ended.is_set(), "the slot was taken from a request"
            assert tokens_of(other) == expected["bert", 0]
            assert long.last["completion_tokens"] == 60

    asyncio.run(main())


def test_a_waiting_request_that_gives_up_frees_its_place(base: Path, trained: Path, expected: Any) -> None:
    async def main() -> None:
        async with serving(base, trained, max_adapters="1") as tiny:
            go, launch = threading.Event(), tiny.engine.runner.launch

            def slowly(*chunks: Any, **how: Any) -> Any:
                go.wait(0.1)  # the request takes 20 s, or until the others wait
                return launch(*chunks, **how)

            tiny.engine.runner.launch = slowly  # type: ignore[method-assign]
            long = tiny.begin(asking("anna", tokens=200))
            await eventually_async(lambda: resident(tiny) == ["anna"])
            given_up, other = tiny.begin(asking("bert")), tiny.begin(asking("carl"))
            await eventually_async(lambda: tiny.value("headrace_llm_adapter_requests_waiting") == 2)
            given_up.cancelled = True
            go.set()
            await asyncio.wait_for(asyncio.gather(given_up.ended.wait(), other.ended.wait(), long.ended.wait()), 60)
            assert not given_up.answers and given_up.error is None
            assert tokens_of(other) == expected["carl", 0]
            assert resident(tiny) == ["carl"]

    asyncio.run(main())


async def eventually_async(check: Any) -> None:
    await asyncio.to_thread(eventually, check)


class StoppedClock:
    """A clock by which no pause ends."""

    def monotonic(self) -> float:
        return 1000.0

    def wall(self) -> float:
        return 1000.0


class HeldReader:
    """Takes the place of the reader of a store: every load waits until it is let go."""

    def __init__(self, tiny: Served) -> None:
        store = tiny.model._adapter_store
        assert store is not None and store.read is not None
        self._read, store.read = store.read, self
        self.reads: list[str] = []
        self.error: Exception | None = None
        self.go = threading.Event()

    def __call__(self, source: AdapterSource) -> Any:
        self.reads.append(source.name)
        assert self.go.wait(60)
        if self.error is not None:
            raise self.error
        return self._read(source)


@pytest.mark.parametrize(
    ("error", "told", "text"),
    [
        (Unavailable("the Hub could not be reached"), Unavailable, "the Hub could not be reached"),
        (ValueError("secret words"), HeadraceError, "adapter 'anna' could not be loaded; the server's log"),
        (MemoryError(), Unavailable, "there is not enough memory for adapter 'anna'"),
    ],
)
def test_a_failed_load_is_reported_to_all_waiters_and_tried_again(
    base: Path, trained: Path, expected: Any, error: Exception, told: type[HeadraceError], text: str
) -> None:
    async def main() -> None:
        async with serving(base, trained) as tiny:
            reader = HeldReader(tiny)
            reader.error = error
            tiny.model._adapter_store._clock = StoppedClock()
            callers = [tiny.begin(asking("anna")) for _ in range(5)]
            await eventually_async(lambda: reader.reads and len(tiny.model._adapter_store._loads["anna"].waiters) == 5)
            assert (await answer(tiny, "")) == expected["", 0], "others do not wait"
            reader.go.set()
            for caller in callers:
                await asyncio.wait_for(caller.ended.wait(), 60)
                assert isinstance(caller.error, told) and text in caller.error.message
            assert reader.reads == ["anna"]
            with pytest.raises(told, match="anna|Hub") as soon:
                await answer(tiny, "anna")
            assert reader.reads == ["anna"], "tried again at once"
            if told is Unavailable:
                assert soon.value.retry_after_seconds and 0 < soon.value.retry_after_seconds <= 1
            reader.error = None
            tiny.model._adapter_store._failures["anna"].retry_at = 0.0
            assert await answer(tiny, "anna") == expected["anna", 0]
            assert tiny.value("headrace_llm_adapter_load_failures_total") == 1

    asyncio.run(main())


def test_a_request_that_gives_up_does_not_stop_the_load_for_others(base: Path, trained: Path, expected: Any) -> None:
    async def main() -> None:
        async with serving(base, trained) as tiny:
            reader = HeldReader(tiny)
            first, second = tiny.begin(asking("anna")), tiny.begin(asking("anna"))
            await eventually_async(lambda: reader.reads and len(tiny.model._adapter_store._loads["anna"].waiters) == 2)
            first.cancelled = True
            reader.go.set()
            await asyncio.wait_for(second.ended.wait(), 60)
            assert tokens_of(second) == expected["anna", 0]
            await asyncio.wait_for(first.ended.wait(), 60)
            assert not first.answers and first.error is None

    asyncio.run(main())


def test_requests_that_wait_for_a_load_are_answered_when_the_model_is_unloaded(base: Path, trained: Path) -> None:
    async def main() -> None:
        async with serving(base, trained) as tiny:
            reader = HeldReader(tiny)
            caller = tiny.begin(asking("anna"))
            await eventually_async(lambda: bool(reader.reads))
            await asyncio.to_thread(tiny.instance.close)
            await asyncio.wait_for(caller.ended.wait(), 60)
            assert isinstance(caller.error, Unavailable) and "is being unloaded" in caller.error.message
            reader.go.set()

    asyncio.run(main())


@pytest.mark.parametrize("level", [1, 2])
def test_adapters_answer_the_same_after_their_model_slept(
    base: Path, trained: Path, expected: Any, level: SleepLevel
) -> None:
    async def main() -> None:
        async with serving(base, trained) as tiny:
            assert await answer(tiny, "anna") == expected["anna", 0]
            await asyncio.to_thread(tiny.model.sleep, level)
            await asyncio.to_thread(tiny.model.wake)
            for name in ("anna", "bert", "carl", ""):
                assert await answer(tiny, name, 1) == expected[name, 1]

    asyncio.run(main())


def test_quantised_weights_take_adapters_on_demand(base: Path, trained: Path) -> None:
    """With weights in FP8 they answer as adapters do that are loaded with the model."""
    named = ",".join(f"{name}={trained / name}" for name in SETTINGS)

    async def main() -> None:
        async with served(base, quantization="fp8", adapters=named) as tiny:
            right = [await answer(tiny, name, 1) for name in SETTINGS]
        async with serving(base, trained, quantization="fp8") as tiny:
            assert [await answer(tiny, name, 1) for name in SETTINGS] == right

    asyncio.run(main())


def test_host_memory_keeps_as_many_as_it_may(base: Path, trained: Path) -> None:
    async def main() -> None:
        async with serving(base, trained, max_host_adapters="2") as tiny:
            for name in ("anna", "bert", "carl"):
                await answer(tiny, name)
            assert tiny.model._adapter_store.loaded == ["bert", "carl"]
            assert tiny.value("headrace_llm_adapter_loads_total") == 3
            await answer(tiny, "anna")
            assert tiny.value("headrace_llm_adapter_loads_total") == 4

    asyncio.run(main())


def test_a_replaced_adapter_has_its_own_answers_and_cache(
    base: Path, folder: Path, expected: Any, tmp_path: Path
) -> None:
    """Same name, other content: pages of the prefix cache that the old one computed are not used."""

    async def main() -> None:
        async with serving(base, folder, page_size="2") as tiny:
            assert await answer(tiny, "anna", 1) == expected["anna", 1]
            shutil.rmtree(folder / "anna")
            shutil.copytree(folder / "dora", folder / "anna")
            assert await answer(tiny, "anna", 1) == expected["anna", 1], "what is loaded stays"
            adapters = tiny.model._adapters
            loaded: asyncio.Queue[Any] = asyncio.Queue()
            loop = asyncio.get_running_loop()
            adapters.require_loader().load(
                adapters.find("anna"), lambda error: loop.call_soon_threadsafe(loaded.put_nowait, error)
            )
            assert await asyncio.wait_for(loaded.get(), 60) is None
            assert await answer(tiny, "anna", 1) == expected["dora", 1]

    asyncio.run(main())


@pytest.mark.parametrize("name", ["ana", "../adapters/anna", "/etc", "..", "anna/../anna", "org/model", "anna\0", ""])
def test_a_name_that_is_no_adapter(base: Path, trained: Path, name: str, expected: Any) -> None:
    async def main() -> None:
        async with serving(base, trained) as tiny:
            if not name:
                assert await answer(tiny, name) == expected["", 0]
                return
            with pytest.raises(NotFound, match="model 'tiny' has no adapter") as error:
                await answer(tiny, name)
            if name == "ana":
                assert "did you mean 'anna'?" in error.value.message

    asyncio.run(main())


def reconfigured(folder: Path, **settings: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))


def spoil(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    name = min(tensors)
    tensors[name][0] = float("nan")
    save_file(tensors, folder / WEIGHTS)


def widen(folder: Path) -> None:
    tensors = {key: torch.zeros(tensor.shape[0], 96) if "lora_A" in key else tensor
               for key, tensor in load_file(folder / WEIGHTS).items()}  # fmt: skip
    save_file(tensors, folder / WEIGHTS)


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        (
            lambda path: reconfigured(path, r=64),
            FailedPrecondition,
            "has rank 64, and this model takes ranks up to 16: set",
        ),
        (widen, FailedPrecondition, "matrices for 96 inputs .* it was trained on another model"),
        (spoil, FailedPrecondition, "has infinite or undefined numbers for"),
        (lambda path: (path / WEIGHTS).write_bytes(b"\0" * 20), FailedPrecondition, "is damaged: copy it again"),
        (lambda path: (path / WEIGHTS).rename(path / "adapter_model.bin"), FailedPrecondition, "can run code when"),
        (lambda path: (path / "adapter_config.json").write_text("{"), FailedPrecondition, "is not JSON"),
        (lambda path: reconfigured(path, use_dora=True), Unimplemented, "has 'use_dora'"),
    ],
)
def test_a_bad_adapter_gets_its_reason_and_works_once_repaired(
    base: Path, folder: Path, trained: Path, expected: Any, change: Any, error: Any, text: str
) -> None:
    async def main() -> None:
        async with serving(base, folder) as tiny:
            change(folder / "bert")
            with pytest.raises(error, match=f"adapter '?bert.*{text}|{text}"):
                await answer(tiny, "bert")
            assert await answer(tiny, "anna") == expected["anna", 0]
            shutil.rmtree(folder / "bert")
            shutil.copytree(trained / "bert", folder / "bert")
            assert await answer(tiny, "bert") == expected["bert", 0], "without a pause: the files have changed"

    asyncio.run(main())


def test_a_whole_layer_is_refused_on_demand_and_served_as_a_named_adapter(base: Path, tmp_path: Path) -> None:
    saved = {"full": {"r": 4, "target_modules": ["o_proj"], "modules_to_save": ["lm_head"]}}
    save_adapters(base, tmp_path, saved)
    right = merged_answers(base, {"full": tmp_path / "full"}, PROMPTS[:1], TOKENS)

    async def main() -> None:
        async with serving(base, tmp_path) as tiny:
            with pytest.raises(
                Unimplemented, match=r"the whole layer 'lm_head' \(modules_to_save\).*parameter adapters"
            ):
                await answer(tiny, "full")
        async with serving(base, None, adapters=f"named={tmp_path / 'full'}") as tiny:
            assert await answer(tiny, "named") == right["full", 0]

    asyncio.run(main())


def test_a_file_that_is_too_large_is_not_read(base: Path, folder: Path) -> None:
    async def main() -> None:
        async with serving(base, folder) as tiny:
            with (folder / "bert" / WEIGHTS).open("r+b") as file:
                file.truncate(1 << 33)  # sparse
            with pytest.raises(
                FailedPrecondition, match="has 8589934592 bytes, and an adapter of this model has at most"
            ):
                await answer(tiny, "bert")

    asyncio.run(main())


@pytest.mark.parametrize(
    ("parameters", "text"),
    [
        ({"max_lora_rank": "8"}, "parameter max_lora_rank is for adapters on demand: set adapters_folder"),
        ({"max_adapters": "0"}, "parameter max_adapters is '0'"),
        (
            {"max_adapters": "8", "max_host_adapters": "4"},
            "parameter max_host_adapters is 4, less than max_adapters, 8",
        ),
        ({"adapters_folder": "a", "tensor_parallel": "2"}, "adapters_folder does not work with tensor_parallel yet"),
        ({"adapters_hub": "*"}, "parameter adapters_hub has"),
        ({"adapters_hub": "*/*"}, "parameter adapters_hub has"),
        ({"adapters_hub": "org/a@"}, "revision"),
    ],
)
def test_wrong_parameters(base: Path, parameters: dict[str, str], text: str) -> None:
    async def main() -> None:
        async with served(base, **parameters):
            pass

    with pytest.raises(InvalidArgument, match=text):
        asyncio.run(main())
