# SPDX-License-Identifier: Apache-2.0
"""What `headrace infer` does: asks what the model wants, sends the request, has it shown."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.cli.client import credentials
from headrace.cli.infer_inputs import Inputs, nearest
from headrace.cli.infer_view import show_note, show_results
from headrace.client import Client, Output, Result
from headrace.client.failures import marked
from headrace.core.errors import HeadraceError, InvalidArgument, NotFound, Unimplemented, retold
from headrace.core.names import check_name


@dataclass(frozen=True, slots=True)
class Wish:
    """What was typed."""

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


def run_wish(wish: Wish) -> None:
    """Send the request, and show the answer."""
    check_name(wish.model)
    if wish.stream and wish.repeat > 1:
        raise InvalidArgument("--stream and --repeat do not go together")
    files = _output_files(wish.outputs)
    if wish.stream and any(files.values()):
        raise InvalidArgument("--stream has many results: they are not written to files")
    with _client(wish) as client:
        metadata = _metadata(client, wish)
        outputs = _outputs(wish, metadata, list(files))
        builder = Inputs(wish.model, metadata)
        for text in wish.inputs:
            builder.add(text)
        if missing := builder.missing():
            if wish.random:
                for name in missing:
                    builder.add(f"{name}=random")
            else:
                builder.check_missing(missing, _optional(client, wish))
        for note in builder.notes:
            show_note(note)
        inputs = builder.inputs
        if wish.stream:
            began = time.perf_counter()
            with client.infer_stream(wish.model, inputs, outputs=outputs, version=wish.version) as results:
                for result in results:
                    show_results(result, [time.perf_counter() - began], wish.classes, wish.as_json)
            return
        seconds: list[float] = []
        for _ in range(wish.repeat):
            began = time.perf_counter()
            try:
                result = client.infer(wish.model, inputs, outputs=outputs, version=wish.version)
            except Unimplemented as error:
                raise hinted(error, "add --stream" if "decoupled" in error.message else "") from None
            seconds.append(time.perf_counter() - began)
        _save(result, files)
        show_results(result, seconds, wish.classes, wish.as_json)


def _metadata(client: Client, wish: Wish) -> dict[str, Any]:
    try:
        return client.metadata(wish.model, version=wish.version)
    except NotFound as error:
        try:
            names = [each["name"] for each in client.models()]
        except HeadraceError:
            names = []
        hint = nearest(wish.model, names) if wish.model not in names else ""
        raise hinted(error, hint.strip(" ()?") + "?" if hint else "") from None


def hinted(error: HeadraceError, hint: str) -> HeadraceError:
    """The same error of a server, with what to do about it here."""
    if not hint:
        return error
    said = vars(error)
    return marked(retold(error, f"{error.message}; {hint}"), said["request_id"], said["status"])


def _client(wish: Wish) -> Client:
    headers = credentials()
    for text in wish.headers:
        name, colon, value = text.partition(":")
        if not colon:
            raise InvalidArgument(f"--header {text[:64]!a}: write NAME:VALUE")
        headers[name.strip()] = value.strip()
    if wish.key and not wish.cert:
        raise InvalidArgument("--key needs --cert with it")
    cert: Any = (wish.cert, wish.key) if wish.key else wish.cert or None
    return Client(wish.url, timeout=wish.timeout, verify=wish.ca or True, cert=cert, headers=headers)


def _optional(client: Client, wish: Wish) -> set[str]:
    """Only the configuration tells which inputs may be left out."""
    config = client.config(wish.model, version=wish.version)
    return {str(each.get("name")) for each in config.get("input") or () if each.get("optional")}


def _output_files(texts: tuple[str, ...]) -> dict[str, str]:
    """The file of each output that is asked for; "" for none."""
    files: dict[str, str] = {}
    for text in texts:
        name, equals, path = text.partition("=")
        if equals and not path.startswith("@"):
            raise InvalidArgument(f"--output {text[:64]!a}: write NAME or NAME=@file.npy")
        files[name] = path[1:]
    return files


def _outputs(wish: Wish, metadata: dict[str, Any], names: list[str]) -> list[Output]:
    offered = {str(each["name"]): str(each.get("datatype", "")) for each in metadata.get("outputs") or ()}
    for name in names:
        if name not in offered:
            raise InvalidArgument(
                f"model '{wish.model}' has no output '{name}'{nearest(name, offered)}; it gives: {', '.join(offered)}"
            )
    if not wish.classes:
        return [Output(name) for name in names]
    wanted = names or [name for name, datatype in offered.items() if datatype != "BYTES"]
    return [Output(name, classes=0 if offered[name] == "BYTES" else wish.classes) for name in wanted]


def _save(result: Result, files: dict[str, str]) -> None:
    for name, path in files.items():
        if not path:
            continue
        array: npt.NDArray[Any] = result[name]
        if array.dtype == object:
            # As text of fixed width: a file of Python objects would have to be pickled.
            array = array.astype(np.bytes_)
        try:
            with open(path, "wb") as file:
                np.save(file, array, allow_pickle=False)
        except OSError as error:
            raise InvalidArgument(f"{path}: {error.strerror}") from None
        show_note(f"wrote {path}: {name}, {array.dtype}, {list(array.shape)}")
