# SPDX-License-Identifier: Apache-2.0
"""What a file of PyTorch is, and that nothing in it runs: each canary makes a folder when it is unpickled or called."""

from __future__ import annotations

import io
import json
import logging
import os
import zipfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pytorch_models import (
    NO_SERVICES,
    Canary,
    Scaled,
    archive_of,
    batched_program,
    changed,
    configured,
    open_instance,
    placed,
    records_of,
    saved_state,
    script,
)

from headrace.backends.pytorch import archive as archives
from headrace.backends.pytorch.archive import open_archive
from headrace.backends.pytorch.backend import PyTorchBackend
from headrace.backends.pytorch.exported_program import UnsafeProgram, check_expression, checked_program, keys_of_tree
from headrace.core.errors import FailedPrecondition, HeadraceError, InvalidArgument
from support.malicious_pickle import poisoned_pickle


@cache
def a_script() -> bytes:
    return script(Scaled())


@cache
def a_program() -> bytes:
    return batched_program()


ROWS = {"x": np.ones((2, 4), np.float32)}


def refused(folder: Path, model: bytes, filename: str = "model.pt") -> str:
    """What complete, and load with open, say to it; both must refuse."""
    files = placed(folder, model, filename)
    with pytest.raises((InvalidArgument, FailedPrecondition)):
        PyTorchBackend().complete(configured({}, {}), files)
    with pytest.raises((InvalidArgument, FailedPrecondition)) as caught:
        open_instance(configured(), files)
    return str(caught.value)


@pytest.mark.parametrize(("model", "kind"), [(a_script, "script"), (a_program, "program")], ids=["script", "program"])
@pytest.mark.parametrize("filename", ["model.pt", "model.pt2"])
def test_the_content_determines_the_kind(tmp_path: Path, model: Callable[[], bytes], kind: str, filename: str) -> None:
    files = placed(tmp_path, model(), filename)
    assert open_archive(configured(), files.version_folder / filename).kind == kind
    assert open_instance(configured(), files).compute(ROWS, ["OUTPUT__0"])["OUTPUT__0"].shape == (2, 3)


def test_a_bare_pickle_is_refused_unread(tmp_path: Path) -> None:
    assert "is a pickle" in refused(tmp_path, poisoned_pickle(tmp_path / "canary"))
    assert not (tmp_path / "canary").exists()


def test_a_pickle_without_its_first_byte_is_refused_unread(tmp_path: Path) -> None:
    assert "neither TorchScript nor" in refused(tmp_path, poisoned_pickle(tmp_path / "canary", protocol=0))
    assert not (tmp_path / "canary").exists()


@pytest.mark.parametrize("content", [{"weight": torch.ones(2)}, Scaled()], ids=["state", "module"])
def test_what_torch_save_writes_is_refused(tmp_path: Path, content: Any) -> None:
    text = refused(tmp_path, saved_state(content))
    assert "was written by torch.save" in text
    assert "Save the model again by torch.jit.save or torch.export.save" in text


def test_a_canary_of_torch_save_stays_unset(tmp_path: Path) -> None:
    assert "was written by torch.save" in refused(tmp_path, saved_state(Canary(tmp_path / "canary")))
    assert not (tmp_path / "canary").exists()


@pytest.mark.parametrize("record", ["data.pkl", "constants.pkl"])
def test_a_canary_inside_torchscript_stays_unset(tmp_path: Path, record: str) -> None:
    model = changed(a_script(), "/" + record, lambda _: poisoned_pickle(tmp_path / "canary"))
    files = placed(tmp_path, model)
    with pytest.raises(InvalidArgument, match="cannot read 'model.pt' as TorchScript"):
        open_instance(configured(), files)
    assert not (tmp_path / "canary").exists()


def sample_inputs(folder: Path) -> bytes:
    return changed(a_program(), "sample_inputs/model.pt", lambda _: saved_state(Canary(folder)))


def test_sample_inputs_are_never_read(tmp_path: Path) -> None:
    """torch.export.load unpickles them, whatever they are: shown here, so that the test is known to mean something."""
    canary = tmp_path / "canary"
    logging.getLogger("torch._export.serde.serialize").disabled = True
    try:
        with pytest.raises(Exception):  # noqa: B017  # a folder's None is no sample input; it is made all the same
            torch.export.load(io.BytesIO(sample_inputs(canary)))
    finally:
        logging.getLogger("torch._export.serde.serialize").disabled = False
    assert canary.exists()
    canary.rmdir()
    instance = open_instance(configured(), placed(tmp_path, sample_inputs(canary), "model.pt2"))
    assert instance.compute(ROWS, ["OUTPUT__0"])["OUTPUT__0"].shape == (2, 3)
    assert not canary.exists()


def with_pickled_weight(folder: Path, record: str) -> bytes:
    def pickled(config: bytes) -> bytes:
        described = json.loads(config)
        described["config"]["linear.weight"] = {
            "path_name": record, "is_param": True, "use_pickle": True, "tensor_meta": None
        }  # fmt: skip
        return json.dumps(described).encode()

    part = "constants" if record.startswith(("opaque", "custom", "tensor")) else "weights"
    model = changed(a_program(), f"model_{part}_config.json", pickled)
    records = records_of(model)
    root = next(iter(records)).partition("/")[0]
    content = saved_state(Canary(folder)) if record.startswith(("weight", "tensor")) else poisoned_pickle(folder)
    return archive_of({**records, f"{root}/data/{part}/{record}": content})


@pytest.mark.parametrize("record", ["weight_9", "tensor_0", "opaque_obj_0", "custom_obj_0"])
def test_pickled_weights_are_refused_unread(tmp_path: Path, record: str) -> None:
    canary = tmp_path / "canary"
    files = placed(tmp_path, with_pickled_weight(canary, record), "model.pt2")
    with pytest.raises(InvalidArgument, match="weights that are kept as pickles"):
        open_instance(configured(), files)
    assert not canary.exists()


@pytest.mark.parametrize("record", ["data/weights/model.pt", "data/constants/model.pt"])
def test_weights_of_an_older_pytorch_are_refused_unread(tmp_path: Path, record: str) -> None:
    records = records_of(a_program())
    root = next(iter(records)).partition("/")[0]
    model = archive_of({**records, f"{root}/{record}": saved_state(Canary(tmp_path / "canary"))})
    assert "exported by PyTorch 2.8 or older" in refused(tmp_path, model, "model.pt2")
    old = archive_of({"version": b"8.2", "serialized_exported_program.json": b"{}",
                      "serialized_state_dict.pt": saved_state(Canary(tmp_path / "canary"))})  # fmt: skip
    with pytest.raises(InvalidArgument):
        open_instance(configured(), placed(tmp_path, old, "model.pt2"))
    assert not (tmp_path / "canary").exists()


def described(change: Callable[[dict[str, Any]], None]) -> bytes:
    def apply(text: bytes) -> bytes:
        program = json.loads(text)
        change(program)
        return json.dumps(program).encode()

    return changed(a_program(), "models/model.json", apply)


def call_function(program: dict[str, Any], target: str, text: str) -> None:
    node = program["graph_module"]["graph"]["nodes"][0]
    node["target"] = target
    node["inputs"] = [{"name": "", "arg": {"as_string": text}, "kind": 1}]


@pytest.mark.parametrize(
    "target",
    [
        "torch.os.mkdir", "torch.hub.os.mkdir", "torch.ops.os.mkdir", "torch.load", "torch.utils.cpp_extension.load",
        "torch.ops.aten.from_file.default", "torch.ops.load_library", "_operator.methodcaller", "#ext:op",
        "torch.ops.higher_order.triton_kernel_wrapper_functional", "torch.ops.aten.__class__.default",
        "torch.ops.debugprims.load_tensor.default",
    ],
)  # fmt: skip
def test_a_node_can_only_be_an_operator(tmp_path: Path, target: str) -> None:
    canary = tmp_path / "canary"
    model = described(lambda program: call_function(program, target, str(canary)))
    text = refused(tmp_path, model, "model.pt2")
    assert "has the operator" in text
    assert target in text
    assert not canary.exists()


def test_sizes_are_not_evaluated(tmp_path: Path) -> None:
    canary = tmp_path / "canary"

    def change(program: dict[str, Any]) -> None:
        size = program["graph_module"]["graph"]["tensor_values"]["x"]["sizes"][0]
        size["as_expr"]["expr_str"] = f"__import__('os').mkdir({str(canary)!r})"

    assert "not arithmetic" in refused(tmp_path, described(change), "model.pt2")
    assert not canary.exists()


def test_names_are_not_source(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    harm = f"x=__import__('os').mkdir({str(canary)!r})"

    def rename(program: dict[str, Any]) -> None:
        graph = program["graph_module"]["graph"]
        graph["inputs"][-1]["as_tensor"]["name"] = harm
        graph["tensor_values"][harm] = graph["tensor_values"].pop("x")

    def argument(program: dict[str, Any]) -> None:
        program["graph_module"]["module_call_graph"][0]["signature"]["forward_arg_names"] = [harm]

    def parameter(program: dict[str, Any]) -> None:
        program["graph_module"]["signature"]["input_specs"][0]["parameter"]["parameter_name"] = harm

    for change in (rename, argument, parameter):
        assert "has the name" in refused(tmp_path, described(change), "model.pt2")
    assert not canary.exists()


def test_guards_are_not_executed(tmp_path: Path) -> None:
    canary = tmp_path / "canary"

    def change(program: dict[str, Any]) -> None:
        program["guards_code"] = [f"__import__('os').mkdir({str(canary)!r}) is None"]
        program["graph_module"]["graph"]["nodes"][0]["metadata"]["source_fn_stack"] = "a,torch.os.mkdir"

    instance = open_instance(configured(), placed(tmp_path, described(change), "model.pt2"))
    assert instance.compute(ROWS, ["OUTPUT__0"])["OUTPUT__0"].shape == (2, 3)
    assert not canary.exists()


def test_a_tree_imports_nothing(tmp_path: Path) -> None:
    context = {"default_factory_module": "os", "default_factory_name": "getcwd", "dict_context": []}
    tree = [1, {"type": "collections.defaultdict", "context": json.dumps(context), "children_spec": []}]

    def change(program: dict[str, Any]) -> None:
        program["graph_module"]["module_call_graph"][0]["signature"]["in_spec"] = json.dumps(tree)

    assert "of type 'collections.defaultdict'" in refused(tmp_path, described(change), "model.pt2")


@pytest.mark.parametrize(
    "text",
    ["s0", "2*s0 + 1", "Symbol('s77', positive=True, integer=True)", "FloorDiv(Symbol('s1', integer=True), Integer(2))",
     "Add(Integer(-1), Mul(Integer(2), s0))", "Pow(s0, Integer(2))", "Max(1, s0)", "s0**2", "Eq(s0, 4)",
     "Float('1.5', precision=53)"],
)  # fmt: skip
def test_sizes_are_arithmetic(text: str) -> None:
    check_expression(text)


@pytest.mark.parametrize(
    "text",
    ["__import__('os')", "s0.__class__", "Symbol('__import__(1)')", "eval('1')", "lambda: 1", "[s0]", "s0[0]",
     "9**9**9", "9**(10**10)", "Pow(Pow(9, 64), 64)", "LShift(1, 10**9)", "sympify('1')", "Float('__import__')", "(",
     "Max(*s0)", "Max(1, key=s0)", "(" * 3000, "__builtins__", "Symbol('s0', name=open('x'))"],
)  # fmt: skip
def test_and_nothing_else(text: str) -> None:
    with pytest.raises(UnsafeProgram):
        check_expression(text)


def test_a_description_that_is_none(tmp_path: Path) -> None:
    deep: Any = []
    for _ in range(400):
        deep = [deep]
    for described_as in ([], "text", {"a": deep}):
        with pytest.raises(UnsafeProgram):
            checked_program(described_as)
    for tree in ("", "[]", "[2, {}]", '[1, {"type": "builtins.tuple", "context": "[]", "children_spec": []}]'):
        with pytest.raises(UnsafeProgram):
            keys_of_tree(tree)
    for content in (b"{}", b"[]", b"\xff", b'{"graph_module": 3}', b"null"):
        refused(tmp_path, changed(a_program(), "models/model.json", lambda _, content=content: content), "model.pt2")


class Writes(torch.nn.Module):
    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch.save(x, self.path)
        return x


class Maps(Writes):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.from_file(self.path, shared=True, size=4) + x


@pytest.mark.parametrize("kind", [Writes, Maps])
def test_torchscript_that_touches_files_is_refused(tmp_path: Path, kind: type[Writes]) -> None:
    canary = tmp_path / "canary"
    text = refused(tmp_path, script(kind(str(canary))))
    assert "reaches outside the model" in text
    assert not canary.exists()


@pytest.mark.parametrize(
    "line",
    [
        "    _9 = ops.c10d.barrier(input)",
        "    _9 = ops.prim.rpc_sync(input)",
        "    _9 = ops . profiler . _record_function_enter(input)",
        "    _9 = input.save('x')",
        '    _9 = getattr(torch, "s" "ave")(input, "x")',
        '    _9 = getattr(torch, "s\\141ve")(input, "x")',
        "    _9 = getattr(\n      torch, 'x')",
        "    _9 = __torch__.torch.classes.dist_rpc.WorkerInfo(1)",
    ],
)
def test_unsafe_operator_names_are_found_before_the_file_is_read(tmp_path: Path, line: str) -> None:
    def insert(text: bytes) -> bytes:
        return text.replace(b"    weight = ", line.encode() + b"\n    weight = ")

    # By what is in it: PyTorch changes the name of the layer's file when the process has scripted another one before.
    whole = a_script()
    layer = next(name for name, text in records_of(whole).items() if name.endswith(".py") and b"    weight = " in text)
    model = changed(whole, layer, insert)
    assert "reaches outside the model" in refused(tmp_path, model)


def test_layer_names_do_not_matter(tmp_path: Path) -> None:
    net = torch.nn.Sequential(Scaled(), torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Linear(3, 3)))
    config = configured({"input": (configured().inputs[0].dtype, (4,))})  # type: ignore[dict-item]
    instance = open_instance(config, placed(tmp_path, script(net)))
    assert instance.compute({"input": ROWS["x"]}, ["OUTPUT__0"])["OUTPUT__0"].shape == (2, 3)


def test_a_file_that_is_cut_short_is_named(tmp_path: Path) -> None:
    whole, program = a_script(), a_program()
    for model in (
        b"",
        b"PK\x03\x04",
        b"hello",
        whole[:-30],
        whole[: len(whole) // 2],
        program[: len(program) // 2],
        program[:-1],
    ):
        assert "'model.pt'" in refused(tmp_path, model)


def test_bytes_that_are_wrong_inside_are_an_error_and_not_a_crash(tmp_path: Path) -> None:
    random = np.random.default_rng(3)
    for model, filename in ((a_script(), "model.pt"), (a_program(), "model.pt2")):
        for _ in range(30):
            broken = bytearray(model)
            for place in random.integers(0, len(model), 20):
                broken[place] = random.integers(0, 256)
            try:
                open_instance(configured(), placed(tmp_path, bytes(broken), filename)).compute(ROWS, ["OUTPUT__0"])
            except HeadraceError:
                pass


def test_other_archives_are_refused(tmp_path: Path) -> None:
    assert "neither TorchScript nor" in refused(tmp_path, archive_of({"a/b.txt": b"text"}))
    assert "without a model" in refused(tmp_path, archive_of({"a/archive_format": b"pt2", "a/version": b"1"}))
    without = {name: content for name, content in records_of(a_program()).items() if "models/" not in name}
    assert "without a model" in refused(tmp_path, archive_of(without), "model.pt2")
    folder = placed(tmp_path / "other", None)
    (folder.version_folder / "model.pt").mkdir()
    with pytest.raises(InvalidArgument, match="it must be a file"):
        PyTorchBackend().load(configured(), folder, NO_SERVICES)


def test_a_bomb_is_not_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archives, "MAX_UNPACKED_BYTES", 1 << 20)
    records = records_of(a_script())
    root = next(iter(records)).partition("/")[0]
    bomb = archive_of({**records, f"{root}/code/big.py": b"#" * (2 << 20)}, zipfile.ZIP_DEFLATED)
    assert len(bomb) < 20_000
    assert "unpacks to far more than it holds" in refused(tmp_path, bomb)


def test_an_archive_with_one_name_twice_is_refused(tmp_path: Path) -> None:
    records = records_of(a_script())
    root = next(iter(records)).partition("/")[0]
    assert "read in two ways" in refused(tmp_path, archive_of({**records, f"{root}/DATA.PKL": b"x"}))
    assert "is damaged" in refused(tmp_path, archive_of({**records, "elsewhere/data.pkl": b"x"}))


def test_weights_that_claim_more_than_there_is(tmp_path: Path) -> None:
    def grow(config: bytes) -> bytes:
        weights = json.loads(config)
        weights["config"]["linear.weight"]["tensor_meta"]["sizes"] = [{"as_int": 1 << 40}, {"as_int": 4}]
        return json.dumps(weights).encode()

    files = placed(tmp_path, changed(a_program(), "model_weights_config.json", grow), "model.pt2")
    with pytest.raises(InvalidArgument, match="cannot read 'model.pt2'"):
        open_instance(configured(), files)
    empty = changed(changed(a_program(), "model_weights_config.json", grow), "weights/weight_0", lambda _: b"")
    with pytest.raises(InvalidArgument, match="weights without their numbers"):
        open_instance(configured(), placed(tmp_path, empty, "model.pt2"))


def test_a_compiled_package_needs_leave(tmp_path: Path) -> None:
    """No such package is made here: it must be refused before its library is loaded, so any bytes will do."""
    records = records_of(a_program())
    root = next(iter(records)).partition("/")[0]
    without = {name: content for name, content in records.items() if "models/" not in name}
    model = archive_of({**without, f"{root}/data/aotinductor/model/x.wrapper.so": b"\x7fELF"})
    text = refused(tmp_path, model, "model.pt2")
    assert "can do whatever the server can" in text
    assert "ALLOW_NATIVE_CODE to true" in text
    hidden = archive_of({**records, f"{root}/extra/y.SO": b"\x7fELF"})
    assert "ALLOW_NATIVE_CODE" in refused(tmp_path, hidden, "model.pt2")
    allowed = configured(parameters={"ALLOW_NATIVE_CODE": "true"})
    with pytest.raises(InvalidArgument, match=r"cannot load 'model.pt2'.*compile it here"):
        open_instance(allowed, placed(tmp_path, model, "model.pt2"))


def test_a_missing_file_is_named_with_its_place(tmp_path: Path) -> None:
    with pytest.raises(FailedPrecondition, match=r"no file 'test/1/model\.pt' or 'test/1/model\.pt2'"):
        PyTorchBackend().load(configured(), placed(tmp_path, None), NO_SERVICES)
    with pytest.raises(InvalidArgument, match="name a file inside it"):
        PyTorchBackend().load(
            configured(default_model_filename="../1/model.pt"), placed(tmp_path, a_script()), NO_SERVICES
        )
    assert os.listdir(tmp_path / "test" / "1") == ["model.pt"]
