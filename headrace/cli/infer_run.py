# SPDX-License-Identifier: Apache-2.0
"""Run `headrace infer`: read the model's metadata, send the request, print the result."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson
import typer

from headrace.cli.client import credentials
from headrace.cli.infer_inputs import Inputs, suggestion
from headrace.cli.tables import line, open_console, table
from headrace.client import Client, Output, Result
from headrace.client.errors import with_request_id
from headrace.client.inference import ClassScore
from headrace.core.errors import HeadraceError, InvalidArgument, NotFound, Unimplemented, with_message
from headrace.core.names import check_name, nearest
from headrace.core.telemetry.logs import one_line

_SHOWN = 8
_TEXT = 40


def show_note(text: str) -> None:
    """Print a note to standard error."""
    typer.echo(f"note: {one_line(text)}", err=True)


def show_results(result: Result, seconds: list[float], classes: int, as_json: bool) -> None:
    """Print the outputs and the latency."""
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
    for name, rows_ in scores.items():
        cells = [
            (name, row, f"{score.value:.6g}", score.index, score.label)
            for row, entries in enumerate(rows_)
            for score in entries
        ]
        console.print(table(["OUTPUT", "ROW", "SCORE", "CLASS", "LABEL"], cells, right=("ROW", "SCORE", "CLASS")))


def _classified(result: Result, name: str) -> bool:
    """Return whether an output has classes: they are strings; a server without support sends the tensor."""
    return result.tensors[name].dtype.name == "BYTES"


def _times(seconds: list[float]) -> str:
    if len(seconds) == 1:
        return f"{seconds[0] * 1e3:.2f} ms"
    ordered = sorted(seconds)
    late = ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))]
    rate = len(ordered) / sum(ordered)
    return (
        f"{len(ordered)} requests: fastest {ordered[0] * 1e3:.2f} ms, median {statistics.median(ordered) * 1e3:.2f} ms, "
        f"p99 {late * 1e3:.2f} ms, {rate:.0f}/s sequentially"
    )


def _shape(sizes: tuple[int, ...]) -> str:
    return f"[{','.join(map(str, sizes))}]"


def _values(array: npt.NDArray[Any]) -> str:
    flat = array.reshape(-1)
    values = [_value(value) for value in flat[:_SHOWN].tolist()]
    return " ".join(values) + (" ..." if flat.size > _SHOWN else "")


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
        document: dict[str, Any] = {"name": name, "datatype": tensor.dtype.name, "shape": tensor.shape}
        if name in scores:
            document["classes"] = [
                [{"value": score.value, "index": score.index, "label": score.label} for score in row]
                for row in scores[name]
            ]
        else:
            flat = result[name].reshape(-1)
            document["data"] = [_text(value) for value in flat] if flat.dtype == object else flat.tolist()
        outputs.append(document)
    return {
        "model_name": result.model_name,
        "model_version": result.model_version,
        "outputs": outputs,
        "milliseconds": [round(duration * 1e3, 3) for duration in seconds],
    }


@dataclass(frozen=True, slots=True)
class InferOptions:
    """The options of `headrace infer`."""

    model: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    classes: int
    random: bool
    stream: bool
    repeat: int
    version: str
    url: str
    timeout: float
    headers: tuple[str, ...]
    ca: str
    cert: str
    key: str
    as_json: bool


def run_infer(options: InferOptions) -> None:
    """Send the request and print the response."""
    check_name(options.model)
    files = _output_files(options.outputs)
    if options.stream:
        _check_stream("--stream", options, files)
    with _client(options) as client:
        metadata = _metadata(client, options)
        stream = options.stream or _is_decoupled(client, options)
        if stream:
            _check_stream(f"model '{options.model}' is decoupled: it", options, files)
        outputs = _outputs(options, metadata, list(files))
        builder = Inputs(options.model, metadata)
        for text in options.inputs:
            builder.add(text)
        if missing := builder.missing():
            if options.random:
                for name in missing:
                    builder.add(f"{name}=random")
            else:
                builder.check_missing(missing, _optional(client, options))
        for note in builder.notes:
            show_note(note)
        inputs = builder.inputs
        if stream:
            started_at = time.perf_counter()
            with client.infer_stream(options.model, inputs, outputs=outputs, version=options.version) as results:
                for result in results:
                    show_results(result, [time.perf_counter() - started_at], options.classes, options.as_json)
            return
        seconds: list[float] = []
        for _ in range(options.repeat):
            started_at = time.perf_counter()
            try:
                result = client.infer(options.model, inputs, outputs=outputs, version=options.version)
            except Unimplemented as error:
                raise hinted(error, "add --stream" if "decoupled" in error.message else "") from None
            seconds.append(time.perf_counter() - started_at)
        _save(result, files)
        show_results(result, seconds, options.classes, options.as_json)


def _check_stream(subject: str, options: InferOptions, files: dict[str, str]) -> None:
    """Raise InvalidArgument for options that need exactly one result."""
    if options.repeat > 1:
        raise InvalidArgument(f"{subject} returns any number of results and cannot be combined with --repeat")
    if any(files.values()):
        raise InvalidArgument(f"{subject} returns any number of results, which cannot be written to files")


def _is_decoupled(client: Client, options: InferOptions) -> bool:
    """Return whether the model may return any number of results; False if the server does not say."""
    try:
        policy = client.config(options.model, version=options.version).get("model_transaction_policy")
    except HeadraceError as error:
        if error.status is None:
            raise
        return False
    return isinstance(policy, dict) and policy.get("decoupled") is True


def _metadata(client: Client, options: InferOptions) -> dict[str, Any]:
    try:
        return client.metadata(options.model, version=options.version)
    except NotFound as error:
        try:
            names = sorted({model["name"] for model in client.models()})
        except HeadraceError:
            names = []
        raise hinted(error, _other_models(options.model, names)) from None


def _other_models(name: str, names: list[str]) -> str:
    """Return a hint for a model that does not exist: the nearest name, or what there is."""
    if name in names or not names:
        return ""
    closest = nearest(name, names)
    if closest:
        return f"did you mean '{closest}'?"
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"the server has {', '.join(names[:_SHOWN])}{more}"


def hinted(error: HeadraceError, hint: str) -> HeadraceError:
    """Return a server's error with a hint added."""
    if not hint:
        return error
    attributes = vars(error)
    return with_request_id(
        with_message(error, f"{error.message}; {hint}"), attributes["request_id"], attributes["status"]
    )


def _client(options: InferOptions) -> Client:
    headers = credentials()
    for text in options.headers:
        name, colon, value = text.partition(":")
        if not colon:
            raise InvalidArgument(f"--header {text[:64]!a}: write NAME:VALUE")
        headers[name.strip()] = value.strip()
    if options.key and not options.cert:
        raise InvalidArgument("--key needs --cert")
    cert: Any = (options.cert, options.key) if options.key else options.cert or None
    return Client(options.url, timeout=options.timeout, verify=options.ca or True, cert=cert, headers=headers)


def _optional(client: Client, options: InferOptions) -> set[str]:
    """Return the optional inputs; only the configuration lists them."""
    config = client.config(options.model, version=options.version)
    return {str(tensor.get("name")) for tensor in config.get("input") or () if tensor.get("optional")}


def _output_files(texts: tuple[str, ...]) -> dict[str, str]:
    """Return the file of each requested output; "" for none."""
    files: dict[str, str] = {}
    for text in texts:
        name, equals, path = text.partition("=")
        if equals and not path.startswith("@"):
            raise InvalidArgument(f"--output {text[:64]!a}: write NAME or NAME=@file.npy")
        files[name] = path[1:]
    return files


def _outputs(options: InferOptions, metadata: dict[str, Any], names: list[str]) -> list[Output]:
    offered = {str(tensor["name"]): str(tensor.get("datatype", "")) for tensor in metadata.get("outputs") or ()}
    for name in names:
        if name not in offered:
            raise InvalidArgument(
                f"model '{options.model}' has no output '{name}'{suggestion(name, offered)}; it has: {', '.join(offered)}"
            )
    if not options.classes:
        return [Output(name) for name in names]
    requested = names or [name for name, datatype in offered.items() if datatype != "BYTES"]
    return [Output(name, classes=0 if offered[name] == "BYTES" else options.classes) for name in requested]


def _save(result: Result, files: dict[str, str]) -> None:
    for name, path in files.items():
        if not path:
            continue
        array: npt.NDArray[Any] = result[name]
        if array.dtype == object:
            # As strings of fixed width: Python objects would need pickle.
            array = array.astype(np.bytes_)
        try:
            with open(path, "wb") as file:
                np.save(file, array, allow_pickle=False)
        except OSError as error:
            raise InvalidArgument(f"{path}: {error.strerror}") from None
        show_note(f"wrote {path}: {name}, {array.dtype}, {list(array.shape)}")
