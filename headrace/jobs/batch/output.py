# SPDX-License-Identifier: Apache-2.0
"""The output of a batch job: where results go, as JSON Lines or Parquet, to disk or to an object store.

Local JSON Lines are written in place. Any other output is written as JSON Lines first, so that the job can continue after a
kill, and is converted or uploaded at the end. A Parquet file has the columns `index`, `id`, the outputs, `error_code` and
`error_message`. A tensor model has a typed column per output; any other result is one column `output` of JSON.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from headrace.core.dtypes import BF16, BOOL, BYTES, DType
from headrace.core.errors import FailedPrecondition, HeadraceError, InvalidArgument, PermissionDenied, Unavailable
from headrace.core.extras import MissingExtra
from headrace.core.fault_points import fault_point
from headrace.core.limits import MIB
from headrace.jobs.batch.blocks import BlockResult, is_packed, unpack
from headrace.jobs.batch.settings import BatchSettings, Shard
from headrace.jobs.batch.sources import pyarrow_for
from headrace.models.storage.locations import LocalLocation, ObjectLocation, parse_location
from headrace.models.storage.object_stores import open_store

log = logging.getLogger("headrace.batch")

SHARD = "{shard}"
_LINES = (".jsonl", ".ndjson")
_PARQUET = (".parquet", ".pq")
Outputs = Mapping[str, DType | None] | None
_DELIVERING = ".delivering-"
_IDLE_SECONDS, _RETRY_SECONDS = 60.0, 30.0

_ROWS = 65_536
_BYTES = 64 * MIB
"""Size of the lines that become one row group."""
_OUTPUT = "output"
_COLUMNS = ("index", "id", _OUTPUT, "error_code", "error_message")
Record = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class OutputTarget:
    """The parsed output of a job."""

    location: LocalLocation | ObjectLocation
    results: Path
    """The file of result lines."""
    parquet: bool

    @property
    def needs_delivery(self) -> bool:
        """Return whether the lines have to be converted or uploaded at the end."""
        return self.parquet or isinstance(self.location, ObjectLocation)

    def __str__(self) -> str:
        return str(self.location)


def parse_output(settings: BatchSettings) -> OutputTarget:
    """Parse the output setting; raise errors before anything is computed."""
    location = parse_location(_with_shard(settings.output, settings.shard))
    if isinstance(location, LocalLocation):
        path = location.path.absolute()
        location = LocalLocation(path / "results.jsonl" if path.is_dir() or settings.output.endswith("/") else path)
        name = location.path.name
    elif isinstance(location, ObjectLocation):
        if not location.key:
            raise InvalidArgument(f"the output {location} is a bucket: use an object, such as {location}results.jsonl")
        name = location.key.rpartition("/")[2]
    else:
        raise InvalidArgument(
            f"the output {location} cannot be written: use a file, or an object of s3://, gs:// or az://"
        )
    suffix = Path(name).suffix.lower()
    if suffix not in (*_LINES, *_PARQUET):
        raise InvalidArgument(f"the output {name} has an unknown format: its name must end in .jsonl or .parquet")
    parquet = suffix in _PARQUET
    if parquet:
        from headrace.jobs.batch.sources import pyarrow_for

        pyarrow_for(f"the output {name}")
    if isinstance(location, ObjectLocation):
        _store(location, settings)  # fail early on bad credentials
        digest = hashlib.sha256(str(location).encode()).hexdigest()[:16]
        return OutputTarget(location, settings.folder / "batch" / digest / "results.jsonl", parquet)
    results = location.path.with_name(f"{name}.records.jsonl") if parquet else location.path
    return OutputTarget(location, results, parquet)


def deliver(target: OutputTarget, settings: BatchSettings, outputs: Outputs = None) -> None:
    """Convert and upload finished results. `outputs`: types of a tensor model's outputs. Blocks."""
    if isinstance(target.location, LocalLocation):
        if target.parquet:
            _to_parquet(target.results, target.location.path, outputs)
            fault_point("batch.output.delivered")
        return
    for leftover in target.results.parent.glob(f"{_DELIVERING}*"):
        shutil.rmtree(leftover, ignore_errors=True)  # of a run that was killed; this one holds the lock of the results
    with tempfile.TemporaryDirectory(dir=target.results.parent, prefix=_DELIVERING) as folder:
        content = target.results
        if target.parquet:
            content = Path(folder, "results.parquet")
            _to_parquet(target.results, content, outputs)
        _upload(content, target.location, settings)
        fault_point("batch.output.delivered")


def _to_parquet(results: Path, path: Path, outputs: Outputs) -> None:

    try:
        write_parquet(results, path, outputs)
    except OSError as error:
        raise FailedPrecondition(
            f"{path} cannot be written: {error.strerror}; the results are kept: free space and run the same command again"
        ) from None


def _store(location: ObjectLocation, settings: BatchSettings) -> Any:
    keys = None if settings.credentials is None else settings.credentials.keys_of(location.cloud, location.bucket)
    try:
        return open_store(location, keys, _IDLE_SECONDS, _RETRY_SECONDS)
    except ImportError:
        raise MissingExtra(str(location), "cloud") from None
    except Exception as error:
        # Its message may contain addresses and keys.
        log.warning("%s: %s", location, type(error).__name__)
        raise FailedPrecondition(
            f"{location} cannot be reached with these credentials: check them and the region"
        ) from None


def _upload(content: Path, location: ObjectLocation, settings: BatchSettings) -> None:
    store = _store(location, settings)
    from obstore import exceptions

    try:
        fault_point("batch.output.upload")
        store.put(location.key, content)
    except HeadraceError:
        raise
    except (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError):
        raise PermissionDenied(
            f"{location} may not be written with these credentials; the results are kept: retry with other credentials"
        ) from None
    except Exception as error:
        log.warning("%s: %s", location, type(error).__name__)
        raise Unavailable(
            f"{location} could not be written: the store failed; the results are kept: run the same command again"
        ) from None


def _with_shard(text: str, shard: Shard) -> str:
    return text.replace(SHARD, f"{shard.number}-of-{shard.count}")


def write_parquet(records: Path, target: Path, outputs: Mapping[str, DType | None] | None = None) -> None:
    """Write a Parquet file from the lines of a ledger, atomically."""
    arrow = pyarrow_for(f"the output {target.name}")
    temporary = target.with_name(f".{target.name}.new")
    try:
        try:
            _write(arrow, records, temporary, _derive_columns(arrow, records, outputs))
        except (arrow.ArrowInvalid, arrow.ArrowTypeError, TypeError, ValueError, OverflowError) as error:
            log.warning("%s: the outputs do not match their types; writing them as JSON: %s", target, error)
            _write(arrow, records, temporary, _derive_columns(arrow, records, None))
        with temporary.open("rb") as written:
            os.fsync(written.fileno())
        fault_point("batch.parquet.rename")
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


@dataclass(frozen=True, slots=True)
class _Columns:
    """The columns of a Parquet file."""

    schema: Any
    outputs: Mapping[str, str]
    """Output names by column; empty if there is one JSON column."""


def _derive_columns(arrow: Any, records: Path, outputs: Mapping[str, DType | None] | None) -> _Columns:
    """Derive the columns; the first result gives the depth of an output's lists."""
    text = arrow.string()
    typed = {}
    if outputs and None not in outputs.values():
        first = next(_results(records), {})
        for name, dtype in outputs.items():
            typed[name] = _value_type(arrow, dtype)
            for _ in range(_depth(first.get(name, [0]))):
                typed[name] = arrow.list_(typed[name])
    columns = {f"{_OUTPUT}_{name}" if name in _COLUMNS else name: name for name in typed}
    output_fields = [(column, typed[name]) for column, name in columns.items()] or [(_OUTPUT, text)]
    fields = [("index", arrow.int64()), ("id", text), *output_fields, ("error_code", text), ("error_message", text)]
    return _Columns(arrow.schema(fields), columns)


def _value_type(arrow: Any, dtype: DType | None) -> Any:
    if dtype is BYTES:
        return arrow.string()
    if dtype is BF16:
        return arrow.float32()  # as `compute` returns it
    return arrow.bool_() if dtype is BOOL else arrow.from_numpy_dtype(dtype.numpy if dtype else np.dtype("f4"))


def _results(records: Path) -> Iterator[Mapping[str, Any]]:
    """Yield the outputs of items."""
    for _, record in _read(records):
        if is_packed(record):
            yield {name: array[0] for name, array in unpack(record).arrays.items()}
        elif "outputs" in record.get(_OUTPUT, ()):
            yield record[_OUTPUT]["outputs"]


def _depth(values: Any) -> int:
    if isinstance(values, np.ndarray):
        return values.ndim
    return 1 + _depth(values[0] if values else 0) if isinstance(values, list) else 0


def _write(arrow: Any, records: Path, path: Path, layout: _Columns) -> None:
    # Dictionary encoding of numbers takes longer than writing them.
    texts = [name for name in layout.schema.names if name not in layout.outputs]
    with arrow.parquet.ParquetWriter(str(path), layout.schema, use_dictionary=texts) as writer:
        for group in _groups(_read(records)):
            parts = [
                _block_columns(arrow, layout, [unpack(record) for record in run])
                if packed
                else arrow.RecordBatch.from_pylist([_row(record, layout) for record in run], schema=layout.schema)
                for packed, run in _runs(group)
            ]
            writer.write_table(arrow.Table.from_batches(parts, schema=layout.schema).combine_chunks())


def _read(records: Path) -> Iterator[tuple[int, Record]]:
    """Yield the size of each line and its record."""
    with records.open("rb") as file:
        for line in file:
            yield len(line), orjson.loads(line)


def _groups(lines: Iterable[tuple[int, Record]]) -> Iterator[list[Record]]:
    """Group lines into row groups."""
    group: list[Record] = []
    rows = size = 0
    for length, record in lines:
        group.append(record)
        rows += record.get("count", 1)
        size += length
        if rows >= _ROWS or size >= _BYTES:
            yield group
            group, rows, size = [], 0, 0
    if group:
        yield group


def _runs(records: Sequence[Record]) -> Iterator[tuple[bool, list[Record]]]:
    """Split records into runs: blocks with equal array types, and single items."""
    run: list[Record] = []
    run_types: Any = None
    for record in records:
        array_types = (
            [(name, packed[0], packed[1]) for name, packed in record["outputs"].items()] if is_packed(record) else None
        )
        if run and array_types != run_types:
            yield run_types is not None, run
            run = []
        run.append(record)
        run_types = array_types
    if run:
        yield run_types is not None, run


def _block_columns(arrow: Any, layout: _Columns, blocks: Sequence[BlockResult]) -> Any:
    """Convert blocks to columns, without touching single numbers."""
    indices = np.concatenate([_index_array(block.indices) for block in blocks])
    ids = [None if item_id is None else str(item_id) for block in blocks for item_id in block.ids]
    arrays = {name: np.concatenate([block.arrays[name] for block in blocks]) for name in blocks[0].arrays}
    no_errors = arrow.nulls(len(indices), arrow.string())
    columns = {"index": indices, "id": ids, "error_code": no_errors, "error_message": no_errors}
    if layout.outputs:
        columns |= {column: _nested_lists(arrow, arrays[name]) for column, name in layout.outputs.items()}
    else:
        columns[_OUTPUT] = _json_texts(arrays)
    return arrow.RecordBatch.from_pydict(columns, schema=layout.schema)


def _index_array(indices: Sequence[int]) -> Any:
    if isinstance(indices, range):
        return np.arange(indices.start, indices.stop, dtype=np.int64)
    return np.asarray(indices, np.int64)


def _nested_lists(arrow: Any, array: Any) -> Any:
    """Convert an array to nested lists of pyarrow."""
    nested = arrow.array(array.reshape(-1))
    for axis in range(array.ndim - 1, 0, -1):
        count = int(np.prod(array.shape[:axis]))
        offsets = np.arange(count + 1, dtype=np.int64) * array.shape[axis]
        nested = arrow.ListArray.from_arrays(arrow.array(offsets.astype(np.int32)), nested)
    return nested


def _json_texts(arrays: Mapping[str, Any]) -> list[str]:
    count = len(next(iter(arrays.values())))
    rows = ({"outputs": {name: array[n] for name, array in arrays.items()}} for n in range(count))
    return [orjson.dumps(row, option=orjson.OPT_SERIALIZE_NUMPY).decode() for row in rows]


def _row(record: Record, layout: _Columns) -> dict[str, Any]:
    """Return the row of a single item."""
    error = record.get("error") or {}
    item_id = record.get("id")
    row = {
        "index": record["index"],
        "id": None if item_id is None else str(item_id),
        "error_code": error.get("code"),
        "error_message": error.get("message"),
    }
    if _OUTPUT in record and layout.outputs:
        row |= {column: record[_OUTPUT]["outputs"].get(name) for column, name in layout.outputs.items()}
    elif _OUTPUT in record:
        row[_OUTPUT] = orjson.dumps(record[_OUTPUT]).decode()
    return row
