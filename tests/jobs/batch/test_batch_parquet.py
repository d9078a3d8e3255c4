# SPDX-License-Identifier: Apache-2.0
"""Parquet: a column for each output, both ways to it with the same results, and going on after a part."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from batch_tools import WEIGHTS, onnx_model, row_of, settings_of
from onnx import TensorProto, helper

from headrace.core.dtypes import BF16, BYTES, FP32, INT64, float32_to_bf16
from headrace.core.requests import InferResponse
from headrace.core.tensors import Tensor
from headrace.engine.dataplane import DataPlane
from headrace.jobs.batch.blocks import BlockResult, PlainInput, can_pack, is_packed, pack, read_columns, unpack
from headrace.jobs.batch.inference import TensorClient
from headrace.jobs.batch.ledger import open_ledger
from headrace.jobs.batch.output import write_parquet
from headrace.jobs.batch.progress import BatchSummary
from headrace.jobs.batch.settings import Shard
from headrace.jobs.batch.sources import ParquetSource, RequestShape
from headrace.jobs.microservice.model_kinds.tensors import compute
from headrace.programs.batch import run_job

PLAIN = PlainInput("X", 2, np.dtype("<f4"), lambda *_: b"")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return onnx_model(tmp_path_factory.mktemp("product"))


def run(model: Path, given: Path, output: Path, **more: Any) -> BatchSummary:
    summary = asyncio.run(run_job(settings_of(model, given, output, **more)))
    assert summary.state == "finished", summary
    return summary


def rows_of(path: Path) -> list[dict[str, Any]]:
    return sorted(pq.read_table(path).to_pylist(), key=lambda row: int(row["index"]))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of the blocks that went the short way."""
    sizes: list[int] = []
    real = TensorClient.infer_block

    async def counted(self: TensorClient, rows: Any) -> Any:
        sizes.append(len(rows))
        return await real(self, rows)

    monkeypatch.setattr(TensorClient, "infer_block", counted)
    return sizes


def test_outputs_are_columns_of_their_types(tmp_path: Path, model: Path, asked: list[int]) -> None:
    given, output = tmp_path / "items.parquet", tmp_path / "results.parquet"
    pq.write_table(pa.table({"X": [row_of(n) for n in range(3000)]}), given)
    run(model, given, output)
    assert sum(asked) == 3000
    table = pq.read_table(output)
    assert table.schema.names == ["index", "id", "Y", "error_code", "error_message"]
    assert table.schema.field("Y").type == pa.list_(pa.float32())
    rows = rows_of(output)
    assert [row["index"] for row in rows] == list(range(3000)) and {row["id"] for row in rows} == {None}
    wanted = np.asarray([row_of(n) for n in range(3000)], np.float32) @ WEIGHTS
    np.testing.assert_allclose([row["Y"] for row in rows], wanted, rtol=1e-4)


@pytest.mark.parametrize("form", ["parquet", "jsonl"])
def test_both_ways_write_the_same(tmp_path: Path, model: Path, asked: list[int], form: str) -> None:
    odd: list[Any] = [[1.0], [1.0, 2.0, 3.0, 4.0, 5.0], None, [], [None, 1.0, 2.0, 3.0], [1e39, 0, 0, 0]]
    odd += [[float("inf"), 1.0, 0.0, 0.0], [float("nan"), 1.0, 2.0, 3.0]]
    values = [[0.1 * n, n / 3, -n, 1e-9] for n in range(1500)] + odd + [row_of(n) for n in range(2000)]
    ids = [None if n % 3 else f"i{n}" for n in range(len(values))]
    given = tmp_path / "items.parquet"
    pq.write_table(pa.table({"X": pa.array(values, pa.list_(pa.float64())), "id": ids}), given)
    run(model, given, tmp_path / f"short.{form}")
    assert 2000 < sum(asked) < 3500, "the part with odd rows went the long way"
    asked.clear()
    summary = run(model, given, tmp_path / f"long.{form}", ordered=True)
    assert not asked and summary.failed == 6
    if form == "jsonl":
        short, long = (
            sorted((tmp_path / f"{name}.jsonl").read_bytes().splitlines(), key=lambda line: json.loads(line)["index"])
            for name in ("short", "long")
        )
        assert short == long
        return
    assert str(rows_of(tmp_path / "short.parquet")) == str(rows_of(tmp_path / "long.parquet"))  # NaN is not NaN
    infinite, nan = rows_of(tmp_path / "long.parquet")[1506:1508]
    assert infinite["Y"][1] == float("inf") and np.isnan(nan["Y"]).all(), "JSON would have lost them"


def chunk_of(column: Any, plain: PlainInput = PLAIN, **more: Any) -> Any:
    part = pa.record_batch({"X": column, **more})
    (chunk,) = read_columns([(0, part)], plain, 64, None, lambda index, row: (index, row))
    return chunk


@pytest.mark.parametrize(
    "kind",
    [
        pa.list_(pa.float32()),
        pa.list_(pa.float64()),
        pa.list_(pa.float16()),
        pa.large_list(pa.float32()),
        pa.list_(pa.float32(), 2),
        pa.list_(pa.int64()),
        pa.list_(pa.uint8()),
    ],
    ids=str,
)
def test_lists_of_numbers_of_any_kind_are_blocks(kind: Any) -> None:
    values = [[1, 2], [3, 4], [5, 6]]
    if pa.types.is_float16(kind.value_type):
        values = [[np.float16(cell) for cell in row] for row in values]
    (block,) = chunk_of(pa.array(values, kind)).blocks
    assert block.rows.dtype == np.float32 and block.rows.flags.c_contiguous
    assert block.rows.tolist() == [[1, 2], [3, 4], [5, 6]] and list(block.indices) == [0, 1, 2]
    whole = PlainInput("X", 2, np.dtype("i1"), lambda *_: b"")
    assert bool(chunk_of(pa.array(values, kind), whole).blocks) == pa.types.is_integer(kind.value_type)


@pytest.mark.parametrize(
    "column",
    [
        pa.array([[1, 2], [3]], pa.list_(pa.float32())),
        pa.array([[1, 2, 3], [4]], pa.list_(pa.float32())),  # as many numbers as two rows have
        pa.array([[1, 2], None], pa.list_(pa.float32())),
        pa.array([[1, 2], [3, None]], pa.list_(pa.float32())),
        pa.array([[True, False]], pa.list_(pa.bool_())),
        pa.array([["1", "2"]], pa.list_(pa.string())),
        pa.array([[[1, 2]]], pa.list_(pa.list_(pa.float32()))),
        pa.array([[1e39, 2]], pa.list_(pa.float64())),
        pa.array([1.0, 2.0]),
        pa.array([{"a": 1.0, "b": 2.0}]),
        pa.array(["ab"]),
    ],
    ids=str,
)
def test_everything_else_takes_the_slow_path(column: Any) -> None:
    chunk = chunk_of(column)
    assert not chunk.blocks and [index for index, _ in chunk.others] == list(range(len(column)))
    assert chunk.others[0][1]["X"] == column[0].as_py()


def test_numbers_that_do_not_fit_and_other_columns_take_the_slow_path() -> None:
    whole = PlainInput("X", 2, np.dtype("u1"), lambda *_: b"")
    assert not chunk_of(pa.array([[0, 256]]), whole).blocks and not chunk_of(pa.array([[-1, 0]]), whole).blocks
    assert chunk_of(pa.array([[0, 255]]), whole).blocks
    pair = pa.array([[1.0, 2.0]])
    assert not chunk_of(pair, top=pa.array([1])).blocks
    assert not chunk_of(pair, id=pa.array([1.5])).blocks and not chunk_of(pair, id=pa.array([True])).blocks
    assert chunk_of(pair, id=pa.array([7])).blocks[0].ids == [7]


def test_sliced_columns_are_read_from_where_they_begin() -> None:
    part = pa.record_batch({"X": pa.array([[float(n), 0.0] for n in range(10)])}).slice(4, 3)
    (chunk,) = read_columns([(4, part)], PLAIN, 2, None, lambda *_: None)
    assert [block.rows[:, 0].tolist() for block in chunk.blocks] == [[4, 5], [6]]
    assert [list(block.indices) for block in chunk.blocks] == [[4, 5], [6]]


def test_it_resumes_in_shards_and_after_a_part(tmp_path: Path, model: Path) -> None:
    given = tmp_path / "items.parquet"
    pq.write_table(pa.table({"X": [row_of(n) for n in range(2500)]}), given, row_group_size=700)
    run(model, given, tmp_path / "whole.parquet")
    whole = rows_of(tmp_path / "whole.parquet")
    parts = []
    for number in (1, 2, 3):
        run(model, given, tmp_path / f"{number}.parquet", shard=Shard(number, 3))
        parts += rows_of(tmp_path / f"{number}.parquet")
    assert sorted(parts, key=lambda row: int(row["index"])) == whole
    # As a kill leaves it: some lines that were made to last, one that was not, and one that is torn.
    output = tmp_path / "part.parquet"
    settings = settings_of(model, given, output, limit=2000)
    run(model, given, output, limit=2000)
    records, job = tmp_path / "part.parquet.records.jsonl", tmp_path / "part.parquet.records.jsonl.job.json"
    assert not records.exists()
    ledger = open_ledger(records, json.loads(job.read_text())["job"], 2000, Shard(), packed=True)
    done = np.asarray([row["Y"] for row in whole[:1000]], np.float32)
    ledger.write([BlockResult(range(1000), [None] * 1000, {"Y": done})])
    ledger.checkpoint()
    for first in (1000, 1100):
        more = np.asarray([row["Y"] for row in whole[first : first + 100]], np.float32)
        ledger.write([BlockResult(range(first, first + 100), [None] * 100, {"Y": more})])
    ledger.close()
    records.write_bytes(records.read_bytes()[:-30])
    assert json.loads(job.read_text())["state"] == "running"
    summary = asyncio.run(run_job(settings))
    assert (summary.state, summary.resumed, summary.succeeded) == ("finished", 1100, 2000)
    assert rows_of(output) == whole[:2000]


@pytest.mark.parametrize("indices", [range(5, 8), [5, 6, 7], [5, 9], [2, 3, 11]])
def test_what_is_packed_is_unpacked(indices: Sequence[int]) -> None:
    count = len(indices)
    arrays = {
        "Y": np.linspace(-1, 1, count * 6, dtype=np.float32).reshape(count, 2, 3),
        "big": np.arange(count, dtype=">i8").reshape(count, 1),
    }
    ids = [f"a{n}" if n % 2 else None for n in range(count)]
    line = pack(BlockResult(indices, list(ids), arrays))
    assert line.endswith(b"\n") and line.count(b"\n") == 1
    record = json.loads(line)
    created = unpack(record)
    assert is_packed(record) and list(created.indices) == list(indices) and created.ids == ids
    assert created.arrays.keys() == arrays.keys()
    for name, array in arrays.items():
        np.testing.assert_array_equal(created.arrays[name], array)
        assert created.arrays[name].shape == array.shape


def test_what_is_not_packed() -> None:
    for array in (np.zeros(3), np.zeros((3, 1), np.longdouble), np.asarray([["a"]], object), [[1.0]]):
        assert not can_pack({"Y": array})
    assert not can_pack({})


def lines(path: Path, *records: Any) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_columns_never_take_the_names_of_ours(tmp_path: Path) -> None:
    records = lines(tmp_path / "r.jsonl", {"index": 0, "id": 7, "output": {"outputs": {"id": [1], "T": ["a", "b"]}}})
    write_parquet(records, tmp_path / "r.parquet", {"id": INT64, "T": BYTES})
    (row,) = rows_of(tmp_path / "r.parquet")
    assert (row["id"], row["output_id"], row["T"], row["error_code"]) == ("7", [1], ["a", "b"], None)


def test_outputs_that_do_not_keep_to_their_types_are_json(tmp_path: Path) -> None:
    outputs = [
        {"index": n, "id": None, "output": {"outputs": {"Y": values}}} for n, values in enumerate(([1.5], [[2]], 3))
    ]
    block = json.loads(pack(BlockResult([3, 4], [None, None], {"Y": np.asarray([[1], [2]], np.float32)})))
    failed = {"index": 5, "id": "f", "error": {"code": "internal", "message": "why"}}
    records = lines(tmp_path / "r.jsonl", *outputs, block, failed)
    write_parquet(records, tmp_path / "r.parquet", {"Y": FP32})
    rows = rows_of(tmp_path / "r.parquet")
    assert [json.loads(row["output"])["outputs"]["Y"] for row in rows[:5]] == [[1.5], [[2]], 3, [1], [2]]
    assert rows[5] == {"index": 5, "id": "f", "output": None, "error_code": "internal", "error_message": "why"}
    write_parquet(lines(tmp_path / "n.jsonl", *outputs[:1]), tmp_path / "n.parquet", {"Y": None})
    assert json.loads(rows_of(tmp_path / "n.parquet")[0]["output"])["outputs"]["Y"] == [1.5]


def test_deep_outputs_and_blocks_of_another_shape(tmp_path: Path) -> None:
    pages = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    records = [
        json.loads(pack(BlockResult([0, 1], [None, "b"], {"Y": pages}))),
        json.loads(pack(BlockResult([2], [None], {"Y": pages[:1, :2, :1]}))),
        {"index": 3, "id": None, "output": {"outputs": {"Y": [[9.0], [None]]}}},
    ]
    write_parquet(lines(tmp_path / "r.jsonl", *records), tmp_path / "r.parquet", {"Y": FP32})
    rows = rows_of(tmp_path / "r.parquet")
    assert [row["Y"] for row in rows] == [*pages.tolist(), pages[0, :2, :1].tolist(), [[9.0], [None]]]
    assert [row["id"] for row in rows] == [None, "b", None, None]


def test_large_rows_are_read_a_few_at_a_time(tmp_path: Path) -> None:
    given = tmp_path / "items.parquet"
    values = np.random.default_rng(1).normal(size=(40, 1 << 18)).astype(np.float32)
    pq.write_table(pa.table({"X": list(values)}), given, compression="none")
    source = ParquetSource(given, RequestShape("tensors", ("X",)), "")
    parts = list(source.parts())
    assert source.total == 40 and 8 <= max(part.num_rows for _, part in parts) <= 20
    assert [first for first, _ in parts] == list(np.cumsum([0, *(part.num_rows for _, part in parts[:-1])]))


def test_a_model_without_batches_has_columns_too(tmp_path: Path) -> None:
    graph = helper.make_graph(
        [helper.make_node("Neg", ["X"], ["Y"])],
        "one",
        [helper.make_tensor_value_info("X", TensorProto.FLOAT, [2, 2])],
        [helper.make_tensor_value_info("Y", TensorProto.FLOAT, [2, 2])],
    )
    path = tmp_path / "one.onnx"
    path.write_bytes(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8).SerializeToString()
    )
    given = tmp_path / "items.parquet"
    pq.write_table(pa.table({"X": [[[float(n), 1.0], [2.0, 3.0]] for n in range(5)]}), given)
    run(path, given, tmp_path / "results.parquet")
    assert [row["Y"] for row in rows_of(tmp_path / "results.parquet")] == [[[-n, -1], [-2, -3]] for n in range(5)]


def test_bf16_is_numbers_and_not_their_bits() -> None:
    class Plane:
        def infer(self, _request: Any, done: Any) -> None:
            array = float32_to_bf16(np.asarray([[1.5, -2.0]], np.float32))
            done(InferResponse("m", "1", [Tensor("Y", BF16, array)]))

    outputs = asyncio.run(compute(cast("DataPlane", Plane()), "m", []))
    assert outputs["Y"].tolist() == [[1.5, -2.0]]
