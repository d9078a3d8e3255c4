# SPDX-License-Identifier: Apache-2.0
"""`headrace get`, `describe`, `apply`, `delete`, `rollout`: output, prompts and exit codes, on an in-memory fleet."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from fleet_in_memory import MemoryFleet, canary, model, service, stepping
from typer.testing import CliRunner, Result

from headrace.cli.main import app
from headrace.core.errors import PermissionDenied
from headrace.fleet import client
from headrace.fleet.client.contract import Fleet, NodeProgress
from headrace.fleet.yaml_documents import parse


def headrace(*words: str | Path, input: str | None = None) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words], input=input)


@pytest.fixture
def fleet(monkeypatch: pytest.MonkeyPatch) -> MemoryFleet:
    fleet = MemoryFleet(
        service(), service("bad", ready="False", reason="OOMKilled", message="container x: out of memory")
    )
    monkeypatch.setattr(client, "open_fleet", lambda target: fleet)
    return fleet


def test_another_fleet_fits_the_contract(fleet: MemoryFleet) -> None:
    for name, asked in inspect.getmembers(Fleet, inspect.isfunction):
        if not name.startswith("_"):
            assert inspect.signature(getattr(MemoryFleet, name)) == inspect.signature(asked), name


@pytest.mark.parametrize(
    "words", [["get"], ["describe", "isvc", "x"], ["delete", "isvc", "x"], ["rollout", "status", "x"]]
)
def test_without_a_fleet_all_verbs_report_the_same(
    words: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("KUBECONFIG", "/somewhere")  # which names no cluster that somebody asked for
    monkeypatch.setenv("HEADRACE_STATE_DIR", str(tmp_path))
    result = headrace(*words)
    said, line = result.output.splitlines()
    assert result.exit_code == 1 and line == "  try: headrace up"
    assert said.startswith("error: no fleet runs on this machine: ") and "--kube" in said


def test_a_table_shows_the_address_and_the_reason(fleet: MemoryFleet) -> None:
    result = headrace("get", "--kube")
    head, bad, good = [line.split("  ") for line in result.output.splitlines()]
    assert [item.strip() for item in head if item] == [
        "NAME", "URL", "READY", "MODE", "MODEL", "RUNTIME", "REPLICAS", "TRAFFIC", "AGE", "REASON",
    ]  # fmt: skip
    assert "OOMKilled: container x: out of memory" in bad[-1] and "False" in " ".join(bad)
    assert {"True", "2/2", "100%", "RawDeployment", "headrace-cpu"} <= {item.strip() for item in good}
    assert fleet.closed
    assert "digits-engine-00001" in headrace("get", "isvc", "-o", "wide", "--kube").output
    assert headrace("get", "isvc", "-A", "--kube").output.startswith("NAMESPACE")
    assert "bad" not in headrace("get", "-l", "app=digits", "--kube").output


def test_documents_and_names_for_programs(fleet: MemoryFleet) -> None:
    one = json.loads(headrace("get", "isvc", "digits", "--kube", "--json").output)
    assert one["kind"] == "InferenceService" and "managedFields" not in one["metadata"]
    assert "managedFields" in headrace("get", "isvc/digits", "--kube", "-o", "yaml", "--show-managed-fields").output
    several = yaml.safe_load(headrace("get", "--kube", "-o", "yaml").output)
    assert several["kind"] == "List" and [item["metadata"]["name"] for item in several["items"]] == ["bad", "digits"]
    assert headrace("get", "--kube", "-o", "name").output.split() == [
        "inferenceservice.ome.io/bad",
        "inferenceservice.ome.io/digits",
    ]
    result = headrace("get", "models", "--kube")
    assert (result.exit_code, result.output) == (0, "no basemodels or clusterbasemodels in namespace default\n")


def test_changes_are_printed_line_by_line(fleet: MemoryFleet) -> None:
    result = headrace("get", "-w", "--kube")
    assert result.exit_code == 130
    lines = result.output.splitlines()
    assert lines[0].startswith("NAME") and len(lines) == 5 and lines[-1].endswith("deleted")
    events = [
        json.loads(line) for line in headrace("get", "isvc", "digits", "-w", "--kube", "--json").output.splitlines()
    ]
    assert [(event["type"], event["object"]["metadata"]["name"]) for event in events] == [
        ("ADDED", "digits"),
        ("DELETED", "digits"),
    ]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["get", "pods"], "use one of isvc, runtimes"),
        (["get", "modls"], "did you mean models?"),
        (["get", "isvc", "-o", "xml"], "write one of table, wide, json, yaml, name"),
        (["get", "isvc", "x", "-A"], "-A lists all namespaces"),
        (["get", "models", "-w"], "one kind at a time"),
        (["get", "isvc/"], "write KIND/NAME"),
        (["describe", "isvc"], "the name is missing"),
        (["apply"], "nothing to apply"),
        (["apply", "-f", "x", "--wait", "--dry-run"], "leave --wait out"),
        (["delete"], "either [KIND] NAME or -f FILE"),
        (["delete", "isvc", "a", "-f", "b"], "either [KIND] NAME or -f FILE"),
        (["rollout", "promote", "digits", "--component", "decoder"], "there are engine"),
    ],
)
def test_wrong_arguments_are_reported(fleet: MemoryFleet, words: list[str], said: str) -> None:
    result = headrace(*words, "--kube")
    assert result.exit_code == 2 and said in result.output and result.output.count("\n") == 1, result.output


def test_missing_objects_are_reported(fleet: MemoryFleet) -> None:
    for words in (["get", "isvc", "nope"], ["describe", "isvc", "nope"], ["rollout", "undo", "nope"]):
        result = headrace(*words, "--kube")
        assert result.exit_code == 1 and "there is no InferenceService nope in namespace default" in result.output


def test_a_description_has_all_of_it_and_what_to_do(fleet: MemoryFleet) -> None:
    fleet.documents["BaseModel", "default", "digits"] = {**model(), "status": {"state": "In_Transit"}}
    fleet.nodes = [NodeProgress("node-1", "Updating", 25, 100, "Downloading")]
    ended = {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}
    fleet.running = [
        {
            "metadata": {"name": "bad-engine-1", "namespace": "default", "labels": {"component": "engine"}},
            "spec": {"nodeName": "node-1"},
            "status": {
                "phase": "Running",
                "containerStatuses": [{"name": "ome-container", "restartCount": 4, "ready": False, "lastState": ended}],
            },
        }
    ]
    fleet.stored_events = [
        {"type": "Warning", "reason": "BackOff", "message": "restarting\nfailed container", "lastTimestamp": ""}
    ]
    result = headrace("describe", "isvc", "bad", "--kube")
    assert result.exit_code == 0, result.output
    for item in ("Conditions", "Components", "Traffic", "Pods", "Model", "Runtime", "Events", "Next"):
        assert f"\n{item}\n" in result.output
    lines = [" ".join(line.split()) for line in result.output.splitlines()]
    assert any(line.startswith("bad-engine-1 engine FailedToLoad 4 node-1 ") for line in lines)
    assert "node-1 Updating Downloading 25% of 0.0 GB" in lines
    assert any("raise the memory limit" in line for line in lines) and any(
        "restarting failed" in line for line in lines
    )
    document = json.loads(headrace("describe", "isvc", "bad", "--kube", "--json").output)
    assert document["pods"][0]["reason"] == "OOMKilled" and document["next"] and document["nodes"][0]["doneBytes"] == 25
    other = headrace("describe", "model", "digits", "--kube").output
    assert "pvc://models/x" in other and "Used by" in other and "node-1" in other


FILE = yaml.safe_dump_all(
    [{name: value for name, value in service("new").items() if name != "status"}, model()], sort_keys=False
)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "new.yaml"
    path.write_text(FILE)
    return path


def test_files_are_applied_models_first(fleet: MemoryFleet, file: Path) -> None:
    result = headrace("apply", "-f", file, "--kube")
    assert result.exit_code == 0, result.output
    assert [line for line in result.output.splitlines() if not line.startswith("warning")] == [
        "basemodel.ome.io/digits created",
        "inferenceservice.ome.io/new created",
    ]
    sent = fleet.documents["InferenceService", "default", "new"]
    assert sent["metadata"]["uid"] != "uid-new" and "managedFields" not in sent["metadata"]
    document = json.loads(headrace("apply", "-f", "-", "--kube", "--json", "--dry-run", input=FILE).stdout)
    assert [document["change"] for document in document["documents"]] == ["configured", "configured"] and document[
        "errors"
    ] == []


def test_with_one_mistake_nothing_is_applied_and_all_are_reported(fleet: MemoryFleet, tmp_path: Path) -> None:
    text = FILE.replace("minReplicas: 2", "minReplicas: -1\n    maxReplicas: many")
    (tmp_path / "a.yaml").write_text(text)
    (tmp_path / "b.yaml").write_text("kind: [")
    (tmp_path / "c.yaml").write_text(FILE)
    before = dict(fleet.documents)
    result = headrace("apply", "-f", tmp_path, "--kube")
    assert result.exit_code == 2 and fleet.documents == before
    errors = [line for line in result.output.splitlines() if line.startswith("error: ")]
    number = text.splitlines().index("    minReplicas: -1") + 1
    assert any(f"{tmp_path}/a.yaml:{number}: spec.engine.minReplicas: " in error for error in errors), errors
    assert any(f"{tmp_path}/a.yaml:{number + 1}: spec.engine.maxReplicas: " in error for error in errors), errors
    assert any(f"{tmp_path}/b.yaml:" in error for error in errors)
    assert any("is also in" in error and f"{tmp_path}/c.yaml" in error for error in errors)
    document = json.loads(headrace("apply", "-f", tmp_path / "a.yaml", "--kube", "--json").stdout)
    assert document["documents"] == [] and {error["place"] for error in document["errors"]} >= {
        f"{tmp_path}/a.yaml:{number}"
    }


def test_without_permission_to_read_models_there_is_a_warning(fleet: MemoryFleet, tmp_path: Path) -> None:
    fleet.denied = PermissionDenied("you may not list models")
    (tmp_path / "a.yaml").write_text(yaml.safe_dump(service("new")))
    result = headrace("apply", "-f", tmp_path, "--kube")
    assert result.exit_code == 0 and "are not checked: you may not list models" in result.output
    assert "new created" in result.output


def test_waiting_prints_progress_and_ends_with_the_outcome(fleet: MemoryFleet, file: Path) -> None:
    steps = [
        {},
        service("new", ready="False", reason="Pending", message="pod a: it has not been started yet")["status"],
        service("new")["status"],
    ]

    def next_status(fleet: MemoryFleet) -> None:
        fleet.documents["InferenceService", "default", "new"]["status"] = steps.pop(0) if len(steps) > 1 else steps[0]

    fleet.looks = next_status
    result = headrace("apply", "-f", file, "--kube", "--wait", "--timeout", "120")
    assert result.exit_code == 0, result.output
    assert "new: 0/0 ready: the operator has not reconciled it yet" in result.stderr
    assert "Pending: pod a: it has not been started yet" in result.stderr
    assert "new is ready: http://new.default.svc.cluster.local:8080" in result.stdout


def test_a_failed_wait_states_the_reason(fleet: MemoryFleet, file: Path) -> None:
    broken = service("new", ready="False", reason="OOMKilled", message="container x: out of memory")["status"]
    fleet.looks = lambda fleet: fleet.documents["InferenceService", "default", "new"].update(status=broken)
    result = headrace("apply", "-f", file, "--kube", "--wait", "--timeout", "0.1")
    assert result.exit_code == 1
    assert "new is not ready: not ready within 0.1 s: OOMKilled: container x: out of memory" in result.output
    document = json.loads(headrace("apply", "-f", file, "--kube", "--wait", "--timeout", "0", "--json").stdout)
    assert document["documents"][1]["ready"] is False and "OOMKilled" in document["documents"][1]["reason"]


def test_deleting_waits_for_pods_and_prints_what_is_left(fleet: MemoryFleet, file: Path) -> None:
    result = headrace("delete", "isvc", "digits", "--kube")
    assert (result.exit_code, result.output) == (0, "inferenceservice.ome.io/digits deleted\n")
    fleet.running = [{"metadata": {"name": "bad-engine-1"}}]
    result = headrace("delete", "isvc", "bad", "--kube", "--timeout", "0")
    assert result.exit_code == 1 and "still terminating after 0 s: pod bad-engine-1" in result.output
    result = headrace("delete", "isvc", "bad", "other", "--kube")
    assert result.exit_code == 1 and "there is no InferenceService bad" in result.output
    assert headrace("delete", "isvc", "bad", "--kube", "--ignore-not-found").exit_code == 0
    assert headrace("apply", "-f", file, "--kube").exit_code == 0
    gone = json.loads(headrace("delete", "-f", file, "--kube", "--json", "--no-wait").stdout)
    assert gone == {"deleted": ["inferenceservice.ome.io/new", "basemodel.ome.io/digits"], "missing": [], "left": []}
    file.write_text("kind: [")
    result = headrace("delete", "-f", file, "--kube")
    assert result.exit_code == 2 and "nothing was deleted" in result.output


def test_a_description_without_the_right_to_pods_has_the_rest(fleet: MemoryFleet) -> None:
    def deny_once(_: MemoryFleet) -> None:
        if requests:
            raise PermissionDenied("you may not list pods")
        requests.append(True)

    requests: list[bool] = []
    fleet.looks = deny_once
    result = headrace("describe", "isvc", "digits", "--kube")
    assert result.exit_code == 0 and "not shown: you may not list pods" in result.output and "Runtime" in result.output


def test_on_a_terminal_deletion_is_confirmed_first(fleet: MemoryFleet, monkeypatch: pytest.MonkeyPatch) -> None:
    from headrace.cli import service_view

    monkeypatch.setattr(service_view, "is_interactive", lambda: True)
    result = headrace("delete", "isvc", "digits", "--kube", input="n\n")
    assert result.exit_code == 1 and "Delete this at memory?" in result.output
    assert ("InferenceService", "default", "digits") in fleet.documents
    assert headrace("delete", "isvc", "digits", "--kube", input="y\n").exit_code == 0
    assert headrace("delete", "isvc", "bad", "--kube", "--yes").exit_code == 0
    assert not fleet.documents


def test_a_canary_is_moved(fleet: MemoryFleet) -> None:
    fleet.documents["InferenceService", "default", "digits"] = canary()
    table = headrace("rollout", "status", "digits", "--kube").output
    assert "canary at 20% of 20%" in table and "digits-engine-00002" in table and "80%" in table
    assert headrace("rollout", "undo", "digits", "--kube").output == "inferenceservice.ome.io/digits undone\n"
    engine: Any = fleet.documents["InferenceService", "default", "digits"]["spec"]["engine"]
    assert engine["canaryTrafficPercent"] == 0
    again = headrace("rollout", "undo", "digits", "--kube")
    assert again.exit_code == 1 and "undone already" in again.output
    document = json.loads(headrace("rollout", "promote", "digits", "--kube", "--json").output)
    assert document == {"name": "digits", "rollout": "promoted"} and engine["canaryTrafficPercent"] == 100
    none = headrace("rollout", "promote", "bad", "--kube")
    assert none.exit_code == 1 and "has no canary" in none.output


def test_a_stepwise_rollout_is_shown_and_promoted(fleet: MemoryFleet) -> None:
    key = ("InferenceService", "default", "digits")
    fleet.documents[key] = stepping()

    def annotations() -> dict[str, str]:
        annotations: dict[str, str] = fleet.documents[key]["metadata"]["annotations"]
        return annotations

    shown = headrace("rollout", "status", "digits", "--kube").output
    assert "step 2 of 3 at 25%" in shown
    assert "engine steps: 10% [25%] 50%: step 25 %: 212 requests, 0.0 % errors" in shown
    (told,) = json.loads(headrace("rollout", "status", "digits", "--kube", "--json").output)["components"]
    assert told["steps"]["percents"] == [10, 25, 50] and (told["steps"]["step"], told["steps"]["paused"]) == (2, False)
    early = headrace("rollout", "resume", "digits", "--kube")
    assert early.exit_code == 1 and "is not paused" in early.output
    assert headrace("rollout", "pause", "digits", "--kube").output == "inferenceservice.ome.io/digits paused\n"
    assert annotations()["ome.io/rollout-paused"] == "true"
    assert "step 2 of 3 at 25%, paused" in headrace("rollout", "status", "digits", "--kube").output
    assert headrace("rollout", "resume", "digits", "--kube").output == "inferenceservice.ome.io/digits resumed\n"
    assert "ome.io/rollout-paused" not in annotations()
    for verb, done in (("promote", "promoted"), ("undo", "undone")):
        assert headrace("rollout", verb, "digits", "--kube").output == f"inferenceservice.ome.io/digits {done}\n"
        assert annotations()["ome.io/rollout-command"].startswith(f"{verb} 20")
    assert "canaryTrafficPercent" not in fleet.documents[key]["spec"]["engine"]
    headrace("rollout", "promote", "digits", "--component", "engine", "--kube")
    assert annotations()["ome.io/rollout-command"].startswith("promote engine 20")


def test_an_aborted_rollout_starts_again_when_resumed(fleet: MemoryFleet) -> None:
    key = ("InferenceService", "default", "digits")
    fleet.documents[key] = stepping(phase="RolledBack")
    assert "rolled back" in headrace("rollout", "status", "digits", "--kube").output
    again = headrace("rollout", "undo", "digits", "--kube")
    assert again.exit_code == 1 and "undone already" in again.output
    assert headrace("rollout", "resume", "digits", "--kube").exit_code == 0
    assert fleet.documents[key]["metadata"]["annotations"]["ome.io/rollout-command"].startswith("retry 20")
    none = headrace("rollout", "pause", "bad", "--kube")
    assert none.exit_code == 1 and "has no steps: give it the annotation ome.io/rollout-steps" in none.output


def test_what_is_printed_cannot_act_on_a_terminal(fleet: MemoryFleet) -> None:
    fleet.documents["InferenceService", "default", "bad"]["status"]["conditions"][0]["message"] = "\x1b[2Jgone\u202e"
    for words in (["get"], ["describe", "isvc", "bad"], ["get", "-w"]):
        output = headrace(*words, "--kube").output
        assert "\x1b" not in output and "\u202e" not in output and "gone" in output


def test_the_file_of_the_test_is_one() -> None:
    assert not parse(FILE).problems


def test_on_a_narrow_terminal_addresses_stay_whole(fleet: MemoryFleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.delenv("NO_COLOR", raising=False)
    output = headrace("get", "--kube").output
    assert "\x1b[" in output and "http://digits.default.svc.cluster.local:8080" in output
