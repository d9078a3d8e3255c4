# SPDX-License-Identifier: Apache-2.0
"""Measure second turns of conversations whose KV pages were evicted: recomputed, or loaded from host memory or disk.

    python3 bench/scenarios/llm_kv_offload.py                         # 64 conversations of 8,000 tokens with an 8B Llama
    python3 bench/scenarios/llm_kv_offload.py --disk /mnt/nvme/pages  # ... and with a disk level
    python3 bench/scenarios/llm_kv_offload.py --device cpu --small --conversations 12 --prompt 1000

The model is made on the spot: what it says is of no interest, and its layers compute as any. The KV cache holds a few of the
conversations. Each is visited once, then all again in the same order, so that what a visit needs was evicted; the figures
are those of the second visits. With `--streams` several are visited at a time. `gpu`, `host` and `disk` are the tokens that
each level had for the second visits. Requests go through the engine without HTTP.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shutil
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
warnings.simplefilter("ignore")

import torch  # noqa: E402

from bench.scenarios.llm_gpu import closed_loop, prepare_run, say  # noqa: E402
from bench.scenarios.llm_speculation import LARGE, SMALL, make_model  # noqa: E402
from headrace.engine.engine import EngineSettings, open_engine  # noqa: E402

ANSWER = 4
CONFIG = """backend: "llm"
instance_group {{ kind: {kind} }}
"""


def main() -> None:
    """Make the model, measure, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="a small model, for a CPU")
    parser.add_argument("--conversations", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=8000, help="tokens of a conversation")
    parser.add_argument("--held", type=int, default=8, help="conversations that the KV cache holds")
    parser.add_argument("--streams", type=int, default=1, help="conversations visited at a time")
    parser.add_argument("--disk", type=Path, help="measure a disk level in this folder, with little host memory")
    parser.add_argument("--set", action="append", default=[], metavar="PARAMETER=VALUE", help="of all models")
    arguments = parser.parse_args()
    prepare_run()
    with tempfile.TemporaryDirectory() as place:
        say("making the model")
        shape = SMALL if arguments.small else LARGE
        make_model(Path(place) / "model", {**shape, "max_position_embeddings": 16384}, arguments.device)
        print(json.dumps(asyncio.run(measure(Path(place), arguments)), indent=1))


async def measure(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Visit all conversations twice, with each kind of levels."""
    shape, cuda = SMALL if arguments.small else LARGE, arguments.device == "cuda"
    token = 2 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * shape["head_dim"] * (2 if cuda else 4)
    conversation = token * (arguments.prompt + 64)
    everything = conversation * arguments.conversations
    kinds: dict[str, dict[str, str]] = {"computed again": {}, "host": {"kv_host_bytes": str(everything)}}
    if arguments.disk is not None:
        kinds["disk"] = {
            "kv_host_bytes": str(conversation * 2 * arguments.streams),
            "kv_disk_path": str(arguments.disk.absolute() / "headrace-bench"),
            "kv_disk_bytes": str(2 * everything),
        }
    figures: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "conversations": arguments.conversations,
        "tokens of each": arguments.prompt,
        "GB of pages": round(everything / 1e9, 2),
    }
    prompts = [
        ([random.randrange(8, shape["vocab_size"]) for _ in range(arguments.prompt)], ANSWER)
        for _ in range(arguments.conversations)
    ]
    for kind, parameters in kinds.items():
        settings = {
            "model_path": str(folder / "model"),
            "max_model_len": str(arguments.prompt + 64),
            "max_running": str(max(4, arguments.streams)),
            "kv_cache_bytes": str(conversation * arguments.held),
            **dict(parameter.split("=", 1) for parameter in arguments.set),
            **parameters,
        }
        figures[kind] = await visit(folder / kind.replace(" ", "-"), settings, prompts, arguments)
    if arguments.disk is not None:
        shutil.rmtree(arguments.disk / "headrace-bench", ignore_errors=True)
    plain = figures["computed again"]["ms to the first token, median"]
    for kind in list(kinds)[1:]:
        figures[kind]["first token sooner by a factor of"] = round(
            plain / figures[kind]["ms to the first token, median"], 2
        )
    return figures


async def visit(
    repository: Path, settings: dict[str, str], prompts: list[Any], arguments: argparse.Namespace
) -> dict[str, Any]:
    """Visit all conversations twice; return the figures of the second visits."""
    folder = repository / "model"
    (folder / "1").mkdir(parents=True)
    (folder / "config.pbtxt").write_text(
        CONFIG.format(kind="KIND_GPU" if arguments.device == "cuda" else "KIND_CPU")
        + "".join(
            f'parameters {{ key: "{name}" value {{ string_value: "{value}" }} }}\n' for name, value in settings.items()
        )
    )
    engine = open_engine(EngineSettings((repository,)))
    say("loading", repository.name)
    await engine.start()
    for state in engine.plane.states():
        say(state)
    say("first visits")
    first = await closed_loop(engine.plane, "model", prompts, arguments.streams)
    await asyncio.sleep(2.0)  # until what waits is saved
    before = level_tokens(engine)
    say("second visits")
    second = await closed_loop(engine.plane, "model", prompts, arguments.streams)
    after = level_tokens(engine)
    figures = {
        "ms to the first token, median": second["ms to the first token, median"],
        "ms to the first token, 99%": second["ms to the first token, 99%"],
        "ms to the first token of first visits, median": first["ms to the first token, median"],
        "seconds of all second visits": second["seconds"],
        "tokens by level": {level: after[level] - before.get(level, 0) for level in after},
    }
    await engine.close(10)
    return figures


def level_tokens(engine: Any) -> dict[str, int]:
    """Prompt tokens that each level had, so far."""
    for family in engine.metrics.families:
        if family.name == "headrace_llm_kv_level_hit_tokens_total":
            return {labels[-1]: int(series.value) for labels, series in family.collect()}
    return {}


if __name__ == "__main__":
    main()
