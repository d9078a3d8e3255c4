# SPDX-License-Identifier: Apache-2.0
"""Batches over HTTP: a real gateway, real processes of `headrace batch`, a real small model."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from batch.bucket_stub import bucket_stub
from gateway_process import Gateway, GatewayAnswer, gateway
from onnx import TensorProto, helper, numpy_helper

from support.waiting import eventually

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
"""Tens of thousands of items, one at a time. Quick: tests/jobs/test_jobs_batches.py, tests/jobs/batch."""
WEIGHTS = np.asarray([[1], [10]], np.float32)
MANY = 20_000
SLOW = {"batch_size": 1, "in_flight": 1}
"""An item at a time: there is time to look, to cancel and to kill."""


def product(path: Path) -> Path:
    """X (2 numbers) times WEIGHTS is Y."""
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["X", "W"], ["Y"])],
        "product",
        [helper.make_tensor_value_info("X", TensorProto.FLOAT, ["batch", 2])],
        [helper.make_tensor_value_info("Y", TensorProto.FLOAT, ["batch", 1])],
        [numpy_helper.from_array(WEIGHTS, "W")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    path.write_bytes(model.SerializeToString())
    return path


def manifest(path: Path, count: int) -> Path:
    path.write_text("".join(json.dumps({"X": [number, 1]}) + "\n" for number in range(count)))
    return path


@dataclass
class GatewayWithModel:
    gateway: Gateway
    folder: Path
    token: str
    experiment: str
    parent: str

    @property
    def jobs(self) -> str:
        return f"/api/v1/orgs/acme/experiments/{self.experiment}/jobs"

    def create(self, body: dict[str, Any]) -> GatewayAnswer:
        return self.gateway.ask("POST", self.jobs, {"action": "inference", **body}, self.token)

    def begin(self, given: str | Path, output: str | Path, **specs: Any) -> str:
        wanted = {"input": str(given), "output": str(output), **specs}
        got = self.create({"parent_job_id": self.parent, "specs": wanted})
        assert got.status == 200, got.body
        return str(got.json)

    def show(self, job: str) -> dict[str, Any]:
        got = self.gateway.ask("GET", f"{self.jobs}/{job}", token=self.token)
        assert got.status == 200, got.body
        result: dict[str, Any] = got.json
        return result

    def until(self, job: str, *statuses: str) -> dict[str, Any]:
        """The job, as soon as it has one of these statuses; fail at once if it has ended with another."""

        def reached() -> dict[str, Any] | None:
            result = self.show(job)
            if result["status"] in statuses:
                return result
            if result["status"] in ("Done", "Error", "Canceled"):
                raise RuntimeError(result)
            return None

        return dict(eventually(reached, within=500))

    def until_written(self, job: str, path: Path, size: int) -> dict[str, Any]:
        """Until so much of the results is there; the job as it was then."""

        def written() -> bool:
            if self.show(job)["status"] not in ("Pending", "Running", "Resuming"):
                raise RuntimeError(self.show(job))
            return path.exists() and path.stat().st_size >= size

        eventually(written, within=500)
        return self.show(job)

    @contextmanager
    def halted(self, job: str, path: Path, size: int) -> Iterator[int]:
        """Its process stands still once so much of the results is there: it must not be done before all of this is."""
        pid = int(self.until_written(job, path, size)["job_details"]["handle"]["pid"])
        os.kill(pid, signal.SIGSTOP)
        try:
            yield pid
        finally:
            os.kill(pid, signal.SIGCONT)

    def until_no_process(self) -> None:
        """One that was canceled while it was launched is ended a moment after its record."""
        eventually(lambda: not self.gateway.processes())

    def events(self, job: str) -> list[dict[str, Any]]:
        events: list[dict[str, Any]] = self.gateway.ask("GET", f"{self.jobs}/{job}:events", token=self.token).json[
            "events"
        ]
        return events


@pytest.fixture(scope="module")
def used(tmp_path_factory: pytest.TempPathFactory, database: str) -> Iterator[GatewayWithModel]:
    folder = tmp_path_factory.mktemp("batches")
    models = folder / "models"
    models.mkdir()
    with gateway(folder, "--models-dir", str(models)) as running:
        key = running.command("users", "add", "alice", "--org", "acme").strip()
        model = product(models / "product.onnx")
        result = running.command("jobs", "register", str(model), "--org", "acme", "--arch", "product", "--json")
        ids = json.loads(result)
        yield GatewayWithModel(running, models, running.login(key, "acme"), ids["experiment_id"], ids["job_id"])


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def check_each_once(path: Path, count: int) -> None:
    result = records(path)
    assert sorted(item["index"] for item in result) == list(range(count))
    assert all(item["output"]["outputs"]["Y"] == [item["index"] + 10.0] for item in result)


def test_done_with_results_and_a_failed_item(used: GatewayWithModel) -> None:
    given, output = manifest(used.folder / "some.jsonl", 100), used.folder / "some-results.jsonl"
    lines = given.read_text().splitlines()
    given.write_text("\n".join([*lines[:7], '{"X": [7]}', *lines[8:]]))
    job = used.begin(given, output, ordered=True, limit=50)
    result = used.until(job, "Done")
    details = result["job_details"]
    assert details["message"] == f"50 items: 49 done, 1 failed; results: {output}"
    assert details["progress"] == {"done": 50, "failed": 1, "total": 50}
    summary = details["summary"]
    assert (summary["succeeded"], summary["failed"], summary["left"], summary["output"]) == (49, 1, 0, str(output))
    assert summary["seconds"] > 0 and summary["failures"][0]["index"] == 7
    written = records(output)
    assert [document["index"] for document in written] == list(range(50))
    assert "shape" in written[7]["error"]["message"] and written[8]["output"]["outputs"]["Y"] == [18.0]
    assert [event["status"] for event in used.events(job)] == ["Pending", "Running", "Done"]
    logs = used.gateway.ask("GET", f"{used.jobs}/{job}/logs", token=used.token)
    assert b'"state": "finished"' in logs.body


def test_too_many_failures_and_what_cannot_begin(used: GatewayWithModel) -> None:
    given = used.folder / "bad.jsonl"
    given.write_text('{"X": [1]}\n' * 20)
    job = used.begin(given, used.folder / "bad-results.jsonl", max_failures=3)
    (used.folder / "taken.jsonl").write_text("somebody's own")
    other = used.begin(given, used.folder / "taken.jsonl")
    result = used.until(job, "Error")
    assert "items failed" in result["job_details"]["message"], result
    assert result["job_details"]["summary"]["failed"] > 3
    assert "belongs to no batch job" in used.until(other, "Error")["job_details"]["message"]
    assert (used.folder / "taken.jsonl").read_text() == "somebody's own"
    assert used.gateway.processes() == []


def test_cancel_keeps_finished_items_and_a_new_job_resumes(used: GatewayWithModel) -> None:
    given, output = manifest(used.folder / "many.jsonl", MANY), used.folder / "canceled.jsonl"
    job = used.begin(given, output, **SLOW)
    with used.halted(job, output, 20_000):
        waits = [used.begin(given, used.folder / f"waits-{number}.jsonl", **SLOW) for number in range(2)]
        assert used.show(waits[1])["status"] == "Pending"  # two at once
        for item in reversed(waits):
            assert used.gateway.ask("POST", f"{used.jobs}/{item}:cancel", token=used.token).status == 200
        assert used.until(waits[1], "Canceled")["job_details"]["message"] == "canceled by a user"
        used.until(waits[0], "Canceled")
        got = used.gateway.ask("POST", f"{used.jobs}/{job}:cancel", token=used.token)
        assert got.status == 200 and got.json["status"] == "Canceling"
    result = used.until(job, "Canceled")
    progress = result["job_details"]["progress"]
    assert 0 < progress["done"] < progress["total"] == MANY
    assert used.gateway.ask("POST", f"{used.jobs}/{job}:cancel", token=used.token).status == 409
    used.until_no_process()
    again = used.until(used.begin(given, output), "Done")["job_details"]["summary"]
    assert again["resumed"] >= progress["done"]
    check_each_once(output, MANY)


def test_paused_resumed_canceled_and_retried(used: GatewayWithModel) -> None:
    given, output = manifest(used.folder / "paused-items.jsonl", MANY), used.folder / "paused.jsonl"
    job = used.begin(given, output, **SLOW)

    def post(of: str, verb: str, body: Any = None) -> Any:
        return used.gateway.ask("POST", f"{used.jobs}/{of}:{verb}", body, used.token)

    with used.halted(job, output, 20_000):
        assert post(job, "resume").status == 409
        assert post(job, "pause").json["status"] == "Pausing"
    used.until(job, "Paused")
    assert used.gateway.processes() == []
    size, done = output.stat().st_size, len(records(output))
    assert 0 < done < MANY
    # Neither a new gateway nor time takes it up.
    used.gateway.end(signal.SIGKILL)
    used.gateway.start("--models-dir", str(used.folder))
    assert used.show(job)["status"] == "Paused"
    got = post(job, "resume", {"specs": None})
    assert (got.status, got.json["status"]) == (200, "Resuming")
    with used.halted(job, output, size + 1):
        assert post(job, "cancel").status == 200
    used.until(job, "Canceled")
    got = post(job, "retry")
    assert got.status == 200 and isinstance(got.json, str) and got.json != job
    summary = used.until(got.json, "Done")["job_details"]["summary"]
    assert summary["resumed"] > done
    check_each_once(output, MANY)
    assert post(got.json, "retry").status == 409
    refused = post(used.parent, "pause")
    assert refused.status == 409 and "with action train cannot be paused" in refused.json["error_desc"]


def test_parquet_in_and_out_through_the_api(used: GatewayWithModel) -> None:
    items = pa.table({"X": [[float(n), 1.0] for n in range(40)], "id": [f"row-{n}" for n in range(40)]})
    pq.write_table(items, used.folder / "items.parquet")
    output = used.folder / "results.parquet"
    job = used.begin(used.folder / "items.parquet", output, ordered=True)
    result = used.until(job, "Done")
    assert result["job_details"]["summary"]["output"] == str(output)
    rows = pq.read_table(output).to_pylist()
    assert [row["index"] for row in rows] == list(range(40)) and rows[7]["id"] == "row-7"
    assert rows[7]["Y"] == [17.0] and rows[7]["error_code"] is None
    # The same again finds that all is done; another input is refused, and nothing is overwritten.
    again = used.until(used.begin(used.folder / "items.parquet", output, ordered=True), "Done")
    assert again["job_details"]["summary"]["resumed"] == 40
    other = used.begin(manifest(used.folder / "other-items.jsonl", 3), output)
    assert "belong to another job" in used.until(other, "Error")["job_details"]["message"]


def test_a_killed_process_resumes_and_repeats_nothing(used: GatewayWithModel) -> None:
    given, output = manifest(used.folder / "killed-items.jsonl", MANY), used.folder / "killed.jsonl"
    job = used.begin(given, output, **SLOW)
    result = used.until_written(job, output, 20_000)
    assert result["job_details"]["progress"]["total"] == MANY
    os.kill(result["job_details"]["handle"]["pid"], signal.SIGKILL)
    eventually(lambda: used.show(job)["job_details"].get("deaths") == 1)
    assert used.show(job)["status"] == "Running"
    result = used.until(job, "Done")
    summary = result["job_details"]["summary"]
    assert 0 < summary["resumed"] < MANY and result["job_details"]["deaths"] == 1
    check_each_once(output, MANY)
    assert any("SIGKILL; restarted to continue" in event["reason"] for event in used.events(job))


def test_a_killed_gateway_takes_its_batch_up(used: GatewayWithModel) -> None:
    given, output = manifest(used.folder / "adopted-items.jsonl", MANY), used.folder / "adopted.jsonl"
    job = used.begin(given, output, **SLOW)
    with used.halted(job, output, 20_000) as pid:
        used.gateway.end(signal.SIGKILL)
        assert used.gateway.processes() == [pid]
        used.gateway.start("--models-dir", str(used.folder))
        eventually(lambda: any("adopted" in event["reason"] for event in used.events(job)))
    result = used.until(job, "Done")
    assert result["job_details"]["summary"]["resumed"] == 0 and "deaths" not in result["job_details"]
    check_each_once(output, MANY)


def test_with_a_bucket_and_the_keys_of_its_workspace(used: GatewayWithModel) -> None:
    with bucket_stub() as bucket:
        bucket.objects["in/items.jsonl"] = manifest(used.folder / "cloud.jsonl", 30).read_bytes()
        keys = {"access_key": "AK", "secret_key": "whispered", "endpoint_url": f"http://127.0.0.1:{bucket.port}"}
        wish = {"cloud_type": "aws", "cloud_specific_details": {**keys, "cloud_bucket_name": "bucket"}}
        answer = used.gateway.ask("POST", "/api/v1/orgs/acme/workspaces", wish, used.token)
        assert answer.status == 200, answer.body
        arguments = (
            "jobs",
            "register",
            str(used.folder / "product.onnx"),
            "--org",
            "acme",
            "--arch",
            "product",
            "--json",
        )
        ids = json.loads(used.gateway.command(*arguments, "--workspace", answer.json["id"]))
        there = replace(used, experiment=ids["experiment_id"], parent=ids["job_id"])
        specs = {"input": "s3://bucket/in/items.jsonl", "output": "s3://others/results.jsonl"}
        refused = there.create({"parent_job_id": there.parent, "specs": specs})
        assert refused.status == 400 and "specs.output: the workspace has no credentials" in refused.json["error_desc"]
        job = there.begin("s3://bucket/in/items.jsonl", "s3://bucket/out/results.jsonl", ordered=True)
        running = eventually(lambda: there.show(job)["job_details"].get("handle"))
        assert b"whispered" not in _seen_by_all(running["pid"])
        summary = there.until(job, "Done")["job_details"]["summary"]
        assert (summary["succeeded"], summary["output"]) == (30, "s3://bucket/out/results.jsonl")
        written = [json.loads(line) for line in bucket.objects["out/results.jsonl"].splitlines()]
        assert [document["output"]["outputs"]["Y"][0] for document in written] == [
            number + 10.0 for number in range(30)
        ]
        shown = used.gateway.ask("GET", f"{there.jobs}/{job}/logs", token=used.token).body
        assert b"whispered" not in shown + json.dumps(there.show(job)).encode() + used.gateway.log.encode()


def _seen_by_all(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes() + Path(f"/proc/{pid}/environ").read_bytes()


def test_bad_specs(used: GatewayWithModel) -> None:
    given = str(manifest(used.folder / "few.jsonl", 3))
    good = {"input": given, "output": str(used.folder / "never.jsonl")}
    for status, text, specs in (
        (400, "specs.input is required", {"output": good["output"]}),
        (400, "specs.output is required", {"input": given}),
        (400, "does not exist", {**good, "input": given + "x"}),
        (403, "specs.input: this local path is not allowed", {**good, "input": "/etc"}),
        (403, "specs.input: this local path is not allowed", {**good, "input": f"{used.folder}/../data"}),
        (403, "specs.output: this local path is not allowed", {**good, "output": "/tmp/x.jsonl"}),
        (403, "specs.output: this local path is not allowed", {**good, "output": "../../x.jsonl"}),
        (400, "specs.output must end", {**good, "output": str(used.folder / "x.csv")}),
        (400, "specs.output: the workspace has no credentials", {**good, "output": "s3://bucket/x.jsonl"}),
        (400, "specs.output must be a file", {**good, "output": "https://example.com/x.jsonl"}),
        (400, "specs.limit must be an integer", {**good, "limit": -1}),
        (400, "specs.ordered must be true or false", {**good, "ordered": "yes"}),
        (400, "specs.parameters must be an object", {**good, "parameters": [1]}),
        (400, "specs.shard must be written", {**good, "shard": "3/2"}),
        (400, "specs.task must be one of", {**good, "task": "nonsense"}),
        (400, "specs.'overwrite' is unknown", {**good, "overwrite": True}),
        (403, "specs.model_path: this local model is not allowed", {**good, "model_path": "/etc/passwd"}),
        (403, "trust_remote_code", {**good, "specs": {"trust_remote_code": True}}),
    ):
        got = used.create({"parent_job_id": used.parent, "specs": specs})
        assert (got.status, text in got.json["error_desc"]) == (status, True), got.body
    assert "specs.model_path is required" in used.create({"specs": good}).json["error_desc"]
    listed = used.gateway.ask("GET", f"{used.jobs}?status=Pending", token=used.token).json
    assert listed["pagination_info"]["total_records"] == 0
