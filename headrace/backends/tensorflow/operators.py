# SPDX-License-Identifier: Apache-2.0
"""The operators that a TensorFlow model may contain: graphs are programs, and some operators run Python or use files.

The readers of both formats check a graph before TensorFlow sees it. The check covers all functions, even those never
called. Only the operators of a `Saver` may be present: every SavedModel has some, to restore its variables, and
operators that the outputs do not depend on do not run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from headrace.core.errors import InvalidArgument
from headrace.models.config.types import ModelConfig

_PYTHON = frozenset({"PyFunc", "PyFuncStateless", "EagerPyFunc"})

_FILE_NAMES = """
    ReadFile WriteFile MatchingFiles ImmutableConst DumpTensor RecordInput Skipgram FileSystemSetConfiguration
    WholeFileReader WholeFileReaderV2 TextLineReader TextLineReaderV2 TFRecordReader TFRecordReaderV2 LMDBReader
    FixedLengthRecordReader FixedLengthRecordReaderV2 CalibrationStatisticsSaver
    MatchingFilesDataset ExperimentalMatchingFilesDataset TextLineDataset TFRecordDataset TFRecordDatasetV2
    FixedLengthRecordDataset FixedLengthRecordDatasetV2 CSVDataset CSVDatasetV2 ExperimentalCSVDataset LMDBDataset
    ExperimentalLMDBDataset SqlDataset ExperimentalSqlDataset CacheDataset CacheDatasetV2 LoadDataset SaveDataset
    SaveDatasetV2 SnapshotDataset SnapshotDatasetV2 SnapshotDatasetReader SnapshotNestedDatasetReader
    SnapshotChunkDataset ListSnapshotChunksDataset DatasetToTFRecord ExperimentalDatasetToTFRecord DistributedSave
    LoadAndRemapMatrix GenerateVocabRemapping CreateSummaryFileWriter CreateSummaryDbWriter
"""
_NETWORK_NAMES = """
    RpcServer RpcClient RpcCall RemoteCall RegisterDataset RegisterDatasetV2 DataServiceDataset DataServiceDatasetV2
    DataServiceDatasetV3 DataServiceDatasetV4
"""
_FILES = frozenset(_FILE_NAMES.split())
_NETWORK = frozenset(_NETWORK_NAMES.split())
_SAVING = frozenset({"Save", "SaveSlices", "SaveV2", "MergeV2Checkpoints"})
_RESTORING = frozenset({"Restore", "RestoreSlice", "RestoreV2", "DTensorRestoreV2"})


def check_operators(config: ModelConfig, graph: Any, *, files_allowed: bool) -> None:
    """Reject a graph with an operator that runs Python, reads or writes files, or calls other machines."""
    for node in _all_nodes(graph):
        if node.op in _PYTHON:
            raise InvalidArgument(
                f"model '{config.name}' has a node '{node.name[:128]}' of type {node.op}, which runs Python code: export "
                "it without tf.py_function and tf.numpy_function, or serve it with the python backend"
            )
        if not files_allowed and (node.op in _FILES or node.op in _NETWORK or _names_a_file(node)):
            raise _rejection(config, node)


def check_reached(
    config: ModelConfig, graph: Any, names: Iterable[str], *, restoring: bool, files_allowed: bool
) -> None:
    """Reject nodes that would save or restore when the `names` are computed."""
    if files_allowed:
        return
    refused = _SAVING if restoring else _SAVING | _RESTORING
    for node in reached_nodes(graph, names):
        if node.op in refused:
            raise _rejection(config, node)


def reached_nodes(graph: Any, names: Iterable[str]) -> Iterator[Any]:
    """Yield the nodes that these nodes or tensors depend on, with all nodes of the functions they call."""
    functions = {function.signature.name: function for function in graph.library.function}
    called: set[str] = set()
    for node in reached_in_main_graph(graph, names):
        yield node
        called.update(called_functions(node, functions))
    calls = list(called)
    while calls:
        for node in functions[calls.pop()].node_def:
            yield node
            more = called_functions(node, functions) - called
            called |= more
            calls.extend(more)


def reached_in_main_graph(graph: Any, names: Iterable[str]) -> Iterator[Any]:
    """Yield the nodes that these depend on, without the nodes in functions."""
    nodes = {node.name: node for node in graph.node}
    waiting = [node_name(name) for name in names]
    seen = set(waiting)
    while waiting:
        node = nodes.get(waiting.pop())
        if node is None:
            continue
        yield node
        for source in map(node_name, node.input):
            if source not in seen:
                seen.add(source)
                waiting.append(source)


def called_functions(node: Any, known: Any) -> set[str]:
    """Return the functions that a node calls: its operator may be one, its attributes may name some."""
    names = {node.op}
    for value in node.attr.values():
        kind = value.WhichOneof("value")
        if kind == "func":
            names.add(value.func.name)
        elif kind == "list":
            names.update(function.name for function in value.list.func)
    return {name for name in names if name in known}


def node_name(tensor: str) -> str:
    """Return the node of a tensor: `node`, `node:0`, `node:out:0` in functions, `^node` for a control dependency."""
    return tensor.removeprefix("^").partition(":")[0]


def _all_nodes(graph: Any) -> Iterator[Any]:
    yield from graph.node
    for function in graph.library.function:
        yield from function.node_def


def _names_a_file(node: Any) -> bool:
    """Return whether an operator with an optional file has one."""
    if node.op == "PrintV2":
        return bool(node.attr["output_stream"].s.startswith(b"file:"))
    if node.op.startswith("Debug"):
        return bool(node.attr["debug_urls"].list.s)
    if node.op in ("DecodeProtoV2", "EncodeProto"):
        source = node.attr["descriptor_source"].s
        return not (source in (b"", b"local://") or source.startswith(b"bytes://"))
    if node.op == "FixedUnigramCandidateSampler":
        return bool(node.attr["vocab_file"].s)
    return False


def _rejection(config: ModelConfig, node: Any) -> InvalidArgument:
    does = "calls other machines" if node.op in _NETWORK else "reads or writes files of the server"
    return InvalidArgument(
        f"model '{config.name}' has a node '{node.name[:128]}' of type {node.op}, which {does}: export it without, or, if "
        "you trust the model, set the parameter allow_file_operators to 1"
    )
