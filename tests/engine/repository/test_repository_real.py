# SPDX-License-Identifier: Apache-2.0
"""The repository with real configurations and real backends: loading, and checking without loading."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from repository_fakes import FakeOpener

from headrace.core.clock import SystemClock
from headrace.core.errors import InvalidArgument
from headrace.engine.repository.check import RepositoryReport, check_repository
from headrace.engine.repository.control import RepositoryControl
from headrace.engine.repository.settings import RepositorySettings

IDENTITY = """
backend: "identity"
max_batch_size: 8
input [ { name: "IN" data_type: TYPE_FP32 dims: [ 4 ] } ]
output [ { name: "OUT" data_type: TYPE_FP32 dims: [ 4 ] } ]
"""

LABELLED = IDENTITY.replace('name: "OUT"', 'name: "OUT" label_filename: "no.txt"')

ENSEMBLE = """
platform: "ensemble"
max_batch_size: 8
input [ { name: "x" data_type: TYPE_FP32 dims: [ 4 ] } ]
output [ { name: "y" data_type: TYPE_FP32 dims: [ 4 ] } ]
ensemble_scheduling {
  step [
    { model_name: "m" input_map { key: "IN" value: "x" } output_map { key: "OUT" value: "between" } },
    { model_name: "m" input_map { key: "IN" value: "between" } output_map { key: "OUT" value: "y" } }
  ]
}
"""


def put(repository: Path, name: str, config: str, *versions: int, files: tuple[str, ...] = ()) -> Path:
    folder = repository / name
    folder.mkdir(parents=True)
    if config:
        (folder / "config.pbtxt").write_text(config)
    for version in versions:
        (folder / str(version)).mkdir()
        for file in files:
            (folder / str(version) / file).write_text("")
    return folder


def lines(report: RepositoryReport) -> list[str]:
    return [str(problem) for problem in report.problems]


def test_real_configurations_are_loaded(tmp_path: Path) -> None:
    async def main() -> None:
        put(tmp_path, "m", IDENTITY + "version_policy { all {} }", 1, 2)
        put(tmp_path, "pipeline", ENSEMBLE)
        opener = FakeOpener()
        settings = RepositorySettings(mode="explicit", load_models=("pipeline",))
        control = RepositoryControl([tmp_path], opener, settings, SystemClock())
        await control.start()
        try:
            assert control.ready()
            loaded = control.directory.find("m")
            assert loaded is not None
            config = loaded.config
            assert (config.backend, config.max_batch_size, config.inputs[0].dims) == ("identity", 8, (4,))
            assert list(control.directory.models["m"].versions) == ["1", "2"]
            assert control.directory.find("pipeline", "1") is not None
            await control.unload("m")
            assert control.directory.models == {}
            await control.load("m", '{"backend": "identity", "max_batch_size": 2, "input": [{"name": "IN", "data_type": '
                               '"TYPE_FP32", "dims": [4]}], "output": [{"name": "OUT", "data_type": "TYPE_FP32", '
                               '"dims": [4]}]}')  # fmt: skip
            # The ensemble allows 8, its model now only 2.
            await control.settled()
            assert control.directory.find("pipeline") is None
            state = control.state_of("pipeline", 1)
            assert state is not None and "only allows maximum batch size to be 2" in state.reason
            with pytest.raises(InvalidArgument, match="failed to load 'm', .*config of the request"):
                await control.load("m", '{"backend": 7}')
            assert control.directory.find("m") is not None
        finally:
            await control.close(5)

    asyncio.run(main())


def test_a_sound_repository_has_no_problems(tmp_path: Path) -> None:
    put(tmp_path, "m", IDENTITY, 1)
    put(tmp_path, "pipeline", ENSEMBLE)
    report = check_repository(tmp_path)
    assert report.models == ("m", "pipeline")
    assert lines(report) == []
    assert report.warnings == ()


@pytest.mark.parametrize(
    ("config", "versions", "files", "text"),
    [
        (IDENTITY, (), (), "m: model 'm' has no version: make a folder m/1 with the model file"),
        (IDENTITY.replace("[ 4 ]", "[ 4"), (1,), (), "m/config.pbtxt:"),
        (IDENTITY + "version_policy { specific { versions: [ 7 ] } }", (1, 2), (), "none of the versions that are there: 1"),
        (IDENTITY.replace('"identity"', '"onnxruntime"'), (1,), ("model.pt",), "m/1: has no model.onnx, but model.pt: put"),
        ('backend: "python" default_model_filename: "main.py"', (1,), ("model.py",), "m/1: found model.py, expected main"),
        (IDENTITY.replace('"identity"', '"abacus"'), (1,), (), "backend: backend 'abacus' is not known: use one of"),
        (LABELLED, (1,), (), "'no.txt' is not a file in the model's folder"),
        (ENSEMBLE, (1,), (), "step 0 is the ensemble itself"),
        ("", (1,), ("weights.xyz",), "no backend is given for model 'm'"),
    ],
)  # fmt: skip
def test_each_mistake_is_named(
    tmp_path: Path, config: str, versions: tuple[int, ...], files: tuple[str, ...], text: str
) -> None:
    put(tmp_path, "m", config, *versions, files=files)
    found = lines(check_repository(tmp_path))
    assert any(text in line for line in found), found


def test_all_mistakes_of_all_models_are_reported_together(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    put(one, "m", IDENTITY.replace("TYPE_FP32", "TYPE_INT32"), 1)
    put(one, "pipeline", ENSEMBLE)
    put(one, "typo", ENSEMBLE.replace('"m"', '"nn"'))
    put(one, "twice", IDENTITY, 1)
    put(two, "twice", IDENTITY, 1)
    put(two, "none", IDENTITY)
    put(two, "a", ENSEMBLE.replace('"m"', '"b"').replace('"IN"', '"x"').replace('"OUT"', '"y"'))
    put(two, "b", ENSEMBLE.replace('"m"', '"a"').replace('"IN"', '"x"').replace('"OUT"', '"y"'))
    (two / "notes").mkdir()
    (two / "none" / "backup").mkdir()
    report = check_repository(one, two)
    text = "\n".join(lines(report))
    assert (
        "pipeline/config.pbtxt:6: ensemble_scheduling: tensor 'x' is FP32 as input of 'pipeline' and INT32 as" in text
    )
    assert "model 'nn' is not in the repository; there are a, b, m" in text
    assert f"model 'twice' is in two repositories, {one / 'twice'} and {two / 'twice'}; remove one" in text
    assert "model 'none' has no version" in text
    assert "ensembles use each other in a circle: a -> b -> a" in text
    assert {problem.path for problem in report.warnings} == {"notes", "none/backup"}


def test_a_backend_that_cannot_run_here_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ImportError("libcudart.so.12: cannot open shared object file")

    monkeypatch.setattr("headrace.engine.repository.check.backend_named", missing)
    put(tmp_path, "m", 'backend: "onnxruntime"', 1, files=("model.onnx",))
    report = check_repository(tmp_path)
    assert lines(report) == []
    assert "its backend cannot be used here: ImportError('libcudart" in str(report.warnings[0])


def test_a_file_that_the_backend_cannot_read_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def complete(self, config: object, files: object) -> None:
            raise ValueError("not a protobuf")

        def usable_gpus(self, present: int) -> int:
            return present

    monkeypatch.setattr("headrace.engine.repository.check.backend_named", lambda name: Broken())
    put(tmp_path, "m", 'backend: "onnxruntime"', 1, files=("model.onnx",))
    assert lines(check_repository(tmp_path)) == ["m/1: the model cannot be read: ValueError('not a protobuf')"]
