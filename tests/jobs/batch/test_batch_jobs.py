# SPDX-License-Identifier: Apache-2.0
"""Whole jobs over real models: what is computed, what is written, and what is said of items that are wrong."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from batch_tools import check_products, manifest, onnx_model, records, row_of, run_command, settings_of
from picture_models import LABELS, onnx_classifier, png, tiny_vit

from headrace.core.errors import FailedPrecondition, HeadraceError, InvalidArgument, NotFound
from headrace.jobs.batch.settings import Shard
from headrace.programs.batch import run_job
from support.llm_models import tiny_llama


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return onnx_model(tmp_path_factory.mktemp("product"))


def test_two_thousand_items_through_onnx(tmp_path: Path, model: Path) -> None:
    given, output = manifest(tmp_path / "items.jsonl", 2000), tmp_path / "out" / "results.jsonl"
    events: list[Any] = []
    summary = asyncio.run(run_job(settings_of(model, given, output), events.append))
    check_products(records(output), 2000)
    assert (summary.state, summary.succeeded, summary.failed, summary.left) == ("finished", 2000, 0, 0)
    assert summary.items_per_second > 0 and summary.seconds > 0
    received = [event for event in events if event.task.startswith("batch ")]
    assert (received[-1].state, received[-1].done, received[-1].total) == ("finished", 2000, 2000)
    # Once more: nothing is left to do, and nothing is written.
    before = output.read_bytes()
    again = asyncio.run(run_job(settings_of(model, given, output)))
    assert (again.state, again.resumed, again.succeeded) == ("finished", 2000, 2000)
    assert output.read_bytes() == before


def test_results_in_order(tmp_path: Path, model: Path) -> None:
    lines = []
    for index in range(700):  # every seventh is wrong, and known to be so before its neighbours are computed
        lines.append(json.dumps({"id": f"i{index}", "X": row_of(index) if index % 7 else "no"}))
    given, output = tmp_path / "items.jsonl", tmp_path / "results.jsonl"
    given.write_text("\n".join(lines))
    summary = asyncio.run(run_job(settings_of(model, given, output, ordered=True)))
    assert [record["index"] for record in records(output)] == list(range(700))
    assert (summary.succeeded, summary.failed) == (600, 100)


def test_a_job_stays_in_order_though_its_shapes_differ(tmp_path: Path) -> None:
    """Items of many sizes do not share batches; few are allowed to wait. None may wait for one that was never sent."""
    from onnx import TensorProto, helper

    node = helper.make_node("Identity", ["X"], ["Y"])
    tensors = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", "size"]) for name in "XY"]
    graph = helper.make_graph([node], "same", tensors[:1], tensors[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    (tmp_path / "same.onnx").write_bytes(model.SerializeToString())
    given = tmp_path / "items.jsonl"
    given.write_text("\n".join(json.dumps({"X": [index] * (1 + index * 7 % 50)}) for index in range(3000)))
    for ordered in (True, False):
        output = tmp_path / f"results-{ordered}.jsonl"
        summary = asyncio.run(run_job(settings_of(tmp_path / "same.onnx", given, output, ordered=ordered)))
        assert summary.succeeded == 3000
        result = records(output)
        assert ([record["index"] for record in result] == list(range(3000))) or not ordered
        for record in result:
            index = record["index"]
            assert record["output"]["outputs"]["Y"] == [index] * (1 + index * 7 % 50)


def test_wrong_items_are_reported_and_do_not_stop_the_others(tmp_path: Path, model: Path) -> None:
    lines = [
        json.dumps({"X": row_of(0)}),
        "",
        "{not json",
        json.dumps({"X": [1, 2, 3]}),
        json.dumps({"X": [1, 2, 3, "four"]}),
        json.dumps({"X": row_of(4), "Z": 1}),
        json.dumps({"id": "none"}),
        json.dumps({"X": [1e300, 0, 0, 0]}),
        json.dumps("text"),
        json.dumps({"id": {}, "X": row_of(1)}),
        json.dumps(row_of(9)),
    ]
    given, output = tmp_path / "items.jsonl", tmp_path / "results.jsonl"
    given.write_text("\ufeff" + "\n".join(lines) + "\n")
    summary = asyncio.run(run_job(settings_of(model, given, output, ordered=True)))
    result = records(output)
    texts = [record.get("error", {}).get("message", "") for record in result]
    assert [record["index"] for record in result] == list(range(10))
    assert [bool(text) for text in texts] == [False, *[True] * 8, False]
    assert texts[1].startswith("line 3 is not JSON")
    assert "the shape [3], but one item has [4]" in texts[2]
    assert "'four', which is not a number" in texts[3]
    assert "'Z' is not an input" in texts[4]
    assert "'X' is missing" in texts[5] and result[5]["id"] == "none"
    assert "do not fit FP32" in texts[6]
    assert "line 10: 'id' must be" in texts[8]
    assert {record["error"]["code"] for record in result if "error" in record} == {"invalid_argument"}
    assert (summary.succeeded, summary.failed, len(summary.failures)) == (2, 8, 5)


def test_too_many_failures_stop_a_job_and_failed_items_can_be_tried_again(tmp_path: Path, model: Path) -> None:
    given, output = tmp_path / "items.jsonl", tmp_path / "results.jsonl"
    bad = {3, 5, 11}
    given.write_text("\n".join(json.dumps({"id": f"i{i}", "X": [1] if i in bad else row_of(i)}) for i in range(20)))
    stopped = asyncio.run(run_job(settings_of(model, given, output, max_failures=2)))
    assert stopped.state == "failed" and "3 items failed, but --max-failures is 2" in stopped.reason
    done = asyncio.run(run_job(settings_of(model, given, output, max_failures=3)))
    assert (done.state, done.succeeded, done.failed) == ("finished", 17, 3)
    assert sorted(record["index"] for record in records(output)) == list(range(20))
    again = asyncio.run(run_job(settings_of(model, given, output, retry_failed=True)))
    assert (again.state, again.resumed, again.failed) == ("finished", 17, 3)
    assert sorted(record["index"] for record in records(output)) == list(range(20))


def test_shards_and_limits_share_the_items(tmp_path: Path, model: Path) -> None:
    given = manifest(tmp_path / "items.jsonl", 100)
    results: list[dict[str, Any]] = []
    for number in (1, 2, 3):
        output = tmp_path / "results-{shard}.jsonl"
        summary = asyncio.run(run_job(settings_of(model, given, output, shard=Shard(number, 3), limit=50)))
        assert summary.total == (17, 17, 16)[number - 1]
        results += records(tmp_path / f"results-{number}-of-3.jsonl")
    check_products(results, 50)


def test_another_job_does_not_write_to_the_same_results(tmp_path: Path, model: Path) -> None:
    given, output = manifest(tmp_path / "items.jsonl", 5), tmp_path / "results.jsonl"
    asyncio.run(run_job(settings_of(model, given, output)))
    before = output.read_bytes()
    manifest(given, 6)
    with pytest.raises(FailedPrecondition, match=r"another job \(different: input\).*--overwrite"):
        asyncio.run(run_job(settings_of(model, given, output)))
    manifest(given, 5)
    with pytest.raises(FailedPrecondition, match="different: limit"):
        asyncio.run(run_job(settings_of(model, given, output, limit=3)))
    with pytest.raises(FailedPrecondition, match="different: model"):
        asyncio.run(run_job(settings_of(onnx_model(tmp_path / "other"), given, output)))
    assert output.read_bytes() == before
    other = tmp_path / "mine.jsonl"
    other.write_text("something of mine\n")
    with pytest.raises(FailedPrecondition, match="belongs to no batch job"):
        asyncio.run(run_job(settings_of(model, given, other)))
    assert other.read_text() == "something of mine\n"
    summary = asyncio.run(run_job(settings_of(model, manifest(given, 6), output, overwrite=True)))
    assert (summary.state, summary.succeeded, summary.resumed) == ("finished", 6, 0)


@pytest.mark.parametrize(
    ("make_classifier", "labels"),
    [
        (onnx_classifier, {"red", "green", "blue"}),
        pytest.param(tiny_vit, set(LABELS.values()), marks=[pytest.mark.slow, pytest.mark.worker("language models")]),
    ],
    ids=["onnx", "vit"],
)
def test_an_image_folder_through_a_classifier(
    tmp_path: Path, make_classifier: Callable[[Path], Path], labels: set[str]
) -> None:
    photos = tmp_path / "photos"
    (photos / "more").mkdir(parents=True)
    for index in range(40):
        (photos / ("more" if index % 2 else ".") / f"p {index:02}#.png").write_bytes(png(seed=index))
    (photos / "broken.png").write_bytes(png()[:60])
    (photos / "text.jpg").write_text("this is no picture")
    (photos / "notes.txt").write_text("not for this model")
    (photos / ".hidden.png").write_bytes(png())
    output = tmp_path / "results.jsonl"
    settings = settings_of(make_classifier(tmp_path / "classifier"), photos, output, parameters={"top_k": 2})
    summary = asyncio.run(run_job(settings))
    results = {record["id"]: record for record in records(output)}
    assert (summary.succeeded, summary.failed, summary.skipped_files, len(results)) == (40, 2, 1, 42)
    for name in ("p 00#.png", "more/p 01#.png"):
        (prediction,) = results[name]["output"]["predictions"]
        assert prediction["image"] == name and prediction["label"] in labels
        assert len(prediction["top_k"]) == 2
    assert len({record["output"]["confidence"] for record in results.values() if "output" in record}) > 10
    for name in ("broken.png", "text.jpg"):
        assert results[name]["error"]["code"] == "invalid_argument"
        assert str(tmp_path) not in results[name]["error"]["message"]
    assert "the content of text.jpg is none of" in results["text.jpg"]["error"]["message"]


def test_a_manifest_names_pictures_beside_it_and_none_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.png").write_bytes(png(seed=1))
    (tmp_path / "secret.png").write_bytes(png(seed=2))
    given, output = tmp_path / "in" / "items.jsonl", tmp_path / "results.jsonl"
    rows = [
        {"image": "a.png", "top_k": 1},
        "a.png",
        {"image": "../secret.png"},
        {"image": str(tmp_path / "secret.png")},
    ]
    given.write_text("\n".join(map(json.dumps, rows)))
    model = onnx_classifier(tmp_path / "seeing")
    asyncio.run(run_job(settings_of(model, given, output, ordered=True)))
    result = records(output)
    assert [("output" in record) for record in result] == [True, True, False, False]
    assert len(result[0]["output"]["predictions"][0]["top_k"]) == 1
    opened = settings_of(model, given, tmp_path / "more.jsonl", media_folders=(tmp_path,))
    assert asyncio.run(run_job(opened)).failed == 0


@pytest.mark.worker("language models")
def test_prompts_through_a_language_model(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path / "llama", eos_token_id=None)
    given, output = tmp_path / "prompts.jsonl", tmp_path / "results.jsonl"
    rows: list[Any] = [{"id": index, "prompt": f"the fox number {index}"} for index in range(40)]
    rows += ["just a text", {"prompt": "short", "max_new_tokens": 2}, {"prompt": 5}, {"promt": "x"}]
    given.write_text("\n".join(map(json.dumps, rows)))
    parameters = {"max_new_tokens": 5, "temperature": 0}
    settings = settings_of(folder, given, output, parameters=parameters, ordered=True)
    summary = asyncio.run(run_job(settings))
    result = records(output)
    assert (summary.succeeded, summary.failed) == (42, 2)
    assert [record["output"]["output_tokens"] for record in result[:42]] == [5] * 41 + [2]
    assert [record["id"] for record in result[:41]] == [*range(40), None]
    assert result[0]["output"]["response"] != result[1]["output"]["response"]
    assert "'prompt' is 5" in result[42]["error"]["message"]
    texts = tmp_path / "texts"
    texts.mkdir()
    (texts / "a.txt").write_text("the fox number 0")
    (texts / "b.json").write_text(json.dumps({"prompt": "the fox number 1"}))
    (texts / "c.json").write_text("{")
    asyncio.run(run_job(settings_of(folder, texts, tmp_path / "t.jsonl", parameters=parameters, ordered=True)))
    same = records(tmp_path / "t.jsonl")
    assert [record["id"] for record in same] == ["a.txt", "b.json", "c.json"]
    assert [record["output"]["response"] for record in same[:2]] == [r["output"]["response"] for r in result[:2]]
    assert same[2]["error"]["message"] == "c.json: it is not JSON"


def test_arrays_of_a_folder_and_a_model_of_a_repository(tmp_path: Path, model: Path) -> None:
    version = tmp_path / "models" / "product" / "1"
    version.mkdir(parents=True)
    (version / "model.onnx").write_bytes(model.read_bytes())
    rows = tmp_path / "rows"
    rows.mkdir()
    for index in range(5):
        np.save(rows / f"{index}.npy", np.asarray(row_of(index), np.float32))
    np.save(rows / "5.npy", np.zeros(4, np.float64))
    (rows / "6.npy").write_bytes(b"nothing")
    output = tmp_path / "results.jsonl"
    settings = settings_of(Path("product"), rows, output, repository=str(tmp_path / "models"), ordered=True)
    asyncio.run(run_job(settings))
    result = records(output)
    for index, record in enumerate(result[:5]):
        wanted = np.asarray(row_of(index), np.float32) @ np.arange(12, dtype=np.float32).reshape(4, 3) / 10
        np.testing.assert_allclose(record["output"]["outputs"]["Y"], wanted, rtol=1e-4)
    assert "type FP64, but the input 'X' has type FP32" in result[5]["error"]["message"]
    assert result[6]["error"]["message"] == "6.npy: it is not a numpy array file"


def test_a_job_that_cannot_start_is_reported(tmp_path: Path, model: Path) -> None:
    given = manifest(tmp_path / "items.jsonl", 2)
    (tmp_path / "odd.csv").write_text("a,b\n")
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "a.png").write_bytes(b"")
    output = tmp_path / "results.jsonl"
    cases: list[tuple[Any, type[HeadraceError], str]] = [
        (settings_of(model, tmp_path / "none", output), NotFound, "does not exist"),
        (
            settings_of(tmp_path / "none.onnx", given, output),
            FailedPrecondition,
            "does not exist: use an existing path",
        ),
        (settings_of(model, tmp_path / "odd.csv", output), InvalidArgument, "neither a folder nor a manifest"),
        (settings_of(model, tmp_path / "pictures", output), InvalidArgument, "none of the 1 files"),
        (settings_of(model, given, tmp_path / "r.csv"), InvalidArgument, "end in .jsonl or .parquet"),
        (settings_of(Path("x"), given, output, repository="/nowhere"), NotFound, "is not a folder"),
    ]
    for settings, kind, text in cases:
        with pytest.raises(kind, match=text):
            asyncio.run(run_job(settings))
    assert not output.exists()


def test_the_command_and_its_exit_codes(tmp_path: Path, model: Path) -> None:
    given, output = manifest(tmp_path / "items.jsonl", 30), tmp_path / "results.jsonl"
    code, out, err = run_command(model, given, output, "--cache-dir", tmp_path)
    assert code == 0, err
    assert "30 items: 30 done, 0 failed, 0 left" in out and f"results: {output}" in out
    with given.open("a") as file:
        file.write("{\n")
    code, out, err = run_command(model, given, output, "--json")
    assert (code, out) == (2, "") and "--overwrite" in err
    code, out, err = run_command(model, given, output, "--json", "--overwrite")
    assert (code, json.loads(out)["failed"]) == (3, 1)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--shard", "5/4"], "write I/N"),
        (["--parameters", "[1]"], "--parameters is not a JSON object"),
        (["--specs", "{"], "--specs is not a JSON object"),
        (["--credentials", "/none"], "--credentials /none cannot be read"),
    ],
)
def test_a_command_line_that_is_wrong(words: list[str], text: str) -> None:
    code, _, err = run_command("model", "input", "output.jsonl", *words)
    assert code == 2 and text in err
