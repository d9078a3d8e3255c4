# SPDX-License-Identifier: Apache-2.0
"""`headrace infer` against a real server: requests, output, files, and error messages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.client import Client
from headrace.client.errors import http_error
from support.programs import Finished, Program, run, run_process


@pytest.fixture(params=["http", "grpc"])
def url(request: pytest.FixtureRequest, session_server: Program) -> str:
    return session_server.url if request.param == "http" else session_server.grpc_url


def refused(*arguments: str | Path) -> str:
    """What is said, in one line, when nothing could be asked."""
    return failed(2, *arguments)


def failed(code: int, *arguments: str | Path) -> str:
    done = run("infer", *arguments)
    assert (done.returncode, done.stdout) == (code, ""), done
    lines = [line for line in done.stderr.splitlines() if not line.startswith(("note: ", "  try: "))]
    assert len(lines) == 1
    assert lines[0].startswith("error: ")
    return lines[0]


def printed_json(done: Finished) -> Any:
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def data_of(done: Finished) -> Any:
    (output,) = printed_json(done)["outputs"]
    return output["data"]


def test_a_table_of_outputs(url: str) -> None:
    done = run("infer", "echo", "--url", url, "--input", "INPUT0=[[1, 2.5, 3, 4], [5, 6, 7, 1e10]]")
    assert done.returncode == 0, done.stderr
    first, head, row = done.stdout.splitlines()
    assert first.startswith("echo version 1, ")
    assert head.split() == ["OUTPUT", "TYPE", "SHAPE", "VALUES"]
    assert row.split() == ["OUTPUT0", "FP32", "[2,4]", "1", "2.5", "3", "4", "5", "6", "7", "1e+10"]
    assert done.stderr == ""


def test_a_missing_batch_dimension_is_added_and_reported(url: str) -> None:
    done = run("infer", "echo", "--url", url, "--input", "INPUT0=[1, 2, 3, 4]", "--json")
    document = printed_json(done)
    assert document["outputs"] == [{"name": "OUTPUT0", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}]
    assert (document["model_name"], document["model_version"], len(document["milliseconds"])) == ("echo", "1", 1)
    assert done.stderr == "note: INPUT0: [4] became [1,4]: the batch dimension was missing\n"


def test_classes_with_labels(url: str) -> None:
    done = run("infer", "echo", "--url", url, "--input", "INPUT0=[[1, 9, 3, 4]]", "--classes", "2")
    rows = [line.split() for line in done.stdout.splitlines()[1:]]
    assert rows == [
        ["OUTPUT", "ROW", "SCORE", "CLASS", "LABEL"],
        ["OUTPUT0", "0", "9", "1", "dog"],
        ["OUTPUT0", "0", "4", "3", "fish"],
    ]
    done = run("infer", "echo", "--url", url, "--input", "INPUT0=[[1, 9, 3, 4]]", "--classes", "1", "--json")
    assert printed_json(done)["outputs"][0]["classes"] == [[{"value": 9.0, "index": 1, "label": "dog"}]]


def test_files_in_and_out(url: str, tmp_path: Path) -> None:
    array = np.arange(8, dtype=np.float32).reshape(2, 4)
    np.save(tmp_path / "in.npy", array)
    target = tmp_path / "out.npy"
    done = run("infer", "echo", "--url", url, "-i", f"INPUT0=@{tmp_path}/in.npy", "-o", f"OUTPUT0=@{target}")
    assert done.returncode == 0, done.stderr
    assert f"wrote {target}" in done.stderr
    np.testing.assert_array_equal(np.load(target), array)
    (tmp_path / "in.raw").write_bytes(array.tobytes())
    (tmp_path / "in.json").write_text(json.dumps(array.tolist()))
    for value in (f"@{tmp_path}/in.raw:fp32:2,4", f"@{tmp_path}/in.json"):
        assert data_of(run("infer", "echo", "--url", url, "-i", f"INPUT0={value}", "--json")) == list(range(8))


def test_text_from_arguments_and_files(url: str, tmp_path: Path) -> None:
    (tmp_path / "photo.jpg").write_bytes(b"some picture")
    for value in ("some picture", '"some picture"', '["some picture"]', f"@{tmp_path}/photo.jpg"):
        done = run(
            "infer", "two", "--url", url, "-i", "ids=[[1, 2]]", "-i", f"text={value}", "-o", "same_text", "--json"
        )
        assert data_of(done) == ["some picture"]
    done = run("infer", "two", "--url", url, "-i", "ids=[[1,2]]", "-i", "text=42", "-o", f"same_text=@{tmp_path}/t.npy")
    assert done.returncode == 0, done.stderr
    assert np.load(tmp_path / "t.npy").tolist() == [b"42"]


def test_an_optional_input_may_be_left_out(url: str) -> None:
    done = run("infer", "two", "--url", url, "-i", "ids=[[1, 2]]", "-o", "same_ids", "--json")
    assert data_of(done) == [1, 2]


@pytest.mark.parametrize(
    ("model", "value", "data"),
    [
        ("uint8", "[[0, 255], [1, 2]]", [0, 255, 1, 2]),
        ("fp16", "[[0.5, 1], [2, 3]]", [0.5, 1, 2, 3]),
        ("bf16", "[[0.5, 1], [2, 3]]", [0.5, 1, 2, 3]),
        ("bool", "[[true, false], [true, true]]", [True, False, True, True]),
        ("int64", "[[9007199254740993, 1], [2, 3]]", [9007199254740993, 1, 2, 3]),
    ],
)
def test_numbers_take_the_models_type(session_server: Program, model: str, value: str, data: list[Any]) -> None:
    assert data_of(run("infer", model, "--url", session_server.url, "-i", f"x={value}", "--json")) == data


@pytest.mark.parametrize(
    ("model", "array", "fits"),
    [
        ("uint8", np.array([[0, 255], [1, 2]], np.int64), True),
        ("uint8", np.array([[0, 256], [1, 2]], np.int64), False),
        ("uint8", np.array([[0, 1.5], [1, 2]]), False),
        ("uint8", np.array([[0, 3.0], [1, 2]]), True),
        ("fp16", np.array([[0.1, 2], [1, 2]]), True),
        ("fp16", np.array([[1e9, 2], [1, 2]]), False),
        ("fp16", np.array([[2049, 2], [1, 2]]), False),
        ("bf16", np.array([[0.5, 2], [1, 2]], np.float32), True),
        ("bool", np.array([[0, 1], [1, 1]]), False),
        ("int64", np.array([["a", "b"], ["c", "d"]]), False),
    ],
)
def test_arrays_are_converted_where_nothing_is_lost(
    session_server: Program, tmp_path: Path, model: str, array: Any, fits: bool
) -> None:
    np.save(tmp_path / "x.npy", array)
    arguments = (model, "--url", session_server.url, "-i", f"x=@{tmp_path}/x.npy")
    if fits:
        done = run("infer", *arguments, "--json")
        np.testing.assert_allclose(data_of(done), array.ravel(), rtol=1e-3)
        assert "the model's type" in done.stderr
    else:
        assert "input 'x' is" in refused(*arguments)


def test_random_inputs_and_how_long_it_takes(url: str) -> None:
    done = run("infer", "echo", "--url", url, "--random", "--repeat", "5")
    assert "5 requests: fastest" in done.stdout
    assert done.stderr == "note: INPUT0: random FP32 [1, 4]\n"
    one, again = (run("infer", "echo", "--url", url, "--random", "--json") for _ in range(2))
    assert data_of(one) == data_of(again)
    done = run("infer", "two", "--url", url, "--random", "-i", "ids=random:3,2", "--json")
    assert [output["shape"] for output in printed_json(done)["outputs"]] == [[3, 2], [1]]


@pytest.mark.parametrize("options", [(), ("--stream",)])
def test_the_results_of_a_decoupled_model_are_streamed(url: str, options: tuple[str, ...]) -> None:
    done = run("infer", "story", "--url", url, "-i", "text=Once upon a time", "--json", *options)
    assert done.returncode == 0, done.stderr
    words = [json.loads(line)["outputs"][0]["data"][0] for line in done.stdout.splitlines()]
    assert words == ["Once", "upon", "a", "time"]


def test_options_for_one_result_are_refused_for_a_decoupled_model(url: str) -> None:
    arguments = ("story", "--url", url, "-i", "text=Once")
    output = refused(*arguments, "--repeat", "2")
    assert "model 'story' is decoupled: it returns any number of results and cannot be combined with --repeat" in output
    assert "model 'story' is decoupled" in refused(*arguments, "-o", "word=@x.npy")


def test_a_server_that_hides_the_configuration_gets_a_hint_at_stream(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def hide(*_: Any, **__: Any) -> Any:
        raise http_error(403, "needs the scope read", "")

    monkeypatch.setattr(Client, "config", hide)
    assert "add --stream" in failed(1, "story", "--url", url, "-i", "text=Once")


def test_headers_are_sent_and_checked(session_server: Program) -> None:
    done = run("infer", "echo", "--url", session_server.url, "--random", "--header", "X-Tenant: blue")
    assert done.returncode == 0, done.stderr
    assert "NAME:VALUE" in refused("echo", "--url", session_server.url, "--random", "--header", "nothing")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((), "model 'echo' takes INPUT0 FP32 [-1,4]; not given: INPUT0"),
        (("-i", "INPUT0"), "write NAME=VALUE, such as INPUT0=@file.npy"),
        (("-i", "INPTU0=[1,2,3,4]"), "no input 'INPTU0' (did you mean 'INPUT0'?); it takes: INPUT0 FP32 [-1,4]"),
        (("-i", "INPUT0=[1,2,3]"), "has shape [3]; model 'echo' takes INPUT0 FP32 [-1,4]"),
        (("-i", "INPUT0=[[1,2],[3]]"), "different lengths; model 'echo' takes INPUT0 FP32 [-1,4]"),
        (("-i", "INPUT0=hello"), "not a number; model 'echo' takes INPUT0 FP32"),
        (("-i", "INPUT0=@none.npy"), "none.npy: No such file or directory"),
        (("-i", "INPUT0=@none.raw:FP32:4"), "none.raw: No such file or directory"),
        (("-i", f"INPUT0=@{__file__}"), ":FP32:SIZES for raw numbers"),
        (("-i", f"INPUT0=@{__file__}:FP32:1,4"), "needs 16 bytes"),
        (("-i", f"INPUT0=@{__file__}:FP99:1,4"), "FP99"),
        (("--random", "-o", "OUTPUT1"), "no output 'OUTPUT1' (did you mean 'OUTPUT0'?); it has: OUTPUT0"),
        (("--random", "-o", "OUTPUT0=file"), "NAME=@file.npy"),
        (("--random", "-o", "OUTPUT0=@/none/x.npy"), "/none/x.npy: No such file or directory"),
        (("--random", "--stream", "--repeat", "2"), "cannot be combined"),
        (("--random", "--stream", "-o", "OUTPUT0=@x.npy"), "cannot be written to files"),
        (("--random", "--key", "k.pem"), "--key needs --cert"),
    ],
)
def test_mistakes_in_one_line(session_server: Program, arguments: tuple[str, ...], text: str) -> None:
    assert text in refused("echo", "--url", session_server.url, *arguments)


def test_files_that_are_not_arrays(session_server: Program, tmp_path: Path) -> None:
    (tmp_path / "empty.npy").write_bytes(b"")
    (tmp_path / "text.npy").write_text("just text")
    (tmp_path / "x.json").write_text("{")
    np.save(tmp_path / "pickled.npy", np.array([{"a": 1}], object), allow_pickle=True)
    for name, text in (
        ("empty.npy", "empty.npy"),
        ("text.npy", "not a .npy"),
        ("pickled.npy", "objects"),
        ("x.json", "JSON"),
    ):
        assert text in refused("echo", "--url", session_server.url, "-i", f"INPUT0=@{tmp_path / name}")


def test_refusals_and_unreachable_servers(url: str) -> None:
    assert "did you mean 'echo'?" in failed(1, "ecko", "--url", url)
    assert "unknown model: 'nothing' is not found; the server has " in failed(1, "nothing", "--url", url)
    assert "version 9 is not found" in failed(1, "echo", "--version", "9", "--url", url, "--random")
    assert "name" in refused("../etc", "--url", url)
    assert "no server answers at http://127.0.0.1:1 (" in refused("echo", "--url", "http://127.0.0.1:1")
    assert "'ftp' is not spoken" in refused("echo", "--url", "ftp://127.0.0.1")


def test_the_process_reports_the_same(session_server: Program) -> None:
    done = run_process("infer", "ecko", "--url", session_server.url)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "error: Request for unknown model: 'ecko' is not found; did you mean 'echo'?\n"


def test_help_has_examples() -> None:
    done = run("infer", "--help")
    assert done.returncode == 0
    assert "headrace infer resnet50" in done.stdout
