# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters, several in one step: compared with PEFT, token for token."""

from __future__ import annotations

import asyncio
import json
import shutil
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from llm_instances import served
from safetensors.torch import load_file, save_file

from headrace.backends.llm.engine_core import make_scheduler
from headrace.backends.llm.lora import LoraAdapters, load_adapters
from headrace.backends.llm.model_runner.model_loader import open_runner
from headrace.backends.llm.scheduler import Sequence
from headrace.backends.llm.settings import LlmSettings
from headrace.core.errors import FailedPrecondition, NotFound, Unimplemented
from headrace.core.generation import Generation, Sampling
from support.llm_models import tiny_llama

TOKENS = 8
PROMPTS = {
    "": [5, 9, 100, 33],
    "wide": [7, 300, 12, 13, 14, 250, 77],
    "narrow": [400, 41],
    "headed": [60, 61, 62, 63, 64],
}
KINDS: dict[str, dict[str, Any]] = {
    "wide": {"r": 8, "lora_alpha": 16, "target_modules": "all-linear"},
    "narrow": {
        "r": 2,
        "lora_alpha": 4,
        "use_rslora": True,
        "target_modules": ["q_proj", "v_proj"],
        "rank_pattern": {"v_proj": 3},
    },
    "headed": {"r": 4, "lora_alpha": 8, "target_modules": ["down_proj", "lm_head"], "alpha_pattern": {"down_proj": 2}},
    "saved": {"r": 4, "lora_alpha": 8, "target_modules": ["o_proj"], "modules_to_save": ["lm_head"]},
}


@dataclass
class Owner:
    adapter: str


@dataclass
class Piece:
    sequence: Owner
    count: int
    samples: bool = True


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("base"))


def loaded(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def trained(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for each kind, with matrices that change a lot."""
    from peft import LoraConfig, get_peft_model

    folder = tmp_path_factory.mktemp("adapters")
    with torch.random.fork_rng(), warnings.catch_warnings():
        # That it saves the embeddings with an adapter of the head, as it does for everybody.
        warnings.filterwarnings("ignore", "Setting `save_embedding_layers` to `True`")
        torch.manual_seed(11)
        for name, settings in KINDS.items():
            changed = get_peft_model(loaded(base), LoraConfig(task_type="CAUSAL_LM", **settings))
            for key, parameter in changed.named_parameters():
                if "lora_" in key or "modules_to_save" in key:
                    parameter.data.normal_(0, 0.3)
            changed.save_pretrained(folder / name)
    return folder


@pytest.fixture(scope="module")
def expected(base: Path, trained: Path) -> dict[tuple[str, str], list[int]]:
    """What PEFT generates, by the adapter and the prompt's name."""
    from peft import PeftModel

    found: dict[tuple[str, str], list[int]] = {}
    for name in ("", *KINDS):
        model = PeftModel.from_pretrained(loaded(base), trained / name).eval() if name else loaded(base)
        for prompt, tokens in PROMPTS.items():
            answer = model.generate(
                input_ids=torch.tensor([tokens]),
                max_new_tokens=TOKENS,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=2,
            )
            found[name, prompt] = answer[0, len(tokens) :].tolist()
    return found


@pytest.fixture
def model(base: Path) -> Any:
    return loaded(base)


@pytest.fixture
def adapters(model: Any, trained: Path) -> Iterator[LoraAdapters]:
    made = load_adapters(model, {name: trained / name for name in KINDS})
    yield made
    made.close()


def packed_step(model: Any, adapters: LoraAdapters, sequences: list[list[int]], names: list[str]) -> list[int]:
    """One forward of all tokens of all sequences in one row, and the likeliest next token of each."""
    adapters.select_rows([Piece(Owner(name), len(tokens)) for name, tokens in zip(names, sequences, strict=True)])
    whose = torch.tensor([number for number, tokens in enumerate(sequences) for _ in tokens])
    places = torch.tensor([[place for tokens in sequences for place in range(len(tokens))]])
    seen = (whose[:, None] == whose[None, :]) & torch.ones(len(whose), len(whose)).tril().bool()
    mask = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)[None, None]
    last = torch.tensor([len(tokens) for tokens in sequences]).cumsum(0) - 1
    with torch.inference_mode():
        output = model(
            input_ids=torch.tensor([[token for tokens in sequences for token in tokens]]),
            position_ids=places,
            attention_mask=mask,
            logits_to_keep=last,
            use_cache=False,
        )
    return output.logits[0].argmax(-1).tolist()


def generated(model: Any, adapters: LoraAdapters, asked: list[tuple[str, str]]) -> list[list[int]]:
    sequences = [list(PROMPTS[prompt]) for _, prompt in asked]
    for _ in range(TOKENS):
        for tokens, token in zip(
            sequences, packed_step(model, adapters, sequences, [name for name, _ in asked]), strict=True
        ):
            tokens.append(token)
    return [tokens[-TOKENS:] for tokens in sequences]


def test_adapters_of_one_step_do_not_touch_each_other(model: Any, adapters: LoraAdapters, expected: Any) -> None:
    asked = [(name, prompt) for prompt in PROMPTS for name in ("wide", "", "narrow", "headed", "saved")]
    assert generated(model, adapters, asked) == [expected[each] for each in asked]
    assert len({tuple(expected[name, "wide"]) for name in ("", *KINDS)}) == 5, "the adapters change nothing"


@pytest.mark.parametrize("chunk", [4, 512])
def test_through_the_runner(model: Any, adapters: LoraAdapters, expected: Any, base: Path, chunk: int) -> None:
    """With pages, chunks and a prefix cache, in which adapters have nothing in common."""
    runner, _ = open_runner(
        model, LlmSettings(model_path=base, kv_cache_bytes=1 << 22, page_size=4), torch.device("cpu")
    )
    runner.before_forward = adapters.select_rows
    scheduler = make_scheduler(runner, max_running=8, max_step_tokens=chunk, prefix_cache=True)
    asked = [(name, prompt) for prompt in PROMPTS for name in ("wide", "", "narrow", "headed", "saved")] * 2
    sequences = [
        Sequence(list(PROMPTS[prompt]), len(PROMPTS[prompt]) + TOKENS, adapter=name, cache_salt=name.encode())
        for name, prompt in asked
    ]
    for sequence in sequences:
        scheduler.add(sequence)
    while not scheduler.idle:
        plan = scheduler.schedule()
        scheduler.commit(plan, runner.launch(plan, greedy=True).tokens())
        scheduler.finish([sequence for sequence in sequences if len(sequence.tokens) == sequence.limit])
    assert [sequence.tokens[-TOKENS:] for sequence in sequences] == [expected[each] for each in asked]
    assert scheduler.prefix_hits
    runner.close()


@pytest.mark.parametrize("name", ["", *KINDS])
def test_an_adapter_alone(model: Any, adapters: LoraAdapters, expected: Any, name: str) -> None:
    assert generated(model, adapters, [(name, "wide")]) == [expected[name, "wide"]]
    assert adapters.active is bool(name)


def test_a_step_without_adapters_is_the_models_own(model: Any, adapters: LoraAdapters, base: Path) -> None:
    plain = loaded(base)
    ids = torch.tensor([PROMPTS["wide"]])
    packed_step(model, adapters, [[1, 2]], ["wide"])
    adapters.select_rows([Piece(Owner(""), 7)])
    with torch.inference_mode():
        assert torch.equal(model(input_ids=ids).logits, plain(input_ids=ids).logits)


def test_rows_in_the_middle_of_a_prompt_do_not_reach_the_head(model: Any, adapters: LoraAdapters) -> None:
    chunks = [
        Piece(Owner("headed"), 3, samples=False),
        Piece(Owner(""), 1),
        Piece(Owner("headed"), 2),
        Piece(Owner("wide"), 1),
    ]
    adapters.select_rows(chunks)
    assert [name for name, _ in adapters.body] == ["headed", "wide"]
    assert adapters.body[0][1].tolist() == [0, 1, 2, 4, 5]
    assert adapters.head == [("headed", slice(1, 2)), ("wide", slice(2, 3))]


def test_closing_gives_the_model_back(model: Any, adapters: LoraAdapters, base: Path) -> None:
    adapters.select_rows([Piece(Owner("wide"), 7)])
    adapters.close()
    ids = torch.tensor([PROMPTS["wide"]])
    with torch.inference_mode():
        assert torch.equal(model(input_ids=ids).logits, loaded(base)(input_ids=ids).logits)
    assert not any("forward" in vars(layer) for layer in model.modules())


def test_everywhere_is_for_what_is_no_step(model: Any, adapters: LoraAdapters, base: Path, trained: Path) -> None:
    from peft import PeftModel

    ids = torch.tensor([PROMPTS["wide"]])
    with torch.inference_mode(), adapters.applied_to_all("wide"):
        found = model(input_ids=ids).logits
    assert not adapters.active
    with torch.inference_mode():
        right = PeftModel.from_pretrained(loaded(base), trained / "wide").eval()(input_ids=ids).logits
    torch.testing.assert_close(found, right, atol=1e-4, rtol=1e-4)


def test_an_unknown_name_is_not_found(adapters: LoraAdapters) -> None:
    adapters.check("")
    adapters.check("wide")
    with pytest.raises(NotFound, match="adapter 'other' is not loaded: this model has wide, narrow, headed, saved"):
        adapters.check("other")


@pytest.fixture
def copy(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained / "narrow", tmp_path / "copy"))


def reconfigured(folder: Path, **settings: Any) -> Path:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))
    return folder


@pytest.mark.parametrize(
    ("settings", "error", "text"),
    [
        ({"peft_type": "IA3"}, Unimplemented, "of kind 'IA3': this server supports LORA"),
        ({"use_dora": True}, Unimplemented, "has 'use_dora'"),
        ({"lora_bias": True}, Unimplemented, "has 'lora_bias'"),
        ({"bias": "all"}, Unimplemented, "trained biases"),
        ({"init_lora_weights": "pissa"}, Unimplemented, "initialized with 'pissa'"),
        ({"r": 5}, FailedPrecondition, "has rank 5: they do not belong to one adapter"),
        ({"r": 0, "rank_pattern": {}}, FailedPrecondition, "has rank 0"),
        ({"r": "many", "rank_pattern": {}}, FailedPrecondition, "has no usable r for"),
        ({"rank_pattern": {"(": 3}}, FailedPrecondition, "has no usable r for"),
        ({"lora_alpha": None}, FailedPrecondition, "has no usable lora_alpha for"),
    ],
)
def test_what_is_not_done_is_refused(model: Any, copy: Path, settings: Any, error: Any, text: str) -> None:
    with pytest.raises(error, match=f"adapter '?mine.*{text}|{text}"):
        load_adapters(model, {"mine": reconfigured(copy, **settings)})
    assert not any("forward" in vars(layer) for layer in model.modules())


def test_files_that_are_missing_or_damaged_are_refused(model: Any, copy: Path, tmp_path: Path) -> None:
    with pytest.raises(FailedPrecondition, match="adapter 'mine' has no adapter_config.json"):
        load_adapters(model, {"mine": tmp_path / "nowhere"})
    (copy / "adapter_model.safetensors").write_bytes(b"\x00" * 20)
    with pytest.raises(FailedPrecondition, match="of adapter 'mine' is damaged"):
        load_adapters(model, {"mine": copy})
    (copy / "adapter_model.safetensors").rename(copy / "adapter_model.bin")
    with pytest.raises(FailedPrecondition, match="can run code when they are read"):
        load_adapters(model, {"mine": copy})
    (copy / "adapter_config.json").write_text("{")
    with pytest.raises(FailedPrecondition, match="is not JSON"):
        load_adapters(model, {"mine": copy})


Q_PROJ = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({f"{Q_PROJ}.lora_A.weight": None}, FailedPrecondition, "only one of lora_A and lora_B"),
        ({f"{Q_PROJ}.lora_A.weight": (2, 32)}, FailedPrecondition, "has matrices for 32 inputs and 64 outputs"),
        ({"base_model.model.model.embed_tokens.weight": (512, 64)}, Unimplemented, "has its own 'model.embed_tokens'"),
        ({f"{Q_PROJ}.lora_magnitude_vector": (64,)}, Unimplemented, "which this server does not support"),
        (
            {
                f"base_model.model.layers.9.q_proj.{part}.weight": size
                for part, size in (("lora_A", (2, 64)), ("lora_B", (64, 2)))
            },
            FailedPrecondition,
            "that the model does not have: it was trained on another",
        ),
        (
            {
                f"base_model.model.model.embed_tokens.{part}.weight": size
                for part, size in (("lora_A", (2, 512)), ("lora_B", (64, 2)))
            },
            Unimplemented,
            "a layer of kind Embedding",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_refused(model: Any, copy: Path, change: Any, error: Any, text: str) -> None:
    path = copy / "adapter_model.safetensors"
    tensors = load_file(path)
    for key, size in change.items():
        tensors.pop(key, None)
        if size is not None:
            tensors[key] = torch.zeros(size)
    save_file(tensors, path)
    with pytest.raises(error, match=text):
        load_adapters(model, {"mine": copy})


def test_adapters_and_their_model_are_the_same_after_it_slept(base: Path, trained: Path) -> None:
    async def main() -> None:
        async with served(base, adapters=",".join(f"{name}={trained / name}" for name in KINDS)) as tiny:
            sampling = Sampling(temperature=0.0, max_tokens=TOKENS)

            async def answers() -> list[str]:
                generations = [
                    Generation(prompt=[5, 9, 100, 33], adapter=name, sampling=sampling) for name in ("", *KINDS)
                ]
                return [caller.text for caller in await asyncio.gather(*map(tiny.ask, generations))]

            before = await answers()
            assert len(set(before)) > 2
            for level in (1, 2):
                await asyncio.to_thread(tiny.model.sleep, level)  # type: ignore[arg-type]
                await asyncio.to_thread(tiny.model.wake)
                assert await answers() == before

    asyncio.run(main())
