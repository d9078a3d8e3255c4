# SPDX-License-Identifier: Apache-2.0
"""Items of a Parquet file, by pyarrow, which Headrace does not bring itself. Called by `sources` and `running`."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from headrace.core.errors import FailedPrecondition, InvalidArgument
from headrace.core.limits import MIB
from headrace.jobs.batch.shaping import Item, Shape
from headrace.jobs.batch.sources import file_digest

_ROWS = 1024
_BYTES = 16 * MIB
"""Of the rows that are read at once, about; a row may hold a picture."""


def pyarrow_for(what: str) -> Any:
    """The modules `pyarrow` and `pyarrow.parquet`; raises what to do without them."""
    try:
        importlib.import_module("pyarrow.parquet")
        return importlib.import_module("pyarrow")
    except ImportError:
        raise FailedPrecondition(
            f"{what} needs pyarrow: install it with `pip install pyarrow`, or use JSON Lines (a name that ends in .jsonl)"
        ) from None


class ParquetSource:
    """A file with an item in each row: a column for each word of a request, `id` among them if there is one."""

    skipped = 0

    def __init__(self, path: Path, shape: Shape, base: str) -> None:
        self._arrow = pyarrow_for(f"the input {path.name}")
        self._path = path
        self._shape = shape
        self._base = base
        with self._opened() as file:
            self.total = int(file.metadata.num_rows)
            groups = (file.metadata.row_group(n) for n in range(file.metadata.num_row_groups))
            row_bytes = sum(group.total_byte_size for group in groups) // max(1, self.total)
        self._rows = max(1, min(_ROWS, _BYTES // max(1, row_bytes)))
        self.fingerprint = f"parquet:{file_digest(path)}"

    def entries(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """See `Source.entries`."""
        for first, part in self.parts():
            yield from enumerate(part.to_pylist(), first)

    def parts(self, multiple: int = 1) -> Iterator[tuple[int, Any]]:
        """Some rows at a time, as pyarrow has them, with the index of the first; whole blocks, where possible."""
        first = 0
        with self._opened() as file:
            for part in file.iter_batches(batch_size=max(1, self._rows // multiple) * multiple):
                yield first, part
                first += part.num_rows

    def id_of(self, entry: dict[str, Any]) -> str | None:
        """See `Source.id_of`."""
        given = entry.get("id")
        return None if given is None else str(given)

    def item(self, index: int, entry: dict[str, Any]) -> Item:
        """See `Source.item`."""
        said = {name: value for name, value in entry.items() if value is not None}
        try:
            return self._shape.item(index, said, self._base)
        except InvalidArgument as error:
            raise InvalidArgument(f"row {index + 1}: {error.message}") from None

    def _opened(self) -> Any:
        try:
            return self._arrow.parquet.ParquetFile(self._path)
        except (self._arrow.ArrowException, OSError):
            raise InvalidArgument(f"the input {self._path.name} is not a Parquet file") from None
