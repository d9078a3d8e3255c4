# SPDX-License-Identifier: Apache-2.0
"""Items to the model and back. Called by `running`.

Two ways. Models of tensors get as many rows in one request as they compute at once, so that what a request costs is shared
by all of them (`RowsAsker`). For all others an item is a request of its own, as the microservice takes it, and the engine
batches or schedules those that are under way together (`KindAsker`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from headrace.core.dtypes import BYTES
from headrace.core.errors import (
    HeadraceError,
    Internal,
    InvalidArgument,
    ResourceExhausted,
    Unavailable,
    retold,
)
from headrace.core.tensors import Tensor
from headrace.engine.dataplane import DataPlane
from headrace.jobs.batch.blocks import PlainInput, Rows, is_plain
from headrace.jobs.batch.rows import Row, RowsOf
from headrace.jobs.batch.shaping import Item
from headrace.jobs.microservice.kinds.computing import compute, plain
from headrace.jobs.microservice.kinds.contract import Kind
from headrace.models.config.types import ModelConfig

log = logging.getLogger("headrace.batch")

Outcome = Mapping[str, Any] | HeadraceError
_TRIES = 4
_TAKEN = ("id", "inputs")
"""Words of an item that are not its values."""
_PAUSE_SECONDS = 0.1
_INTERNAL = "internal error; the job's log has the details"


class Asker(Protocol):
    """A model, as a job sees it."""

    @property
    def group(self) -> int:
        """How many items go together, at most."""

    @property
    def in_flight(self) -> int:
        """How many requests are under way, unless told otherwise."""

    def prepare(self, item: Item) -> tuple[Any, Any]:
        """What items must have in common to go together, and the item as `ask` wants it.

        In any thread. Raises InvalidArgument.
        """

    async def ask(self, prepared: Sequence[Any]) -> list[Outcome]:
        """What came of each. Raises nothing but what ends the job."""


class KindAsker:
    """One item, one inference request."""

    group = 1

    def __init__(self, kind: Kind) -> None:
        self._kind = kind
        # Enough for the batches of a GPU; pictures and videos are large, and their decoding is what takes the time.
        self.in_flight = {"llm": 256, "embedding": 256, "video": 1}.get(kind.model_type, 64)

    def prepare(self, item: Item) -> tuple[Any, Item]:
        """See `Asker.prepare`."""
        return None, item

    async def ask(self, prepared: Sequence[Item]) -> list[Outcome]:
        """See `Asker.ask`."""
        return [await self._one(item) for item in prepared]

    async def _one(self, item: Item) -> Outcome:
        try:
            output: dict[str, Any] = await _tried(lambda: self._kind.infer(item.body))
        except HeadraceError as error:
            message = error.message
            for url, name in item.names.items():
                message = message.replace(url, name)
            return retold(error, message)
        except Exception:
            log.exception("item %d", item.index)
            return Internal(_INTERNAL)
        for prediction in output.get("predictions") or ():
            prediction["image"] = item.names.get(prediction["image"], prediction["image"])
        return output


class RowsAsker:
    """Rows of tensors, many in one request."""

    def __init__(self, plane: DataPlane, config: ModelConfig, batch_size: int | None = None) -> None:
        self._plane = plane
        self._model = config.name
        self._batched = config.max_batch_size > 0
        self._inputs = {spec.name: RowsOf(spec) for spec in config.inputs}
        self._needed = [spec.name for spec in config.inputs if not spec.optional]
        most = max(1, config.max_batch_size)
        self.group = most if batch_size is None else max(1, min(batch_size, most))
        instances = sum(each.count * max(1, len(each.gpus)) for each in config.instance_groups) or 1
        # For each instance the batch that it computes, the next one, and one that is being read.
        self.in_flight = 3 * instances + 1 if self._batched else max(16, 4 * instances)

    @property
    def plain(self) -> PlainInput | None:
        """For the short way (`blocks`), if the model has one input, of a list of numbers, and is batched."""
        alone = len(self._inputs) == 1 and self._batched and self.group > 1
        found = next(iter(self._inputs.values())).plain if alone else None
        return None if found is None or found.name in _TAKEN else found

    async def ask_block(self, rows: Rows) -> Mapping[str, Any] | list[Outcome]:
        """What came of rows of the one input: a row of each output for each, or what `ask` would say."""
        ((name, rows_of),) = self._inputs.items()
        try:
            joined = [rows_of.joined(rows)]
            outputs = await _tried(lambda: compute(self._plane, self._model, joined))
            if is_plain(outputs) and all(len(array) == len(rows) for array in outputs.values()):
                return dict(outputs)
        except Exception:
            log.debug("%d items are asked again, each for itself", len(rows), exc_info=True)
        return await self.ask([{name: row} for row in rows])

    def prepare(self, item: Item) -> tuple[Any, dict[str, Row]]:
        """See `Asker.prepare`."""
        given = item.body.get("inputs")
        if not isinstance(given, dict) or len(item.body) != 1:
            raise InvalidArgument(f"give {', '.join(self._inputs)}: nested lists of values, and nothing else")
        for name in self._needed:
            if name not in given:
                raise InvalidArgument(f"the input {name!a} is missing")
        rows: dict[str, Row] = {}
        key = []
        for name, values in given.items():
            rows_of = self._inputs.get(name)
            if rows_of is None:
                known = ", ".join(self._inputs)
                raise InvalidArgument(f"{str(name)[:64]!a} is no input of the model, which takes {known}")
            shape, rows[name] = rows_of.row(values)
            key.append((name, shape))
        return tuple(key), rows

    async def ask(self, prepared: Sequence[Mapping[str, Row]]) -> list[Outcome]:
        """See `Asker.ask`."""
        try:
            return await self._together(prepared)
        except HeadraceError as error:
            # Whose fault it was, each finds out by itself.
            return [error] if len(prepared) == 1 else [(await self.ask([each]))[0] for each in prepared]
        except Exception:
            log.exception("%d items", len(prepared))
            return [Internal(_INTERNAL)] * len(prepared)

    async def _together(self, prepared: Sequence[Mapping[str, Row]]) -> list[Outcome]:
        joined = [self._inputs[name].joined([each[name] for each in prepared]) for name in prepared[0]]
        if not self._batched:
            alone = [Tensor(tensor.name, tensor.dtype, tensor.array[0]) for tensor in joined]
            outputs = await _tried(lambda: compute(self._plane, self._model, alone))
            return [{"outputs": {name: _value(array) for name, array in outputs.items()}}]
        outputs = await _tried(lambda: compute(self._plane, self._model, joined))
        for name, array in outputs.items():
            if array.shape[:1] != (len(prepared),):
                raise Internal(f"the model's output {name!a} has not one row for each item: give it a batch size of 0")
        values = {name: _values(array) for name, array in outputs.items()}
        return [{"outputs": {name: rows[row] for name, rows in values.items()}} for row in range(len(prepared))]


def _value(array: Any) -> Any:
    """What can be written as JSON."""
    if array.dtype == BYTES.numpy:
        return plain(array)
    return array if array.flags.c_contiguous and array.ndim else array.tolist()


def _values(array: Any) -> Any:
    """Each row of an array, as `_value`."""
    if array.dtype == BYTES.numpy or array.ndim == 1 or not array.flags.c_contiguous:
        return plain(array)
    return array


async def _tried(ask: Any) -> Any:
    """Again a few times where a queue was full, or the model was just being replaced."""
    for left in range(_TRIES - 1, -1, -1):
        try:
            return await ask()
        except (ResourceExhausted, Unavailable) as error:
            if not left:
                raise
            await asyncio.sleep(error.retry_after_seconds or _PAUSE_SECONDS * (_TRIES - left))
    raise Internal(_INTERNAL)
