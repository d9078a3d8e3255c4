# SPDX-License-Identifier: Apache-2.0
"""Inputs and outputs elsewhere than in JSON Lines on this machine: a cloud, Parquet."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from batch_tools import check_products, manifest, onnx_model, records, settings_of
from bucket_stub import bucket_stub
from picture_models import onnx_classifier, png

from headrace.core.errors import FailedPrecondition, InvalidArgument, PermissionDenied
from headrace.jobs.batch.output import parse_output
from headrace.jobs.batch.settings import BatchSettings
from headrace.programs.batch import run_job


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return onnx_model(tmp_path_factory.mktemp("product"))


def open_files() -> list[str]:
    """What this process has open. Threads of others may close theirs while this looks."""
    results = []
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            results.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    return results


def lines_of(content: bytes) -> list[dict[str, Any]]:
    return [json.loads(line) for line in content.splitlines()]


def test_from_a_bucket_into_a_bucket(tmp_path: Path, model: Path) -> None:
    given = manifest(tmp_path / "items.jsonl", 60)
    with bucket_stub() as bucket:
        bucket.objects["in/items.jsonl"] = given.read_bytes()
        settings = BatchSettings(
            str(model),
            "s3://bucket/in/items.jsonl",
            "s3://bucket/out/results.jsonl",
            folder=tmp_path / "cache",
            credentials=bucket.credentials,
        )
        bucket.closed = True
        refused = asyncio.run(run_job(settings))
        assert refused.state == "failed" and "may not be written with these credentials" in refused.reason
        assert (refused.succeeded, refused.left) == (60, 0)
        bucket.closed = False
        summary = asyncio.run(run_job(settings))
        # Nothing is computed again: only the way to the bucket was missing.
        assert (summary.state, summary.resumed, summary.output) == ("finished", 60, "s3://bucket/out/results.jsonl")
        check_products(lines_of(bucket.objects["out/results.jsonl"]), 60)
        assert not [
            open_file for open_file in open_files() if "/brought/" in open_file
        ]  # nothing holds the downloads any more
        assert not list((tmp_path / "cache").rglob("results.jsonl"))
        del bucket.objects["out/results.jsonl"]
        again = asyncio.run(run_job(settings))
        assert (again.state, again.succeeded, again.resumed) == ("finished", 60, 60)
        assert "out/results.jsonl" not in bucket.objects  # it was delivered once


def test_a_folder_of_pictures_and_a_manifest_in_a_bucket(tmp_path: Path) -> None:
    seeing = onnx_classifier(tmp_path / "seeing")
    with bucket_stub() as bucket:
        bucket.objects |= {"in/a.png": png(seed=1), "in/more/b.png": png(seed=2)}
        folder = tmp_path / "cache"
        output = tmp_path / "results.jsonl"
        more: dict[str, Any] = {"folder": folder, "credentials": bucket.credentials}
        asyncio.run(run_job(BatchSettings(str(seeing), "s3://bucket/in", str(output), **more)))
        assert {record["id"] for record in records(output) if "output" in record} == {"a.png", "more/b.png"}
        bucket.objects["in/items.jsonl"] = b'{"image": "more/b.png"}\n{"image": "none.png"}\n'
        output = tmp_path / "listed.jsonl"
        settings = BatchSettings(str(seeing), "s3://bucket/in/items.jsonl", str(output), ordered=True, **more)
        asyncio.run(run_job(settings))
        first, second = records(output)
        assert first["output"]["predictions"][0]["image"] == "more/b.png"
        assert "there is nothing at none.png" in second["error"]["message"]


def test_outputs_that_cannot_be(tmp_path: Path, model: Path) -> None:
    given = manifest(tmp_path / "items.jsonl", 1)

    def refused(output: str, **more: Any) -> str:
        settings = BatchSettings(str(model), str(given), output, folder=tmp_path, **more)
        with pytest.raises((InvalidArgument, PermissionDenied)) as caught:
            parse_output(settings)
        return caught.value.message

    assert "is a bucket: use an object" in refused("s3://bucket")
    assert "cannot be written: use" in refused("https://host/results.jsonl")
    assert "has an unknown format" in refused("s3://bucket/results")
    with bucket_stub() as bucket:
        assert "no credentials for the aws bucket other" in refused(
            "s3://other/results.jsonl", credentials=bucket.credentials
        )


def test_a_folder_gets_a_file(tmp_path: Path, model: Path) -> None:
    given = manifest(tmp_path / "items.jsonl", 3)
    settings = BatchSettings(str(model), str(given), f"{tmp_path}/new/", folder=tmp_path / "cache")
    asyncio.run(run_job(settings))
    check_products(records(tmp_path / "new" / "results.jsonl"), 3)


def test_missing_pyarrow_is_reported_before_anything_is_computed(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    given = manifest(tmp_path / "items.jsonl", 3)
    with pytest.raises(
        FailedPrecondition, match=r"the output results.parquet needs the extra \"parquet\": .* JSON Lines"
    ):
        asyncio.run(run_job(settings_of(model, given, tmp_path / "results.parquet")))
    (tmp_path / "items.parquet").write_bytes(b"PAR1")
    with pytest.raises(FailedPrecondition, match=r"the input items.parquet needs the extra"):
        asyncio.run(run_job(settings_of(model, tmp_path / "items.parquet", tmp_path / "results.jsonl")))


def test_parquet_in_and_out(tmp_path: Path, model: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows: list[dict[str, Any]] = [{"id": f"i{i}", "X": [float(i), float(i % 7), -1.0, 0.5]} for i in range(3000)]
    given, output = tmp_path / "items.parquet", tmp_path / "results.parquet"
    parquet.write_table(arrow.Table.from_pylist([*rows, {"id": "bad", "X": [1.0]}]), given)
    summary = asyncio.run(run_job(settings_of(model, given, output)))
    assert (summary.state, summary.succeeded, summary.failed) == ("finished", 3000, 1)
    result = parquet.read_table(output).to_pylist()
    good = [row for row in result if row["Y"] is not None]
    check_products([{**row, "output": {"outputs": {"Y": row["Y"]}}} for row in good], 3000)
    (bad,) = [row for row in result if row["Y"] is None]
    assert (bad["index"], bad["id"], bad["error_code"]) == (3000, "bad", "invalid_argument")
    records = tmp_path / "results.parquet.records.jsonl"
    assert not records.exists()
    records.write_text("of a process that was killed after it wrote its end\n")
    assert asyncio.run(run_job(settings_of(model, given, output))).resumed == 3001
    assert not records.exists() and parquet.read_table(output).num_rows == 3001
    (tmp_path / "wrong.parquet").write_bytes(b"nothing")
    with pytest.raises(InvalidArgument, match="is not a Parquet file"):
        asyncio.run(run_job(settings_of(model, tmp_path / "wrong.parquet", tmp_path / "other.jsonl")))
