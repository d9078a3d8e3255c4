# SPDX-License-Identifier: Apache-2.0
"""Goes through the description of an exported program, so that reading it cannot run anything but operators.

Called by `program` with the parsed JSON, before PyTorch sees it. `torch.export.load` trusts its file: it unpickles sample
inputs (and falls back to unpickling anything when a safe read fails), evaluates the text of sizes and of guards as Python,
writes names into Python source that it then executes, imports modules that a tree of inputs names, and calls whatever
function a node names (`torch.hub.load`, say). So the pickles are never read (see `program`), and here:

    targets        operators of known namespaces, and the arithmetic of sizes; `FORBIDDEN` ones are refused
    expressions    numbers, symbols and the functions of sizes; parsed, not evaluated
    trees          tuples, lists and mappings with text keys
    all other text letters, digits and `_.-@`: nothing that could leave a name in Python source
    guards, metadata   dropped
"""

from __future__ import annotations

import ast
import json
import re
from typing import Any

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


class NotPlain(Exception):
    """The description has something that only a program made to do harm, or one of another kind, would have."""


def checked_program(described: Any) -> dict[str, Any]:
    """The description without what is not needed. Raises `NotPlain` with what was found."""
    if not isinstance(described, dict):
        raise NotPlain("no program")
    checked: dict[str, Any] = _checked(described, "", 0)
    return checked


def check_expression(text: str) -> None:
    """Whether a size is arithmetic of numbers and symbols."""
    if len(text) > MAX_EXPRESSION:
        raise NotPlain("an expression of a size that is too long")
    try:
        tree = ast.parse(text, mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise NotPlain("an expression of a size that cannot be read") from None
    _check_node(tree.body, 0, in_power=False)


def keys_of_tree(text: str) -> Any:
    """A tree of inputs or outputs: None for a leaf, a list, or a mapping from names."""
    try:
        version, tree = json.loads(text)
    except (ValueError, TypeError, RecursionError):
        raise NotPlain("a tree of inputs that cannot be read") from None
    if version != 1:
        raise NotPlain("a tree of inputs of another version")
    return _tree(tree, 0)


def _checked(value: Any, key: str, depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise NotPlain("too many levels")
    if key in _DROPPED:
        return _DROPPED[key]()
    if isinstance(value, str):
        _check_text(value, key)
        return value
    if isinstance(value, list):
        return [_checked(item, key, depth + 1) for item in value]
    if isinstance(value, dict):
        if "as_custom_obj" in value or "custom_obj" in value:
            raise NotPlain("a native object")
        for name in value:
            if key == "range_constraints":
                check_expression(name)
            elif _PLAIN.fullmatch(name) is None:
                raise NotPlain(f"the name {name[:64]!a}")
        return {name: _checked(item, name, depth + 1) for name, item in value.items()}
    return value


def _check_text(text: str, key: str) -> None:
    if key in ("target", "as_operator"):
        _check_target(text)
    elif key == "expr_str":
        check_expression(text)
    elif key in _TREE_KEYS:
        keys_of_tree(text)
    # Text arguments of operators stay text: PyTorch writes them into source as Python's own literals.
    elif key not in _FREE_TEXT and _PLAIN.fullmatch(text) is None:
        raise NotPlain(f"the name {text[:64]!a}")


def _check_target(target: str) -> None:
    if target in _SYM_TARGETS:
        return
    found = _TARGET.fullmatch(target)
    if found is not None:
        namespace, name = found.groups()
        if namespace == "higher_order" and name in HIGHER_ORDER:
            return
        if namespace in NAMESPACES and name not in FORBIDDEN and not name.startswith("__"):
            return
    raise NotPlain(f"the operator {target[:64]!a}")


def _check_node(node: ast.expr, depth: int, *, in_power: bool) -> None:
    if depth > MAX_DEPTH:
        raise NotPlain("an expression of a size with too many levels")
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
                raise NotPlain(f"the symbol {name[:64]!a}")
            for keyword in keywords:
                _check_node(keyword.value, deeper, in_power=in_power)
        case ast.Call(func=ast.Name(id=name), args=[left, right], keywords=[]) if name in _POWERS:
            _check_power(left, right, deeper, in_power)
        case ast.Call(func=ast.Name(id="Float"), args=[ast.Constant(value=str() as text)], keywords=keywords):
            if _NUMBER.fullmatch(text) is None:
                raise NotPlain("a number that cannot be read")
            for keyword in keywords:
                _check_node(keyword.value, deeper, in_power=in_power)
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in _FUNCTIONS:
            for value in args:
                _check_node(value, deeper, in_power=in_power)
        case _:
            raise NotPlain("an expression of a size that is not arithmetic")


def _check_power(left: ast.expr, right: ast.expr, depth: int, in_power: bool) -> None:
    """Powers of powers would be computed when they are read, and may be larger than the memory."""
    exponent = right.args[0] if isinstance(right, ast.Call) and len(right.args) == 1 else right
    if isinstance(exponent, ast.UnaryOp):
        exponent = exponent.operand
    if in_power or not (
        isinstance(exponent, ast.Constant) and isinstance(exponent.value, int) and exponent.value <= MAX_EXPONENT
    ):
        raise NotPlain("an expression of a size with large powers")
    _check_node(left, depth, in_power=True)
    _check_node(right, depth, in_power=True)


def _tree(tree: Any, depth: int) -> Any:
    if depth > MAX_DEPTH or not isinstance(tree, dict) or not isinstance(tree.get("children_spec"), list):
        raise NotPlain("a tree of inputs that cannot be read")
    kind, context, children = tree.get("type"), tree.get("context"), tree["children_spec"]
    if kind is None:
        return None
    if kind not in _TREES:
        raise NotPlain(f"inputs or outputs of type {str(kind)[:64]!a}")
    # The context is JSON inside JSON: null of tuples and lists, the keys of mappings.
    keys = context
    if isinstance(context, str):
        try:
            keys = json.loads(context)
        except (ValueError, RecursionError):
            raise NotPlain("a tree of inputs that cannot be read") from None
    inside = [_tree(child, depth + 1) for child in children]
    if kind in ("builtins.tuple", "builtins.list"):
        if keys is not None:
            raise NotPlain("a tree of inputs that cannot be read")
        return inside
    if not (isinstance(keys, list) and len(keys) == len(inside)):
        raise NotPlain("a tree of inputs that cannot be read")
    if not all(isinstance(key, str) and _PLAIN.fullmatch(key) for key in keys):
        raise NotPlain("inputs or outputs under keys that are not plain names")
    return dict(zip(keys, inside, strict=True))
