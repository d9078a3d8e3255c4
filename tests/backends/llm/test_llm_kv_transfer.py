# SPDX-License-Identifier: Apache-2.0
"""KV transfer between instances: the replies are those of one instance alone, whatever happens to the pages.

Real tiny models, the real shared memory, real sockets. On CUDA: HEADRACE_TEST_DEVICE=cuda.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
import time
import warnings
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from llm_instances import Caller, Served, runs, served

from headrace.backends.llm.kv_transfer import connector, page_store
from headrace.backends.llm.kv_transfer.receiver import TransferError, fetch_pages
from headrace.backends.llm.kv_transfer.sender import (
    MAGIC,
    OK,
    REFUSED,
    REQUEST,
    RESPONSE,
    VERSION,
    PageSender,
    read_exactly,
    request_proof,
    response_proof,
)
from headrace.core import fleet_key
from headrace.core.errors import FailedPrecondition
from headrace.core.generation import Generation, OutputFormat, Sampling
from headrace.core.kv_transfer import KvTransferSettings, TransferToken
from support import llm_models
from support.ports import free_port

PREFILL = KvTransferSettings("prefill", b"k" * 32)
DECODE = KvTransferSettings("decode", b"k" * 32)
PROMPT = "the quick brown fox jumps over the lazy dog while the river runs to the sea " * 4
GREEDY = Sampling(temperature=0.0, max_tokens=24, ignore_eos=True)
ALONE = Sampling(temperature=0.0, max_tokens=1)


@pytest.fixture(autouse=True)
def own_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of shared memory for each test."""
    folder = tmp_path / "shm"
    folder.mkdir()
    monkeypatch.setattr(fleet_key.user_folder, "__defaults__", (folder,))
    return folder


@asynccontextmanager
async def apart(
    prefill: KvTransferSettings = PREFILL,
    decode: KvTransferSettings = DECODE,
    folder: Path | None = None,
    **parameters: str,
) -> AsyncIterator[tuple[Served, Served]]:
    async with served(folder, prefill, **parameters) as one, served(folder, decode, **parameters) as other:
        yield one, other


async def token_of(prefill: Served, generation: Generation) -> str:
    asked = replace(generation, prefill_only=True, sampling=ALONE, output_format=None, stream=False)
    caller = await prefill.ask(asked)
    return str(caller.last["ticket"])


async def transferred(prefill: Served, decode: Served, generation: Generation) -> Caller:
    token = await token_of(prefill, generation)
    assert token
    return await decode.ask(replace(generation, transfer_token=token))


def fallbacks(instance: Served) -> dict[str, float]:
    """By reason."""
    (family,) = (
        family for family in instance.metrics.families if family.name == "headrace_llm_handing_fallbacks_total"
    )
    return {labels[-1]: series.value for labels, series in family.collect()}  # type: ignore[union-attr]


def ways(instance: Served) -> dict[str, float]:
    (family,) = (family for family in instance.metrics.families if family.name == "headrace_llm_handings_total")
    return {labels[-1]: series.value for labels, series in family.collect()}  # type: ignore[union-attr]


def computed(instance: Served) -> float:
    """Tokens of prompts that were neither found nor received_pages."""
    return instance.value("headrace_llm_prompt_tokens_total") - instance.value("headrace_llm_handing_tokens_total")


def files(folder: Path) -> list[str]:
    return [path.name for path in folder.rglob("*") if path.is_file() and path.name not in ("gate", "lock", "key")]


SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seed": {"temperature": 0.9, "seed": 17},
    "several": {"temperature": 1.0, "seed": 3, "n": 3},
    "logprobs": {"logprobs": 4},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.2},
    "top": {"temperature": 0.8, "seed": 5, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
    "bias": {"logit_bias": {70: 4.0, 80: -100.0}},
    "least": {"min_tokens": 10, "ignore_eos": False},
}


@pytest.mark.slow  # quick: test_stops_streams_and_grammars_too
@runs
async def test_every_way_of_sampling_gives_what_one_instance_gives() -> None:
    async with served() as alone, apart() as (prefill, decode):
        for name, changes in SAMPLINGS.items():
            prompt = f"{name} {PROMPT}"
            generation = Generation(prompt=prompt, sampling=replace(GREEDY, **changes))
            wanted, found = await alone.ask(generation), await transferred(prefill, decode, generation)
            assert found.texts() == wanted.texts(), name
            assert [answer[1].get("logprobs") for answer in found.answers] == [
                answer[1].get("logprobs") for answer in wanted.answers
            ]
            assert found.last["prompt_tokens"] == wanted.last["prompt_tokens"]
            assert found.last["completion_tokens"] == wanted.last["completion_tokens"]
        assert ways(decode) == {"shared_memory": len(SAMPLINGS)}
        assert ways(prefill) == {"kept": len(SAMPLINGS)}
        assert fallbacks(decode) == fallbacks(prefill) == {}
        # All but the last few tokens of each prompt came from the other.
        assert computed(decode) <= 17 * len(SAMPLINGS)


@runs
async def test_stops_streams_and_grammars_too() -> None:
    async with served() as alone, apart() as (prefill, decode):
        text = (await alone.ask(Generation(prompt=PROMPT, sampling=GREEDY))).text
        stops = replace(GREEDY, stop=(text[8:11],))
        for asked in (
            Generation(prompt=PROMPT, sampling=stops),
            Generation(prompt=PROMPT + "x", sampling=GREEDY, stream=True),
            Generation(prompt=PROMPT + "y", sampling=GREEDY, output_format=OutputFormat("regex", regex="[a-d]{5,9}")),
            Generation(messages=({"role": "user", "content": PROMPT},), sampling=GREEDY),
        ):
            assert (await transferred(prefill, decode, asked)).text == (await alone.ask(asked)).text
        assert fallbacks(decode) == {}


@pytest.mark.parametrize(
    "kind",
    [
        llm_models.tiny_gemma3,
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in (llm_models.tiny_mistral, llm_models.tiny_qwen2)),
    ],
)
def test_other_models(kind: Any, tmp_path: Path) -> None:
    async def asking() -> None:
        folder = kind(tmp_path / "model" / "1")
        generation = Generation(prompt=PROMPT, sampling=GREEDY)
        async with served(folder) as alone, apart(folder=folder) as (prefill, decode):
            assert (await transferred(prefill, decode, generation)).text == (await alone.ask(generation)).text
            assert ways(decode) == {"shared_memory": 1}

    asyncio.run(asking())


@runs
async def test_both_sides_remember_and_only_what_is_missing_is_sent() -> None:
    async with apart() as (prefill, decode):
        generation = Generation(prompt=PROMPT, sampling=GREEDY)
        first = await transferred(prefill, decode, generation)
        sent = decode.value("headrace_llm_handing_bytes_total")
        # The same again: the prefill computes next to nothing, and the decoder has every page.
        second = await transferred(prefill, decode, generation)
        assert second.text == first.text
        assert ways(decode) == {"shared_memory": 1, "not_needed": 1}
        assert decode.value("headrace_llm_handing_bytes_total") == sent
        assert second.last["cached_tokens"] > 0
        # What begins alike: only the rest.
        longer = replace(generation, prompt=PROMPT + "and a mill grinds corn near the river " * 3)
        await transferred(prefill, decode, longer)
        assert 0 < decode.value("headrace_llm_handing_bytes_total") - sent < sent
        assert prefill.value("headrace_llm_prefix_cache_hit_tokens_total") > 0


@runs
async def test_a_decoder_without_a_prefix_cache_takes_pages_too() -> None:
    async with served(None, PREFILL) as prefill, served(None, DECODE, prefix_cache="false") as decode:
        generation = Generation(prompt=PROMPT, sampling=replace(GREEDY, n=2, temperature=0.7, seed=1))
        async with served() as alone:
            wanted = (await alone.ask(generation)).texts()
        for _ in range(2):
            assert (await transferred(prefill, decode, generation)).texts() == wanted
        assert ways(decode) == {"shared_memory": 2}


@pytest.mark.slow  # quick: test_pages_that_cannot_be_used_are_computed; on one instance, test_llm_engine.py
@runs
async def test_many_concurrent_transfers_in_a_small_cache() -> None:
    # A token takes 512 bytes: 20 pages of 4 tokens, so that sequences have to give way.
    small = {"kv_cache_bytes": str(512 * 80), "page_size": "4", "max_running": "6", "max_step_tokens": "5"}
    prompts = [("the quick brown fox jumps over Grüße " * 3)[number : 3 + 5 * number] for number in range(20)]
    asks = [Generation(prompt=prompt, sampling=replace(GREEDY, max_tokens=12)) for prompt in prompts]
    async with (
        served() as alone,
        served(None, PREFILL, page_size="4") as prefill,
        served(None, DECODE, **small) as decode,
    ):
        wanted = [(await alone.ask(ask)).text for ask in asks]
        tokens = await asyncio.gather(*(token_of(prefill, ask) for ask in asks))
        found = await asyncio.gather(
            *(decode.ask(replace(each, transfer_token=token)) for each, token in zip(asks, tokens, strict=True))
        )
        assert [each.text for each in found] == wanted
        assert not any(tokens[:1])  # it has not one full page
        assert sum(ways(decode).values()) > 10
        await decode.quiet()
        assert decode.engine.scheduler.pool.used == 0


@runs
async def test_over_tcp_where_the_memory_is_not_shared() -> None:
    async with apart() as (prefill, decode):
        connector: Any = decode.instance._connector
        connector._connector._connector.folder = Path("/nonexistent")
        generation = Generation(prompt=PROMPT, sampling=GREEDY)
        async with served() as alone:
            wanted = (await alone.ask(generation)).text
        assert (await transferred(prefill, decode, generation)).text == wanted
        longer = replace(generation, prompt=PROMPT + "and a mill grinds corn near the river " * 3)
        await transferred(prefill, decode, longer)  # from a page in the middle on
        assert ways(decode) == {"tcp": 2}
        store: Any = prefill.instance._connector._connector._connector.store  # type: ignore[union-attr]
        await _until(lambda: not store._stored)
        assert store.bytes == 0


async def _until(true: Any) -> None:
    for _ in range(3000):
        if true():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it did not come to that")


@runs
async def test_whatever_is_wrong_with_a_ticket_the_prompt_is_computed() -> None:
    async with apart() as (prefill, decode):
        generation = Generation(prompt=PROMPT, sampling=GREEDY)
        async with served() as alone:
            wanted = (await alone.ask(generation)).text
        token = await token_of(prefill, generation)
        parsed = TransferToken.parse(token, PREFILL.key, 0)
        other = await token_of(prefill, replace(generation, prompt="another " + PROMPT))
        wrong = {
            "bad_ticket": [
                "nonsense",
                token + "0",
                parsed.signed(b"another key of 32 bytes........."),
                "ü",
                "." * 3000,
            ],
            "other_model": [replace(parsed, model="0" * 32).signed(DECODE.key)],
            "other_prompt": [other, replace(parsed, pages=1).signed(DECODE.key)],
            "unreachable": [replace(parsed, file="", port=free_port()).signed(DECODE.key)],
            "gone": [
                replace(parsed, file="", id="0" * 32).signed(DECODE.key),
                replace(parsed, file="", port=0).signed(DECODE.key),
            ],
        }
        for reason, tokens in wrong.items():
            for each in tokens:
                found = await decode.ask(replace(generation, prompt=PROMPT, transfer_token=each))
                assert found.text == wanted, reason
                decode.engine.scheduler.pool.reset_prefix_cache()
        assert fallbacks(decode) == {reason: len(tokens) for reason, tokens in wrong.items()}
        assert ways(decode) == {}


@runs
async def test_other_weights_are_distinguished() -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as place:
        other = llm_models.tiny_llama(Path(place) / "other" / "1", seed=8)
        async with served(None, PREFILL) as prefill, served(other, DECODE) as decode, served(other) as alone:
            generation = Generation(prompt=PROMPT, sampling=GREEDY)
            assert (await transferred(prefill, decode, generation)).text == (await alone.ask(generation)).text
            assert fallbacks(decode) == {"other_model": 1}


@runs
async def test_pages_of_another_size_are_distinguished() -> None:
    async with served(None, PREFILL) as prefill, served(None, DECODE, page_size="8") as decode:
        await transferred(prefill, decode, Generation(prompt=PROMPT, sampling=GREEDY))
        assert fallbacks(decode) == {"other_model": 1}


@runs
async def test_a_prefill_keeps_no_more_than_it_may_and_not_for_ever() -> None:
    little = replace(PREFILL, keep_bytes=50_000)
    async with served(None, little) as prefill, served(None, DECODE) as decode:
        first = await token_of(prefill, Generation(prompt=PROMPT, sampling=GREEDY))
        assert first
        assert not await token_of(prefill, Generation(prompt="again " + PROMPT, sampling=GREEDY))
        assert fallbacks(prefill) == {"no_room": 1}
        connector: Any = prefill.instance._connector
        store: Any = connector._connector._connector.store
        assert store.evict_expired(TransferToken.parse(first, PREFILL.key, 0).expires + 1) == 1
        assert store.bytes == 0
        assert files(store._folder.parent) == []
        # It is too late for this one, and there is room for another.
        found = await decode.ask(Generation(prompt=PROMPT, sampling=GREEDY, transfer_token=first))
        assert found.text
        assert fallbacks(decode) == {"gone": 1}
        assert await token_of(prefill, Generation(prompt="again " + PROMPT, sampling=GREEDY))


@runs
async def test_pages_that_cannot_be_used_are_computed() -> None:
    async with apart() as (prefill, decode):
        generation = Generation(prompt=PROMPT, sampling=GREEDY)
        async with served() as alone:
            wanted = (await alone.ask(generation)).text
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(connector, "pack_pages", _broken)
            refused = prefill.begin(replace(generation, prefill_only=True, sampling=ALONE))
            await asyncio.wait_for(refused.ended.wait(), 60)
            assert refused.error is not None
        token = await token_of(prefill, generation)
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr("headrace.backends.llm.kv_transfer.page_layout.unpack_pages", _broken)
            assert (await decode.ask(replace(generation, transfer_token=token))).text == wanted
        assert prefill.engine.scheduler.pool.used == 0


def _broken(*_: Any) -> None:
    raise RuntimeError("broken for a test")


@runs
async def test_a_server_without_a_role_says_so_and_ignores_tickets() -> None:
    async with served() as alone, served(None, PREFILL) as prefill:
        generation = Generation(prompt=PROMPT, sampling=GREEDY)
        with pytest.raises(FailedPrecondition, match="--role prefill"):
            await alone.ask(replace(generation, prefill_only=True))
        wanted = (await alone.ask(generation)).text
        assert (await alone.ask(replace(generation, transfer_token=await token_of(prefill, generation)))).text == wanted


@runs
async def test_strangers_get_nothing() -> None:
    async with served(None, PREFILL) as prefill:
        token = await token_of(prefill, Generation(prompt=PROMPT, sampling=GREEDY))
        parsed = TransferToken.parse(token, PREFILL.key, 0)
        question = REQUEST.pack(MAGIC, VERSION, bytes.fromhex(parsed.id), 0, parsed.pages, b"n" * 16, b"p" * 32)
        for said in (question, question[:20], b"GET / HTTP/1.1\r\n\r\n" * 5):
            told = await asyncio.to_thread(_said, parsed.port, said)
            assert told == b"" or RESPONSE.unpack(told)[:2] == (REFUSED, 0)
        assert files(prefill.instance._connector._connector._connector.folder)  # type: ignore[union-attr]


def _said(port: int, said: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", port), 30) as connection:
        told = b""
        with contextlib.suppress(OSError):  # it may hang up at any point
            connection.sendall(said)
            connection.shutdown(socket.SHUT_WR)
            while piece := connection.recv(65536):
                told += piece
        return told


@runs
async def test_adapters() -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as place:
        base = llm_models.tiny_llama(Path(place) / "base" / "1")
        adapter = _adapter(base, Path(place) / "wide")
        with_it = {"adapters": f"wide={adapter}"}
        async with served(base, None, **with_it) as alone, apart(folder=base, **with_it) as (prefill, decode):
            generation = Generation(prompt=PROMPT, sampling=GREEDY, adapter="wide")
            plain = replace(generation, adapter="")
            wanted = (await alone.ask(generation)).text
            assert wanted != (await alone.ask(plain)).text
            assert (await transferred(prefill, decode, generation)).text == wanted
            assert ways(decode) == {"shared_memory": 1}
            # A token for the model with the adapter is none for the model without.
            found = await decode.ask(replace(plain, transfer_token=await token_of(prefill, generation)))
            assert found.text == (await alone.ask(plain)).text
            assert fallbacks(decode) == {"other_prompt": 1}


def _adapter(base: Path, folder: Path) -> Path:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(11)
        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        changed = get_peft_model(
            model, LoraConfig(task_type="CAUSAL_LM", r=8, lora_alpha=16, target_modules="all-linear")
        )
        for name, parameter in changed.named_parameters():
            if "lora_" in name:
                parameter.data.normal_(0, 0.3)
        changed.save_pretrained(folder)
    return folder


def test_what_a_killed_server_left_is_removed_and_what_lives_is_not(tmp_path: Path) -> None:
    folder = fleet_key.user_folder()
    dead = page_store.PageStore(folder, max_bytes=1000, seconds=30)
    dead.put([memoryview(b"x" * 100)], 100, 1, 0)
    living = page_store.PageStore(folder, max_bytes=1000, seconds=30)
    living.put([memoryview(b"y" * 60), memoryview(b"y" * 40)], 100, 1, 0)
    dead._running.release()  # as the system does when a process is killed
    (folder / "killed-before-it-had-a-lock").mkdir()
    page_store.PageStore(folder, max_bytes=1000, seconds=30).close()
    assert sorted(path.name for path in folder.iterdir()) == sorted((living.name, "gate"))
    assert oct((folder / living.name).stat().st_mode & 0o777) == "0o700"
    assert {oct(path.stat().st_mode & 0o777) for path in (folder / living.name).iterdir()} == {"0o600"}
    living.close()


def test_a_folder_that_others_may_use_is_refused(own_memory: Path) -> None:
    (own_memory / f"headrace-handing-{os.getuid()}").mkdir(mode=0o777)
    (own_memory / f"headrace-handing-{os.getuid()}").chmod(0o777)
    with pytest.raises(FailedPrecondition, match="not private to this user"):
        fleet_key.user_folder()


def test_servers_of_one_machine_find_the_same_key() -> None:
    folder = fleet_key.user_folder()
    assert fleet_key.machine_key(folder) == fleet_key.machine_key(folder)
    assert oct((folder / "key").stat().st_mode & 0o777) == "0o600"
    (folder / "key").write_bytes(b"short")  # not of ours: we write it whole
    assert len(fleet_key.machine_key(folder)) >= 16


def test_drops_are_not_waited_for_for_ever() -> None:
    """All pages have one limit, however small the pieces in which they come."""
    page = 1 << 16

    def drip(listening: socket.socket) -> None:
        with contextlib.suppress(OSError):
            connection, _ = listening.accept()
            with connection:
                nonce = REQUEST.unpack(read_exactly(connection, REQUEST.size, time.monotonic() + 30))[5]
                connection.sendall(RESPONSE.pack(OK, page, response_proof(PREFILL.key, OK, page, nonce)))
                for _ in range(page):
                    connection.sendall(b"x")
                    time.sleep(0.01)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        dripping = threading.Thread(target=drip, args=(listening,), daemon=True)
        dripping.start()
        port = listening.getsockname()[1]
        parsed = TransferToken("0" * 32, "m", "d", 1, page, "", "127.0.0.1", port, 0.0)
        with pytest.raises(TransferError) as refused:
            fetch_pages(parsed, 0, memoryview(bytearray(page)), Path("/nonexistent"), PREFILL.key, 0.3)
        assert refused.value.reason == "timeout"
        dripping.join(60)
        assert not dripping.is_alive(), "who gave up has hung up"


def test_a_decoder_that_does_not_read_keeps_no_server_from_ending() -> None:
    store = page_store.PageStore(fleet_key.user_folder(), max_bytes=1 << 28, seconds=30)
    kept = store.put([memoryview(bytearray(1 << 26))], 1 << 26, 1, time.time())
    sender = PageSender(store, PREFILL.key, "127.0.0.1", 0)
    with socket.create_connection(("127.0.0.1", sender.port), 30) as decoder, contextlib.ExitStack() as others:
        named, nonce = bytes.fromhex(kept.id), b"n" * 16
        proof = request_proof(PREFILL.key, named, 0, 1, nonce)
        decoder.sendall(REQUEST.pack(MAGIC, VERSION, named, 0, 1, nonce, proof))
        assert RESPONSE.unpack(read_exactly(decoder, RESPONSE.size, time.monotonic() + 30))[0] == OK
        for _ in range(20):  # more than are served at once, and none of them asks anything
            others.enter_context(socket.create_connection(("127.0.0.1", sender.port), 30))
        sender.close()
    assert not [each for each in threading.enumerate() if each.name.startswith("llm kv sender")]
    store.close()


def test_if_its_port_is_taken_loopback_uses_another_and_other_addresses_fail() -> None:
    store = page_store.PageStore(fleet_key.user_folder(), max_bytes=1000, seconds=30)
    with socket.create_server(("0.0.0.0", 0)) as taken:
        port = taken.getsockname()[1]
        sender = PageSender(store, PREFILL.key, "127.0.0.1", port)
        assert sender.port not in (0, port)
        sender.close()
        with pytest.raises(FailedPrecondition, match=f"0.0.0.0:{port} cannot be listened on"):
            PageSender(store, PREFILL.key, "0.0.0.0", port)
    store.close()


def test_full_shared_memory_is_reported_as_out_of_pages() -> None:
    real = os.open
    store = page_store.PageStore(fleet_key.user_folder(), max_bytes=1 << 20, seconds=30)
    with pytest.MonkeyPatch.context() as patched:
        # Whatever is written there, the system says that there is no space left.
        patched.setattr(os, "open", lambda *_: real(os.devnull.replace("null", "full"), os.O_WRONLY))
        with pytest.raises(page_store.StoreFull):
            store.put([memoryview(b"x" * 100)], 100, 1, 0)
    assert store.bytes == 0
    store.close()


def test_of_what_breaks_off_nothing_is_kept() -> None:
    def chunks() -> Iterator[memoryview]:
        yield memoryview(b"x" * 50)
        raise RuntimeError("the GPU is gone")

    folder = fleet_key.user_folder()
    store = page_store.PageStore(folder, max_bytes=1000, seconds=30)
    with pytest.raises(RuntimeError, match="the GPU is gone"):
        store.put(chunks(), 100, 1, 0)
    assert store.bytes == 0
    assert [path.name for path in (folder / store.name).iterdir()] == ["lock"]
    store.close()
