# SPDX-License-Identifier: Apache-2.0
"""Build the request of `headrace bench` and `headrace tune`: random values in the model's shapes unless given."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.cli.infer_inputs import Inputs, suggestion
from headrace.client import Client, Input
from headrace.core.errors import HeadraceError, InvalidArgument

_SIZES = re.compile(r"[0-9]+(?:,[0-9]+)*")
_FILE = re.compile(r"[^@\[{\"].*\.(?:npy|json)")


@dataclass(frozen=True, slots=True)
class Prepared:
    """The inputs of a request."""

    inputs: Mapping[str, Input]
    rows: int
    batched: bool
    """Whether the first dimension is the batch."""
    notes: Sequence[str]
    config: Mapping[str, Any]
    """The model's configuration if the server returns it; empty otherwise."""


def prepare(
    client: Client, model: str, version: str, given: Sequence[str], shapes: Sequence[str], rows: int
) -> Prepared:
    """Read the model's metadata and build its inputs."""
    metadata = client.metadata(model, version=version)
    try:
        config = client.config(model, version=version)
    except HeadraceError:
        config = {}  # not every v2 server has this endpoint
    tensors = {str(tensor["name"]): tensor for tensor in metadata.get("inputs") or ()}
    first_sizes = [next(iter(tensor.get("shape") or [0])) for tensor in tensors.values()]
    batched = int(config.get("max_batch_size") or 0) > 0 if config else all(size == -1 for size in first_sizes)
    _check_rows(model, config, batched, rows)
    sizes = dict(_parse_shape(shape, tensors, model) for shape in shapes)
    optional = {str(tensor.get("name")) for tensor in config.get("input") or () if tensor.get("optional")}
    builder = Inputs(model, metadata)
    for text in given:
        name, equals, value = text.partition("=")
        if equals and name in tensors and _SIZES.fullmatch(value):
            sizes[name] = _sizes(value)
        elif equals and _FILE.fullmatch(value):
            builder.add(f"{name}=@{value}")
        else:
            builder.add(text)
    for name in builder.missing():
        if name not in optional or name in sizes:
            shape = _full_shape(model, tensors[name], sizes.get(name), rows, batched)
            builder.add(f"{name}=random" + (f":{','.join(map(str, shape))}" if shape else ""))
    inputs = builder.inputs
    row_counts = {len(tensor.values) for tensor in inputs.values()} if batched and inputs else {1}
    if len(row_counts) > 1:
        raise InvalidArgument(
            f"the inputs have {' and '.join(map(str, sorted(row_counts)))} rows: give all the same number"
        )
    return Prepared(inputs, row_counts.pop(), batched, builder.notes, config)


def _check_rows(model: str, config: Mapping[str, Any], batched: bool, rows: int) -> None:
    if rows > 1 and not batched:
        raise InvalidArgument(f"--rows {rows}: model '{model}' takes one request at a time (max_batch_size is 0)")
    limit = int(config.get("max_batch_size") or 0)
    if limit and rows > limit:
        raise InvalidArgument(f"--rows {rows}: model '{model}' takes at most {limit} in a request (max_batch_size)")


def _parse_shape(text: str, tensors: Mapping[str, Any], model: str) -> tuple[str, list[int]]:
    name, colon, sizes = text.rpartition(":")
    if not colon or not _SIZES.fullmatch(sizes):
        raise InvalidArgument(f"--shape {text[:64]!a}: write NAME:SIZES, such as ids:128 or image:3,224,224")
    if name not in tensors:
        raise InvalidArgument(
            f"model '{model}' has no input '{name}'{suggestion(name, tensors)}; it has: {', '.join(tensors)}"
        )
    return name, _sizes(sizes)


def _full_shape(
    model: str, described: Mapping[str, Any], given: list[int] | None, rows: int, batched: bool
) -> list[int] | None:
    """Return the shape to send; None if the model takes any."""
    shape = [int(size) for size in described.get("shape") or ()]
    name = described.get("name")
    if not shape:
        return given
    inner = shape[1:] if batched else shape
    if given is not None:
        if len(given) == len(inner) and _fits(given, inner):
            return [rows, *given] if batched else given
        if len(given) == len(shape) and _fits(given, shape):
            return given
        raise InvalidArgument(
            f"--shape {name}:{_shown(given)} does not fit model '{model}', which takes [{_shown(inner)}]"
        )
    if -1 in inner:
        example = ",".join("16" if size < 0 else str(size) for size in inner)
        raise InvalidArgument(
            f"input '{name}' of model '{model}' has dynamic sizes [{_shown(inner)}]: choose them, such as "
            f"--shape {name}:{example}"
        )
    return [rows, *inner] if batched else inner


def _fits(shape: list[int], model_shape: list[int]) -> bool:
    return all(want in (-1, size) for size, want in zip(shape, model_shape, strict=True))


def _sizes(text: str) -> list[int]:
    return [int(size) for size in text.split(",")]


def _shown(sizes: Sequence[int]) -> str:
    return ",".join(map(str, sizes))
