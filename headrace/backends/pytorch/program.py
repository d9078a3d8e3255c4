# SPDX-License-Identifier: Apache-2.0
"""Opens exported programs, and reads their inputs and outputs without opening them.

Called by `backends.pytorch.backend`. In place of `torch.export.load`, which runs code of its file (`program_check` says
where), the parts of the archive are read here one by one: the description, checked; the weights, whose bytes become
tensors; no sample inputs, and nothing that is kept as a pickle.
"""

from __future__ import annotations

import json
import logging
import math
import threading
from typing import Any

import torch
from torch._export.serde import schema
from torch._export.serde.serialize import ExportedProgramDeserializer, _dict_to_dataclass
from torch.fx import Node
from torch.fx.graph import CodeGen

from headrace.backends.pytorch.archive import Archive
from headrace.backends.pytorch.calls import Argument, Call, Outputs, Ports, Range
from headrace.backends.pytorch.dtypes import DTYPES_BY_NUMBER, TORCH_BY_NUMBER
from headrace.backends.pytorch.program_check import NotPlain, checked_program, keys_of_tree
from headrace.backends.pytorch.settings import Settings
from headrace.backends.signature import Port
from headrace.core.errors import FailedPrecondition, HeadraceError, InvalidArgument
from headrace.models.config.types import ModelConfig

log = logging.getLogger("headrace.backends")

_ONE_AT_A_TIME = threading.Lock()
"""PyTorch keeps the program that it is reading in a variable of its module, and fails when there is one already."""

_STRIDED = 7  # schema.Layout.Strided


def read_ports(config: ModelConfig, archive: Archive) -> tuple[Ports, tuple[Range, ...]]:
    """The inputs and outputs and the limits of their sizes, from the description alone."""
    described = _described(config, archive)
    try:
        return _ports(described), _ranges(described)
    except (KeyError, TypeError, IndexError, ValueError, AttributeError, NotPlain):
        raise _unreadable(config, archive) from None


def load_program(config: ModelConfig, archive: Archive, device: torch.device, settings: Settings) -> Call:
    """Read the program onto a device."""
    described = _described(config, archive)
    try:
        ports, outputs, ranges = _ports(described), _outputs(described), _ranges(described)
        weights = _tensors(archive, "data/weights/", "model_weights_config.json")
        constants = _tensors(archive, "data/constants/", "model_constants_config.json")
        description = _dict_to_dataclass(schema.ExportedProgram, described)
        with _ONE_AT_A_TIME:
            program = ExportedProgramDeserializer().deserialize(description, weights, constants, None)
            module = _on_device(program, device, settings)
    except NotPlain as found:
        raise _poisoned(config, archive, found) from None
    except HeadraceError:
        raise
    except torch.OutOfMemoryError:
        raise FailedPrecondition(
            f"model '{config.name}': {device} has not enough free memory for the weights of '{archive.file.name}'"
        ) from None
    except Exception:
        log.exception("model %s: %s could not be read", config.name, archive.file)
        raise _unreadable(config, archive) from None
    written = {root.op for node in module.graph.nodes for root in _written_by(node)}
    return Call(
        # Past `Module.__call__`: its hooks check again what the signature has settled.
        function=module.forward,
        arguments=tuple(Argument(port.name) for port in ports.inputs),
        outputs=outputs,
        signature=ports,
        ranges=ranges,
        writes_inputs="placeholder" in written,
        writes_itself="get_attr" in written,
        release=lambda: _release([*weights.values(), *constants.values(), *module.parameters(), *module.buffers()]),
    )


def _described(config: ModelConfig, archive: Archive) -> dict[str, Any]:
    if "models/model.json" not in archive.sizes:
        raise InvalidArgument(
            f"model '{config.name}': '{archive.file.name}' has no program called 'model': save one program by "
            "torch.export.save"
        )
    if "data/weights/model.pt" in archive.sizes or "data/constants/model.pt" in archive.sizes:
        raise InvalidArgument(
            f"model '{config.name}': '{archive.file.name}' was exported by PyTorch 2.8 or older, which kept weights as "
            "pickles: load it there and save it by torch.export.save of a newer PyTorch"
        )
    try:
        described = json.loads(archive.read("models/model.json"))
        return checked_program(described)
    except NotPlain as found:
        raise _poisoned(config, archive, found) from None
    except (ValueError, RecursionError):
        log.exception("model %s: %s could not be read", config.name, archive.file)
        raise _unreadable(config, archive) from None


def _tensors(archive: Archive, folder: str, directory: str) -> dict[str, Any]:
    """Weights or constants by their names, those that share memory sharing it."""
    listed = json.loads(archive.read(folder + directory))["config"]
    flat: dict[str, Any] = {}
    tensors: dict[str, Any] = {}
    for name, payload in listed.items():
        meta, path = payload["tensor_meta"], payload["path_name"]
        if payload.get("use_pickle") or meta is None:
            raise NotPlain("weights that are kept as pickles")
        if path.startswith(("custom_obj", "opaque_obj")):
            raise NotPlain("a native object")
        dtype = TORCH_BY_NUMBER[meta["dtype"]]
        sizes, strides = _numbers(meta["sizes"]), _numbers(meta["strides"])
        if meta["layout"] != _STRIDED:
            raise NotPlain("weights that are not dense")
        if path not in flat:
            flat[path] = _flat(archive, folder + path, dtype, sizes)
        (offset,) = _numbers([meta["storage_offset"]])
        tensor = torch.as_strided(flat[path], sizes, strides, offset)
        tensors[name] = torch.nn.Parameter(tensor, requires_grad=False) if payload.get("is_param") else tensor
    return tensors


def _flat(archive: Archive, record: str, dtype: Any, sizes: list[int]) -> Any:
    length = archive.sizes[record]
    if length == 0:
        if math.prod(sizes):
            raise NotPlain("weights without their numbers")
        return torch.empty(0, dtype=dtype)
    if length % dtype.itemsize:
        raise NotPlain("weights that are cut short")
    raw = archive.reader.get_storage_from_record(record, length // dtype.itemsize, dtype)
    # The reader's tensor has no device yet; its memory goes into one that has.
    return torch.empty(0, dtype=dtype).set_(raw.untyped_storage(), 0, (length // dtype.itemsize,), (1,))


def _on_device(program: Any, device: torch.device, settings: Settings) -> Any:
    if device.type != "cpu":
        # Moves what the graph makes by itself too, which `Module.to` cannot see.
        from torch.export.passes import move_to_device_pass

        program = move_to_device_pass(program, str(device))
    try:
        module = program.module(check_guards=False)
    except TypeError:  # before PyTorch 2.9
        module = program.module()
    if settings.precision is not None:
        module.to(settings.precision)
    # Tensors in and out as they are in the graph: taking trees apart costs more than a small model computes.
    module.graph.set_codegen(CodeGen())
    module.recompile()
    return module


def _release(tensors: list[Any]) -> None:
    """Graphs refer to themselves in circles, and what they hold would wait for the garbage collector."""
    for tensor in tensors:
        tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)


def _written_by(node: Any) -> list[Any]:
    """The nodes whose memory a node computes in, with what they are views of followed back to where it was made."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return []
    return [
        _root(given)
        for position, argument in enumerate(node.target._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
        for given in _given(node, position, argument.name)
    ]


def _given(node: Any, position: int, name: str) -> list[Any]:
    value = node.args[position] if position < len(node.args) else node.kwargs.get(name)
    return [each for each in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(each, Node)]


def _root(node: Any) -> Any:
    while node.op == "call_function" and node.args:
        target, first = node.target, node.args[0]
        shares = not isinstance(target, torch._ops.OpOverload) or any(
            each.alias_info is not None for each in target._schema.returns
        )
        if not (shares and isinstance(first, Node)):
            break
        node = first
    return node


def _ports(described: dict[str, Any]) -> Ports:
    module = described["graph_module"]
    values = module["graph"]["tensor_values"]
    inputs = []
    for spec in module["signature"]["input_specs"]:
        if "constant_input" in spec:
            raise NotPlain("an input that is a constant")
        if "user_input" in spec:
            inputs.append(_port(spec["user_input"]["arg"], values, None))
    given = [spec["user_output"]["arg"] for spec in module["signature"]["output_specs"] if "user_output" in spec]
    names = _outputs(described).names or [f"OUTPUT__{index}" for index in range(len(given))]
    outputs = [_port(argument, values, name) for argument, name in zip(given, names, strict=True)]
    return Ports(tuple(inputs), tuple(outputs))


def _port(argument: dict[str, Any], values: dict[str, Any], name: str | None) -> Port:
    (kind,) = argument
    if kind != "as_tensor":
        if name is None:
            raise NotPlain("an input that is no tensor")
        return Port(name, kind.removeprefix("as_"), None, None)
    meta = values[argument["as_tensor"]["name"]]
    shape = tuple(size.get("as_int", -1) for size in meta["sizes"])
    dtype = DTYPES_BY_NUMBER.get(meta["dtype"])
    return Port(name or argument["as_tensor"]["name"], str(TORCH_BY_NUMBER.get(meta["dtype"])), dtype, shape or None)


def _outputs(described: dict[str, Any]) -> Outputs:
    module = described["graph_module"]
    call = next(entry["signature"] for entry in module["module_call_graph"] if entry["fqn"] == "")
    tree = keys_of_tree(call["out_spec"])
    count = sum("user_output" in spec for spec in module["signature"]["output_specs"])
    if isinstance(tree, dict) and all(leaf is None for leaf in tree.values()):
        return Outputs(count, tuple(tree))
    return Outputs(count)


def _ranges(described: dict[str, Any]) -> tuple[Range, ...]:
    """Dimensions that may not have just any size: those with limits, and those that must agree with another."""
    module = described["graph_module"]
    values, limits = module["graph"]["tensor_values"], described["range_constraints"]
    given = [spec["user_input"]["arg"] for spec in module["signature"]["input_specs"] if "user_input" in spec]
    found = []
    for position, argument in enumerate(given):
        for axis, size in enumerate(values[argument["as_tensor"]["name"]]["sizes"]):
            text = size.get("as_expr", {}).get("expr_str", "")
            symbol = text.partition("'")[2].partition("'")[0] if text.startswith("Symbol(") else text
            if symbol in limits:
                limit = limits[symbol]
                found.append(Range(position, axis, symbol, limit["min_val"] or 0, limit["max_val"]))
    often = {each.symbol for each in found if sum(other.symbol == each.symbol for other in found) > 1}
    return tuple(each for each in found if each.symbol in often or each.lowest > 1 or each.highest is not None)


def _numbers(sizes: list[dict[str, int]]) -> list[int]:
    return [int(size["as_int"]) for size in sizes]


def _poisoned(config: ModelConfig, archive: Archive, found: NotPlain) -> InvalidArgument:
    return InvalidArgument(
        f"model '{config.name}': '{archive.file.name}' has {found}, which a program for serving has no use for and which "
        "could run code of the file: export it with tensors in and out and operators of PyTorch, or save it as TorchScript"
    )


def _unreadable(config: ModelConfig, archive: Archive) -> InvalidArgument:
    return InvalidArgument(
        f"model '{config.name}': PyTorch {torch.__version__} cannot read '{archive.file.name}' as an exported program. It "
        "is damaged, or from another version of PyTorch: export it again with this one; the server's log says more"
    )
