# SPDX-License-Identifier: Apache-2.0
"""Ensembles and the models they use: order, failure, coming and going."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest
from repository_fakes import RepositoryFixture, put_model, put_version

from headrace.core.dtypes import FP32, INT32
from headrace.core.errors import FailedPrecondition, InvalidArgument
from headrace.engine.repository.ensemble_dependencies import ensemble_problems
from headrace.models.config.types import EnsembleScheduling, EnsembleStep, InputSpec, ModelConfig, OutputSpec


def test_an_ensemble_is_loaded_after_the_models_it_uses(tmp_path: Path) -> None:
    async def main() -> None:
        put_model(tmp_path, "a_first", steps=["y", "z"])
        put_model(tmp_path, "inner", steps=["y"])
        put_model(tmp_path, "y", 1)
        put_model(tmp_path, "z", 1)
        fixture = RepositoryFixture(tmp_path, model_load_thread_count=1)
        async with fixture:
            opened = [line for line in fixture.opener.log if line.startswith("opened")]
            assert opened.index("opened a_first/1") > max(opened.index("opened y/1"), opened.index("opened z/1"))
            assert opened.index("opened inner/1") > opened.index("opened y/1")
            assert fixture.control.ready()

    asyncio.run(main())


def test_a_failed_step_fails_the_ensemble_and_its_reload_restores_it(tmp_path: Path) -> None:
    async def main() -> None:
        put_model(tmp_path, "e", steps=["m"])
        folder = put_model(tmp_path, "m", 1)
        fixture = RepositoryFixture(tmp_path)
        fixture.opener.failures["m/1"] = InvalidArgument("weights are missing")
        async with fixture:
            assert fixture.states("e") == [
                "1 UNAVAILABLE ensemble 'e' depends on 'm' which has no loaded version: weights are missing"
            ]
            fixture.opener.failures.clear()
            put_version(folder, 1, "whole weights")
            await fixture.poll()
            assert fixture.states("e") == ["1 READY"]
            shutil.rmtree(folder)
            await fixture.poll()
            assert fixture.served("e") == []
            assert fixture.states("e") == ["1 UNAVAILABLE ensemble 'e' depends on 'm' which has no loaded version"]
            assert not fixture.control.ready()
            put_model(tmp_path, "m", 1)
            await fixture.poll()
            assert fixture.served("e") == ["1"] and fixture.control.ready()

    asyncio.run(main())


def test_a_step_that_reloads_does_not_disturb_the_ensemble(tmp_path: Path) -> None:
    async def main() -> None:
        put_model(tmp_path, "e", steps=["m"])
        folder = put_model(tmp_path, "m", 1)
        async with RepositoryFixture(tmp_path) as fixture:
            ensemble = fixture.newest("e")
            put_version(folder, 2)
            await fixture.poll()
            assert fixture.newest("e") is ensemble and not ensemble.retired

    asyncio.run(main())


@pytest.mark.parametrize("mode", ["none", "explicit"])
def test_ensembles_in_a_circle_fail_and_do_not_wait_for_ever(tmp_path: Path, mode: str) -> None:
    async def main() -> None:
        put_model(tmp_path, "a", steps=["b"])
        put_model(tmp_path, "b", steps=["c"])
        put_model(tmp_path, "c", steps=["a"])
        put_model(tmp_path, "self", steps=["self"])
        async with RepositoryFixture(tmp_path, mode=mode, load_models=("*",)) as fixture:
            reasons = " ".join(" ".join(fixture.states(name)) for name in ("a", "b", "c"))
            assert "ensembles use each other in a circle: " in reasons
            assert "circle: self -> self" in fixture.states("self")[0]
            assert fixture.opener.log == []

    asyncio.run(main())


def test_an_unknown_step_is_named(tmp_path: Path) -> None:
    async def main() -> None:
        put_model(tmp_path, "e", steps=["typo"])
        async with RepositoryFixture(tmp_path, mode="explicit") as fixture:
            with pytest.raises(
                FailedPrecondition, match="failed to load 'e', ensemble 'e' depends on 'typo' which has no"
            ):
                await fixture.control.load("e")

    asyncio.run(main())


def test_loading_an_ensemble_loads_its_models_and_unloading_unloads_them_on_request(tmp_path: Path) -> None:
    async def main() -> None:
        put_model(tmp_path, "e", steps=["x", "shared"])
        put_model(tmp_path, "f", steps=["shared"])
        for name in ("x", "shared"):
            put_model(tmp_path, name, 1)
        async with RepositoryFixture(tmp_path, mode="explicit") as fixture:
            await fixture.control.load("e")
            assert sorted(fixture.control.directory.models) == ["e", "shared", "x"]
            await fixture.control.unload("e")
            assert sorted(fixture.control.directory.models) == ["shared", "x"]
            await fixture.control.load("e")
            await fixture.control.load("f")
            await fixture.control.unload("e", unload_dependents=True)
            assert sorted(fixture.control.directory.models) == ["f", "shared"]
            await fixture.control.unload("f", unload_dependents=True)
            assert fixture.control.directory.models == {}
            assert fixture.control.ready()

    asyncio.run(main())


def model(name: str, batch: int = 0, **changes: object) -> ModelConfig:
    inputs = (InputSpec("IN", FP32, (4,)), InputSpec("EXTRA", FP32, (1,), optional=True))
    whole = {"inputs": inputs, "outputs": (OutputSpec("OUT", FP32, (-1,)),), "max_batch_size": batch} | changes
    return ModelConfig(name, "fake", **whole)  # type: ignore[arg-type]


def ensemble(batch: int = 0, dtype: object = FP32, dims: tuple[int, ...] = (4,), **maps: str) -> ModelConfig:
    taken = {key: value for key, value in maps.items() if value.startswith("in")} or {"IN": "in"}
    given = {key: value for key, value in maps.items() if value.startswith("out")} or {"OUT": "out"}
    return ModelConfig(
        "e",
        "ensemble",
        max_batch_size=batch,
        inputs=(InputSpec("in", dtype, dims),),  # type: ignore[arg-type]
        outputs=(OutputSpec("out", FP32, (2,)),),
        scheduling=EnsembleScheduling((EnsembleStep("m", -1, taken, given),)),
    )


@pytest.mark.parametrize(
    ("config", "step", "problem"),
    [
        (ensemble(), model("m"), ""),
        (ensemble(batch=4), model("m", batch=8), ""),
        (ensemble(dims=(-1, 4)), model("m", batch=8), "tensor 'out' is [-1, -1] as output 'OUT' of 'm' and [2] as"),
        (ensemble(batch=8), model("m", batch=4), "allows maximum batch size 8, but it contains model 'm' which only"),
        (ensemble(dtype=INT32), model("m"), "tensor 'in' is INT32 as input of 'e' and FP32 as input 'IN' of 'm'"),
        (ensemble(dims=(5,)), model("m"), "tensor 'in' is [5] as input of 'e' and [4] as input 'IN' of 'm'"),
        (ensemble(dims=(2, 2)), model("m"), "tensor 'in' is [2, 2] as input"),
        (
            ensemble(WRONG="in"),
            model("m"),
            "step 'm': input_map names 'WRONG', but model 'm' has no such input; it has",
        ),
        (ensemble(WRONG="in"), model("m"), "step 'm': its input 'IN' is not in the input_map"),
        (ensemble(WRONG="out"), model("m"), "step 'm': output_map names 'WRONG', but model 'm' has no such output"),
        (ensemble(dtype=None), model("m", inputs=(InputSpec("IN", None, None),)), ""),
    ],
)
def test_steps_must_fit_their_models(config: ModelConfig, step: ModelConfig, problem: str) -> None:
    problems = ensemble_problems(config, lambda _: step)
    if problem:
        assert any(problem in text for text in problems), problems
    else:
        assert problems == []
    assert ensemble_problems(config, lambda _: None) == []
