# SPDX-License-Identifier: Apache-2.0
"""Measure the backend `llm` on a GPU beside plain transformers, and print the table of docs/performance.md.

    python3 bench/scenarios/llm_gpu.py                     # 1.04 billion parameters in bfloat16, random weights
    python3 bench/scenarios/llm_gpu.py --device cpu --small --requests 12 --streams 4 --max-tokens 24

The model is made on the spot. Requests go through Headrace's engine as those of any protocol do (`infer_stream` of its data
plane, token by token), without HTTP. First one stream alone; then a closed loop: each of the streams sends its next
request when its last one is answered. Lengths of prompts and answers are drawn evenly from 32 to 512 and from 16 to 512.
Everything is counted: prompts, and the end, when streams run dry. Nothing is warmed up but what loading does.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import logging
import random
import resource
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
warnings.simplefilter("ignore")

import torch  # noqa: E402
import transformers  # noqa: E402

from headrace.core.generation import Generation, GenerationRequest, Sampling  # noqa: E402
from headrace.core.requests import InferResponse  # noqa: E402
from headrace.engine.engine import EngineSettings, open_engine  # noqa: E402

Request = tuple[list[int], int]
"""A prompt, and how many tokens its answer has."""

LARGE: dict[str, Any] = {
    "vocab_size": 32000, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "head_dim": 64,
    "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 4096, "tie_word_embeddings": True,
}  # fmt: skip
SMALL: dict[str, Any] = {
    **LARGE, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 16,
    "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.3,
}  # fmt: skip
CONFIG = """backend: "llm"
instance_group {{ kind: {kind} }}
parameters {{ key: "model_path" value {{ string_value: "{folder}" }} }}
parameters {{ key: "max_model_len" value {{ string_value: "{length}" }} }}
parameters {{ key: "max_running" value {{ string_value: "{streams}" }} }}
parameters {{ key: "dtype" value {{ string_value: "{dtype}" }} }}
{more}"""


def main() -> None:
    """Make, measure, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="a tiny model")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--requests", type=int, default=512)
    parser.add_argument("--max-tokens", type=int, default=512, help="of the longest answer")
    parser.add_argument("--set", action="append", default=[], metavar="PARAMETER=VALUE", help="of the model")
    parser.add_argument("--sampled", action="store_true", help="measure temperature 0.8 and top_p 0.95 as well")
    parser.add_argument(
        "--deterministic", action="store_true", help="measure the model with parameter deterministic as well"
    )
    parser.add_argument("--no-transformers", action="store_true")
    arguments = parser.parse_args()
    prepare_run()
    with tempfile.TemporaryDirectory() as folder:
        say("making the model")
        make_model(Path(folder) / "model", arguments)
        print(json.dumps(measure(Path(folder), arguments), indent=1))


def prepare_run() -> None:
    """Log warnings only, and seed the random generators."""
    logging.basicConfig(level=logging.WARNING, stream=sys.stdout, format="%(levelname)s %(message)s")
    transformers.logging.set_verbosity_error()
    random.seed(7)
    torch.manual_seed(7)


def measure(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """All of it."""
    vocabulary = (SMALL if arguments.small else LARGE)["vocab_size"]

    def request(prompt: int, answer: int) -> Request:
        return [random.randrange(8, vocabulary) for _ in range(prompt)], min(answer, arguments.max_tokens)

    single = request(128, 384)
    many = [request(random.randint(32, 512), random.randint(16, 512)) for _ in range(arguments.requests)]
    equal = [request(random.randint(2, 300), 48) for _ in range(20)]
    cuda = arguments.device == "cuda"
    figures: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "torch": torch.__version__,
        "release of transformers": transformers.__version__,
        "streams": arguments.streams,
    }
    if cuda:
        figures["copy bandwidth, TB/s"] = bandwidth()
        figures["memory before, MB"] = memory()
    figures["headrace"], answers = asyncio.run(headrace(folder, arguments, single, many, equal))
    gc.collect()
    if cuda:
        torch.cuda.empty_cache()
        figures["memory after unloading, MB"] = memory()
    figures["roofline"] = roofline(
        single, many, arguments.streams, figures.get("copy bandwidth, TB/s", 0.02), arguments
    )
    if not arguments.no_transformers:
        figures["transformers"] = plain(folder / "model", arguments, single, many)
    figures["greedy answers equal to transformers' in float32"] = (
        f"{same(folder, arguments, equal, answers)} of {len(equal)}"
    )
    return figures


def say(*values: object) -> None:
    """Where we are."""
    print(f"[{time.strftime('%H:%M:%S')}]", *values, file=sys.stderr, flush=True)


def make_model(folder: Path, arguments: argparse.Namespace) -> None:
    """A Llama with random weights, and a tokenizer."""
    config = transformers.LlamaConfig(**(SMALL if arguments.small else LARGE), bos_token_id=0, eos_token_id=1)
    dtype = torch.float32 if arguments.device == "cpu" else torch.bfloat16
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    with torch.device(arguments.device):
        model = transformers.LlamaForCausalLM(config)
    torch.set_default_dtype(before)
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    say(f"{sum(parameter.numel() for parameter in model.parameters()) / 1e9:.3f} billion parameters")
    save_tokenizer(folder, config.vocab_size)


def save_tokenizer(folder: Path, vocabulary: int) -> None:
    """One of so many tokens, made of bytes and of words."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    pieces = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    merges = []
    for left, right in words():
        if len(pieces) == vocabulary:
            break
        merges.append((left, right))
        pieces.append(left + right)
    numbered = {piece: number for number, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=numbered, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    fast.save_pretrained(folder)


def words() -> Iterator[tuple[str, str]]:
    """Merges of letters to two, three, four ..., as long as somebody asks."""
    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)]
    shorter = ["\u0120", *letters]
    while True:
        longer = []
        for left in shorter:
            for right in letters:
                yield left, right
                longer.append(left + right)
        shorter = longer


async def headrace(
    folder: Path, arguments: argparse.Namespace, single: Request, many: list[Request], equal: list[Request]
) -> tuple[dict[str, Any], list[str]]:
    """Through the engine."""
    repository = folder / "repository"
    kind = "KIND_GPU" if arguments.device == "cuda" else "KIND_CPU"
    parameters = dict(item.split("=", 1) for item in arguments.set)
    more = "\n".join(
        f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}' for key, value in parameters.items()
    )
    also = [("deterministic", "auto")] if arguments.deterministic else []
    for name, dtype in (("model", "auto"), ("exact", "float32"), *also):
        (repository / name / "1").mkdir(parents=True)
        text = CONFIG.format(
            kind=kind, folder=folder / "model", length=1100, streams=arguments.streams, dtype=dtype, more=more
        )
        # The second model is there to compare answers; it shall not have the memory of the first.
        exact = 'parameters { key: "kv_cache_bytes" value { string_value: "1000000000" } }\n' if name == "exact" else ""
        if name == "deterministic":
            exact = 'parameters { key: "deterministic" value { string_value: "true" } }\n'
        if also and name != "exact":  # both have the same memory
            exact += 'parameters { key: "kv_cache_bytes" value { string_value: "8000000000" } }\n'
        (repository / name / "config.pbtxt").write_text(text + "\n" + exact)
    engine = open_engine(EngineSettings((repository,)))
    say("loading")
    begin = time.perf_counter()
    await engine.start()
    for state in engine.plane.states():
        say(state)
    figures: dict[str, Any] = {"seconds to load both models": round(time.perf_counter() - begin, 1)}
    if arguments.device == "cuda":
        figures["memory with the models, MB"] = memory()
    say("one stream")
    figures["batch 1"] = await closed_loop(engine.plane, "model", [single], 1)
    figures["batch 1, again"] = await closed_loop(engine.plane, "model", [single], 1)
    for sampling in ("greedy", "sampled")[: 1 + arguments.sampled]:
        say(arguments.streams, "streams,", sampling)
        figures[f"{arguments.streams} streams, {sampling}"] = await closed_loop(
            engine.plane, "model", many, arguments.streams, sampled=sampling == "sampled"
        )
    for name in ("model", "deterministic") if also else ():
        if name != "model":
            say("deterministic")
            figures[f"{name}: batch 1"] = await closed_loop(engine.plane, name, [single], 1)
            for sampling in ("greedy", "sampled")[: 1 + arguments.sampled]:
                figures[f"{name}: {arguments.streams} streams, {sampling}"] = await closed_loop(
                    engine.plane, name, many, arguments.streams, sampled=sampling == "sampled"
                )
        figures[f"{name}: greedy answers equal alone and in company"] = await in_company(
            engine.plane, name, equal, many, arguments.streams
        )
    if arguments.device == "cuda":
        figures["memory after the requests, MB"] = memory()
    texts: list[str] = []
    await closed_loop(engine.plane, "exact", equal, 8, texts=texts)
    say("unloading")
    await engine.close(10)
    return figures, texts


async def in_company(plane: Any, model: str, requests: list[Request], others: list[Request], streams: int) -> str:
    """How many answers are the same one at a time and between other requests."""
    alone: list[str] = []
    together: list[str] = []
    await closed_loop(plane, model, requests, 1, texts=alone)
    mixed = [others[number % len(others)] for number in range(2 * streams)]
    await closed_loop(plane, model, [*mixed[:streams], *requests, *mixed[streams:]], streams, texts=together)
    return f"{sum(map(str.__eq__, alone, together[streams:]))} of {len(requests)}"


async def closed_loop(
    plane: Any,
    model: str,
    requests: list[Request],
    streams: int,
    *,
    sampled: bool = False,
    texts: list[str] | None = None,
) -> dict[str, Any]:
    """Each stream sends its next request when its last is answered."""
    waiting = iter(enumerate(requests))
    first: list[float] = []
    gaps: list[float] = []
    counts = {"tokens": 0, "answers": 0}
    found: dict[int, str] = {}
    choosing: dict[str, Any] = {"temperature": 0.8, "top_p": 0.95} if sampled else {"temperature": 0.0}

    async def stream() -> None:
        for number, (prompt, count) in waiting:
            over = asyncio.get_running_loop().create_future()
            sampling = Sampling(max_tokens=count, ignore_eos=True, **choosing)
            request = GenerationRequest(model, Generation(prompt=prompt, sampling=sampling, stream=True))
            plane.infer_stream(request, _Listener(over, counts, first, gaps, found, number))
            await over

    cpu, begin = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    await asyncio.gather(*(stream() for _ in range(streams)))
    took = time.perf_counter() - begin
    after = resource.getrusage(resource.RUSAGE_SELF)
    used = after.ru_utime + after.ru_stime - cpu.ru_utime - cpu.ru_stime
    if texts is not None:
        texts.extend(found[number] for number in range(len(requests)))
    gaps.sort()
    first.sort()
    return {
        "seconds": round(took, 3),
        "tokens": counts["tokens"],
        "answers": counts["answers"],
        "tokens a second": round(counts["tokens"] / took, 1),
        "ms a token": round(1e3 * took * min(streams, len(requests)) / counts["tokens"], 3),
        "ms to the first token, median": round(1e3 * first[len(first) // 2], 2),
        "ms to the first token, 99%": round(1e3 * first[int(len(first) * 0.99)], 2),
        "ms between tokens, median": round(1e3 * gaps[len(gaps) // 2], 3),
        "ms between tokens, 99%": round(1e3 * gaps[int(len(gaps) * 0.99)], 3),
        "us of CPU a token": round(1e6 * used / counts["tokens"], 1),
    }


class _Listener:
    """Hears the answers to one request."""

    def __init__(
        self,
        over: Any,
        counts: dict[str, int],
        first: list[float],
        gaps: list[float],
        found: dict[int, str],
        number: int,
    ) -> None:
        self._over, self._counts, self._first, self._gaps = over, counts, first, gaps
        self._found, self._number = found, number
        self._texts: list[bytes] = []
        self._begin = self._last = time.perf_counter()

    def __call__(self, answer: InferResponse | BaseException | None, final: bool) -> None:
        now = time.perf_counter()
        if isinstance(answer, BaseException):
            self._over.set_exception(answer)
            return
        self._counts["answers"] += 1
        (self._gaps if self._texts else self._first).append(now - self._last)
        self._last = now
        if answer is not None:
            self._texts.append(answer.outputs[0].array[0])
        if final and answer is not None:
            self._counts["tokens"] += int(answer.parameters["completion_tokens"])
            self._found[self._number] = b"".join(self._texts).decode("utf-8", "replace")
        if final:
            self._over.set_result(None)


def roofline(
    single: Request, many: list[Request], streams: int, terabytes: float, arguments: argparse.Namespace
) -> dict[str, Any]:
    """What reading the weights and the cached keys and values once a step takes, and nothing else."""
    config = SMALL if arguments.small else LARGE
    layer = (
        config["hidden_size"] * config["head_dim"] * 2 * (config["num_attention_heads"] + config["num_key_value_heads"])
    )
    layer += 3 * config["hidden_size"] * config["intermediate_size"]
    weights = 2 * (config["num_hidden_layers"] * layer + config["vocab_size"] * config["hidden_size"])
    token = 2 * 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"]

    def context(requests: list[Request]) -> float:
        places = [(len(prompt) + count / 2, count) for prompt, count in requests]
        return sum(length * count for length, count in places) / sum(count for _, count in places)

    alone = (weights + token * context([single])) / (terabytes * 1e12)
    together = (weights + streams * token * context(many)) / (terabytes * 1e12)
    return {
        "bytes of weights": weights,
        "bytes of a cached token": token,
        "mean context": round(context(many)),
        "batch 1, ms a token": round(1e3 * alone, 3),
        f"{streams} streams, tokens a second": round(streams / together),
    }


def plain(folder: Path, arguments: argparse.Namespace, one: Request, many: list[Request]) -> dict[str, Any]:
    """The same with `generate` of transformers: one alone, and one batch of as many as there are streams."""
    model = load(folder, arguments, None)
    generate(model, [one[0]], 4)
    begin = time.perf_counter()
    count = min(64, one[1])
    generate(model, [one[0]], count)
    alone = (time.perf_counter() - begin) / count
    batch = many[: arguments.streams]
    say("transformers: a batch of", len(batch))
    begin = time.perf_counter()
    generate(model, [prompt for prompt, _ in batch], max(count for _, count in batch))
    took = time.perf_counter() - begin
    return {
        "batch 1, ms a token": round(1e3 * alone, 3),
        f"static batch of {len(batch)}, useful tokens a second": round(sum(count for _, count in batch) / took, 1),
    }


def load(folder: Path, arguments: argparse.Namespace, dtype: torch.dtype | None) -> Any:
    """The model as transformers has it."""
    kind = transformers.AutoModelForCausalLM
    return kind.from_pretrained(folder, dtype=dtype or "auto", attn_implementation="sdpa").to(arguments.device).eval()


def generate(model: Any, prompts: list[list[int]], count: int) -> Any:
    """Greedy, to the end."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts], device=model.device)
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=model.device)
    return model.generate(
        ids, attention_mask=mask, max_new_tokens=count, min_new_tokens=count, do_sample=False, eos_token_id=None,
        pad_token_id=0,
    )[:, longest:]  # fmt: skip


def same(folder: Path, arguments: argparse.Namespace, requests: list[Request], texts: list[str]) -> int:
    """How many answers are those of transformers, both in float32."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "model")
    model = load(folder / "model", arguments, torch.float32)
    wanted = [tokenizer.decode(generate(model, [prompt], count)[0].tolist()) for prompt, count in requests]
    return sum(text == other for text, other in zip(texts, wanted, strict=True))


def bandwidth() -> float:
    """Of a copy from the device's memory to itself, what is read and what is written."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    for _ in range(3):
        target.copy_(source)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(20):
        target.copy_(source)
    end.record()
    end.synchronize()
    return float(round(20 * 2 * source.numel() / begin.elapsed_time(end) / 1e9, 2))


def memory() -> float:
    """What PyTorch has allocated on the device."""
    gc.collect()
    return float(round(torch.cuda.memory_allocated() / 1e6, 1))


if __name__ == "__main__":
    main()
