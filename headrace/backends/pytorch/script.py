# SPDX-License-Identifier: Apache-2.0
"""Opens TorchScript, and reads what a module takes, gives and writes to.

Called by `backends.pytorch.backend`. Knows PyTorch and no requests. TorchScript tells the names and kinds of forward()'s
arguments; it tells no types or shapes of tensors, so a configuration must.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence
from typing import Any

import torch

from headrace.backends.pytorch.archive import Archive
from headrace.backends.pytorch.calls import Argument, Call, Outputs
from headrace.backends.pytorch.script_check import check_nodes, check_text, nodes_of
from headrace.backends.pytorch.settings import Settings
from headrace.core.errors import FailedPrecondition, InvalidArgument, Unimplemented
from headrace.models.config.types import ModelConfig

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
"""Nodes that hand on the memory of their first input without saying so in their schema."""


def load_script(config: ModelConfig, archive: Archive, device: torch.device, settings: Settings) -> Call:
    """Read the module onto a device."""
    check_text(config, archive)
    try:
        # Who saves models is to be told, not who serves them. Not `catch_warnings`, which is not for several threads.
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
    # Kept by name: the nodes live as long as it does, and each look at the property makes another.
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
    )


def _function(module: Any) -> Any:
    """The method itself: `Module.__call__` costs 5 us more and would only look for hooks, of which most have none."""
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
    """Whether it writes into its inputs, and into its own attributes. Yes where that is not certain."""
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
    """The kind of node that made the memory behind a value."""
    node = value.node()
    for _ in range(1000):
        kind: str = node.kind()
        # A schema writes (a) behind an argument and a result that may be the same memory.
        if kind in _CONTAINERS or "(a" in node.schema().partition("->")[2]:
            node = next(iter(node.inputs())).node()
        elif kind in ("prim::If", "prim::Loop"):
            return "prim::Param"
        else:
            return kind
    return "prim::Param"
