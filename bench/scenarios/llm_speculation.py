# SPDX-License-Identifier: Apache-2.0
"""Measure speculative decoding of the backend `llm`, on text that repeats its prompt and on text that does not.

    python3 bench/scenarios/llm_speculation.py                        # the shape of an 8B Llama in bfloat16, on a GPU
    python3 bench/scenarios/llm_speculation.py --draft 0.7            # ... and a draft model with this acceptance
    python3 bench/scenarios/llm_speculation.py --device cpu --small --tokens 128

The model is made on the spot. Its layers compute as any and add nothing, so its next token depends on the last one alone:
some tokens go round in a circle of 200 (text that repeats its prompt), most in one circle of all (text that never repeats),
and 30 are followed by any of them, evenly (noise, whose n-grams occurred before and are no help: the worst case). Requests
go through the engine without HTTP. A figure is the median of some runs; runs with and without drafts alternate.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
warnings.simplefilter("ignore")

import torch  # noqa: E402
import transformers  # noqa: E402

from bench.scenarios.llm_gpu import closed_loop, prepare_run, save_tokenizer, say  # noqa: E402
from headrace.engine.engine import EngineSettings, open_engine  # noqa: E402

Prompts = list[tuple[list[int], int]]

LARGE: dict[str, Any] = {
    "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "head_dim": 128,
    "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 8192, "tie_word_embeddings": False,
}  # fmt: skip
LARGE_DRAFT: dict[str, Any] = {
    **LARGE, "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 12, "num_attention_heads": 8,
}  # fmt: skip
SMALL: dict[str, Any] = {
    **LARGE, "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8, "head_dim": 64,
    "num_attention_heads": 8, "num_key_value_heads": 2,
}  # fmt: skip
SMALL_DRAFT: dict[str, Any] = {**SMALL, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
CIRCLE, NOISE, LINE = range(1000, 1200), range(2000, 2030), range(3000, 32000)
CONFIG = """backend: "llm"
instance_group {{ kind: {kind} }}
parameters {{ key: "model_path" value {{ string_value: "{folder}" }} }}
parameters {{ key: "max_model_len" value {{ string_value: "4096" }} }}
parameters {{ key: "max_running" value {{ string_value: "64" }} }}
parameters {{ key: "kv_cache_bytes" value {{ string_value: "{cache}" }} }}
{more}"""


def main() -> None:
    """Make the models, measure, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="a small model, for a CPU")
    parser.add_argument("--layers", type=int, help="of the model, in place of 32 (8 with --small)")
    parser.add_argument("--tokens", type=int, default=512, help="of an answer")
    parser.add_argument("--prompt", type=int, default=600, help="tokens of a prompt")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--streams", type=int, default=16, help="of the runs with several streams")
    parser.add_argument(
        "--draft", type=float, help="measure a draft model, too, that is right for this share of tokens"
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="PARAMETER=VALUE", help="of models with speculation"
    )
    arguments = parser.parse_args()
    prepare_run()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        say("making the models")
        shape = SMALL if arguments.small else LARGE
        shape = {**shape, "num_hidden_layers": arguments.layers or shape["num_hidden_layers"]}
        make_model(folder / "model", shape, arguments.device)
        if arguments.draft is not None:
            draft = SMALL_DRAFT if arguments.small else LARGE_DRAFT
            make_model(folder / "draft", draft, arguments.device, right=arguments.draft)
        print(json.dumps(asyncio.run(measure(folder, arguments)), indent=1))


def make_model(folder: Path, shape: dict[str, Any], device: str, *, right: float = 1.0) -> None:
    """A Llama that continues as the module's docstring says; with `right`, for this share of tokens."""
    config = transformers.LlamaConfig(**shape, bos_token_id=0, eos_token_id=1)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32 if device == "cpu" else torch.bfloat16)
    with torch.device(device):
        model = transformers.LlamaForCausalLM(config)
    torch.set_default_dtype(before)
    model.generation_config.eos_token_id = None
    generator, mistakes = random.Random(3), random.Random(4)
    after = list(range(config.vocab_size))
    for tokens in (CIRCLE, LINE):
        order = list(tokens)
        generator.shuffle(order)
        for index, token in enumerate(order):
            steps = 1 if mistakes.random() < right else 2
            after[token] = order[(index + steps) % len(order)]
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        embeddings, head = model.model.embed_tokens.weight, model.lm_head.weight
        embeddings.normal_()
        embeddings[NOISE.start : NOISE.stop] = embeddings[NOISE.start]
        head.zero_()
        scale = 20.0 / config.hidden_size
        numbers = torch.arange(config.vocab_size, device=device)
        head.index_add_(0, torch.tensor(after, device=device), embeddings[numbers] * scale)
        head[NOISE.start : NOISE.stop] = embeddings[NOISE.start] * scale
    model.save_pretrained(folder)
    say(f"{sum(parameter.numel() for parameter in model.parameters()) / 1e9:.3f} billion parameters")
    save_tokenizer(folder, config.vocab_size)


async def measure(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """All of it: each scenario with every kind of speculation in turn."""
    kinds: dict[str, list[str]] = {"none": [], "ngram": ["speculation=ngram", *arguments.set]}
    if arguments.draft is not None:
        kinds["draft"] = ["speculation=draft", f"draft_model={folder / 'draft'}", *arguments.set]
    repository = folder / "repository"
    cuda = arguments.device == "cuda"
    for name, parameters in kinds.items():
        (repository / name / "1").mkdir(parents=True)
        more = "\n".join(
            f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}'
            for key, value in (parameter.split("=", 1) for parameter in parameters)
        )
        text = CONFIG.format(
            kind="KIND_GPU" if cuda else "KIND_CPU",
            folder=folder / "model",
            cache=(16 if cuda else 1) << 30,
            more=more,
        )
        (repository / name / "config.pbtxt").write_text(text)
    engine = open_engine(EngineSettings((repository,)))
    say("loading")
    begin = time.perf_counter()
    await engine.start()
    for state in engine.plane.states():
        say(state)
    figures: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "seconds to load the models": round(time.perf_counter() - begin, 1),
    }
    count = arguments.tokens
    repeats: Prompts = [(laps(CIRCLE, arguments.prompt), count)]
    fresh: Prompts = [(random.sample(LINE, arguments.prompt), count)]
    noise: Prompts = [(random.choices(NOISE, k=arguments.prompt), count)]
    streams = arguments.streams
    scenarios: dict[str, tuple[Prompts, bool]] = {
        "one stream, repeats its prompt": (repeats, False),
        "one stream, nothing repeats": (fresh, False),
        "one stream, noise": (noise, True),
        f"{streams} streams, repeat their prompts": (repeats * streams, False),
        f"{streams} streams, nothing repeats": (fresh * streams, False),
        f"{streams} streams, noise": (noise * streams, True),
        f"{streams} streams, one repeats its prompt": (repeats + fresh * (streams - 1), False),
    }
    for title, (prompts, sampled) in scenarios.items():
        say(title)
        rates: dict[str, list[float]] = {name: [] for name in kinds}
        for _ in range(arguments.runs):
            for name in kinds:
                rates[name].append(await rate(engine.plane, name, prompts, sampled=sampled))
        medians = {name: statistics.median(found) for name, found in rates.items()}
        figures[title] = {
            name: f"{median:.1f} tokens/s, x {median / medians['none']:.3f}" for name, median in medians.items()
        }
    await engine.close(10)
    return figures


def laps(circle: range, count: int) -> list[int]:
    """Return the tokens of a circle in the order in which the model says them."""
    generator = random.Random(3)
    order = list(circle)
    generator.shuffle(order)
    return (order * (count // len(order) + 1))[:count]


async def rate(plane: Any, model: str, prompts: Prompts, *, sampled: bool) -> float:
    """Return the tokens a second of all streams together."""
    figures = await closed_loop(plane, model, prompts, len(prompts), sampled=sampled)
    return float(figures["tokens a second"])


if __name__ == "__main__":
    main()
