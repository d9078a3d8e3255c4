# SPDX-License-Identifier: Apache-2.0
"""The short way of usual items, beside the long one: the same results, letter for letter, whatever the lines hold."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from batch_tools import onnx_model

from headrace.jobs.batch.blocks import BlockResult, PlainInput, is_plain, lines_of, read_blocks
from headrace.jobs.batch.inference import TensorClient, _packer
from headrace.jobs.batch.ledger import _line, open_ledger
from headrace.jobs.batch.settings import BatchSettings, Shard
from headrace.programs.batch import run_job

ODD = [
    '{"X": [1, 2]}',  # the first line
    '{"X": [1, 2]}',
    '{"X": [0.1, -2e-3]}',
    '{"id": "a", "X": [3, 4]}',
    '{"id": 7, "X": [3, 4]}',
    '{"id": null, "X": [3, 4]}',
    '{"id": [1], "X": [3, 4]}',
    '{"id": 1.5, "X": [3, 4]}',
    '{"id": true, "X": [3, 4]}',
    '{"id": "true", "X": [3, 4]}',
    '{"X": [true, 1]}',
    '{"X": [1]}',
    '{"X": [1, 2, 3]}',
    '{"X": ["1", 2]}',
    '{"X": [null, 2]}',
    '{"X": [1e400, 2]}',
    '{"X": [1e39, 2]}',
    '{"X": {"a": 1, "b": 2}}',
    '{"X": "ab"}',
    '{"Z": [1, 2]}',
    '{"X": [1, 2], "Z": [1, 2]}',
    '{"inputs": {"X": [5, 6]}}',
    "[8, 9]",
    "[[8, 9]]",
    '"ab"',
    "3",
    "{}",
    "no JSON",
    '{"X": [1, 2]} {"X": [1, 2]}',
    '{"X": [1, 2]',
    "",
    '  {"X": [1, 2]}  ',
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return onnx_model(tmp_path_factory.mktemp("product"))


def results(model: Path, items: Path, output: Path, **more: Any) -> list[bytes]:
    settings = BatchSettings(str(model), str(items), str(output), folder=output.parent / "cache", **more)
    summary = asyncio.run(run_job(settings))
    assert summary.state == "finished", summary
    return sorted(output.read_bytes().splitlines(), key=lambda line: int(json.loads(line)["index"]))


def test_both_ways_write_the_same(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requests: list[int] = []
    real = TensorClient.infer_block

    async def counted(self: TensorClient, rows: Any) -> Any:
        requests.append(len(rows))
        return await real(self, rows)

    monkeypatch.setattr(TensorClient, "infer_block", counted)
    items = tmp_path / "items.jsonl"
    usual = [json.dumps({"X": [n, n / 3, 0, 0]}) for n in range(700)]
    odd = [re.sub(r"(\d)]", r"\1, 0, 0]", line) for line in ODD]  # the model takes four numbers
    items.write_text("\n".join([*odd, *usual, *odd[1:]]) + "\n")
    short = results(model, items, tmp_path / "short.jsonl")
    assert sum(requests) > 700
    requests.clear()
    long = results(model, items, tmp_path / "long.jsonl", ordered=True)
    assert not requests
    assert short == long
    failed = sum("error" in json.loads(line) for line in long)
    assert 20 < failed < len(long) - 700


def test_it_resumes_in_shards_and_after_a_part(tmp_path: Path, model: Path) -> None:
    items = tmp_path / "items.jsonl"
    items.write_text("".join(json.dumps({"X": [n, 1, 0, 0]}) + "\n" for n in range(500)))
    whole = results(model, items, tmp_path / "whole.jsonl")
    parts = [
        line
        for number in (1, 2, 3)
        for line in results(model, items, tmp_path / f"{number}.jsonl", shard=Shard(number, 3))
    ]
    assert sorted(parts) == sorted(whole)
    half = tmp_path / "whole.jsonl"
    half.write_bytes(b"".join(half.read_bytes().splitlines(keepends=True)[:123]) + b'{"index": 4')
    (tmp_path / "whole.jsonl.job.json").write_text(
        (tmp_path / "whole.jsonl.job.json").read_text().replace('"state": "finished"', '"state": "running"')
    )
    assert results(model, items, half) == whole


@pytest.mark.parametrize("ids", [[None, "a", 7], ['"', "ü%d", -1]])
def test_lines_are_those_of_the_ledger(ids: list[Any]) -> None:
    arrays = {
        'Y%d"': np.asarray([[1.5, np.nan], [-0.1, 1e30], [0, np.inf]], np.float32),
        "N": np.asarray([[1], [2], [-3]], np.int64),
    }
    for some in (arrays, {'Y%d"': arrays['Y%d"']}):
        assert is_plain(some)
        created = lines_of(BlockResult([3, 4, 9], ids, some))
        wanted = [
            (n, given, {"outputs": {k: v[i] for k, v in some.items()}})
            for i, (n, given) in enumerate(zip((3, 4, 9), ids, strict=True))
        ]
        assert created == b"".join(_line(item)[1] for item in wanted)


def test_what_is_not_plain() -> None:
    assert not is_plain({})
    for array in (np.zeros(3), np.zeros((3, 0)), np.zeros((3, 2, 2)), np.zeros((2, 3)).T, np.asarray([["a"]], object)):
        assert not is_plain({"Y": array})


def test_numbers_that_json_cannot_represent_are_reported_per_item(tmp_path: Path) -> None:
    ledger = open_ledger(tmp_path / "r.jsonl", {}, 2, Shard())
    try:
        wide = np.zeros((2, 1), np.longdouble)
        ledger.write([BlockResult([0, 1], [None, None], {"Y": wide})])
        assert (ledger.marks.finished, ledger.marks.failed) == (2, 2)
    finally:
        ledger.close()
    assert all("error" in json.loads(line) for line in (tmp_path / "r.jsonl").read_text().splitlines())


def test_chunks_are_bounded() -> None:
    plain = PlainInput("X", 2, np.dtype("f4"), _packer(2, "f").pack)
    lines = [(n, (n + 2, b'{"X": [1, 2]}')) for n in range(1000)] + [(1000 + n, (n, b"{}")) for n in range(50)]
    chunks = list(read_blocks(iter(lines), plain, 4, lambda index, _entry: index))
    assert max(len(chunk.blocks) for chunk in chunks) <= 16
    assert max(len(chunk.others) for chunk in chunks) <= 4
    taken = [index for chunk in chunks for block in chunk.blocks for index in block.indices]
    assert taken == list(range(1000))
    assert [index for chunk in chunks for index in chunk.others] == list(range(1000, 1050))
