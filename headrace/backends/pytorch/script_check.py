# SPDX-License-Identifier: Apache-2.0
"""Looks through TorchScript for what reaches outside the model.

Called by `script`, before PyTorch reads the archive and again when it has. TorchScript is a language of its own, run by
an interpreter of PyTorch that has no Python in it: a model can compute for ever or fill the memory, but it imports nothing
and starts nothing. Some of its operators do touch the machine, and no model needs them to answer requests:

    aten::save, aten::from_file    write and map any file the server can
    prim::rpc_*, c10d and others   talk to other machines
    torch.classes.*                native objects; only those that hold packed weights are let in

The text is searched first, because `__setstate__` of a class runs while the archive is read; the search would rather
refuse a harmless word than miss one. The graph is walked afterwards, where nothing can be written in two ways.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from headrace.backends.pytorch.archive import Archive
from headrace.core.errors import InvalidArgument
from headrace.models.config.types import ModelConfig

NAMESPACES = frozenset(
    {
        "aten", "prim", "prims", "quantized", "_quantized", "quantized_decomposed", "quantization", "sparse", "prepacked",
        "mkldnn", "mkldnn_prepacked", "onednn", "xnnpack", "inductor", "static_runtime", "tensorexpr", "torchvision",
        "torchaudio", "torchtext", "fbgemm", "_caffe2", "rnn",
    }
)  # fmt: skip
"""Operators that compute."""

CLASSES = frozenset({"quantized", "sparse", "xnnpack", "mkldnn", "rnn"})
"""Native classes that hold weights."""

FORBIDDEN = frozenset({"aten::save", "aten::from_file", "prim::PythonOp", "prim::IgnoredPythonOp", "prim::CallPython"})

_WORDS = re.compile(r"\b(?:save|from_file|rpc_sync|rpc_async|rpc_remote|PythonOp|IgnoredPythonOp)\b")
_OPERATOR = re.compile(r"\bops\s*\.\s*(\w+)")
_CLASS = re.compile(r"\btorch\s*\.\s*classes\s*\.\s*(\w+)")
_CLASS_BYTES = re.compile(rb"torch\.classes\.(\w+)")
# As PyTorch prints it, on one line; anything else could spell a name so that the search does not see it.
_PLAIN_GETATTR = re.compile(r'\bgetattr\([\w.()", \-]*"[\w.\-]*"\)')
_TWO_LITERALS = re.compile(r'"\s*"')


def check_text(config: ModelConfig, archive: Archive) -> None:
    """Search the archive's source and the names in its pickles."""
    for name in archive.sizes:
        folded = name.casefold()
        if folded.endswith(".py"):
            _check_source(config, archive, name)
        elif folded.endswith(".pkl"):
            for found in _CLASS_BYTES.findall(archive.read(name)):
                if found.decode() not in CLASSES:
                    raise _refused(config, archive, f"the native class torch.classes.{found.decode()[:64]}")


def check_nodes(config: ModelConfig, archive: Archive, module: Any, nodes: Sequence[Any]) -> None:
    """Look at forward() of the loaded module, with all that it calls; nothing else of the module is called any more."""
    if any(node.kind() == "prim::CallMethod" for node in nodes):
        # Of an interface: which method it is turns out when it runs.
        inside = [part._c for part in module.modules()]
        graphs = [part._get_method(name).inlined_graph for part in inside for name in part._method_names()]
        nodes = [node for graph in graphs for node in nodes_of(graph)]
    for kind in {node.kind() for node in nodes}:
        if kind in FORBIDDEN or kind.startswith("prim::rpc_") or kind.partition("::")[0] not in NAMESPACES:
            raise _refused(config, archive, f"the operator {kind[:64]}")


def nodes_of(graph: Any) -> Iterator[Any]:
    """All nodes, those of branches and loops too."""
    for node in graph.nodes():
        yield node
        for block in node.blocks():
            yield from nodes_of(block)


def _check_source(config: ModelConfig, archive: Archive, name: str) -> None:
    try:
        source = archive.read(name).decode()
    except UnicodeDecodeError:
        raise InvalidArgument(
            f"model '{config.name}': '{archive.file.name}' has source that is no text: save it again by torch.jit.save"
        ) from None
    word = _WORDS.search(source)
    if word is not None:
        raise _refused(config, archive, f"'{word.group()}'")
    for namespace in _OPERATOR.findall(source):
        if namespace not in NAMESPACES:
            raise _refused(config, archive, f"operators of '{namespace[:64]}'")
    for family in _CLASS.findall(source):
        if family not in CLASSES:
            raise _refused(config, archive, f"the native class torch.classes.{family[:64]}")
    for line in source.splitlines():
        if "getattr" in line:
            rest = _PLAIN_GETATTR.sub("", line)
            if "getattr" in rest or "\\" in line or _TWO_LITERALS.search(line):
                raise _refused(config, archive, "getattr in a form that PyTorch does not write")


def _refused(config: ModelConfig, archive: Archive, what: str) -> InvalidArgument:
    return InvalidArgument(
        f"model '{config.name}': '{archive.file.name}' uses {what}, which reaches outside the model (files, other machines, "
        "native objects) or looks like it: take it out of the module, or give it another name, and save it again"
    )
