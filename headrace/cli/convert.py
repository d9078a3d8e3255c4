# SPDX-License-Identifier: Apache-2.0
"""`headrace models convert`: convert a Caffe2 model to an ONNX file.

Finds the pair of files and the declared inputs; the NetDef backend translates. The file is written atomically.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.core.clock import SystemClock
from headrace.core.dtypes import FP32, dtype_named
from headrace.core.errors import (
    AlreadyExists,
    FailedPrecondition,
    HeadraceError,
    InvalidArgument,
    NotFound,
    with_message,
)
from headrace.core.files import write_atomically
from headrace.core.telemetry.progress import Progress, Reporter, silent

if TYPE_CHECKING:
    from headrace.backends.netdef.files import Pair
    from headrace.backends.netdef.translation import InputTensor

_NET, _ZOO_NET, _ZOO_WEIGHTS = "model.netdef", "predict_net.pb", "init_net.pb"


@dataclass(frozen=True, slots=True)
class Converted:
    """The result of a conversion."""

    source: Path
    target: Path
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    nodes: int
    size_bytes: int

    def as_json(self) -> dict[str, Any]:
        """Return the document that `--json` prints."""
        return {**asdict(self), "source": str(self.source), "target": str(self.target)}


def convert_netdef(
    source: Path,
    target: Path,
    *,
    inputs: Sequence[str] = (),
    outputs: Sequence[str] = (),
    overwrite: bool = False,
    progress: Progress = silent,
) -> Converted:
    """Convert the net at `source`: its file, or the folder of a version or of a model.

    `inputs` look like "gpu_0/data=-1,3,224,224" or "ids=INT64:-1,16". Without them, the model's configuration declares
    the inputs; without a configuration they are FP32 of any shape. `outputs` are names; the default is all outputs of
    the net.
    """
    from headrace.backends.table import backend_named

    backend_named("netdef")  # raises an error with the install command if a package is missing
    target = _checked_target(target, overwrite)
    net = find_net(source)
    with Reporter(progress, SystemClock(), f"convert {net.name}", unit="operators") as reporter:
        reporter.update(message="reading")
        pair = _read(net)
        tensors, outputs = _ends(net, pair, inputs, outputs)
        reporter.update(message="translating")
        content, written = _translated(net, pair, tensors, outputs, reporter)
        reporter.update(message="writing")
        _write(target, content)
    return Converted(net, target, *written, len(content))


def find_net(source: Path) -> Path:
    """Return the net's file: `source` itself, or the one in the folder of a version, a model or the model zoo."""
    if source.is_file():
        return source
    if not source.is_dir():
        raise NotFound(f"there is no '{source}'")
    from headrace.models.config.formats import version_folders

    for folder in (source, *version_folders(source)):
        for name in (_NET, _ZOO_NET):
            if (folder / name).is_file():
                return folder / name
    raise NotFound(
        f"'{source}' has neither '{_NET}' nor '{_ZOO_NET}', in itself or in the folders of its versions: name the file"
    )


def _checked_target(target: Path, overwrite: bool) -> Path:
    if target.is_dir():
        target = target / "model.onnx"
    if target.suffix != ".onnx":
        raise InvalidArgument(f"'{target.name}' is not an ONNX file name: use the extension .onnx")
    if not target.parent.is_dir():
        raise NotFound(f"there is no folder '{target.parent}': create it first")
    if target.exists() and not overwrite:
        raise AlreadyExists(f"'{target}' exists already: remove it, or add --overwrite")
    return target


def _read(net: Path) -> Pair:
    from headrace.backends.netdef.files import Pair, init_path, read_net, read_pair

    weights = net.with_name(_ZOO_WEIGHTS)
    if net.name == _ZOO_NET and weights.is_file() and not init_path(net).exists():
        # The file names of Caffe2's model zoo and its exporters.
        return Pair(read_net(weights), read_net(net))
    return read_pair(net)


def _ends(
    net: Path, pair: Pair, inputs: Sequence[str], outputs: Sequence[str]
) -> tuple[list[InputTensor], Sequence[str]]:
    """Return the inputs and outputs: from the options, else from the configuration, else from the net."""
    from headrace.backends.netdef.backend import declared_inputs
    from headrace.backends.netdef.translation import InputTensor
    from headrace.models.config.drafts import read_draft

    if inputs:
        return [_parsed_input(text) for text in inputs], outputs
    draft = read_draft(net.parent.resolve().parent)
    if draft.path is not None and draft.message.input:
        config = draft.typed()
        return list(declared_inputs(config)), outputs or [spec.name for spec in config.outputs]
    filled = {blob for operator in pair.init.operators for blob in operator.outputs}
    # Some exporters fill the input with zeros too; then it is the first.
    names = [name for name in pair.net.external_inputs if name not in filled] or pair.net.external_inputs[:1]
    return [InputTensor(name, FP32, None) for name in names], outputs


def _parsed_input(text: str) -> InputTensor:
    from headrace.backends.netdef.translation import InputTensor

    name, _, rest = text.rpartition("=")
    datatype, _, numbers = rest.rpartition(":")
    try:
        shape = tuple(int(number) for number in numbers.split(","))
    except ValueError:
        shape = ()
    if not name or not shape or any(not -1 <= size < 2**31 for size in shape):
        raise InvalidArgument(
            f"invalid input '{text[:128]}': write NAME=SIZES or NAME=TYPE:SIZES, like data=-1,3,224,224 or ids=INT64:-1,16"
        )
    return InputTensor(name, dtype_named(datatype.upper()) if datatype else FP32, shape)


def _translated(
    net: Path, pair: Pair, tensors: Sequence[InputTensor], outputs: Sequence[str], reporter: Reporter
) -> tuple[bytes, tuple[tuple[str, ...], tuple[str, ...], int]]:
    from headrace.backends.netdef.translation import translate
    from headrace.backends.onnx.session import CPU, new_session

    try:
        model = translate(pair, tensors, outputs, lambda done, total: reporter.update(done=done, total=total))
    except HeadraceError as error:
        if any(tensor.shape is None for tensor in tensors):
            hint = " ".join(f"--input {tensor.name}=-1,3,224,224" for tensor in tensors[:2])
            raise with_message(error, f"{error.message}. Give the shapes, as in {hint}") from None
        raise
    content = model.SerializeToString()
    reporter.update(message="checking")
    import onnxruntime as ort

    try:
        options = ort.SessionOptions()
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        new_session(content, options, [(CPU, {})])
    except Exception:
        raise InvalidArgument(
            f"'{net.name}' was translated, but ONNX Runtime {ort.__version__} cannot load the result: the types or "
            "shapes of its inputs differ from those the net was made for"
        ) from None
    names = (tuple(tensor.name for tensor in model.graph.input), tuple(tensor.name for tensor in model.graph.output))
    return content, (*names, len(model.graph.node))


def _write(target: Path, content: bytes) -> None:
    try:
        write_atomically(target, content, mode=0o644)
    except OSError as error:
        raise FailedPrecondition(
            f"'{target}' cannot be written ({error.strerror or 'error'}): check the folder's permissions and space"
        ) from None
