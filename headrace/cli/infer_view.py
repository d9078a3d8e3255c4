# SPDX-License-Identifier: Apache-2.0
"""How `headrace infer` shows a result: tables, or JSON. Notes go to standard error, so that output can be piped."""

from __future__ import annotations

import statistics
from typing import Any

import numpy.typing as npt
import orjson
import typer

from headrace.cli.tables import line, open_console, table
from headrace.client import Result
from headrace.client.results import ClassScore
from headrace.core.telemetry.logs import one_line

_SHOWN = 8
_TEXT = 40


def show_note(text: str) -> None:
    """Something worth knowing beside the result."""
    typer.echo(f"note: {one_line(text)}", err=True)


def show_results(result: Result, seconds: list[float], classes: int, as_json: bool) -> None:
    """Print the outputs and how long they took."""
    scores = {name: result.classes(name) for name in result if classes and _classified(result, name)}
    if as_json:
        typer.echo(orjson.dumps(_document(result, seconds, scores), option=orjson.OPT_SERIALIZE_NUMPY).decode())
        return
    console = open_console()
    console.print(line(f"{result.model_name} version {result.model_version}, {_times(seconds)}"))
    rows = [
        (name, tensor.dtype.name, _shape(tensor.shape), _values(result[name]))
        for name, tensor in result.tensors.items()
        if name not in scores
    ]
    if rows:
        console.print(table(["OUTPUT", "TYPE", "SHAPE", "VALUES"], rows))
    for name, found in scores.items():
        cells = [
            (name, row, f"{score.value:.6g}", score.index, score.label)
            for row, entries in enumerate(found)
            for score in entries
        ]
        console.print(table(["OUTPUT", "ROW", "SCORE", "CLASS", "LABEL"], cells, right=("ROW", "SCORE", "CLASS")))


def _classified(result: Result, name: str) -> bool:
    """Classes come as text; a server that does not know them sends the tensor."""
    return result.tensors[name].dtype.name == "BYTES"


def _times(seconds: list[float]) -> str:
    if len(seconds) == 1:
        return f"{seconds[0] * 1e3:.2f} ms"
    ordered = sorted(seconds)
    late = ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))]
    rate = len(ordered) / sum(ordered)
    return (
        f"{len(ordered)} requests: fastest {ordered[0] * 1e3:.2f} ms, median {statistics.median(ordered) * 1e3:.2f} ms, "
        f"99 % {late * 1e3:.2f} ms, {rate:.0f}/s one after the other"
    )


def _shape(sizes: tuple[int, ...]) -> str:
    return f"[{','.join(map(str, sizes))}]"


def _values(array: npt.NDArray[Any]) -> str:
    flat = array.reshape(-1)
    shown = [_value(value) for value in flat[:_SHOWN].tolist()]
    return " ".join(shown) + (" ..." if flat.size > _SHOWN else "")


def _value(value: Any) -> str:
    if isinstance(value, bytes):
        text = _text(value)
        return text if len(text) <= _TEXT else f"{text[:_TEXT]}..."
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _text(value: bytes) -> str:
    return value.decode(errors="backslashreplace")


def _document(result: Result, seconds: list[float], scores: dict[str, list[list[ClassScore]]]) -> dict[str, Any]:
    outputs: list[dict[str, Any]] = []
    for name, tensor in result.tensors.items():
        shown: dict[str, Any] = {"name": name, "datatype": tensor.dtype.name, "shape": tensor.shape}
        if name in scores:
            shown["classes"] = [
                [{"value": each.value, "index": each.index, "label": each.label} for each in row]
                for row in scores[name]
            ]
        else:
            flat = result[name].reshape(-1)
            shown["data"] = [_text(each) for each in flat] if flat.dtype == object else flat.tolist()
        outputs.append(shown)
    return {
        "model_name": result.model_name,
        "model_version": result.model_version,
        "outputs": outputs,
        "milliseconds": [round(each * 1e3, 3) for each in seconds],
    }
