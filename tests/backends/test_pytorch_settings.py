# SPDX-License-Identifier: Apache-2.0
"""What a configuration says to PyTorch."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from pytorch_models import Scaled, configured, open_instance, placed, script

from headrace.backends.pytorch import settings as torch_settings
from headrace.backends.pytorch.settings import Settings, apply_to_process, settings_of
from headrace.core.errors import InvalidArgument


def settings(**parameters: str) -> Settings:
    return settings_of(configured(parameters=parameters))


def test_an_instance_computes_with_one_thread_and_shared_weights() -> None:
    usual = settings()
    assert usual == Settings()
    assert usual.threads == 1
    assert usual.inference_mode and usual.optimized and usual.share_weights
    assert not usual.native_code
    assert usual.precision is None


def test_parameters_have_tritons_names() -> None:
    given = settings(
        INTRA_OP_THREAD_COUNT="3",
        INTER_OP_THREAD_COUNT="2",
        INFERENCE_MODE="false",
        DISABLE_OPTIMIZED_EXECUTION="true",
        ENABLE_WEIGHT_SHARING="false",
        ENABLE_CACHE_CLEANING="true",
        DISABLE_CUDNN="true",
        ENABLE_JIT_EXECUTOR="false",
        ENABLE_JIT_PROFILING="true",
        ALLOW_NATIVE_CODE="true",
        precision="BF16",
        somebody_elses="x",
    )
    assert given == Settings(3, 2, False, False, False, True, False, False, True, torch.bfloat16, True)
    assert settings(INTRA_OP_THREAD_COUNT="0").threads == os.cpu_count()


@pytest.mark.parametrize(
    ("key", "value"),
    [("INTRA_OP_THREAD_COUNT", "many"), ("INTER_OP_THREAD_COUNT", "-1"), ("INTRA_OP_THREAD_COUNT", "²")],
)
def test_a_parameter_that_is_not_a_number_is_refused_by_name(key: str, value: str) -> None:
    with pytest.raises(InvalidArgument, match=f"parameter {key} is '{value}': use a whole number from 0 to"):
        settings(**{key: value})


@pytest.mark.parametrize("key", ["INFERENCE_MODE", "DISABLE_OPTIMIZED_EXECUTION", "ALLOW_NATIVE_CODE"])
def test_a_switch_is_true_or_false(key: str) -> None:
    with pytest.raises(InvalidArgument, match=f"parameter {key} is 'maybe': use true or false"):
        settings(**{key: "maybe"})


def test_an_unknown_precision_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="parameter precision is 'int8': use one of fp32, bf16, fp16"):
        settings(precision="int8")


def test_settings_removed_from_pytorch_are_logged_and_ignored(caplog: pytest.LogCaptureFixture) -> None:
    assert settings(ENABLE_NVFUSER="true", ENABLE_TENSOR_FUSER="x") == Settings()
    assert "ignoring parameter ENABLE_NVFUSER" in caplog.text


def test_process_wide_switches_are_logged(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    called: list[tuple[str, bool]] = []
    inside = torch_settings.torch._C
    monkeypatch.setattr(inside, "_jit_set_profiling_executor", lambda on: called.append(("executor", on)))
    monkeypatch.setattr(inside, "_jit_set_profiling_mode", lambda on: called.append(("profiling", on)))
    apply_to_process(configured(), settings(ENABLE_JIT_EXECUTOR="false", ENABLE_JIT_PROFILING="true"))
    assert called == [("executor", False), ("profiling", True)]
    assert "ENABLE_JIT_EXECUTOR is set for all models of this process" in caplog.text

    def too_late(count: int) -> None:
        raise RuntimeError("cannot set number of interop threads after parallel work has started")

    monkeypatch.setattr(torch, "set_num_interop_threads", too_late)
    apply_to_process(configured(), settings(INTER_OP_THREAD_COUNT="9"))
    assert "ignoring INTER_OP_THREAD_COUNT" in caplog.text


@pytest.mark.parametrize(
    "parameters",
    [{"INFERENCE_MODE": "false"}, {"DISABLE_OPTIMIZED_EXECUTION": "true"}],
    ids=lambda item: next(iter(item)),
)
def test_every_way_to_run_computes_the_same(tmp_path: Path, parameters: dict[str, str]) -> None:
    net = Scaled()
    rows = np.ones((2, 4), np.float32)
    instance = open_instance(configured(parameters=parameters), placed(tmp_path, script(net)))
    answer = instance.compute({"x": rows}, ["OUTPUT__0"])["OUTPUT__0"]
    assert np.allclose(answer, net(torch.from_numpy(rows)).detach().numpy())
