# SPDX-License-Identifier: Apache-2.0
"""The PyTorch backend computes: every data type, every way to name tensors, errors that say what to do."""

from __future__ import annotations

import gc
import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from pytorch_models import (
    CPU,
    NO_SERVICES,
    Scaled,
    batched_program,
    configured,
    exported,
    open_instance,
    placed,
    script,
    traced,
)

from headrace.backends.contract import ComputeInstance, DeviceComputeInstance, ModelFiles, Placement
from headrace.backends.device_array import TORCH_TYPES
from headrace.backends.pytorch.archive import open_archive
from headrace.backends.pytorch.backend import PyTorchBackend
from headrace.backends.pytorch.instance import CudaInstance
from headrace.backends.pytorch.model_function import plan_of
from headrace.backends.pytorch.settings import settings_of
from headrace.backends.pytorch.torchscript import load_script
from headrace.backends.signature import DEFAULT_MAX_BATCH_SIZE
from headrace.core.dtypes import BF16, BYTES, FP16, FP32, FP64, INT64, DType
from headrace.core.errors import FailedPrecondition, Internal, InvalidArgument, Unimplemented
from headrace.models.config.types import ModelConfig, SequenceBatching, StateSpec

ROWS = np.arange(8, dtype=np.float32).reshape(2, 4)


class Same(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Two(torch.nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x + y, x - y


class Keyed(torch.nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"sum": x + y, "difference": x - y}


class Mapped(torch.nn.Module):
    def forward(self, given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"sum": given["x"] + given["y"]}


class Listed(torch.nn.Module):
    def forward(self, given: list[torch.Tensor]) -> list[torch.Tensor]:
        return [given[0] + given[1], given[0] - given[1]]


class Defaults(torch.nn.Module):
    def forward(
        self, x: torch.Tensor, scale: torch.Tensor | None = None, bias: torch.Tensor | None = None, times: int = 1
    ) -> torch.Tensor:
        if scale is not None:
            x = x * scale
        if bias is not None:
            x = x + bias
        return x * times


class Words(torch.nn.Module):
    def forward(self, words: list[str]) -> tuple[torch.Tensor, list[str]]:
        return torch.tensor([len(word) for word in words]).unsqueeze(1), [word.upper() for word in words]


class InPlace(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(-1, 4).add_(1)


class Counter(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(1, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count.add_(x.sum())
        return self.count


class Picky(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.sum() < 0:
            raise ValueError("secret: only positive sums")
        return torch.linalg.cholesky(x.reshape(2, 2)).reshape(1, 4)


def sample(dtype: DType, shape: tuple[int, ...]) -> Any:
    if dtype.name == "BOOL":
        return (np.arange(np.prod(shape)) % 3 == 0).reshape(shape)
    random = np.random.default_rng(7)
    return random.integers(0, 256, int(np.prod(shape)) * dtype.item_bytes, np.uint8).view(dtype.numpy).reshape(shape)


@pytest.mark.parametrize("dtype", TORCH_TYPES, ids=lambda dtype: dtype.name)
def test_every_data_type_passes_through_unchanged(tmp_path: Path, dtype: DType) -> None:
    config = configured({"x": (dtype, (4,))}, {"OUTPUT__0": (dtype, (4,))})
    instance = open_instance(config, placed(tmp_path, script(Same())))
    assert isinstance(instance, ComputeInstance)
    for given in (sample(dtype, (1, 4)), sample(dtype, (3, 4)), sample(dtype, (0, 4)), sample(dtype, (4, 2)).T):
        given.flags.writeable = False
        answer = instance.compute({"x": given}, ["OUTPUT__0"])["OUTPUT__0"]
        assert answer.dtype == dtype.numpy
        assert answer.shape == given.shape
        assert answer.tobytes() == given.tobytes()
        assert answer.flags.c_contiguous


def test_a_single_number_has_no_dimension(tmp_path: Path) -> None:
    config = configured({"x": (FP32, ())}, {"OUTPUT__0": (FP32, ())}, max_batch_size=0)
    instance = open_instance(config, placed(tmp_path, script(Same())))
    assert instance.compute({"x": np.array(3, np.float32)}, ["OUTPUT__0"])["OUTPUT__0"].shape == ()


NAMES = [("x", "y"), ("INPUT__0", "INPUT__1"), ("first", "second")]


@pytest.mark.parametrize("names", NAMES, ids=["forward", "index", "order"])
@pytest.mark.parametrize("kind", ["script", "program"])
def test_tensors_are_found_by_name_position_or_order(tmp_path: Path, names: tuple[str, str], kind: str) -> None:
    model = script(Two()) if kind == "script" else exported(Two(), [torch.ones(2, 4), torch.ones(2, 4)])
    shape = (2, 4)
    config = configured(
        {names[1]: (FP32, shape), names[0]: (FP32, shape)}
        if names[0] != "first"
        else {names[0]: (FP32, shape), names[1]: (FP32, shape)},
        {"OUTPUT__1": (FP32, shape)},
        max_batch_size=0,
    )
    instance = open_instance(config, placed(tmp_path, model))
    answer = instance.compute({names[0]: ROWS * 3, names[1]: ROWS}, ["OUTPUT__1"])
    assert answer["OUTPUT__1"].tolist() == (ROWS * 2).tolist()


@pytest.mark.parametrize("kind", ["script", "traced", "program"])
def test_a_mapping_names_the_outputs(tmp_path: Path, kind: str) -> None:
    given = [torch.ones(2, 4), torch.ones(2, 4)]
    model = {"script": lambda: script(Keyed()), "traced": lambda: traced(Keyed(), *given),
             "program": lambda: exported(Keyed(), given)}[kind]()  # fmt: skip
    inputs = {"x": (FP32, (2, 4)), "y": (FP32, (2, 4))}
    config = configured(inputs, {"difference": (FP32, (2, 4)), "sum": (FP32, (2, 4))}, 0)
    instance = open_instance(config, placed(tmp_path, model))
    answer = instance.compute({"x": ROWS * 3, "y": ROWS}, ["sum"])
    assert {name: array.tolist() for name, array in answer.items()} == {"sum": (ROWS * 4).tolist()}
    if kind != "program":
        wrong = open_instance(configured(inputs, {"product": (FP32, (2, 4))}, 0), placed(tmp_path, model))
        with pytest.raises(FailedPrecondition, match="does not give output 'product': it gives sum, difference"):
            wrong.compute({"x": ROWS, "y": ROWS}, ["product"])


def test_a_mapping_or_a_list_may_be_the_only_argument(tmp_path: Path) -> None:
    inputs = {"y": (FP32, (4,)), "x": (FP32, (4,))}
    mapped = open_instance(configured(inputs, {"sum": (FP32, (4,))}), placed(tmp_path, script(Mapped())))
    assert mapped.compute({"x": ROWS, "y": ROWS}, ["sum"])["sum"].tolist() == (ROWS * 2).tolist()
    listed_inputs = {"INPUT__1": (FP32, (4,)), "INPUT__0": (FP32, (4,))}
    listed = open_instance(configured(listed_inputs, {"OUTPUT__1": (FP32, (4,))}), placed(tmp_path, script(Listed())))
    answer = listed.compute({"INPUT__0": ROWS * 5, "INPUT__1": ROWS}, ["OUTPUT__1"])
    assert answer["OUTPUT__1"].tolist() == (ROWS * 4).tolist()


def test_arguments_with_defaults_may_be_left_out(tmp_path: Path) -> None:
    files = placed(tmp_path, script(Defaults()))
    outputs = {"OUTPUT__0": (FP32, (4,))}
    alone = open_instance(configured(outputs=outputs), files)
    assert alone.compute({"x": ROWS}, ["OUTPUT__0"])["OUTPUT__0"].tolist() == ROWS.tolist()
    behind = open_instance(configured({"x": (FP32, (4,)), "bias": (FP32, (4,))}, outputs), files)
    answer = behind.compute({"x": ROWS, "bias": ROWS}, ["OUTPUT__0"])["OUTPUT__0"]
    assert answer.tolist() == (ROWS * 2).tolist()
    every = open_instance(configured(dict.fromkeys(("x", "scale", "bias"), (FP32, (4,))), outputs), files)
    answer = every.compute({"x": ROWS, "bias": ROWS}, ["OUTPUT__0"])["OUTPUT__0"]
    assert answer.tolist() == (ROWS * 2).tolist()
    with pytest.raises(InvalidArgument, match="needs input 'x'"):
        every.compute({"bias": ROWS}, ["OUTPUT__0"])
    with pytest.raises(InvalidArgument, match=r"needs an input for argument 'x' of forward\(\)"):
        open_instance(configured({"bias": (FP32, (4,))}, outputs), files)


@pytest.mark.parametrize(
    ("inputs", "outputs", "text"),
    [
        ({"x": 1, "y": 1, "z": 1}, {"OUTPUT__0": 1}, r"has 2 inputs \(x, y\), and its configuration names x, y, z"),
        ({"INPUT__0": 1, "INPUT__2": 1}, {"OUTPUT__0": 1}, "use the names of forward"),
        ({"INPUT__0": 1, "B__0": 1}, {"OUTPUT__0": 1}, "each once"),
        ({"INPUT__0": 1}, {"OUTPUT__0": 1}, "needs an input for argument 'y'"),
        ({"x": 1, "y": 1}, {"OUTPUT__2": 1}, "has 2 outputs, and its configuration names OUTPUT__2"),
    ],
)
def test_names_that_do_not_fit_are_refused(
    tmp_path: Path, inputs: dict[str, int], outputs: dict[str, int], text: str
) -> None:
    config = configured(dict.fromkeys(inputs, (FP32, (4,))), dict.fromkeys(outputs, (FP32, (4,))))
    with pytest.raises(InvalidArgument, match=text):
        open_instance(config, placed(tmp_path, script(Two())))


def test_text_is_a_list_of_strings(tmp_path: Path) -> None:
    files = placed(tmp_path, script(Words()))
    config = configured({"words": (BYTES, (1,))}, {"OUTPUT__0": (INT64, (1,)), "OUTPUT__1": (BYTES, (1,))})
    instance = open_instance(config, files)
    given = np.array([[b"one"], ["zwölf".encode()], [b""]], dtype=object)
    answer = instance.compute({"words": given}, ["OUTPUT__0", "OUTPUT__1"])
    assert answer["OUTPUT__0"].tolist() == [[3], [6], [0]]  # TorchScript counts bytes
    assert answer["OUTPUT__1"].tolist() == [[b"ONE"], ["ZWöLF".encode()], [b""]]
    with pytest.raises(InvalidArgument, match="input 'words' has an element that is not UTF-8"):
        instance.compute({"words": np.array([[b"\xff"]], dtype=object)}, ["OUTPUT__0"])
    with pytest.raises(InvalidArgument, match="text for PyTorch has one dimension"):
        instance.compute({"words": np.array([[b"a", b"b"]], dtype=object)}, ["OUTPUT__0"])
    with pytest.raises(InvalidArgument, match="PyTorch has no tensors of text"):
        open_instance(configured({"x": (BYTES, (4,))}), placed(tmp_path / "other", script(Scaled())))


def test_an_argument_that_no_request_can_carry_is_named(tmp_path: Path) -> None:
    class Times(torch.nn.Module):
        def forward(self, x: torch.Tensor, times: int) -> torch.Tensor:
            return x * times

    with pytest.raises(Unimplemented, match="takes 'times' of type int, which no request can carry"):
        open_instance(configured(), placed(tmp_path, script(Times())))


@pytest.mark.parametrize("kind", ["script", "program"])
def test_a_model_that_writes_to_its_input_gets_a_copy(tmp_path: Path, kind: str) -> None:
    model = script(InPlace()) if kind == "script" else exported(InPlace(), [torch.ones(2, 4)])
    config = configured({"x": (FP32, (2, 4))}, {"OUTPUT__0": (FP32, (2, 4))}, 0)
    instance = open_instance(config, placed(tmp_path, model))
    given = ROWS.copy()
    given.flags.writeable = False
    assert instance.compute({"x": given}, ["OUTPUT__0"])["OUTPUT__0"].tolist() == (ROWS + 1).tolist()
    assert given.tolist() == ROWS.tolist()


@pytest.mark.parametrize("kind", ["script", "program"])
def test_a_model_that_writes_to_itself_is_not_shared(tmp_path: Path, kind: str) -> None:
    model = script(Counter()) if kind == "script" else exported(Counter(), [torch.ones(1, 4)])
    config = configured({"x": (FP32, (1, 4))}, {"OUTPUT__0": (FP32, (1, 4))}, 0)
    version = PyTorchBackend().load(config, placed(tmp_path, model), NO_SERVICES)
    first, second = version.open(CPU), version.open(CPU)
    one = np.ones((1, 4), np.float32)
    kept = first.compute({"x": one}, ["OUTPUT__0"])["OUTPUT__0"]
    assert first.compute({"x": one}, ["OUTPUT__0"])["OUTPUT__0"].tolist() == [[8] * 4]
    assert second.compute({"x": one}, ["OUTPUT__0"])["OUTPUT__0"].tolist() == [[4] * 4]
    assert kept.tolist() == [[4] * 4]


def test_weights_are_shared_by_default(tmp_path: Path) -> None:
    files = placed(tmp_path, script(Scaled()))
    for parameters, shared in (({}, True), ({"ENABLE_WEIGHT_SHARING": "false"}, False)):
        version = PyTorchBackend().load(configured(parameters=parameters), files, NO_SERVICES)
        first, second = version.open(CPU), version.open(CPU)
        assert (first._call is second._call) is shared
        first.close()
        version.close()
        assert second.compute({"x": ROWS}, ["OUTPUT__0"])["OUTPUT__0"].shape == (2, 3)


@pytest.mark.parametrize("kind", ["script", "program"])
def test_instances_compute_side_by_side(tmp_path: Path, kind: str) -> None:
    model = script(Scaled()) if kind == "script" else batched_program()
    version = PyTorchBackend().load(configured(), placed(tmp_path, model), NO_SERVICES)
    instances = [version.open(CPU) for _ in range(4)]
    rows = [np.random.default_rng(seed).random((3, 4), np.float32) for seed in range(4)]
    expected = [instances[0].compute({"x": row}, ["OUTPUT__0"])["OUTPUT__0"].copy() for row in rows]
    wrong: list[int] = []

    def work(index: int) -> None:
        for _ in range(200):
            if not np.allclose(
                instances[index].compute({"x": rows[index]}, ["OUTPUT__0"])["OUTPUT__0"], expected[index]
            ):
                wrong.append(index)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_programs_are_loaded_side_by_side(tmp_path: Path) -> None:
    files = placed(tmp_path, batched_program(), "model.pt2")
    with ThreadPoolExecutor(4) as pool:
        for instance in pool.map(lambda _: open_instance(configured(), files), range(12)):
            assert instance.compute({"x": ROWS}, ["OUTPUT__0"])["OUTPUT__0"].shape == (2, 3)


def test_an_instance_computes_with_its_own_number_of_threads(tmp_path: Path) -> None:
    files = placed(tmp_path, script(Scaled()))
    one = open_instance(configured(), files)
    three = open_instance(configured(parameters={"INTRA_OP_THREAD_COUNT": "3"}), files)
    seen: list[int] = []

    def elsewhere() -> None:
        three.compute({"x": ROWS}, ["OUTPUT__0"])
        seen.append(torch.get_num_threads())

    one.compute({"x": ROWS}, ["OUTPUT__0"])
    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert seen == [3]
    assert torch.get_num_threads() == 1
    three.compute({"x": ROWS}, ["OUTPUT__0"])
    assert torch.get_num_threads() == 3
    one.compute({"x": ROWS}, ["OUTPUT__0"])
    assert torch.get_num_threads() == 1


@pytest.mark.parametrize("kind", ["script", "program"])
def test_a_shape_the_model_refuses_is_the_callers_error(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = script(Scaled()) if kind == "script" else batched_program()
    instance = open_instance(configured(), placed(tmp_path, model))
    with pytest.raises(InvalidArgument, match=r"model 'test' does not accept these inputs: 'x' \[1, 5\]") as caught:
        instance.compute({"x": np.zeros((1, 5), np.float32)}, ["OUTPUT__0"])
    assert "multiplied" not in str(caught.value)
    assert "multiplied" in caplog.text


def test_output_of_a_model_goes_to_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    instance = open_instance(configured(outputs={"OUTPUT__0": (FP32, (4,))}), placed(tmp_path, script(Picky())))
    with pytest.raises(InvalidArgument, match="does not accept these inputs") as caught:
        instance.compute({"x": np.full((1, 4), -1, np.float32)}, ["OUTPUT__0"])
    assert "secret" not in str(caught.value)
    assert "secret" in caplog.text
    with caplog.at_level(logging.ERROR), pytest.raises(Internal, match="the server's log has the details"):
        instance.compute({"x": np.array([[0, 1, 1, 0]], np.float32)}, ["OUTPUT__0"])


def test_an_output_of_another_type_is_named(tmp_path: Path) -> None:
    instance = open_instance(configured(outputs={"OUTPUT__0": (FP64, (3,))}), placed(tmp_path, script(Scaled())))
    with pytest.raises(FailedPrecondition, match="gives output 'OUTPUT__0' as FP32, and its configuration says FP64"):
        instance.compute({"x": ROWS}, ["OUTPUT__0"])


def test_a_program_determines_its_configuration(tmp_path: Path) -> None:
    silent = configured({}, {}, 0)
    message = PyTorchBackend().complete(silent, placed(tmp_path, batched_program(), "model.pt2"))
    assert message.max_batch_size == DEFAULT_MAX_BATCH_SIZE
    assert message.HasField("dynamic_batching")
    assert [(tensor.name, list(tensor.dims)) for tensor in message.input] == [("x", [4])]
    assert [(tensor.name, list(tensor.dims)) for tensor in message.output] == [("OUTPUT__0", [3])]
    fixed = exported(Keyed(), [torch.ones(2, 4, dtype=torch.bfloat16), torch.ones(4, dtype=torch.int64)])
    message = PyTorchBackend().complete(silent, placed(tmp_path, fixed, "model.pt2"))
    assert message.max_batch_size == 0
    kinds = (
        message.DESCRIPTOR.fields_by_name["input"].message_type.fields_by_name["data_type"].enum_type.values_by_number
    )
    assert [(tensor.name, kinds[tensor.data_type].name, list(tensor.dims)) for tensor in message.input] == [
        ("x", "TYPE_BF16", [2, 4]),
        ("y", "TYPE_INT64", [4]),
    ]
    assert [tensor.name for tensor in message.output] == ["sum", "difference"]
    assert PyTorchBackend().complete(configured(), placed(tmp_path, b"not a model")) is None


def test_torchscript_does_not_and_the_error_says_so(tmp_path: Path) -> None:
    with pytest.raises(
        InvalidArgument, match="TorchScript, which does not declare types and shapes: write input and output"
    ):
        PyTorchBackend().complete(configured({}, {}), placed(tmp_path, script(Scaled())))


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (
            configured({"x": (FP16, (4,))}),
            "FP16 in the configuration and FP32 in the model: write data_type: TYPE_FP32",
        ),
        (configured({"x": (FP32, (5,))}), r"shape \[-1, 5\] by the configuration .*correct its dims"),
        (configured(outputs={"y": (FP32, (4,))}), r"output 'y' of model 'test' has shape \[-1, 4\]"),
        (configured({"x": (FP32, (4,))}, max_batch_size=0), r"has shape \[4\] by the configuration and \[-1, 4\]"),
    ],
)
def test_a_configuration_for_another_program_is_refused(tmp_path: Path, config: ModelConfig, text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        open_instance(config, placed(tmp_path, batched_program(), "model.pt2"))


def test_sizes_that_a_program_was_not_exported_for_are_refused(tmp_path: Path) -> None:
    rows = torch.export.Dim("rows", min=2, max=5)
    model = exported(Two(), [torch.ones(3, 4), torch.ones(3, 4)], {"x": {0: rows}, "y": {0: rows}})
    names = {"x": (FP32, (-1, 4)), "y": (FP32, (-1, 4))}
    config = configured(names, {"OUTPUT__0": (FP32, (-1, 4))}, 0)
    instance = open_instance(config, placed(tmp_path, model, "model.pt2"))
    assert instance.compute({"x": ROWS, "y": ROWS}, ["OUTPUT__0"])["OUTPUT__0"].tolist() == (ROWS * 2).tolist()
    with pytest.raises(InvalidArgument, match="dimension 0 of input 'x' has size 1, .* exported for from 2 to 5"):
        instance.compute({"x": ROWS[:1], "y": ROWS[:1]}, ["OUTPUT__0"])
    with pytest.raises(InvalidArgument, match="exported for the size that another input has there, 2"):
        instance.compute({"x": ROWS, "y": np.ones((3, 4), np.float32)}, ["OUTPUT__0"])


class Folded(torch.nn.Module):
    """Sizes that are computed from sizes, and a constant."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, : x.shape[1] // 2] + torch.tensor([0.5]) + x.new_ones(x.shape[0], x.shape[1] // 2)


def test_a_program_may_compute_with_sizes(tmp_path: Path) -> None:
    columns = torch.export.Dim("columns", min=2, max=50) * 2
    model = exported(Folded(), [torch.ones(2, 8)], {"x": {0: torch.export.Dim("rows"), 1: columns}})
    config = configured({"x": (FP32, (-1,))}, {"OUTPUT__0": (FP32, (-1,))})
    instance = open_instance(config, placed(tmp_path, model, "model.pt2"))
    answer = instance.compute({"x": ROWS}, ["OUTPUT__0"])["OUTPUT__0"]
    assert answer.tolist() == (ROWS[:, :2] + 1.5).tolist()


class Branching(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda y: y * 2, lambda y: y - 1, (x,))


def test_a_program_may_branch(tmp_path: Path) -> None:
    model = exported(Branching(), [torch.ones(2, 4)])
    config = configured({"x": (FP32, (2, 4))}, {"OUTPUT__0": (FP32, (2, 4))}, 0)
    instance = open_instance(config, placed(tmp_path, model, "model.pt2"))
    for rows, expected in ((ROWS, ROWS * 2), (-ROWS, -ROWS - 1)):
        assert instance.compute({"x": rows}, ["OUTPUT__0"])["OUTPUT__0"].tolist() == expected.tolist()


def test_a_batch_is_at_most_what_the_program_was_exported_for(tmp_path: Path) -> None:
    rows = torch.export.Dim("rows", max=5)
    files = placed(tmp_path, exported(Scaled(), [torch.ones(2, 4)], {"x": {0: rows}}), "model.pt2")
    assert PyTorchBackend().complete(configured({}, {}, 0), files).max_batch_size == 5
    assert open_instance(configured(max_batch_size=5), files).compute({"x": ROWS}, ["OUTPUT__0"])[
        "OUTPUT__0"
    ].shape == (2, 3)
    with pytest.raises(InvalidArgument, match="exported for at most 5 rows, .*max_batch_size: 6: lower it"):
        open_instance(configured(max_batch_size=6), files)


@pytest.mark.parametrize("kind", ["script", "program"])
@pytest.mark.parametrize(("precision", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_the_precision_is_inside_only(tmp_path: Path, kind: str, precision: str, dtype: Any) -> None:
    net = Scaled()
    model = script(net) if kind == "script" else batched_program(net)
    instance = open_instance(configured(parameters={"precision": precision}), placed(tmp_path, model))
    answer = instance.compute({"x": ROWS}, ["OUTPUT__0"])["OUTPUT__0"]
    assert answer.dtype == np.float32
    with torch.inference_mode():
        exact, rounded = net(torch.from_numpy(ROWS)), net.to(dtype)(torch.from_numpy(ROWS).to(dtype)).float()
    assert np.array_equal(answer, rounded.numpy())
    assert not np.array_equal(answer, exact.numpy())


def test_bf16_is_returned_as_its_bits(tmp_path: Path) -> None:
    config = configured({"x": (BF16, (4,))}, {"OUTPUT__0": (BF16, (3,))})
    net = Scaled().to(torch.bfloat16)
    instance = open_instance(config, placed(tmp_path, script(net)))
    bits = np.array([[0x3F80, 0x4000, 0xBF80, 0]], np.uint16)
    answer = instance.compute({"x": bits}, ["OUTPUT__0"])["OUTPUT__0"]
    expected = net(torch.tensor([[1.0, 2.0, -1.0, 0.0]], dtype=torch.bfloat16)).detach()
    assert answer.tolist() == expected.view(torch.uint16).tolist()


def test_state_is_named_like_inputs_and_outputs(tmp_path: Path) -> None:
    states = SequenceBatching(states=(StateSpec("y", "OUTPUT__1", FP32, (4,)),))
    config = configured({"x": (FP32, (4,))}, {"OUTPUT__0": (FP32, (4,))}, scheduling=states)
    instance = open_instance(config, placed(tmp_path, script(Two())))
    answer = instance.compute({"x": ROWS * 3, "y": ROWS}, ["OUTPUT__0", "OUTPUT__1"])
    assert answer["OUTPUT__1"].tolist() == (ROWS * 2).tolist()


def test_a_gpu_that_is_not_there_is_an_error_and_not_a_slow_cpu(tmp_path: Path) -> None:
    model = PyTorchBackend().load(configured(), placed(tmp_path, script(Scaled())), NO_SERVICES)
    with pytest.raises(FailedPrecondition, match="asks for GPU 63, and PyTorch .* sees .*KIND_CPU"):
        model.open(Placement("test_0_gpu63", "gpu", 63))
    if not torch.cuda.is_available():
        assert PyTorchBackend().usable_gpus(2) == 0


class FakeStream:
    """Stands in for a CUDA stream: counts how often it was waited for."""

    def __init__(self, device: Any) -> None:
        self.waited = 0

    def synchronize(self) -> None:
        self.waited += 1


@pytest.fixture
def gpu_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The steps of a GPU instance on the CPU. What CUDA does by itself is not shown by this."""
    empty = torch.empty

    def unpinned(*size: Any, pin_memory: bool = False, **more: Any) -> Any:
        return empty(*size, **more)

    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch, "empty", unpinned)


def on_fake_gpu(config: ModelConfig, files: ModelFiles) -> CudaInstance:
    archive, settings = open_archive(config, files.version_folder / "model.pt"), settings_of(config)
    call = load_script(config, archive, torch.device("cpu"), settings)
    return CudaInstance(config, call, plan_of(config, call), torch.device("cpu"), settings)


def test_a_gpu_instance_waits_for_its_stream_alone(tmp_path: Path, gpu_steps: None) -> None:
    net = Scaled()
    instance = on_fake_gpu(configured(), placed(tmp_path, script(net)))
    assert isinstance(instance, DeviceComputeInstance)
    with torch.inference_mode():
        expected = net(torch.from_numpy(ROWS)).numpy()
    answer = instance.compute({"x": ROWS}, ["OUTPUT__0"])["OUTPUT__0"]
    assert np.allclose(answer, expected)
    assert instance._stream.waited == 1
    left: Any = instance.compute_on_device({"x": ROWS}, ["OUTPUT__0"])["OUTPUT__0"]
    assert instance._stream.waited == 2
    assert left.shape == (2, 3)
    assert np.allclose(np.asarray(left), expected)
    with pytest.raises(InvalidArgument, match="does not accept these inputs"):
        instance.compute_on_device({"x": ROWS[:, :3]}, ["OUTPUT__0"])
    instance.close()


def test_a_tensor_on_the_device_is_used_without_a_copy_and_not_written_to(tmp_path: Path, gpu_steps: None) -> None:
    config = configured(outputs={"OUTPUT__0": (FP32, (4,))})
    instance = on_fake_gpu(config, placed(tmp_path, script(InPlace())))
    left = instance.compute_on_device({"x": ROWS}, ["OUTPUT__0"])["OUTPUT__0"]
    answer = instance.compute({"x": left}, ["OUTPUT__0"])["OUTPUT__0"]
    assert answer.tolist() == (ROWS + 2).tolist()
    assert np.asarray(left).tolist() == (ROWS + 1).tolist()


@pytest.mark.slow  # quick: test_backend_contract.py, test_unload_gives_everything_back
@pytest.mark.parametrize("sharing", ["true", "false"])
@pytest.mark.parametrize("kind", ["script", "program"])
def test_closing_gives_the_memory_back(tmp_path: Path, kind: str, sharing: str) -> None:
    side = 3600  # 52 MB of weights
    net = torch.nn.Linear(side, side, bias=False)
    model = script(net) if kind == "script" else exported(net, [torch.ones(2, side)])
    files = placed(tmp_path, model)
    config = configured(
        {"input": (FP32, (2, side))}, {"OUTPUT__0": (FP32, (2, side))}, 0, parameters={"ENABLE_WEIGHT_SHARING": sharing}
    )
    rows = np.ones((2, side), np.float32)

    def once() -> int:
        version = PyTorchBackend().load(config, files, NO_SERVICES)
        instance = version.open(CPU)
        instance.compute({"input": rows}, ["OUTPUT__0"])
        instance.close()
        version.close()
        with pytest.raises(FailedPrecondition, match="is closed"):
            instance.compute({"input": rows}, ["OUTPUT__0"])
        return int(psutil.Process().memory_info().rss)

    gc.collect()
    gc.disable()  # closing must do it by itself
    try:
        before = max(once() for _ in range(2))
        after = [once() for _ in range(5)]
    finally:
        gc.enable()
    # One model kept each time would be 250 MB more at the end.
    assert min(after[-2:]) - before < 60e6
