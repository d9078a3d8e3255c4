# SPDX-License-Identifier: Apache-2.0
"""Parquet in and out, by pyarrow, which Headrace does not bring itself. Called by `sources` and `delivering`."""

from __future__ import annotations

import importlib
import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson

from headrace.batch.shaping import Item, Shape
from headrace.batch.sources import file_digest
from headrace.core.errors import FailedPrecondition, InvalidArgument

_ROWS = 1024


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
        self.fingerprint = f"parquet:{file_digest(path)}"

    def entries(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """See `Source.entries`."""
        index = 0
        with self._opened() as file:
            for batch in file.iter_batches(batch_size=_ROWS):
                for row in batch.to_pylist():
                    yield index, row
                    index += 1

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


def write_parquet(records: Path, target: Path) -> None:
    """Results in JSON Lines as a Parquet file: index, id, output (JSON), error_code, error_message. All of it or none."""
    arrow = pyarrow_for(f"the output {target.name}")
    text = arrow.string()
    schema = arrow.schema(
        [
            ("index", arrow.int64()),
            ("id", text),
            ("output", text),
            ("error_code", text),
            ("error_message", text),
        ]
    )
    fresh = target.with_name(f".{target.name}.new")
    try:
        with records.open("rb") as file, arrow.parquet.ParquetWriter(str(fresh), schema) as writer:
            for rows in _rows(file):
                writer.write_table(arrow.Table.from_pylist(rows, schema=schema))
        with fresh.open("rb") as written:
            os.fsync(written.fileno())
        fresh.replace(target)
    finally:
        fresh.unlink(missing_ok=True)


def _rows(file: io.BufferedReader) -> Iterator[list[dict[str, Any]]]:
    rows: list[dict[str, Any]] = []
    for line in file:
        rows.append(_row(orjson.loads(line)))
        if len(rows) == _ROWS:
            yield rows
            rows = []
    if rows:
        yield rows


def _row(record: dict[str, Any]) -> dict[str, Any]:
    error = record.get("error") or {}
    given = record.get("id")
    return {
        "index": record["index"],
        "id": None if given is None else str(given),
        "output": orjson.dumps(record["output"]).decode() if "output" in record else None,
        "error_code": error.get("code"),
        "error_message": error.get("message"),
    }
