# SPDX-License-Identifier: Apache-2.0
"""KV offload of real tiny models: answers are token for token those of a server without it, from memory and from disk.

On CUDA: HEADRACE_TEST_DEVICE=cuda.
"""

from __future__ import annotations

import asyncio
import logging
import random
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from llm_instances import ON_CUDA, AsyncLauncher, Caller, Served, runs, served
from transformers import AutoModelForCausalLM

from headrace.backends.llm.kv_offload import disk_pages
from headrace.core import fault_points
from headrace.core.errors import FailedPrecondition, HeadraceError, InvalidArgument, Unimplemented
from headrace.core.fault_points import Fault, FaultInjector
from headrace.core.generation import Generation, Sampling
from headrace.core.kv_events import BlockRemoved, BlockStored
from headrace.core.kv_transfer import KvTransferSettings
from support.llm_models import tiny_llama, tiny_mistral

WORDS = (*"abcdefghijklmnop", "the", "fox", "mill", "river", "corn")
GREEDY = Sampling(temperature=0.0, max_tokens=8, ignore_eos=True)
SEEDED = Sampling(temperature=1.1, top_p=0.9, seed=11, max_tokens=8, ignore_eos=True)
PAGE_BYTES = 512 * 4
"""Of 4 tokens."""
SMALL = {"page_size": "4", "kv_cache_bytes": str(PAGE_BYTES * 100), "max_running": "4", "max_step_tokens": "48"}
"""A KV cache of 400 tokens: a few conversations."""
OFFLOAD = {**SMALL, "kv_host_bytes": str(PAGE_BYTES * 2000), "kv_host_min_tokens": "8"}


def conversation(number: int) -> str:
    chance = random.Random(number)
    return " ".join(chance.choice(WORDS) for _ in range(70))


def asked(number: int, sampling: Sampling = GREEDY, **more: Any) -> Generation:
    return Generation(prompt=conversation(number), sampling=sampling, **more)


def level(tiny: Served, name: str, level: str) -> float:
    (family,) = (family for family in tiny.metrics.families if family.name == f"headrace_llm_kv_level_{name}")
    return sum(series.value for labels, series in family.collect() if level in labels)


async def visited(tiny: Served, numbers: Any, sampling: Sampling = GREEDY) -> list[str]:
    """One after the other."""
    return [(await tiny.ask(asked(number, sampling))).text for number in numbers]


async def written(tiny: Served) -> None:
    """Until nothing is to be saved or written, and the metrics say so."""
    offload, left = tiny.engine._components.offload, True
    assert offload is not None

    def settle(components: Any) -> dict[str, int]:
        offload.drain()
        offload.poll()
        tiny.engine._update_metrics()
        return {"left": offload._host.pinned + offload.busy}

    while left:
        left = bool((await asyncio.to_thread(tiny.engine.run_idle, settle))["left"])
        await asyncio.sleep(0.005)


@pytest.mark.parametrize("kind", ["host", pytest.param("ahead", marks=pytest.mark.slow), "disk"])
def test_answers_are_the_same_under_pressure(kind: str, tmp_path: Path) -> None:
    """Several at a time, in random order, greedy and seeded, in chunks; some are cancelled.

    With steps launched before the last is read, as on a GPU; with little host memory above a disk.
    """
    more = {"kv_disk_path": str(tmp_path), "kv_host_bytes": str(PAGE_BYTES * 60)} if kind == "disk" else {}
    asyncio.run(check_under_pressure(kind, **more))


async def check_under_pressure(kind: str, **more: str) -> None:
    chance = random.Random(5)
    samplings = {"greedy": GREEDY, "seeded": SEEDED}
    order = [(chance.randrange(6), chance.choice(("greedy", "seeded"))) for _ in range(40)]
    async with served(**SMALL) as plain:
        wanted = {
            (number, how): (await plain.ask(asked(number, sampling))).text
            for number in range(6)
            for how, sampling in samplings.items()
        }
    async with served(**{**OFFLOAD, **more}) as tiny:
        if kind == "ahead" and not ON_CUDA:
            AsyncLauncher(tiny.engine.runner)
        open_callers: list[tuple[tuple[int, str], Caller]] = []
        for index, entry in enumerate(order):
            open_callers.append((entry, tiny.begin(asked(entry[0], samplings[entry[1]]))))
            if index % 5 == 4:
                gone = tiny.begin(asked(chance.randrange(6), stream=True))
                await asyncio.sleep(0)
                gone.cancelled = True
            if len(open_callers) >= 5:
                entry, caller = open_callers.pop(0)
                await asyncio.wait_for(caller.ended.wait(), 60)
                assert caller.text == wanted[entry]
        for entry, caller in open_callers:
            await asyncio.wait_for(caller.ended.wait(), 60)
            assert caller.text == wanted[entry]
        await tiny.quiet()
        assert level(tiny, "hit_tokens_total", "host") > 0
        assert kind != "disk" or level(tiny, "hit_tokens_total", "disk") > 0
        await written(tiny)
        assert tiny.engine.scheduler.pool.used == 0


@runs
async def test_a_second_visit_hits_the_host_level_and_hits_are_counted_apart() -> None:
    async with served(**OFFLOAD) as tiny:
        first = await visited(tiny, range(6))
        assert level(tiny, "hits_total", "host") == level(tiny, "hits_total", "gpu") == 0
        second = await tiny.ask(asked(0))
        assert second.text == first[0]
        prompt = second.last["prompt_tokens"]
        assert second.last["cached_tokens"] == (prompt - 1) // 4 * 4
        assert level(tiny, "hit_tokens_total", "host") == second.last["cached_tokens"]
        assert tiny.value("headrace_llm_prefix_cache_hit_tokens_total") == 0
        await tiny.ask(asked(0))
        assert level(tiny, "hit_tokens_total", "gpu") == second.last["cached_tokens"]
        assert tiny.value("headrace_llm_prefix_cache_hit_tokens_total") == second.last["cached_tokens"]
        await written(tiny)
        assert level(tiny, "lookups_total", "gpu") == 8
        assert level(tiny, "hits_total", "gpu") == level(tiny, "hits_total", "host") == 1
        assert level(tiny, "written_pages_total", "host") * PAGE_BYTES == level(tiny, "bytes", "host") > 0


@runs
async def test_the_memory_is_bounded() -> None:
    async with served(**{**OFFLOAD, "kv_host_bytes": str(PAGE_BYTES * 60 + 5)}) as tiny:
        await visited(tiny, range(6))
        await written(tiny)
        assert level(tiny, "bytes", "host") == PAGE_BYTES * 60


@pytest.mark.parametrize(
    ("make", "more"),
    [
        (tiny_mistral, {}),
        pytest.param(tiny_llama, {"speculation": "ngram"}, marks=pytest.mark.slow),
        pytest.param(
            tiny_llama, {"kv_cache_dtype": "fp8", "kv_cache_bytes": str(PAGE_BYTES * 25)}, marks=pytest.mark.slow
        ),
    ],
    ids=["sliding windows", "n-grams", "fp8"],
)
def test_other_caches_choices_and_prompt_logprobs(make: Any, more: dict[str, str], tmp_path: Path) -> None:
    folder = make(tmp_path / "model" / "1")

    async def main() -> None:
        async with served(folder, **{**SMALL, **more}) as plain:
            wanted = await visited(plain, range(5)) + await visited(plain, range(5), SEEDED)
        async with served(folder, **{**OFFLOAD, **more}) as tiny:
            await visited(tiny, range(5))
            assert await visited(tiny, range(5)) + await visited(tiny, range(5), SEEDED) == wanted
            assert level(tiny, "hit_tokens_total", "host") > 0
            several = await tiny.ask(asked(0, replace(GREEDY, n=2)))
            assert set(several.texts().values()) == {wanted[0]}
            probed = await tiny.ask(asked(1, replace(GREEDY, prompt_logprobs=1)))
            assert probed.text == wanted[1]

    asyncio.run(main())


def test_pages_of_an_adapter_are_its_own(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    folder = tiny_llama(tmp_path / "model" / "1")
    with torch.random.fork_rng():
        torch.manual_seed(11)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        changed = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"]))
        for name, parameter in changed.named_parameters():
            if "lora_" in name:
                parameter.data.normal_(0, 0.3)
        changed.save_pretrained(tmp_path / "adapter")
    adapters = {"adapters": f"mine={tmp_path / 'adapter'}"}

    async def answers(tiny: Served) -> list[str]:
        order = [(number, adapter) for number in range(5) for adapter in ("", "mine")] * 2
        return [(await tiny.ask(asked(number, adapter=adapter))).text for number, adapter in order]

    async def main() -> None:
        async with served(folder, **SMALL, **adapters) as plain:
            wanted = await answers(plain)
        assert wanted[0] != wanted[1]
        async with served(folder, **OFFLOAD, **adapters) as tiny:
            assert await answers(tiny) == wanted
            assert level(tiny, "hits_total", "host") == 10

    asyncio.run(main())


def test_a_draft_model_computes_again_what_is_loaded(tmp_path: Path) -> None:
    folder, draft = tiny_llama(tmp_path / "model" / "1"), tiny_llama(tmp_path / "draft", num_hidden_layers=1)
    drafting = {"speculation": "draft", "draft_model": str(draft), "kv_cache_bytes": str(PAGE_BYTES * 160)}

    async def main() -> None:
        async with served(folder, **SMALL) as plain:
            wanted = await visited(plain, range(5))
        async with served(folder, **{**OFFLOAD, **drafting}) as tiny:
            assert await visited(tiny, [*range(5), *range(5)]) == wanted * 2
            assert level(tiny, "hits_total", "host") > 0
            assert tiny.value("headrace_llm_speculation_drafts_total") > 0

    asyncio.run(main())


@runs
async def test_pages_stay_in_host_memory_while_a_model_sleeps() -> None:
    async with served(**OFFLOAD) as tiny:
        first = await visited(tiny, range(6))
        for depth, hits in ((1, True), (2, False)):
            before = level(tiny, "hit_tokens_total", "host")
            freed = await asyncio.to_thread(tiny.model.sleep, depth)  # type: ignore[arg-type]
            assert (freed.get("host", 0) >= PAGE_BYTES * 2000) is (depth == 2)
            await asyncio.to_thread(tiny.model.wake)
            assert await visited(tiny, range(2)) == first[:2]
            assert (level(tiny, "hit_tokens_total", "host") > before) is hits
            await visited(tiny, range(6))


@runs
async def test_kv_events_say_what_is_in_host_memory() -> None:
    pytest.importorskip("zmq", reason="needs the extra kv-events")
    async with served(**OFFLOAD, kv_events="tcp://127.0.0.1:*") as tiny:
        publisher = tiny.engine._components.kv_events
        offload = tiny.engine._components.offload
        assert publisher is not None and offload is not None
        told: dict[str, set[Any]] = {"GPU": set(), "CPU": set()}
        flush = publisher.flush

        def noted() -> None:
            for event in publisher._events:
                if isinstance(event, BlockStored):
                    assert event.tokens if event.medium == "GPU" else not event.tokens
                    told[event.medium] |= set(event.hashes)
                elif isinstance(event, BlockRemoved):
                    told[event.medium] -= set(event.hashes)
            flush()

        publisher.flush = noted  # type: ignore[method-assign]
        await visited(tiny, [*range(6), *range(4)])

        def held(components: Any) -> dict[str, int]:
            """In the engine's thread, which would go on saving pages."""
            noted()
            for medium, hashes in (("GPU", components.scheduler.pool._by_hash), ("CPU", offload._host._entries)):
                saving = {page_hash for _, pages in offload._saves for page_hash in pages} if medium == "CPU" else set()
                assert told[medium] == {int.from_bytes(each[:8], "big") for each in hashes if each not in saving}
            return {medium: len(hashes) for medium, hashes in told.items()}

        counts = await asyncio.to_thread(tiny.engine.run_idle, held)
        assert min(counts.values()) > 50


# Disk


def with_disk(folder: Path, **more: str) -> dict[str, str]:
    return {**OFFLOAD, "kv_disk_path": str(folder), **more}


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.kv"))


@pytest.fixture
def filled(tmp_path: Path) -> tuple[Path, Path, list[str]]:
    """A model, a folder with the pages of its conversations, and the answers."""
    folder, disk = tiny_llama(tmp_path / "model" / "1"), tmp_path / "pages"

    async def fill() -> list[str]:
        async with served(folder, **with_disk(disk)) as tiny:
            first = await visited(tiny, range(6))
            await written(tiny)
            assert level(tiny, "written_pages_total", "disk") == len(files(disk)) > 100
            assert level(tiny, "bytes", "disk") == sum(file.stat().st_size for file in files(disk))
            return first

    return folder, disk, asyncio.run(fill())


def visit_again(folder: Path, disk: Path, **more: str) -> tuple[list[str], float]:
    """Answers of a server that starts now, and the tokens that it found on disk."""

    async def main() -> tuple[list[str], float]:
        async with served(folder, **with_disk(disk, **more)) as tiny:
            answers = await visited(tiny, range(6))
            assert tiny.engine.scheduler.pool.used == 0
            return answers, level(tiny, "hit_tokens_total", "disk")

    return asyncio.run(main())


def test_pages_on_disk_are_found_after_a_restart(filled: tuple[Path, Path, list[str]]) -> None:
    folder, disk, first = filled
    answers, tokens = visit_again(folder, disk)
    assert answers == first
    assert tokens > 300


def test_small_host_memory_reads_what_fits_from_disk(filled: tuple[Path, Path, list[str]]) -> None:
    folder, disk, first = filled
    answers, tokens = visit_again(folder, disk, kv_host_bytes=str(PAGE_BYTES * 7))
    assert answers == first
    assert tokens > 0


def test_damaged_files_are_removed_with_one_line(
    filled: tuple[Path, Path, list[str]], caplog: pytest.LogCaptureFixture
) -> None:
    folder, disk, first = filled
    kinds = [
        lambda content: content[:-1],
        lambda content: content + b"x",
        lambda content: b"",
        lambda content: content[:20],
        lambda content: content[:-9] + bytes([content[-9] ^ 1]) + content[-8:],
        lambda content: content[:5] + b"\x07" + content[6:],
        lambda content: content[:40] + bytes(16) + content[56:],
    ]
    for number, file in enumerate(files(disk)):
        file.write_bytes(kinds[number % len(kinds)](file.read_bytes()))
    with caplog.at_level(logging.INFO, "headrace.backends.llm"):
        answers, tokens = visit_again(folder, disk)
    assert (answers, tokens) == (first, 0)
    assert len([line for line in caplog.messages if "is damaged" in line]) == 1


@pytest.mark.parametrize(
    "change",
    [
        "weights",
        *(
            pytest.param(each, marks=pytest.mark.slow)
            for each in ("page_size", "cache", "dtype", "release", "positions")
        ),
    ],
)
def test_files_of_another_model_are_ignored_with_one_line(
    filled: tuple[Path, Path, list[str]],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    change: str,
) -> None:
    folder, disk, _ = filled
    before, more = files(disk), dict[str, str]()
    if change == "weights":
        folder = tiny_llama(tmp_path / "other" / "1", seed=8)
    elif change == "release":
        monkeypatch.setattr("headrace.backends.llm.kv_offload.opening.__version__", "0.0.1")
    elif change == "positions":
        config = folder / "config.json"
        assert "10000.0" in config.read_text()
        config.write_text(config.read_text().replace("10000.0", "20000.0"))
    else:
        changes = {"page_size": {"page_size": "2"}, "cache": {"kv_cache_dtype": "fp8"}, "dtype": {"dtype": "bfloat16"}}
        more = changes[change]
    with caplog.at_level(logging.INFO, "headrace.backends.llm"):
        assert visit_again(folder, disk, **more)[1] == 0
    assert len([line for line in caplog.messages if "belong to another model" in line]) == 1
    assert set(before) <= set(files(disk)), "they are left alone"


def test_a_renamed_file_is_not_read(filled: tuple[Path, Path, list[str]], tmp_path: Path) -> None:
    """Neither that of another page, nor that of another model."""
    folder, disk, first = filled
    found = files(disk)
    contents = [file.read_bytes() for file in found]
    for file, content in zip(found, contents[1:] + contents[:1], strict=True):
        file.write_bytes(content)
    assert visit_again(folder, disk) == (first, 0)
    other = tmp_path / "other pages"
    visit_again(tiny_llama(tmp_path / "other" / "1", seed=8), other)
    foreign = {file.name.split("-")[1]: file for file in files(other)}
    own = {file.name.split("-")[1]: file for file in found}
    assert len(foreign.keys() & own.keys()) > 50
    for page_hash, file in own.items():
        file.unlink(missing_ok=True)
        if page_hash in foreign:
            foreign[page_hash].rename(file)
    assert visit_again(folder, disk) == (first, 0)


def test_the_folder_is_bounded_and_the_oldest_go_first(filled: tuple[Path, Path, list[str]]) -> None:
    folder, disk, first = filled
    limit = 50 * (PAGE_BYTES + 64)
    answers, _ = visit_again(folder, disk, kv_disk_bytes=str(limit))
    assert answers == first
    assert sum(file.stat().st_size for file in files(disk)) <= limit


def test_a_full_disk_switches_the_level_off_with_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder, disk = tiny_llama(tmp_path / "model" / "1"), tmp_path / "pages"

    async def main() -> None:
        async with served(folder, **with_disk(disk)) as tiny:
            first = await visited(tiny, range(6))
            assert await visited(tiny, range(6)) == first
            await written(tiny)
            assert level(tiny, "hit_tokens_total", "host") > 0
            assert level(tiny, "dropped_pages_total", "disk") > 0

    faults = FaultInjector([Fault("files.replace", "disk_full", time=number) for number in (3, 4, 5)])
    with patch.object(fault_points, "_injector", faults), caplog.at_level(logging.INFO, "headrace.backends.llm"):
        asyncio.run(main())
    assert len([line for line in caplog.messages if "the disk level is off" in line]) == 1
    assert not list(disk.glob(".*.new"))
    assert len(files(disk)) == 2


def test_one_instance_uses_a_folder_and_the_next_waits_for_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_pages, "_RETRY_SECONDS", 0.0)
    folder, disk = tiny_llama(tmp_path / "model" / "1"), tmp_path / "pages"

    async def main() -> None:
        async with served(folder, **with_disk(disk)) as first:
            await visited(first, range(6))
            await written(first)
            async with served(folder, **with_disk(disk)) as second:
                answers = await visited(second, range(5))
                assert level(second, "bytes", "disk") == 0
                await asyncio.to_thread(first.instance.close)
                assert await visited(second, range(6)) == answers + await visited(second, range(5, 6))
                await written(second)
                assert level(second, "bytes", "disk") > 0

    with caplog.at_level(logging.INFO, "headrace.backends.llm"):
        asyncio.run(main())
    assert len([line for line in caplog.messages if "Another instance uses" in line]) == 1


# Refusals


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"kv_host_bytes": "9999999", "tensor_parallel": "2"}, "does not work with tensor_parallel"),
        ({"kv_host_bytes": "9999999", "prefix_cache": "false"}, "needs the prefix cache"),
        ({"kv_disk_path": "x"}, "kv_disk_path needs kv_host_bytes"),
        ({"kv_host_min_tokens": "5"}, "kv_host_min_tokens needs kv_host_bytes"),
        ({"kv_host_bytes": "9999999", "kv_disk_bytes": "99"}, "kv_disk_bytes needs kv_disk_path"),
        ({"kv_host_bytes": "99"}, "a page takes 8192 bytes"),
        ({"kv_host_bytes": "9999999", "kv_disk_path": "/proc/nothing"}, "kv_disk_path: '/proc/nothing' cannot be used"),
    ],
)
def test_what_would_be_ignored_or_wrong_is_refused(parameters: dict[str, str], message: str) -> None:
    async def main() -> None:
        async with served(**parameters):
            raise AssertionError("it was loaded")

    with pytest.raises(HeadraceError, match=message) as refusal:
        asyncio.run(main())
    assert isinstance(refusal.value, InvalidArgument | FailedPrecondition)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_roles_are_refused(role: Any) -> None:
    async def main() -> None:
        async with served(None, KvTransferSettings(role, b"k" * 32), kv_host_bytes="9999999"):
            raise AssertionError("it was loaded")

    with pytest.raises(Unimplemented, match="does not work with --role"):
        asyncio.run(main())
