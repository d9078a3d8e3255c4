# SPDX-License-Identifier: Apache-2.0
"""A loader of TorchScript modules that first checks that they reach nothing outside the model."""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from headrace.backends.pytorch.archive import Archive
from headrace.backends.pytorch.model_function import Argument, Call, Outputs
from headrace.backends.pytorch.settings import Settings
from headrace.core.errors import FailedPrecondition, InvalidArgument, Unimplemented
from headrace.models.config.types import ModelConfig

NAMESPACES = frozenset(
    {
        "aten", "prim", "prims", "quantized", "_quantized", "quantized_decomposed", "quantization", "sparse", "prepacked",
        "mkldnn", "mkldnn_prepacked", "onednn", "xnnpack", "inductor", "static_runtime", "tensorexpr", "torchvision",
        "torchaudio", "torchtext", "fbgemm", "_caffe2", "rnn",
    }
)  # fmt: skip
"""Namespaces of operators that only compute."""

CLASSES = frozenset({"quantized", "sparse", "xnnpack", "mkldnn", "rnn"})
"""Native classes that hold weights."""

FORBIDDEN = frozenset({"aten::save", "aten::from_file", "prim::PythonOp", "prim::IgnoredPythonOp", "prim::CallPython"})

_WORDS = re.compile(r"\b(?:save|from_file|rpc_sync|rpc_async|rpc_remote|PythonOp|IgnoredPythonOp)\b")
_OPERATOR = re.compile(r"\bops\s*\.\s*(\w+)")
_CLASS = re.compile(r"\btorch\s*\.\s*classes\s*\.\s*(\w+)")
_CLASS_BYTES = re.compile(rb"torch\.classes\.(\w+)")
# As PyTorch prints it, on one line; any other form could hide a name from the search.
_PLAIN_GETATTR = re.compile(r'\bgetattr\([\w.()", \-]*"[\w.\-]*"\)')
_TWO_LITERALS = re.compile(r'"\s*"')


def check_text(config: ModelConfig, archive: Archive) -> None:
    """Search the archive's source and the names in its pickles."""
    for name in archive.sizes:
        folded = name.casefold()
        if folded.endswith(".py"):
            _check_source(config, archive, name)
        elif folded.endswith(".pkl"):
            for class_name in _CLASS_BYTES.findall(archive.read(name)):
                if class_name.decode() not in CLASSES:
                    raise _rejection(config, archive, f"the native class torch.classes.{class_name.decode()[:64]}")


def check_nodes(config: ModelConfig, archive: Archive, module: Any, nodes: Sequence[Any]) -> None:
    """Check forward() of the loaded module with everything it calls; no other method is called later."""
    if any(node.kind() == "prim::CallMethod" for node in nodes):
        # An interface: the method is known only at run time.
        inside = [part._c for part in module.modules()]
        graphs = [part._get_method(name).inlined_graph for part in inside for name in part._method_names()]
        nodes = [node for graph in graphs for node in nodes_of(graph)]
    for kind in {node.kind() for node in nodes}:
        if kind in FORBIDDEN or kind.startswith("prim::rpc_") or kind.partition("::")[0] not in NAMESPACES:
            raise _rejection(config, archive, f"the operator {kind[:64]}")


def nodes_of(graph: Any) -> Iterator[Any]:
    """Yield all nodes, also those of branches and loops."""
    for node in graph.nodes():
        yield node
        for block in node.blocks():
            yield from nodes_of(block)


def _check_source(config: ModelConfig, archive: Archive, name: str) -> None:
    try:
        source = archive.read(name).decode()
    except UnicodeDecodeError:
        raise InvalidArgument(
            f"model '{config.name}': '{archive.file.name}' has source that is not text: save it again by torch.jit.save"
        ) from None
    word = _WORDS.search(source)
    if word is not None:
        raise _rejection(config, archive, f"'{word.group()}'")
    for namespace in _OPERATOR.findall(source):
        if namespace not in NAMESPACES:
            raise _rejection(config, archive, f"operators of '{namespace[:64]}'")
    for family in _CLASS.findall(source):
        if family not in CLASSES:
            raise _rejection(config, archive, f"the native class torch.classes.{family[:64]}")
    for line in source.splitlines():
        if "getattr" in line:
            rest = _PLAIN_GETATTR.sub("", line)
            if "getattr" in rest or "\\" in line or _TWO_LITERALS.search(line):
                raise _rejection(config, archive, "getattr in a form that PyTorch does not write")


def _rejection(config: ModelConfig, archive: Archive, what: str) -> InvalidArgument:
    return InvalidArgument(
        f"model '{config.name}': '{archive.file.name}' uses {what}, which reaches outside the model (files, other machines, "
        "native objects) or has such a name: take it out of the module, or give it another name, and save it again"
    )


log = logging.getLogger("headrace.backends")

_KINDS = {
    "Tensor": "tensor",
    "Optional[Tensor]": "tensor",
    "List[str]": "strings",
    "Dict[str, Tensor]": "mapping",
    "List[Tensor]": "list",
}
_CONTAINERS = frozenset(
    {
        "prim::ListUnpack",
        "prim::TupleUnpack",
        "prim::TupleIndex",
        "prim::ListConstruct",
        "prim::TupleConstruct",
        "prim::unchecked_cast",
        "aten::__getitem__",
        "aten::dropout",
    }
)
"""Kinds of nodes that return the memory of their first input although their schema does not say so."""


def load_script(config: ModelConfig, archive: Archive, device: torch.device, settings: Settings) -> Call:
    """Load the module onto a device."""
    check_text(config, archive)
    try:
        # This warning is for model authors. `catch_warnings` is not thread-safe.
        warnings.filterwarnings("ignore", r"`torch\.jit\.load` is deprecated", DeprecationWarning)
        module = torch.jit.load(str(archive.file), map_location=device)
    except torch.OutOfMemoryError:
        raise FailedPrecondition(
            f"model '{config.name}': {device} has not enough free memory for the weights of '{archive.file.name}'"
        ) from None
    except Exception:
        log.exception("model %s: %s could not be read", config.name, archive.file)
        raise InvalidArgument(
            f"model '{config.name}': PyTorch {torch.__version__} cannot read '{archive.file.name}' as TorchScript. It is "
            "damaged, or needs a newer PyTorch or a package with more operators; the server's log says which"
        ) from None
    # Keep the graph: the nodes live as long as it does, and each access to the property creates another.
    graph = module.inlined_graph
    nodes = list(nodes_of(graph))
    check_nodes(config, archive, module, nodes)
    for parameter in module.parameters():
        parameter.requires_grad_(False)
    if settings.precision is not None:
        module.to(settings.precision)
    writes_inputs, writes_itself = _written(nodes)
    schema = module.forward.schema
    return Call(
        function=_function(module),
        arguments=tuple(_argument(config, argument) for argument in schema.arguments[1:]),
        outputs=_outputs(schema.returns),
        signature=None,
        writes_inputs=writes_inputs,
        writes_itself=writes_itself,
        scripted=True,
        weights=[*module.parameters(), *module.buffers()],
    )


def _function(module: Any) -> Any:
    """Return the method itself: `Module.__call__` costs 5 us more, only to look for hooks, which most models lack."""
    inside = module._c
    hooked = inside._get_forward_hooks() or inside._get_forward_pre_hooks()
    return module if hooked else inside._get_method("forward")


def _argument(config: ModelConfig, argument: Any) -> Argument:
    kind = _KINDS.get(str(argument.type))
    optional = argument.has_default_value()
    if kind is None and not optional:
        raise Unimplemented(
            f"model '{config.name}': forward() takes '{argument.name}' of type {argument.type}, which no request can carry: "
            "give it a default, or take a Tensor, List[str] or Dict[str, Tensor] instead"
        )
    return Argument(argument.name, kind or "fixed", optional)


def _outputs(returns: Any) -> Outputs:
    text = str(returns[0].type) if len(returns) == 1 else ""
    if text == "Tensor":
        return Outputs(1)
    if text == "Dict[str, Tensor]":
        return Outputs(None, mapping=True)
    if text.startswith("Tuple["):
        return Outputs(len(returns[0].type.elements()))
    return Outputs(None)


def _written(nodes: Sequence[Any]) -> tuple[bool, bool]:
    """Return whether it writes to its inputs, and to its own attributes; True if uncertain."""
    writes_inputs = writes_itself = False
    for node in nodes:
        kind = node.kind()
        if kind == "prim::SetAttr":
            writes_itself = True
        elif kind in ("prim::CallMethod", "prim::CallFunction") or "!) out" in node.schema():
            writes_inputs = writes_itself = True
        elif _is_in_place(kind):
            root = _root(next(iter(node.inputs())))
            writes_inputs = writes_inputs or root == "prim::Param"
            writes_itself = writes_itself or root in ("prim::GetAttr", "prim::Param")
    return writes_inputs, writes_itself


def _is_in_place(kind: str) -> bool:
    return kind.endswith("_") and not kind.endswith("__")


def _root(value: Any) -> str:
    """Return the kind of the node that created the memory of a value."""
    node = value.node()
    for _ in range(1000):
        kind: str = node.kind()
        # A schema marks an argument and a result with (a) if they may share memory.
        if kind in _CONTAINERS or "(a" in node.schema().partition("->")[2]:
            node = next(iter(node.inputs())).node()
        elif kind in ("prim::If", "prim::Loop"):
            return "prim::Param"
        else:
            return kind
    return "prim::Param"
