# SPDX-License-Identifier: Apache-2.0
"""Programs that die, or whose disk, socket or clock fails, at each named point: the next run finds whole records.

`headrace.core.fault_points.POINTS` lists the points; the last quick test compares it with what is tried here.
"""

from __future__ import annotations

import ast
import contextlib
import http.client
import json
import os
import signal
import sqlite3
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pyarrow.parquet as pq
import pytest
from batch_tools import check_products, manifest, onnx_model, records, start_batch
from bucket_stub import bucket_stub
from chaos_records import Writers
from fault_cases import (
    Cases,
    check_met,
    environment,
    is_deadly,
    processes_in,
    run_script,
    temporary_files,
    unreadable_files,
)
from gateway_process import Gateway, gateway
from local_site import LocalSite, fetch_text, runtime, service
from picture_models import onnx_classifier
from store_stub import StoreStub
from test_gateway_batches import GatewayWithModel, check_each_once, product
from test_gateway_batches import manifest as pairs
from test_local_rollouts import in_phase, stepped
from web_stub import WebStub, serve

from headrace.core import clock, fault_points
from headrace.core.clock import SystemClock
from headrace.core.errors import HeadraceError, InvalidArgument
from headrace.core.fault_points import POINTS, VARIABLE, Fault, FaultInjector, fault_point, parse_faults
from headrace.core.files import remove_temporary_files
from headrace.fleet.local.object_store import DocumentStore, ServiceObjects
from headrace.fleet.rollouts.controller import RolloutObservation, advance
from headrace.fleet.rollouts.policy import RolloutPolicy
from headrace.fleet.rollouts.state import STEPPING, RolloutState
from headrace.jobs.batch.output import deliver, parse_output
from headrace.jobs.batch.progress import progress_file_path
from headrace.jobs.batch.settings import BatchSettings
from headrace.models.storage.credentials import CloudCredentials
from headrace.models.storage.fetch import fetch_location
from support.waiting import eventually

PRODUCT = Path(fault_points.__file__).parent.parent
CASES = Cases()


# The switch


def test_a_switch_names_the_fault_the_point_and_the_time() -> None:
    text = "batch.ledger.append:die@3, files.replace:disk_full,jobs.database.commit:stall=0.5@2,files.replace:jump=-60"
    assert parse_faults(text) == [
        Fault("batch.ledger.append", "die", time=3),
        Fault("files.replace", "disk_full"),
        Fault("jobs.database.commit", "stall", 0.5, 2),
        Fault("files.replace", "jump", -60.0),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("files.replace", "'files.replace' is not a fault: write POINT:KIND"),
        ("files.replace:burn", "is not a fault"),
        ("files.replace:die=3", "is not a fault"),
        ("files.replace:stall", "is not a fault"),
        ("files.replace:die@0", "is not a fault"),
        ("files.replace:die,", "'' is not a fault"),
        ("files.rename:die", "unknown point 'files.rename': use one of files.replace, jobs.database.commit"),
    ],
)
def test_an_invalid_switch_is_refused_with_a_reason(text: str, message: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        parse_faults(text)
    assert message in caught.value.message


def test_a_fault_happens_at_its_point_and_time_only() -> None:
    injector = FaultInjector(parse_faults("files.replace:disk_full@2,files.replace:reset@3"))
    injector.reach("files.replace")
    injector.reach("jobs.database.commit")
    with pytest.raises(OSError, match="No space left on device"):
        injector.reach("files.replace")
    with pytest.raises(ConnectionResetError):
        injector.reach("files.replace")
    injector.reach("files.replace")


def test_the_wall_clock_jumps_and_durations_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock, "_wall_time", lambda: 0.0)  # restored at the end
    system = SystemClock()
    before = system.monotonic()
    FaultInjector([Fault("files.replace", "jump", 7200.0)]).reach("files.replace")
    ahead = system.wall()
    FaultInjector([Fault("files.replace", "jump", -7200.0)]).reach("files.replace")
    assert ahead - system.wall() == pytest.approx(14400, abs=60)
    assert 0 <= system.monotonic() - before < 3600


def test_without_the_switch_nothing_happens() -> None:
    assert fault_points._injector is None
    for name in POINTS:
        fault_point(name)


def test_every_point_of_the_table_is_in_the_code_and_none_on_the_way_of_a_request() -> None:
    document: dict[str, set[str]] = {}
    sources = {path: text for path in PRODUCT.rglob("*.py") if "fault_point" in (text := path.read_text())}
    for path, text in sources.items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "fault_point":
                (name,) = node.args
                assert isinstance(name, ast.Constant), f"{path}:{node.lineno}: the name must be a literal"
                document.setdefault(str(name.value), set()).add(path.relative_to(PRODUCT).parts[0])
    assert document.keys() == POINTS.keys()
    assert set().union(*document.values()) <= {"core", "jobs", "models", "fleet"}


def test_a_wrong_switch_ends_a_program_with_one_line() -> None:
    done = run_script("import headrace.core.files", fault="files.replace:burn")
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert done.stderr.startswith("error: HEADRACE_FAULTS: 'files.replace:burn' is not a fault")


def test_a_program_warns_once_that_it_injects_faults() -> None:
    done = run_script("import headrace.core.files, headrace.core.fault_points", fault="files.replace:die@2")
    assert (done.returncode, done.stderr.count("for tests only: this process injects the faults")) == (0, 1)


# Files


def test_only_temporary_files_of_write_atomically_are_removed(tmp_path: Path) -> None:
    below = tmp_path / "below"
    below.mkdir()
    temporary = [folder / f".{name}.0123456789abcdef.new" for folder in (tmp_path, below) for name in ("a.json", "[b]")]
    others = [tmp_path / name for name in ("a.json", ".a.json.new", ".a.json.0123456789ABCDEF.new", "b.new", ".c")]
    for path in (*temporary, *others):
        path.touch()
    remove_temporary_files(tmp_path, "[b]")
    assert [path.exists() for path in temporary] == [True, False, True, True]
    remove_temporary_files(tmp_path)
    assert not any(path.exists() for path in temporary) and all(path.exists() for path in others)


WRITE = """
import sys
from pathlib import Path
from headrace.core.errors import HeadraceError
from headrace.core.files import write_json
for number in range(3):
    try:
        write_json(Path(sys.argv[1]), {"number": number})
    except HeadraceError as error:
        sys.exit(f"error: {error.message}")
"""


@pytest.mark.slow
@CASES.of("files.replace:die@1", "files.replace:die@3", "files.replace:disk_full@3", "files.replace:stall=0.01@2")
def test_a_file_has_its_old_content_or_its_new_one(tmp_path: Path, fault: str) -> None:
    path = tmp_path / "file.json"
    done = run_script(WRITE, path, fault=fault)
    check_met(fault, done.returncode, done.stderr)
    if "@1" in fault:
        assert not path.exists()
    elif "stall" not in fault:
        assert json.loads(path.read_text()) == {"number": 1}
    if "disk_full" in fault:
        assert done.returncode == 1 and "No space left on device; make room on its disk" in done.stderr
        assert list(tmp_path.iterdir()) == [path]
    assert run_script(WRITE, path).returncode == 0
    assert json.loads(path.read_text()) == {"number": 2}


# Batch jobs

COUNT = 1500
SLOW = ("--batch-size", "1", "--in-flight", "2")
"""One item at a time, so that results are appended several times."""


@pytest.fixture(autouse=True)
def scratch(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder for what a killed program leaves among the temporary files of the machine."""
    monkeypatch.setenv("TMPDIR", str(tmp_path_factory.mktemp("scratch")))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return onnx_model(tmp_path_factory.mktemp("product"))


def run_batch(*arguments: str | Path, fault: str = "") -> tuple[int, str]:
    process = start_batch(*arguments, env=environment(fault))
    _, error_output = process.communicate(timeout=240)
    return process.returncode, error_output.decode()


def progress_of(results: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(progress_file_path(results).read_text())
    return document


@pytest.mark.slow
@CASES.of(
    "batch.ledger.append:die@1",
    "batch.ledger.append:die@3",
    "batch.ledger.append:disk_full@2",
    "batch.ledger.append:stall=0.3@2",
    "batch.ledger.appended:die@1",
    "batch.ledger.appended:die@3",
    "batch.ledger.checkpoint:die",
    "batch.ledger.checkpoint:disk_full",
    "files.replace:die@3",  # the progress file, at the start
    "files.replace:die@4",  # and at the end; the two before are of the model
)
def test_a_batch_computes_every_item_exactly_once(tmp_path: Path, model: Path, fault: str) -> None:
    given, output = manifest(tmp_path / "items.jsonl", COUNT), tmp_path / "out" / "results.jsonl"
    arguments = (model, given, output, *SLOW, "--cache-dir", tmp_path / "cache")
    code, error_output = run_batch(*arguments, fault=fault)
    check_met(fault, code, error_output)
    if "append:disk_full" in fault:
        assert code == 1 and f"no space left for {output}: free some space" in error_output
        assert progress_of(output)["state"] == "failed"
    if "checkpoint:disk_full" in fault:
        assert code == 0 and "Could not write the end of the job: no space left" in error_output
    before = output.read_bytes() if output.exists() else b""
    code, error_output = run_batch(*arguments)
    assert code == 0, error_output
    assert output.read_bytes().startswith(before)
    check_products(records(output), COUNT)
    progress = progress_of(output)
    assert progress["state"] == "finished"
    assert progress["summary"]["resumed"] == before.count(b"\n")  # what was written is not computed again
    assert temporary_files(tmp_path) == []


@pytest.mark.slow
@CASES.of(
    "batch.parquet.rename:die",
    "batch.parquet.rename:disk_full",
    "batch.output.delivered:die",
    "files.replace:die@4",
)
def test_a_parquet_file_is_whole_or_not_there(tmp_path: Path, model: Path, fault: str) -> None:
    given, output = manifest(tmp_path / "items.jsonl", COUNT), tmp_path / "results.parquet"
    arguments = (model, given, output, "--cache-dir", tmp_path / "cache")
    code, error_output = run_batch(*arguments, fault=fault)
    check_met(fault, code, error_output)
    if "rename" in fault:
        assert not output.exists()
    if "disk_full" in fault:
        assert code == 1 and "No space left on device; the results are kept: free space" in error_output
    code, error_output = run_batch(*arguments)
    assert code == 0, error_output
    rows = pq.read_table(output).to_pylist()
    assert sorted(row["index"] for row in rows) == list(range(COUNT))
    assert not (tmp_path / "results.parquet.records.jsonl").exists()
    assert temporary_files(tmp_path) == []


def test_a_delivery_removes_what_a_killed_one_left(tmp_path: Path) -> None:
    with bucket_stub() as bucket:
        settings = BatchSettings(
            "model", "items", "s3://bucket/results.jsonl", folder=tmp_path, credentials=bucket.credentials
        )
        target = parse_output(settings)
        (target.results.parent / ".delivering-x" / "results.parquet").mkdir(parents=True)
        target.results.write_bytes(b"{}\n")
        deliver(target, settings)
        assert bucket.objects == {"results.jsonl": b"{}\n"}
    assert list(target.results.parent.iterdir()) == [target.results]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["results.jsonl", "results.parquet"])
@CASES.of(
    "batch.output.upload:die",
    "batch.output.upload:reset",
    "batch.output.upload:stall=0.3",
    "batch.output.delivered:die",
)
def test_an_upload_is_repeated_until_the_progress_file_records_it(
    tmp_path: Path, model: Path, fault: str, name: str
) -> None:
    given, cache = manifest(tmp_path / "items.jsonl", COUNT), tmp_path / "cache"
    with bucket_stub() as bucket:
        keys = tmp_path / "keys.json"
        details = {"access_key": "AK", "secret_key": "SK", "endpoint_url": f"http://127.0.0.1:{bucket.port}"}
        keys.write_text(json.dumps({"aws": {"bucket": details}}))
        arguments = (model, given, f"s3://bucket/{name}", "--cache-dir", cache, "--credentials", keys)
        code, error_output = run_batch(*arguments, fault=fault)
        check_met(fault, code, error_output)
        if "reset" in fault:
            assert code == 1 and "the store failed; the results are kept: run the same command again" in error_output
        assert bool(bucket.objects) is (("delivered" in fault) or ("stall" in fault))
        code, error_output = run_batch(*arguments)
        assert code == 0, error_output
        (tmp_path / name).write_bytes(bucket.objects[name])
    if name.endswith(".jsonl"):
        check_products(records(tmp_path / name), COUNT)
    else:
        rows = pq.read_table(tmp_path / name).to_pylist()
        assert sorted(row["index"] for row in rows) == list(range(COUNT))
    assert temporary_files(cache) == []
    assert not list(cache.rglob("results.jsonl"))


# Downloads

FETCH = """
import json, sys
from pathlib import Path
from headrace.core.errors import HeadraceError
from headrace.models.storage.credentials import CloudCredentials
from headrace.models.storage.fetch import FetchSettings, fetch_location
url, folder, metadata = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
settings = FetchSettings(part_bytes=10_000, private_hosts=("127.0.0.1",))
try:
    print(fetch_location(url, folder, CloudCredentials.from_metadata(metadata), settings=settings))
except HeadraceError as error:
    sys.exit(f"error: {error.message}")
"""
BODY = bytes(range(256)) * 200  # 51,200 bytes: 6 parts


def entries(cache: Path) -> list[Path]:
    return [path for path in cache.iterdir() if not path.name.startswith(".")] if cache.exists() else []


@pytest.mark.slow
@CASES.of(
    "storage.part.written:die@1",
    "storage.part.written:die@4",
    "storage.part.written:disk_full@3",
    "storage.part.written:reset@3",
    "storage.part.written:stall=0.1@2",
    "storage.entry.rename:die",
    "storage.entry.rename:disk_full",
    "storage.entry.renamed:die",
)
def test_an_object_is_in_the_cache_whole_or_not_at_all(tmp_path: Path, fault: str) -> None:
    cache = tmp_path / "cache"
    with StoreStub({"bkt": {"large": BODY}}) as store:
        words = ("s3://bkt/large", cache, json.dumps(store.metadata("bkt")))
        done = run_script(FETCH, *words, fault=fault)
        check_met(fault, done.returncode, done.stderr)
        if "disk_full" in fault:
            assert done.returncode == 1 and "there is no room for s3://bkt/large" in done.stderr
        if "reset" in fault:
            assert done.returncode == 1 and "s3://bkt/large could not be read" in done.stderr
        assert all((entry / "large").read_bytes() == BODY for entry in entries(cache))
        second = run_script(FETCH, *words)
    assert second.returncode == 0, second.stderr
    assert Path(second.stdout.strip()).read_bytes() == BODY
    assert len(entries(cache)) == 1 and temporary_files(cache) == []


def test_the_journal_of_a_finished_download_is_removed(tmp_path: Path) -> None:
    with StoreStub({"bkt": {"large": BODY}}) as store:
        keys = CloudCredentials.from_metadata(store.metadata("bkt"))
        entry = fetch_location("s3://bkt/large", tmp_path, keys).parent
        (tmp_path / f".bringing-{entry.name}.parts").touch()
        assert fetch_location("s3://bkt/large", tmp_path, keys).parent == entry
    assert temporary_files(tmp_path) == []


@pytest.mark.slow
@CASES.of("storage.file.rename:die", "storage.file.rename:disk_full", "storage.file.rename:reset")
def test_a_file_of_the_web_is_in_the_cache_whole_or_not_at_all(tmp_path: Path, fault: str) -> None:
    cache = tmp_path / "cache"
    with WebStub({"/large": serve(BODY, etag='"1"')}) as web:
        done = run_script(FETCH, web.url("/large"), cache, "{}", fault=fault)
        check_met(fault, done.returncode, done.stderr)
        assert is_deadly(fault) or (done.returncode == 1 and "error: " in done.stderr)
        assert entries(cache) == []
        second = run_script(FETCH, web.url("/large"), cache, "{}")
    assert second.returncode == 0, second.stderr
    assert Path(second.stdout.strip()).read_bytes() == BODY
    assert temporary_files(cache) == []


MIRROR = """
import json, sys
from pathlib import Path
from headrace.core.errors import HeadraceError
from headrace.models.storage.credentials import CloudCredentials
from headrace.models.storage.locations import ObjectLocation
from headrace.models.storage.mirror import Mirror
credentials = CloudCredentials.from_metadata(json.loads(sys.argv[2]))
try:
    Mirror(ObjectLocation("aws", "bkt", "models"), Path(sys.argv[1]), credentials).build()
except HeadraceError as error:
    sys.exit(f"error: {error.message}")
except OSError as error:
    sys.exit(f"error: {error.strerror}")  # `Mirror.refresh` reports it
"""


@pytest.mark.slow
@CASES.of(
    "storage.mirror.move:die@1",
    "storage.mirror.move:die@2",
    "storage.mirror.move:die@3",
    "storage.mirror.move:disk_full@2",
    "storage.part.written:die@2",
    "files.replace:die",
)
def test_a_mirror_has_whole_files_and_whole_versions(tmp_path: Path, fault: str) -> None:
    old = {"models/a/config.pbtxt": b"old" * 1000, "models/a/1/model.bin": b"1" * 5000}
    new = {
        "models/a/config.pbtxt": b"new" * 1000,
        "models/a/1/model.bin": b"3" * 5000,
        "models/a/2/model.bin": b"2" * 5000,
        "models/a/2/more.bin": b"2" * 100,
    }
    folder = tmp_path / "mirror"
    folder.mkdir()

    def files() -> dict[str, bytes]:
        own = (".lock", ".mirror.json", "..mirror.json.", ".incoming", ".going")
        paths = [path for path in folder.rglob("*") if path.is_file()]
        relative = {str(path.relative_to(tmp_path)).replace("mirror/", "models/", 1): path for path in paths}
        return {name: path.read_bytes() for name, path in relative.items() if not name[7:].startswith(own)}

    with StoreStub({"bkt": dict(old)}) as store:
        words = (folder, json.dumps(store.metadata("bkt")))
        assert run_script(MIRROR, *words).returncode == 0
        assert files() == old
        store.buckets["bkt"] = dict(new)
        done = run_script(MIRROR, *words, fault=fault)
        check_met(fault, done.returncode, done.stderr)
        assert is_deadly(fault) or (done.returncode == 1 and "No space left on device" in done.stderr)
        assert all(content in (old.get(name), new[name]) for name, content in files().items())
        assert len([name for name in files() if name.startswith("models/a/2/")]) in (0, 2)
        second = run_script(MIRROR, *words)
    assert second.returncode == 0, second.stderr
    assert files() == new
    assert temporary_files(folder) == []


# The models of a node

PLACE = """
import json, sys
from pathlib import Path
from headrace.core.errors import HeadraceError
from headrace.fleet.agent.downloads import Download, download_model
from headrace.fleet.agent.model_sources import parse_source
from headrace.fleet.agent.model_store import ModelStore
from headrace.models.storage.credentials import CloudCredentials
from headrace.models.storage.fetch import FetchSettings
root = Path(sys.argv[1])
store = ModelStore(root)
store.open()
source = parse_source({"spec": {"storage": {"storageUri": "s3://bkt/model", "path": str(root / "a")}}})
credentials = CloudCredentials.from_metadata(json.loads(sys.argv[2]))
try:
    record = store.claim(("", "a"), source, reserved=False)
    record = download_model(store, record, Download(("", "a"), source), credentials, FetchSettings())
except HeadraceError as error:
    sys.exit(f"error: {error.message}")
print(record.state, store.is_complete(record))
"""


@pytest.mark.slow
@pytest.mark.parametrize("update", [False, True])
@CASES.of(
    "agent.model.place:die",
    "agent.model.place:disk_full",
    "agent.model.placed:die",
    "agent.model.placed:disk_full",
    "storage.entry.renamed:die",
    "files.replace:die@1",
    "files.replace:die@2",
)
def test_a_model_of_a_node_has_whole_files_and_a_record(tmp_path: Path, fault: str, update: bool) -> None:
    old = {"model/config.json": b"{}", "model/weights": b"1" * 5000}
    new = {"model/config.json": b'{"a": 1}', "model/weights": b"2" * 7000, "model/sub/more": b"2"}
    root = tmp_path / "models"

    def files() -> dict[str, bytes]:
        paths = [path for path in (root / "a").rglob("*") if path.is_file() and not path.name.startswith(".")]
        return {f"model/{path.relative_to(root / 'a')}": path.read_bytes() for path in paths}

    with StoreStub({"bkt": dict(old if update else new)}) as store:
        words = (root, json.dumps(store.metadata("bkt")))
        if update:
            assert run_script(PLACE, *words).returncode == 0
            assert files() == old
            store.buckets["bkt"] = dict(new)
        done = run_script(PLACE, *words, fault=fault)
        check_met(fault, done.returncode, done.stderr)
        assert is_deadly(fault) or (done.returncode == 1 and "there is no room for s3://bkt/model" in done.stderr)
        assert all(content in (old.get(name), new[name]) for name, content in files().items())
        assert update or files() in ({}, new)
        second = run_script(PLACE, *words)
    assert (second.returncode, second.stdout) == (0, "there True\n"), second.stderr
    assert files() == new
    assert temporary_files(root) == [] and list((root / ".headrace" / "new").iterdir()) == []
    (shelf,) = (root / ".headrace" / "cache").iterdir()
    assert len(entries(shelf)) == 1


# The operator

OPERATE = """
import json, sys
from pathlib import Path
from test_rollout_steps import FakeCluster, asked

class SavedCluster(FakeCluster):
    # An API server outlives the operator: this one is in a file.
    def __init__(self, path):
        super().__init__()
        self.path = path
        if path.exists():
            objects, self.document = json.loads(path.read_text())
            self.objects = {(kind, name): made for kind, name, made in objects}

    def save(self):
        content = [[*key, made] for key, made in self.objects.items()], self.document
        self.path.write_text(json.dumps(content))

    async def apply(self, *args):
        try:
            return await super().apply(*args)
        finally:
            self.save()

    async def patch(self, *args):
        try:
            return await super().patch(*args)
        finally:
            self.save()

cluster = SavedCluster(Path(sys.argv[1]))
if not cluster.document:
    cluster.edit(asked("engine:1"))
    cluster.save()
for _ in range(3):
    cluster.look()
"""


@pytest.mark.slow
@CASES.of(
    "fleet.cluster.apply:die@1",
    "fleet.cluster.apply:die@2",
    "fleet.cluster.apply:die@3",
    "fleet.cluster.apply:stall=0.1@2",
)
def test_an_operator_that_dies_between_two_writes_writes_the_rest_when_it_is_back(tmp_path: Path, fault: str) -> None:
    assert run_script(OPERATE, tmp_path / "wanted.json").returncode == 0
    done = run_script(OPERATE, tmp_path / "found.json", fault=fault)
    check_met(fault, done.returncode, done.stderr)
    if is_deadly(fault):
        objects, _ = json.loads((tmp_path / "found.json").read_text())
        assert len(objects) == parse_faults(fault)[0].time - 1
    second = run_script(OPERATE, tmp_path / "found.json")
    assert second.returncode == 0, second.stderr
    wanted, found = (json.loads((tmp_path / name).read_text()) for name in ("wanted.json", "found.json"))
    assert found == wanted


# The gateway's records, and the processes of its jobs


def start_gateway(running: Gateway, *more: str, fault: str = "", wait: bool = True) -> None:
    with patch.dict(os.environ, {VARIABLE: fault}):
        running.start(*more, wait=wait)


def check_gateway_met(running: Gateway, fault: str) -> None:
    """It has met the fault; it is dead then, or lives on and is stopped."""
    assert running.program is not None
    program = running.program
    if is_deadly(fault):
        check_met(fault, program.wait(), program.log)
    else:
        eventually(lambda: "headrace: injecting" in program.log)
        assert running.end() == 0
        check_met(fault, None, program.log)


def check_database(running: Gateway) -> None:
    """The file is sound, and each job has one event for each of its changes."""
    with contextlib.closing(sqlite3.connect(running.data_dir / "headrace.sqlite3")) as database:
        assert database.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        assert database.execute("PRAGMA foreign_key_check").fetchall() == []
        for job, version in database.execute("SELECT id, version FROM jobs").fetchall():
            numbers = database.execute("SELECT number FROM events WHERE job_id = ? ORDER BY number", (job,))
            assert [number for (number,) in numbers] == list(range(1, version + 1))


@pytest.mark.slow
@pytest.mark.timeout(300)
@CASES.of(
    "jobs.database.commit:die@12",
    "jobs.database.commit:stall=1@12",
    "jobs.database.committed:die@12",
    "jobs.database.committed:jump=+600@12",
    "jobs.database.committed:jump=-600@12",
)
def test_a_gateway_keeps_every_record_that_it_acknowledged(tmp_path: Path, fault: str) -> None:
    with gateway(tmp_path) as running, Writers(running) as writers:
        writers.wait_for(3)
        running.end()
        start_gateway(running, fault=fault)
        if not is_deadly(fault):
            writers.wait_for(20)
        check_gateway_met(running, fault)
        start_gateway(running)
        writers.wait_for(6)
        writers.check_kept()
        check_database(running)


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[GatewayWithModel]:
    """A gateway that runs without faults, with a registered model."""
    models = tmp_path / "models"
    models.mkdir()
    with gateway(tmp_path, "--models-dir", str(models)) as running:
        key = running.command("users", "add", "alice", "--org", "acme").strip()
        model = product(models / "product.onnx")
        arguments = ("jobs", "register", str(model), "--org", "acme", "--arch", "product", "--json")
        ids = json.loads(running.command(*arguments))
        yield GatewayWithModel(running, models, running.login(key, "acme"), ids["experiment_id"], ids["job_id"])


def check_batch_done(jobs: GatewayWithModel, job: str, output: Path, count: int) -> None:
    """Done, every item once, all changes on record, and nothing left of its process."""
    result = jobs.until(job, "Done")
    assert result["job_details"]["summary"]["succeeded"] == count
    check_each_once(output, count)
    jobs.until_no_process()
    eventually(lambda: not list(jobs.gateway.data_dir.glob(f"**/{job}")))
    check_database(jobs.gateway)


@pytest.mark.slow
@pytest.mark.timeout(600)
@CASES.of(
    "jobs.batch.launched:die",
    "jobs.batch.launched:jump=+7200",
    "jobs.batch.launched:jump=-7200",
    "jobs.batch.exit:die",
    "files.replace:die@1",
    "files.replace:die@2",
    "files.replace:die@3",
)
def test_a_batch_job_of_a_gateway_that_dies_is_done_once(jobs: GatewayWithModel, fault: str) -> None:
    models = ("--models-dir", str(jobs.folder))
    given, output = pairs(jobs.folder / "items.jsonl", 300), jobs.folder / "results.jsonl"
    jobs.gateway.end()
    start_gateway(jobs.gateway, *models, fault=fault)
    job = jobs.begin(given, output)
    if not is_deadly(fault):
        jobs.until(job, "Done")
    check_gateway_met(jobs.gateway, fault)
    start_gateway(jobs.gateway, *models)
    check_batch_done(jobs, job, output, 300)


@pytest.mark.slow
@pytest.mark.timeout(600)
@CASES.of("jobs.batch.adopt:die", "jobs.batch.adopt:jump=+7200")
def test_a_gateway_that_dies_while_it_adopts_a_batch_leaves_it_to_the_next(jobs: GatewayWithModel, fault: str) -> None:
    models = ("--models-dir", str(jobs.folder))
    given, output = pairs(jobs.folder / "items.jsonl", 3000), jobs.folder / "results.jsonl"
    job = jobs.begin(given, output, batch_size=1, in_flight=1)
    with jobs.halted(job, output, 2000):  # it must run when its gateway is gone
        jobs.gateway.end(signal.SIGKILL)
        start_gateway(jobs.gateway, *models, fault=fault, wait=False)
        check_gateway_met(jobs.gateway, fault)
    start_gateway(jobs.gateway, *models)
    check_batch_done(jobs, job, output, 3000)


@pytest.mark.slow
@pytest.mark.timeout(600)
@CASES.of("jobs.service.launched:die")
def test_a_microservice_whose_gateway_dies_at_its_launch_runs_and_can_be_stopped(tmp_path: Path, fault: str) -> None:
    with gateway(tmp_path) as running:
        key = running.command("users", "add", "alice", "--org", "acme").strip()
        model = onnx_classifier(tmp_path / "model")
        arguments = ("jobs", "register", str(model), "--org", "acme", "--arch", "classification", "--json")
        ids = json.loads(running.command(*arguments))
        token = running.login(key, "acme")
        base = f"/api/v1/orgs/acme/experiments/{ids['experiment_id']}"
        running.end()
        start_gateway(running, fault=fault)
        with pytest.raises((OSError, http.client.HTTPException)):
            running.ask("POST", f"{base}/inference_microservice/start", {"parent_id": ids["job_id"]}, token)
        check_gateway_met(running, fault)
        start_gateway(running)
        listed = running.ask("GET", f"{base}/jobs", token=token).json["jobs"]
        (job,) = (row["id"] for row in listed if row["id"] != ids["job_id"])
        service = f"{base}/jobs/{job}/inference_microservice"
        running.until_loaded(f"{service}/status", token)
        eventually(lambda: running.ask("GET", f"{base}/jobs/{job}", token=token).json["status"] == "Running")
        assert len(running.processes()) == 1
        got = running.ask("POST", f"{service}/stop", token=token)
        assert got.status == 200, got.body
        assert running.processes() == []
        check_database(running)


# The local fleet

needs_linux = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs Linux")


@pytest.fixture
def site(tmp_path: Path) -> Iterator[LocalSite]:
    site = LocalSite(tmp_path)
    yield site
    site.close()


def start_site(site: LocalSite, fault: str = "") -> None:
    with patch.dict(os.environ, {VARIABLE: fault}):
        site.up()


def check_site_met(site: LocalSite, fault: str) -> None:
    log = site.root.parent / "daemon.log"
    if is_deadly(fault):
        assert site.process is not None
        check_met(fault, site.process.wait(90), log.read_text())
        site.process = None
    else:
        eventually(lambda: "headrace: injecting" in log.read_text())
        check_met(fault, None, log.read_text())


def test_what_a_killed_daemon_left_of_a_write_is_removed_when_its_objects_are_read(tmp_path: Path) -> None:
    left = [tmp_path / "InferenceService" / "default", tmp_path / "default"]
    for folder in left:
        folder.mkdir(parents=True)
        (folder / ".a.json.0123456789abcdef.new").touch()
    DocumentStore(tmp_path / "InferenceService").load()
    ServiceObjects(tmp_path).load()
    assert temporary_files(tmp_path) == []


def test_a_step_of_a_rollout_ends_though_the_clock_was_set_back() -> None:
    """The time of the step runs again from then on."""
    now = datetime(2026, 11, 18, tzinfo=UTC)
    policy = RolloutPolicy(steps=(20, 50), step_seconds=60.0, min_requests=0)
    state: RolloutState | None = RolloutState("new", STEPPING, since=now)
    seen = RolloutObservation("engine", "new", "old", two=True, ready=True, settled=True, counted=False)
    for seconds, step in ((-7200, 0), (-7200 + 59, 0), (-7200 + 60, 1)):
        state, _ = advance(policy, state, seen, now + timedelta(seconds=seconds))
        assert state is not None and state.step == step


def apply_until_the_daemon_dies(site: LocalSite, *documents: dict[str, Any]) -> list[str]:
    """Apply documents one after the other; return the names of those that were applied."""
    applied = []
    with contextlib.suppress(HeadraceError, OSError):
        for document in documents:
            site.apply(document)
            applied.append(document["metadata"]["name"])
    return applied


@needs_linux
@pytest.mark.slow
@pytest.mark.timeout(600)
@CASES.of(
    "fleet.document.write:die@1",
    "fleet.document.write:die@3",
    "fleet.document.write:stall=0.5@2",
    "fleet.document.written:die@1",
    "fleet.document.written:die@3",
    "fleet.objects.write:die@1",
    "fleet.objects.write:stall=0.5@1",
    "fleet.objects.write:jump=+7200",
    "fleet.objects.write:jump=-7200",
    "fleet.container.record:die@1",
    "fleet.container.record:die@2",
    "files.replace:die@2",
    "files.replace:die@5",
    "files.replace:die@8",
    "files.replace:die@11",
    "files.replace:disk_full@3",
    "files.replace:disk_full@9",
)
def test_a_fleet_keeps_what_it_acknowledged_and_runs_each_replica_once(site: LocalSite, fault: str) -> None:
    documents = (site.model, runtime(), service("a", minReplicas=2))
    start_site(site, fault)
    applied = apply_until_the_daemon_dies(site, *documents)
    check_site_met(site, fault)
    assert unreadable_files(site.root) == []
    on_disk = {path.stem for path in site.root.glob("documents/*/*/*.json")}
    assert set(applied) <= on_disk
    site.kill(signal.SIGTERM)
    start_site(site)
    site.apply(*documents)
    url = site.ready("a", 2)
    assert fetch_text(url).startswith("a ")
    eventually(lambda: len(processes_in(site.root / "pods")) == 2)
    eventually(lambda: set(processes_in(site.root / "pods")) == site.pids("a"))
    assert temporary_files(site.root / "documents", site.root / "objects") == []


@needs_linux
@pytest.mark.slow
@pytest.mark.timeout(600)
@CASES.of(
    "fleet.rollout.step:die@1",
    "fleet.rollout.step:die@2",
    "fleet.rollout.step:die@3",
    "fleet.rollout.step:jump=+7200@2",
    "fleet.rollout.step:jump=-7200@2",
)
def test_a_rollout_continues_where_its_daemon_died_or_the_clock_jumped(site: LocalSite, fault: str) -> None:
    by_time = {"ome.io/rollout-min-requests": "0"}
    start_site(site, fault)
    site.apply(site.model, runtime(), stepped("a", "old", steps=by_time))
    url = site.ready("a")
    site.apply(stepped("a", "new", steps=by_time))
    check_site_met(site, fault)
    assert fetch_text(url).startswith(("old", "new"))
    assert unreadable_files(site.root) == []
    if is_deadly(fault):
        start_site(site)
    in_phase(site, "a", "Promoted")
    assert site.ready("a") == url
    eventually(lambda: fetch_text(url).startswith("new"))
    eventually(lambda: set(processes_in(site.root / "pods")) == site.pids("a"))


def test_every_point_is_tried_by_a_test_of_this_file() -> None:
    """Each of them sees that its program met the fault: `check_met`."""
    assert POINTS.keys() - CASES.points == set()
