# SPDX-License-Identifier: Apache-2.0
"""A loader of `torch.export` programs that first checks that the file can only run operators.

`torch.export.load` trusts its file: it unpickles sample inputs, evaluates the text of sizes and guards as Python,
writes names into Python source that it executes, imports modules that an input tree names, and calls any function of a
node. So the pickles are never read, and these parts are checked before PyTorch sees the file:

    targets        operators of known namespaces, and arithmetic of sizes; `FORBIDDEN` ones are rejected
    expressions    numbers, symbols and functions of sizes; parsed, not evaluated
    trees          tuples, lists and mappings with string keys
    other texts    letters, digits and `_.-@`: nothing that could break out of a name in Python source
    guards, metadata   dropped
"""

from __future__ import annotations

import ast
import json
import logging
import math
import re
import threading
from typing import Any

import torch
from torch._export.serde import schema
from torch._export.serde.serialize import ExportedProgramDeserializer, _dict_to_dataclass
from torch.fx import Node
from torch.fx.graph import CodeGen

from headrace.backends.pytorch.archive import Archive
from headrace.backends.pytorch.model_function import (
    DTYPES_BY_NUMBER,
    TORCH_BY_NUMBER,
    Argument,
    Call,
    Outputs,
    Ports,
    Range,
)
from headrace.backends.pytorch.settings import Settings
from headrace.backends.signature import Port
from headrace.core.errors import FailedPrecondition, HeadraceError, InvalidArgument
from headrace.core.python_source import parse_python
from headrace.models.config.types import ModelConfig

NAMESPACES = frozenset(
    {"aten", "prim", "prims", "quantized", "quantized_decomposed", "mkldnn", "onednn", "torchvision", "torchaudio",
     "torchao", "torchtext"}
)  # fmt: skip
HIGHER_ORDER = frozenset(
    {"cond", "while_loop", "map_impl", "scan", "associative_scan", "wrap_with_set_grad_enabled", "wrap_with_autocast",
     "flex_attention", "invoke_subgraph"}
)  # fmt: skip
FORBIDDEN = frozenset({"from_file", "save", "rpc_sync", "rpc_async", "rpc_remote", "PythonOp"})

_SYM_TARGETS = frozenset(
    {f"_operator.{name}" for name in (
        "eq", "ne", "le", "ge", "lt", "gt", "neg", "pos", "mul", "add", "sub", "floordiv", "mod", "pow", "truediv", "and_",
        "or_", "lshift", "rshift", "getitem", "not_", "abs",
    )}
    | {f"torch.sym_{name}" for name in ("not", "int", "float", "ite", "max", "min", "sqrt", "sum")}
    | {f"torch._sym_{name}" for name in ("sqrt", "log2")}
    | {f"math.{name}" for name in ("trunc", "ceil", "floor", "sqrt", "log2", "exp")}
)  # fmt: skip
_FUNCTIONS = frozenset(
    {"FloorDiv", "ModularIndexing", "Where", "PythonMod", "Mod", "CleanDiv", "CeilToInt", "FloorToInt", "CeilDiv",
     "RShift", "FloatTrueDiv", "IntTrueDiv", "IsNonOverlappingAndDenseIndicator",
     "TruncToFloat", "TruncToInt", "RoundToInt", "RoundDecimal", "ToFloat", "Identity", "Integer", "Float",
     "Rational", "Add", "Mul", "Max", "Min", "Abs", "floor", "ceiling", "Eq", "Ne", "Lt", "Le", "Gt", "Ge", "And",
     "Or", "Not", "Equality", "Unequality", "StrictLessThan", "LessThan", "StrictGreaterThan", "GreaterThan",
     "Piecewise", "ExprCondPair"}
)  # fmt: skip
_POWERS = frozenset({"Pow", "PowByNatural", "FloatPow", "LShift"})
_TREES = frozenset({"builtins.tuple", "builtins.list", "builtins.dict", "collections.OrderedDict"})
_TARGET = re.compile(r"torch\.ops\.(\w+)\.(\w+)(?:\.\w+)?", re.ASCII)
_SYMBOL = re.compile(r"[A-Za-z_]\w{0,63}", re.ASCII)
_PLAIN = re.compile(r"[\w.\-@]*", re.ASCII)
_NUMBER = re.compile(r"[-+0-9.e]{1,64}")
_FREE_TEXT = frozenset({"as_string", "as_strings", "torch_version"})
_TREE_KEYS = frozenset({"in_spec", "out_spec"})
_DROPPED = {"metadata": dict, "guards_code": list, "treespec_namedtuple_fields": dict}
MAX_DEPTH = 200
MAX_EXPRESSION = 4000
MAX_EXPONENT = 64


class UnsafeProgram(Exception):
    """The description contains something that only a malicious or unsupported program would have."""


def checked_program(described: Any) -> dict[str, Any]:
    """Return the description without the parts that are not needed. Raise `UnsafeProgram` with what was found."""
    if not isinstance(described, dict):
        raise UnsafeProgram("no program")
    checked: dict[str, Any] = _checked(described, "", 0)
    return checked


def check_expression(text: str) -> None:
    """Check that a size is arithmetic of numbers and symbols."""
    if len(text) > MAX_EXPRESSION:
        raise UnsafeProgram("an expression of a size that is too long")
    try:
        tree = parse_python(text, "eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise UnsafeProgram("an expression of a size that cannot be read") from None
    _check_node(tree.body, 0, in_power=False)


def keys_of_tree(text: str) -> Any:
    """Parse a tree of inputs or outputs: None for a leaf, a list, or a mapping from names."""
    try:
        version, tree = json.loads(text)
    except (ValueError, TypeError, RecursionError):
        raise UnsafeProgram("a tree of inputs that cannot be read") from None
    if version != 1:
        raise UnsafeProgram("a tree of inputs of another version")
    return _tree(tree, 0)


def _checked(value: Any, key: str, depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise UnsafeProgram("too many levels")
    if key in _DROPPED:
        return _DROPPED[key]()
    if isinstance(value, str):
        _check_text(value, key)
        return value
    if isinstance(value, list):
        return [_checked(item, key, depth + 1) for item in value]
    if isinstance(value, dict):
        if "as_custom_obj" in value or "custom_obj" in value:
            raise UnsafeProgram("a native object")
        for name in value:
            if key == "range_constraints":
                check_expression(name)
            elif _PLAIN.fullmatch(name) is None:
                raise UnsafeProgram(f"the name {name[:64]!a}")
        return {name: _checked(item, name, depth + 1) for name, item in value.items()}
    return value


def _check_text(text: str, key: str) -> None:
    if key in ("target", "as_operator"):
        _check_target(text)
    elif key == "expr_str":
        check_expression(text)
    elif key in _TREE_KEYS:
        keys_of_tree(text)
    # String arguments of operators stay unchecked: PyTorch writes them into source as Python literals.
    elif key not in _FREE_TEXT and _PLAIN.fullmatch(text) is None:
        raise UnsafeProgram(f"the name {text[:64]!a}")


def _check_target(target: str) -> None:
    if target in _SYM_TARGETS:
        return
    match = _TARGET.fullmatch(target)
    if match is not None:
        namespace, name = match.groups()
        if namespace == "higher_order" and name in HIGHER_ORDER:
            return
        if namespace in NAMESPACES and name not in FORBIDDEN and not name.startswith("__"):
            return
    raise UnsafeProgram(f"the operator {target[:64]!a}")


def _check_node(node: ast.expr, depth: int, *, in_power: bool) -> None:
    if depth > MAX_DEPTH:
        raise UnsafeProgram("an expression of a size with too many levels")
    deeper = depth + 1
    match node:
        case ast.Constant(value=bool() | int() | float() | None):
            return
        case ast.Name(id=name) if _SYMBOL.fullmatch(name) and not name.startswith("__"):
            return
        case ast.UnaryOp(operand=operand):
            _check_node(operand, deeper, in_power=in_power)
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            _check_power(left, right, deeper, in_power)
        case ast.BinOp(
            left=left, op=ast.Add() | ast.Sub() | ast.Mult() | ast.Div() | ast.FloorDiv() | ast.Mod(), right=right
        ):
            _check_node(left, deeper, in_power=in_power)
            _check_node(right, deeper, in_power=in_power)
        case ast.BoolOp(values=values):
            for value in values:
                _check_node(value, deeper, in_power=in_power)
        case ast.Compare(left=left, comparators=comparators):
            for value in (left, *comparators):
                _check_node(value, deeper, in_power=in_power)
        case ast.Tuple(elts=elements):
            for value in elements:
                _check_node(value, deeper, in_power=in_power)
        case ast.Call(func=ast.Name(id="Symbol"), args=[ast.Constant(value=str() as name)], keywords=keywords):
            if _SYMBOL.fullmatch(name) is None:
                raise UnsafeProgram(f"the symbol {name[:64]!a}")
            for keyword in keywords:
                _check_node(keyword.value, deeper, in_power=in_power)
        case ast.Call(func=ast.Name(id=name), args=[left, right], keywords=[]) if name in _POWERS:
            _check_power(left, right, deeper, in_power)
        case ast.Call(func=ast.Name(id="Float"), args=[ast.Constant(value=str() as text)], keywords=keywords):
            if _NUMBER.fullmatch(text) is None:
                raise UnsafeProgram("a number that cannot be read")
            for keyword in keywords:
                _check_node(keyword.value, deeper, in_power=in_power)
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in _FUNCTIONS:
            for value in args:
                _check_node(value, deeper, in_power=in_power)
        case _:
            raise UnsafeProgram("an expression of a size that is not arithmetic")


def _check_power(left: ast.expr, right: ast.expr, depth: int, in_power: bool) -> None:
    """Reject nested powers: evaluating them when they are read could exhaust the memory."""
    exponent = right.args[0] if isinstance(right, ast.Call) and len(right.args) == 1 else right
    if isinstance(exponent, ast.UnaryOp):
        exponent = exponent.operand
    if in_power or not (
        isinstance(exponent, ast.Constant) and isinstance(exponent.value, int) and exponent.value <= MAX_EXPONENT
    ):
        raise UnsafeProgram("an expression of a size with large powers")
    _check_node(left, depth, in_power=True)
    _check_node(right, depth, in_power=True)


def _tree(tree: Any, depth: int) -> Any:
    if depth > MAX_DEPTH or not isinstance(tree, dict) or not isinstance(tree.get("children_spec"), list):
        raise UnsafeProgram("a tree of inputs that cannot be read")
    kind, context, children = tree.get("type"), tree.get("context"), tree["children_spec"]
    if kind is None:
        return None
    if kind not in _TREES:
        raise UnsafeProgram(f"inputs or outputs of type {str(kind)[:64]!a}")
    # The context is JSON inside JSON: null for tuples and lists, the keys for mappings.
    keys = context
    if isinstance(context, str):
        try:
            keys = json.loads(context)
        except (ValueError, RecursionError):
            raise UnsafeProgram("a tree of inputs that cannot be read") from None
    inside = [_tree(child, depth + 1) for child in children]
    if kind in ("builtins.tuple", "builtins.list"):
        if keys is not None:
            raise UnsafeProgram("a tree of inputs that cannot be read")
        return inside
    if not (isinstance(keys, list) and len(keys) == len(inside)):
        raise UnsafeProgram("a tree of inputs that cannot be read")
    if not all(isinstance(key, str) and _PLAIN.fullmatch(key) for key in keys):
        raise UnsafeProgram("inputs or outputs under keys that are not plain names")
    return dict(zip(keys, inside, strict=True))


log = logging.getLogger("headrace.backends")

_LOAD_LOCK = threading.Lock()
"""PyTorch keeps the program it is reading in a module variable, and fails if two threads read at once."""

_STRIDED = 7  # schema.Layout.Strided


def read_ports(config: ModelConfig, archive: Archive) -> tuple[Ports, tuple[Range, ...]]:
    """Read the inputs, outputs and size limits from the description alone."""
    described = _described(config, archive)
    try:
        return _ports(described), _ranges(described)
    except (KeyError, TypeError, IndexError, ValueError, AttributeError, UnsafeProgram):
        raise _unreadable(config, archive) from None


def load_program(config: ModelConfig, archive: Archive, device: torch.device, settings: Settings) -> Call:
    """Load the program onto a device."""
    described = _described(config, archive)
    try:
        ports, outputs, ranges = _ports(described), _outputs(described), _ranges(described)
        weights = _tensors(archive, "data/weights/", "model_weights_config.json")
        constants = _tensors(archive, "data/constants/", "model_constants_config.json")
        description = _dict_to_dataclass(schema.ExportedProgram, described)
        with _LOAD_LOCK:
            program = ExportedProgramDeserializer().deserialize(description, weights, constants, None)
            module = _on_device(program, device, settings)
    except UnsafeProgram as error:
        raise _unsafe_error(config, archive, error) from None
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
    tensors = [*weights.values(), *constants.values(), *module.parameters(), *module.buffers()]
    return Call(
        # Bypasses `Module.__call__`: its hooks repeat the checks of the signature.
        function=module.forward,
        arguments=tuple(Argument(port.name) for port in ports.inputs),
        outputs=outputs,
        signature=ports,
        ranges=ranges,
        writes_inputs="placeholder" in written,
        writes_itself="get_attr" in written,
        release=lambda: _release(tensors),
        weights=tensors,
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
    except UnsafeProgram as error:
        raise _unsafe_error(config, archive, error) from None
    except (ValueError, RecursionError):
        log.exception("model %s: %s could not be read", config.name, archive.file)
        raise _unreadable(config, archive) from None


def _tensors(archive: Archive, folder: str, directory: str) -> dict[str, Any]:
    """Return weights or constants by name; those that share memory in the file share it here."""
    listed = json.loads(archive.read(folder + directory))["config"]
    flat: dict[str, Any] = {}
    tensors: dict[str, Any] = {}
    for name, payload in listed.items():
        meta, path = payload["tensor_meta"], payload["path_name"]
        if payload.get("use_pickle") or meta is None:
            raise UnsafeProgram("weights that are kept as pickles")
        if path.startswith(("custom_obj", "opaque_obj")):
            raise UnsafeProgram("a native object")
        dtype = TORCH_BY_NUMBER[meta["dtype"]]
        sizes, strides = _numbers(meta["sizes"]), _numbers(meta["strides"])
        if meta["layout"] != _STRIDED:
            raise UnsafeProgram("weights that are not dense")
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
            raise UnsafeProgram("weights without their numbers")
        return torch.empty(0, dtype=dtype)
    if length % dtype.itemsize:
        raise UnsafeProgram("weights that are cut short")
    raw = archive.reader.get_storage_from_record(record, length // dtype.itemsize, dtype)
    # The reader's tensor has no device yet; its storage goes into a tensor that has one.
    return torch.empty(0, dtype=dtype).set_(raw.untyped_storage(), 0, (length // dtype.itemsize,), (1,))


def _on_device(program: Any, device: torch.device, settings: Settings) -> Any:
    if device.type != "cpu":
        # Also moves tensors that the graph creates, which `Module.to` does not see.
        from torch.export.passes import move_to_device_pass

        program = move_to_device_pass(program, str(device))
    try:
        module = program.module(check_guards=False)
    except TypeError:  # before PyTorch 2.9
        module = program.module()
    if settings.precision is not None:
        module.to(settings.precision)
    # Tensors go in and out flat, as in the graph: unpacking trees costs more than a small model.
    module.graph.set_codegen(CodeGen())
    module.recompile()
    return module


def _release(tensors: list[Any]) -> None:
    """Free the weights at once: graphs are reference cycles, which would wait for the garbage collector."""
    for tensor in tensors:
        tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)


def _written_by(node: Any) -> list[Any]:
    """Return the nodes whose memory a node writes to, with views traced back to their base."""
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
    return [item for item in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(item, Node)]


def _root(node: Any) -> Any:
    while node.op == "call_function" and node.args:
        target, first = node.target, node.args[0]
        shares = not isinstance(target, torch._ops.OpOverload) or any(
            result.alias_info is not None for result in target._schema.returns
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
            raise UnsafeProgram("an input that is a constant")
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
            raise UnsafeProgram("an input that is not a tensor")
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
    """Return the dimensions that are restricted: those with limits, and those that must equal another one."""
    module = described["graph_module"]
    values, limits = module["graph"]["tensor_values"], described["range_constraints"]
    given = [spec["user_input"]["arg"] for spec in module["signature"]["input_specs"] if "user_input" in spec]
    ranges = []
    for position, argument in enumerate(given):
        for axis, size in enumerate(values[argument["as_tensor"]["name"]]["sizes"]):
            text = size.get("as_expr", {}).get("expr_str", "")
            symbol = text.partition("'")[2].partition("'")[0] if text.startswith("Symbol(") else text
            if symbol in limits:
                limit = limits[symbol]
                ranges.append(Range(position, axis, symbol, limit["min_val"] or 0, limit["max_val"]))
    shared_symbols = {
        size_range.symbol for size_range in ranges if sum(other.symbol == size_range.symbol for other in ranges) > 1
    }
    return tuple(
        size_range
        for size_range in ranges
        if size_range.symbol in shared_symbols or size_range.lowest > 1 or size_range.highest is not None
    )


def _numbers(sizes: list[dict[str, int]]) -> list[int]:
    return [int(size["as_int"]) for size in sizes]


def _unsafe_error(config: ModelConfig, archive: Archive, error: UnsafeProgram) -> InvalidArgument:
    return InvalidArgument(
        f"model '{config.name}': '{archive.file.name}' has {error}, which a served program does not need and which "
        "could run code of the file: export it with tensors in and out and operators of PyTorch, or save it as TorchScript"
    )


def _unreadable(config: ModelConfig, archive: Archive) -> InvalidArgument:
    return InvalidArgument(
        f"model '{config.name}': PyTorch {torch.__version__} cannot read '{archive.file.name}' as an exported program. It "
        "is damaged, or from another version of PyTorch: export it again with this one; the server's log says more"
    )
