# SPDX-License-Identifier: Apache-2.0
"""What a configuration says to TensorFlow."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tensorflow_models import CPU, NO_SERVICES, TensorFlowBackend, configured, identity, placed

from headrace.backends.contract import Placement
from headrace.core.errors import InvalidArgument, Unimplemented
from headrace.models.config.messages import new_config
from support.late_imports import late

pytestmark = pytest.mark.worker("frameworks")

settings = late("headrace.backends.tensorflow.session")
GPU = Placement("test_0_gpu1", "gpu", 1)


def session_config(placement: Placement = CPU, **parameters: str) -> Any:
    return settings.session_config(configured(parameters=parameters), placement)


def optimised(level: int = 0, accelerator: str = "", placement: Placement = CPU) -> Any:
    proto = new_config(name="test")
    proto.optimization.graph.level = level
    if accelerator:
        proto.optimization.execution_accelerators.gpu_execution_accelerator.add(name=accelerator)
    return settings.session_config(configured(proto=proto), placement).graph_options


def test_an_instance_computes_in_the_thread_that_calls_it() -> None:
    config = session_config()
    assert config.intra_op_parallelism_threads == 1
    assert config.inter_op_parallelism_threads == -1
    assert config.device_count["GPU"] == 0
    assert config.allow_soft_placement


def test_parameters_have_tritons_names() -> None:
    config = session_config(TF_NUM_INTRA_THREADS="3", TF_NUM_INTER_THREADS="2", TF_USE_PER_SESSION_THREADS="yes")
    assert config.intra_op_parallelism_threads == 3
    assert config.inter_op_parallelism_threads == 2
    assert config.use_per_session_threads
    every = session_config(TF_NUM_INTRA_THREADS="0", TF_NUM_INTER_THREADS="0")
    assert (every.intra_op_parallelism_threads, every.inter_op_parallelism_threads) == (0, 0)


def test_gpu_memory_is_not_allocated_all_at_start() -> None:
    config = session_config(GPU)
    assert config.gpu_options.allow_growth
    assert "GPU" not in config.device_count


@pytest.mark.parametrize(
    ("parameters", "text"),
    [
        ({"TF_NUM_INTRA_THREADS": "many"}, "TF_NUM_INTRA_THREADS is 'many': use a whole number from 0 to 1024"),
        ({"TF_NUM_INTER_THREADS": "-1"}, "TF_NUM_INTER_THREADS is '-1'"),
        ({"MAX_SESSION_SHARE_COUNT": "x"}, "MAX_SESSION_SHARE_COUNT is 'x'"),
        ({"allow_file_operators": "maybe"}, "allow_file_operators is 'maybe': use 1 or 0"),
    ],
)
def test_nonsense_is_refused_before_the_model_is_read(tmp_path: Path, parameters: dict[str, str], text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        TensorFlowBackend().load(configured(parameters=parameters), placed(tmp_path, identity()), NO_SERVICES)


def test_the_levels_of_optimisation() -> None:
    assert optimised(-1).rewrite_options.disable_meta_optimizer
    assert optimised(-1).optimizer_options.opt_level == -1
    assert optimised(0).optimizer_options.global_jit_level == 0
    assert not optimised(0).rewrite_options.disable_meta_optimizer
    assert optimised(1).optimizer_options.global_jit_level == 1
    assert optimised(7).optimizer_options.global_jit_level == 2


def test_accelerators() -> None:
    assert optimised(accelerator="auto_mixed_precision", placement=GPU).rewrite_options.auto_mixed_precision == 1
    assert optimised(accelerator="gpu_io", placement=GPU).rewrite_options.auto_mixed_precision == 0
    assert optimised(accelerator="tensorrt").rewrite_options.auto_mixed_precision == 0
    with pytest.raises(Unimplemented, match=r"tensorrt, which TensorFlow .* has no longer"):
        optimised(accelerator="tensorrt", placement=GPU)
    with pytest.raises(InvalidArgument, match="'magic' is not known: use auto_mixed_precision"):
        optimised(accelerator="magic", placement=GPU)


PROGRAM = """
import sys
import numpy as np, psutil
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from tensorflow_models import configured, graph, open_instance, placed, tf, v1, FP32
side = 500
def build():
    x = v1.placeholder(tf.float32, [None, side], name="X")
    for _ in range(6):
        x = tf.matmul(x, np.eye(side, dtype=np.float32))
    tf.identity(x, name="Y")
files = placed(Path(sys.argv[2]), graph(build))
rows = {"X": np.ones((side, side), np.float32)}
instances = []
def running():
    return {each.id for each in psutil.Process().threads()}
for threads in ("1", "1", "3"):
    before = running()
    config = configured({"X": (FP32, (side,))}, {"Y": (FP32, (side,))}, parameters={"TF_NUM_INTRA_THREADS": threads})
    instances.append(open_instance(config, files))
    instances[-1].compute(rows, ["Y"])
    print(len(running() - before))
"""


@pytest.mark.slow  # quick: what the session is told, above
def test_each_instance_has_the_configured_threads_and_tensorflow_is_silent(tmp_path: Path) -> None:
    """In a process of its own: whether sessions have their own threads is decided by TensorFlow's first."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("TF_")}
    environment["PYTHONPATH"] = str(Path(__file__).parents[1])
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(Path(__file__).parent), str(tmp_path)],
        capture_output=True,
        text=True,
        env=environment,
        check=True,
        timeout=100,
    )
    _, one, three = map(int, ran.stdout.split())  # the first starts TensorFlow's own threads too
    assert (one, three) == (1, 3)
    # Builds for GPUs complain where there is none, as errors; what is only informative is not said.
    # The build for x86-64 says two such lines while it is imported, whatever its level is.
    at_import = ("port.cc", "cudart_stub.cc")
    outputs = [line for line in ran.stderr.splitlines() if not any(place in line for place in at_import)]
    assert not [line for line in outputs if line.startswith("I0000")]
