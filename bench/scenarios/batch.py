# SPDX-License-Identifier: Apache-2.0
"""Measure `headrace batch` against the model's own offline throughput: 10,000 small items through three ONNX models.

    python bench/scenarios/batch.py [--items 10000] [--batch 64] [--rounds 5] [--format jsonl]

The model's own is the backend's `compute` in a loop, with arrays that lie ready, of the same batch size, in this process. A
job reads JSON Lines or Parquet, computes with as many instances as it takes by itself (one for a core; `--instances 1` for
just one) and writes the same; its time is that of the run, without loading. They take turns, and the best of each are
compared, since other work on the machine only adds. Prints a line per model and format: items per second of both, and their
ratio.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from onnx import TensorProto, helper, numpy_helper

from headrace.backends.contract import EngineServices, ModelFiles, Placement
from headrace.backends.onnx.backend import OnnxBackend
from headrace.core.dtypes import FP32
from headrace.jobs.batch.settings import BatchSettings
from headrace.models.config.messages import new_config
from headrace.models.config.types import InputSpec, ModelConfig, OutputSpec
from headrace.programs.batch import run_batch

WIDTHS = {"small": (32, 256, 256, 8), "medium": (32, 1024, 1024, 8), "large": (32, 2048, 2048, 2048, 8)}


def write_mlp(path: Path, widths: tuple[int, ...]) -> None:
    """A stack of matrix products with ReLU between them."""
    random = np.random.default_rng(1)
    nodes, constants, last = [], [], "X"
    for index, (rows, columns) in enumerate(itertools.pairwise(widths)):
        weights = random.normal(0, rows**-0.5, (rows, columns)).astype(np.float32)
        constants.append(numpy_helper.from_array(weights, f"w{index}"))
        end = index == len(widths) - 2
        nodes.append(helper.make_node("MatMul", [last, f"w{index}"], ["Y" if end else f"m{index}"]))
        if not end:
            nodes.append(helper.make_node("Relu", [f"m{index}"], [f"r{index}"]))
        last = f"r{index}"
    graph = helper.make_graph(
        nodes,
        "mlp",
        [helper.make_tensor_value_info("X", TensorProto.FLOAT, ["batch", widths[0]])],
        [helper.make_tensor_value_info("Y", TensorProto.FLOAT, ["batch", widths[-1]])],
        constants,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    path.write_bytes(model.SerializeToString())


def open_own(folder: Path, widths: tuple[int, ...], batch: int) -> Any:
    """The backend's instance of the model, as the engine opens it."""
    version = folder / "own" / "1"
    version.mkdir(parents=True)
    (version / "model.onnx").symlink_to(folder / "model.onnx")
    config = ModelConfig(
        "own",
        "onnxruntime",
        max_batch_size=batch,
        inputs=(InputSpec("X", FP32, (widths[0],)),),
        outputs=(OutputSpec("Y", FP32, (widths[-1],)),),
        proto=new_config(backend="onnxruntime"),
    )
    files = ModelFiles(folder / "own", 1, version)
    loaded = OnnxBackend().load(config, files, cast("EngineServices", None))
    return loaded.open(Placement("own_0_cpu"))


def own_seconds(instance: Any, rows: Any, batch: int) -> float:
    """All rows through `compute`."""
    began = time.perf_counter()
    for start in range(0, len(rows), batch):
        instance.compute({"X": rows[start : start + batch]}, ("Y",))
    return time.perf_counter() - began


def write_items(folder: Path, rows: Any) -> None:
    """The same numbers in both formats."""
    columns = {"X": pa.array(list(rows), pa.list_(pa.float32()))}
    pq.write_table(pa.table(columns), folder / "items.parquet")
    lines = (json.dumps({"X": [round(float(x), 4) for x in row]}) for row in rows)
    (folder / "items.jsonl").write_text("\n".join(lines) + "\n")


def job_seconds(folder: Path, form: str, batch: int, count: int, instances: int = 0) -> float:
    """All rows through a job."""
    settings = BatchSettings(
        str(folder / "model.onnx"),
        str(folder / f"items.{form}"),
        str(folder / f"results.{form}"),
        specs={"max_batch_size": batch, **({"instances": instances} if instances else {})},
        overwrite=True,
        folder=folder,
    )
    summary, _ = run_batch(settings)
    if (summary.state, summary.succeeded) != ("finished", count):
        sys.exit(f"the job is {summary.state}: {summary}")
    return summary.seconds


def measure(name: str, formats: list[str], count: int, batch: int, rounds: int, instances: int) -> None:
    """One model; prints."""
    widths = WIDTHS[name]
    rows = np.random.default_rng(2).normal(size=(count, widths[0])).astype(np.float32)
    with tempfile.TemporaryDirectory(prefix="headrace-measure-") as text:
        folder = Path(text)
        write_mlp(folder / "model.onnx", widths)
        write_items(folder, rows)
        instance = open_own(folder, widths, batch)
        own_seconds(instance, rows[: 20 * batch], batch)  # warm
        own: list[float] = []
        jobs: dict[str, list[float]] = {name: [] for name in formats}
        for _ in range(rounds):
            own.append(own_seconds(instance, rows, batch))
            for form, job in jobs.items():
                job.append(job_seconds(folder, form, batch, count, instances))
        instance.close()
    theirs = count / min(own)
    for form, job in jobs.items():
        ours = count / min(job)
        print(
            f"{name:7} {'-'.join(map(str, widths)):24} own {theirs:9.0f} items/s ({1e6 / theirs:6.1f} us an item), "
            f"{form:7} {ours:9.0f} items/s: {100 * ours / theirs:5.1f} %",
            flush=True,
        )


def main() -> None:
    """All models, or those that are named."""
    parser = argparse.ArgumentParser(description="See the beginning of this file.")
    parser.add_argument("models", nargs="*", default=list(WIDTHS), help=f"of {', '.join(WIDTHS)}")
    parser.add_argument("--items", type=int, default=10_000)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--format", choices=("jsonl", "parquet"), default="", help="of items and results; both if not given"
    )
    parser.add_argument(
        "--instances", type=int, default=0, help="of the model, in the job; 0 for what a job takes itself"
    )
    options = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    for name in options.models:
        formats = [options.format] if options.format else ["jsonl", "parquet"]
        measure(name, formats, options.items, options.batch, options.rounds, options.instances)


if __name__ == "__main__":
    main()
