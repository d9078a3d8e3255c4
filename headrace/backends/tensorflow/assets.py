# SPDX-License-Identifier: Apache-2.0
"""Which files the tables of a SavedModel read. Those of its assets are its own; any other would be one of the server's.

Called by `backends.tensorflow.savedmodel`. A table's file name comes to it through variables and calls of functions, so it
is followed back to where it is made.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from headrace.backends.tensorflow.operators import called_functions, node_name, reached_nodes
from headrace.core.errors import InvalidArgument
from headrace.models.config.types import ModelConfig

_TABLES = {"InitializeTableFromTextFile": 1, "InitializeTableFromTextFileV2": 1}
"""Where the file's name is among the inputs."""
_PASSING = frozenset({"Identity"})
_VARIABLE_USERS = frozenset({"AssignVariableOp", "ReadVariableOp", "VarIsInitializedOp"})
_CALLING = frozenset({"PartitionedCall", "StatefulPartitionedCall"})

_Place = tuple[str, str]
"""A function, "" for the graph itself, and a tensor in it."""


def check_tables(config: ModelConfig, graph: Any, assets: Collection[str], outputs: Collection[str]) -> None:
    """Refuse a table that is filled from a file that is not one of the `assets`, which are tensors of the graph."""
    names = _Names(graph, {node_name(tensor) for tensor in assets})
    strange = list(names.strange_tables())
    # The assets' tensors have the right paths when the model is made ready, and not any more when it computes.
    strange.extend(node for node in reached_nodes(graph, outputs) if node.op in _TABLES)
    for node in strange:
        raise InvalidArgument(
            f"model '{config.name}' has a node '{node.name[:128]}' of type {node.op}, which reads a file that is not one "
            "of the model's assets: save the model with the file as an asset, or, if you trust the model, set the "
            "parameter allow_file_operators to 1"
        )


class _Names:
    """Follows the names of files through one graph."""

    def __init__(self, graph: Any, assets: Collection[str]) -> None:
        self._assets = assets
        self._functions = {function.signature.name: function for function in graph.library.function}
        self._scopes = {"": {node.name: node for node in graph.node}}
        for name, function in self._functions.items():
            self._scopes[name] = {node.name: node for node in function.node_def}

    def strange_tables(self) -> Iterator[Any]:
        """The nodes that fill a table from a file that is no asset."""
        for scope, nodes in self._scopes.items():
            for node in nodes.values():
                if node.op in _TABLES and not self._is_asset((scope, node.input[_TABLES[node.op]])):
                    yield node

    def _is_asset(self, place: _Place) -> bool:
        waiting, seen = [place], {place}
        while waiting:
            sources = self._sources(*waiting.pop())
            if sources is None:
                return False
            for source in sources:
                if source not in seen:
                    seen.add(source)
                    waiting.append(source)
        return True

    def _sources(self, scope: str, tensor: str) -> list[_Place] | None:
        """Where a value is from: nowhere else if it is an asset, None if it is made by the graph itself."""
        name = node_name(tensor)
        node = self._scopes[scope].get(name)
        if node is None:
            return list(self._arguments(scope, name)) if scope else None
        if not scope and name in self._assets:
            return []
        if node.op in _PASSING:
            return [(scope, node.input[0])]
        if node.op == "ReadVariableOp":
            return self._assigned(scope, node.input[0])
        return None

    def _arguments(self, called: str, argument: str) -> Iterator[_Place]:
        """What the callers of a function give it. None of them, if nobody calls it: then it does not run."""
        names = [each.name for each in self._functions[called].signature.input_arg]
        for scope, nodes in self._scopes.items():
            for node in nodes.values():
                if called not in called_functions(node, self._functions):
                    continue
                # Loops and conditions have arguments of their own in front.
                index = names.index(argument) if argument in names and node.op in _CALLING else -1
                given = [source for source in node.input if not source.startswith("^")]
                yield (scope, given[index]) if 0 <= index < len(given) else ("", "")

    def _assigned(self, scope: str, handle: str) -> list[_Place] | None:
        """The values that a variable gets, if it is one of the graph's own that nobody else can reach."""
        variable = node_name(handle)
        node = self._scopes[scope].get(variable)
        if scope or node is None or node.op != "VarHandleOp":
            return None
        shared = _shared_name(node)
        handles = [each for nodes in self._scopes.values() for each in nodes.values() if each.op == "VarHandleOp"]
        if sum(_shared_name(each) == shared for each in handles) != 1:
            return None
        users = [each for each in self._scopes[scope].values() if variable in map(node_name, each.input)]
        if any(each.op not in _VARIABLE_USERS for each in users):
            return None
        return [(scope, each.input[1]) for each in users if each.op == "AssignVariableOp"] or None


def _shared_name(node: Any) -> str:
    return str(node.attr["shared_name"].s.decode(errors="replace") or node.name)
