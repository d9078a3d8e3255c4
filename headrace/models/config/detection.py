# SPDX-License-Identifier: Apache-2.0
"""Detect the model format of a file or folder by its content, and the files that belong to it."""

from __future__ import annotations

import bz2
import json
import lzma
import mmap
import re
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Literal

from headrace.core.errors import InvalidArgument
from headrace.core.python_source import parse_python
from headrace.core.wire_format import (
    DELIMITED,
    FIXED32,
    FIXED64,
    VARINT,
    InvalidMessage,
    TruncatedMessage,
    WireField,
    decode_varint,
    read_fields,
)
from headrace.models.config.formats import hub_backend, hub_files, is_hub_folder

Message = Literal["onnx", "saved_model", "graphdef", "netdef", "init_netdef", ""]

_MAX_FIELDS = 1_000_000
_MAX_DEPTH = 8
_TEXT = re.compile(rb"[A-Za-z0-9_.>]{1,128}")

_Data = mmap.mmap | bytes
_fields = partial(read_fields, truncated=True)


def detect_message(path: Path) -> Message:
    """Return the format of a protobuf file; "" if it is none of `Message`."""
    with _mapped(path) as data:
        fields: list[WireField] = []
        try:
            for field in islice(_fields(data, 0, len(data)), _MAX_FIELDS):
                fields.append(field)  # noqa: PERF402  # keep those before the cut
        except TruncatedMessage:
            pass  # Still detected: the backend reports that it is truncated.
        except InvalidMessage:
            return ""
        kinds = {(number, wire) for number, wire, *_ in fields}
        if not fields or any(number > 31 or wire in (FIXED64, FIXED32) for number, wire in kinds):
            return ""
        if fields[0][:2] == (1, VARINT):
            version, _ = decode_varint(data, fields[0].content, fields[0].end)
            if kinds & {(7, DELIMITED), (8, DELIMITED)} and version < 1000:
                return "onnx"
            return "saved_model" if (2, DELIMITED) in kinds and version == 1 else ""
        return _detect_graph(data, fields)


def _detect_graph(data: _Data, fields: list[WireField]) -> Message:
    operators = [field for field in fields if field[:2] == (2, DELIMITED)]
    types = [_text_field(data, operator, 4) for operator in operators]
    # Field 2 of a GraphDef is its library, whose messages have no text in field 4.
    if operators and all(types) and sum(number == 1 for number, *_ in fields) <= 1:
        return "init_netdef" if all(name.endswith(b"Fill") for name in types) else "netdef"
    nodes = [field for field in fields if field[:2] == (1, DELIMITED)]
    if nodes and _text_field(data, nodes[0], 1) and _text_field(data, nodes[0], 2):
        return "graphdef"
    return ""


def external_files(path: Path) -> list[str]:
    """Return the files with an ONNX model's external weights, as the model names them."""
    names: dict[str, None] = {}
    with _mapped(path) as data:
        try:
            for number, wire, _, content, end in _fields(data, 0, len(data)):
                if (number, wire) == (7, DELIMITED):
                    _walk_graph(data, content, end, names, 0)
        except InvalidMessage:
            pass  # The backend reports what is wrong.
    for name in names:
        parts = PurePosixPath(name)
        if parts.is_absolute() or ".." in parts.parts or not parts.parts:
            raise InvalidArgument(
                f"{path} wants its weights from '{name[:128]}', which is not beside it: save the model again with its "
                "external data in the same folder"
            )
        if not (path.parent / name).is_file():
            raise InvalidArgument(f"{path} keeps its weights in '{name[:128]}', which is not there: put it beside it")
    return list(names)


# Field numbers of onnx.proto: GraphProto, NodeProto, AttributeProto, TensorProto, StringStringEntryProto.


def _walk_graph(data: _Data, start: int, end: int, names: dict[str, None], depth: int) -> None:
    if depth > _MAX_DEPTH:
        return
    for number, wire, _, begin, stop in _fields(data, start, end):
        if wire != DELIMITED:
            continue
        if number == 1:
            _walk_node(data, begin, stop, names, depth)
        elif number == 5:
            _walk_tensor(data, begin, stop, names)


def _walk_node(data: _Data, start: int, end: int, names: dict[str, None], depth: int) -> None:
    for number, wire, _, begin, stop in _fields(data, start, end):
        if (number, wire) != (5, DELIMITED):
            continue
        for inner, kind, _, first, last in _fields(data, begin, stop):
            if kind == DELIMITED and inner in (5, 10):
                _walk_tensor(data, first, last, names)
            elif kind == DELIMITED and inner in (6, 11):
                _walk_graph(data, first, last, names, depth + 1)


def _walk_tensor(data: _Data, start: int, end: int, names: dict[str, None]) -> None:
    for number, wire, _, begin, stop in _fields(data, start, end):
        if (number, wire) == (13, DELIMITED):
            entry = {
                inner: data[first:last]
                for inner, kind, _, first, last in _fields(data, begin, stop)
                if kind == DELIMITED
            }
            if entry.get(1) == b"location":
                names[entry.get(2, b"").decode(errors="replace")] = None


def _text_field(data: _Data, field: WireField, number: int) -> bytes:
    """Return a text field of a message; b"" if there is none."""
    try:
        for inner, wire, _, start, end in _fields(data, field.content, field.end):
            if (inner, wire) == (number, DELIMITED):
                text = data[start : min(end, start + 200)]
                # Node names have slashes.
                return text if _TEXT.fullmatch(text.replace(b"/", b"_").replace(b":", b"_")) else b""
    except InvalidMessage:
        pass
    return b""


@contextmanager
def _mapped(path: Path) -> Iterator[_Data]:
    with path.open("rb") as file:
        try:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError:  # An empty file cannot be mapped.
            yield b""
            return
        try:
            yield mapped
        finally:
            mapped.close()


_PICKLE_SUFFIXES = frozenset({".pkl", ".pickle", ".joblib", ".dill"})
_PEEK = 65_536
_LZMA_MEMORY_BYTES = 256 << 20
"""Memory limit for decompressing the beginning of a file; the largest preset needs 65 MiB."""

PICKLED_TORCH = (
    "is a pickle made by torch.save, which runs whatever it likes when it is opened; it is not served. In the program "
    "that made it, save the model as torch.export (torch.export.save) or TorchScript (torch.jit.script(model).save), and "
    "give that file"
)
_PICKLE = (
    "is a pickle, which runs whatever it likes when it is opened; it is not served. In the program that made it, save the "
    "model in its own format: scikit-learn by skops.io.dump, XGBoost by save_model('model.ubj'), LightGBM by "
    "save_model('model.txt'), PyTorch by torch.export.save; or export it to ONNX"
)
_KERAS = "is a Keras model: load it with Keras and call model.export('model.savedmodel'), then give that folder"

ZIPS: tuple[tuple[str, str], ...] = (
    ("model.weights.h5", _KERAS),
    ("MAR-INF/MANIFEST.json", "is an archive for TorchServe: unpack it, and give the .pt or .onnx file that is in it"),
    ("saved_model.pb", "is a SavedModel in a zip archive: unpack it, and give the folder that has saved_model.pb"),
)
"""Formats by a file name in a zip archive."""

_MAGIC: tuple[tuple[int, bytes, str], ...] = (
    (0, b"\x89HDF\r\n\x1a\n", _KERAS),
    (0, b"GGUF", "has weights for llama.cpp (GGUF), which has a server of its own; no backend here reads them"),
    (4, b"TFL3", "is a TensorFlow Lite model: convert the original to ONNX with tf2onnx, or give its SavedModel"),
    (0, b"binf", "is XGBoost's old binary format: load it with XGBoost below 3 and save_model('model.ubj')"),
    (0, b"CBM1", "is a CatBoost model: save it with save_model('model.onnx', format='onnx') and give that file"),
    (0, b"\x93NUMPY", "is an array, not a model"),
)


def refusal(path: Path, head: bytes) -> str:
    """Return why a file is not served, and what to do; "" if nothing is known."""
    if _is_pickle(path, head):
        return _PICKLE if path.suffix not in {".pt", ".pth", ".bin"} else PICKLED_TORCH
    for offset, magic, text in _MAGIC:
        if head[offset : offset + len(magic)] == magic:
            return text
    # A length, then JSON.
    if head[8:10] == b'{"' and int.from_bytes(head[:8], "little") < 1 << 30:
        return "has weights without a model (safetensors): load them in the model's own program and export that to ONNX"
    if b"<PMML" in head[:4096]:
        return "is PMML, which no backend here reads: export the model to ONNX"
    return ""


def _is_pickle(path: Path, head: bytes) -> bool:
    if _has_pickle_header(head) or path.suffix in _PICKLE_SUFFIXES:
        return True
    decompressors: tuple[Callable[[], zlib._Decompress | bz2.BZ2Decompressor | lzma.LZMADecompressor], ...] = (
        lambda: zlib.decompressobj(47),  # zlib or gzip.
        bz2.BZ2Decompressor,
        lambda: lzma.LZMADecompressor(memlimit=_LZMA_MEMORY_BYTES),
    )
    for decompressor in decompressors:
        try:
            if _has_pickle_header(decompressor().decompress(head[:_PEEK], 16)):
                return True
        except (zlib.error, OSError, lzma.LZMAError, ValueError):
            continue
    return False


def _has_pickle_header(head: bytes) -> bool:
    return len(head) > 2 and head[0] == 0x80 and 2 <= head[1] <= 5


_HEAD_BYTES = 65_536
_MAX_NAMES = 200_000
_XGBOOST_JSON = re.compile(rb'\s*\{\s*"(learner|version)"\s*:')
_XML_NET = re.compile(rb"<net[\s>]")


@dataclass(frozen=True, slots=True)
class Part:
    """A file or folder of a model, and its usual name in a version folder."""

    source: Path
    name: str


@dataclass(frozen=True, slots=True)
class Detected:
    """A detected model."""

    what: str
    """A description for people: "an ONNX model"."""
    backend: str
    platform: str
    """The configuration's `platform`, if the backend has several formats; else ""."""
    parts: tuple[Part, ...]
    """The model file first."""
    has_signature: bool = True
    """Whether the format includes inputs and outputs; otherwise the configuration must have them."""


KNOWN = (
    "ONNX (.onnx), TorchScript (.pt), torch.export and AOTInductor (.pt2), TensorFlow SavedModel (a folder with "
    "saved_model.pb) and GraphDef (.graphdef, .pb), TensorRT (.plan, .engine), Caffe2 (predict_net.pb with init_net.pb), "
    "OpenVINO (.xml with .bin), Hugging Face (a folder with config.json and .safetensors), "
    "XGBoost (.ubj, .json), LightGBM (.txt), scikit-learn by skops (.skops), Python (model.py)"
)


_SUFFIXES = {
    ".onnx": "ONNX",
    ".pt": "TorchScript",
    ".pt2": "torch.export",
    ".graphdef": "GraphDef",
    ".plan": "TensorRT",
    ".engine": "TensorRT",
    ".ubj": "XGBoost",
    ".skops": "skops",
}
"""Suffixes that only one format has."""


def detect(path: Path) -> Detected:
    """Detect the model at a path; raise InvalidArgument with the reason if it cannot be served."""
    try:
        if path.is_dir():
            return _folder(path)
        if path.is_file():
            return _file(path)
    except OSError as error:
        raise InvalidArgument(f"{path} cannot be read: {error.strerror}; check its permissions") from None
    raise InvalidArgument(f"{path} is not there: give a model's file or folder")


def _file(path: Path) -> Detected:
    with path.open("rb") as file:
        head = file.read(_HEAD_BYTES)
    if not head:
        raise InvalidArgument(f"{path} is empty: copy the model's file again")
    if head.startswith(b"version https://git-lfs.github.com/"):
        raise InvalidArgument(f"{path} is a pointer of Git LFS, not the file itself: run git lfs pull")
    if head.startswith(b"PK\x03\x04"):
        return _archive(path)
    why = refusal(path, head)
    if why:
        raise InvalidArgument(f"{path} {why}")
    for detector in _DETECTORS:
        detected = detector(path, head)
        if detected is not None:
            return detected
    raise _unknown(path, "has an unknown format")


def _archive(path: Path) -> Detected:
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()[:_MAX_NAMES]
    except (zipfile.BadZipFile, NotImplementedError, ValueError):
        raise InvalidArgument(f"{path} is a zip archive that is cut off or damaged: copy it again") from None
    # torch.save puts everything into a folder named like the file.
    inner = {name.partition("/")[2] for name in names}
    if any("data/aotinductor/" in name for name in names):
        return _single_part(
            "an AOTInductor package, which is machine code", "pytorch", path, "model.pt2", has_signature=False
        )
    if "archive_format" in inner or "serialized_exported_program.json" in names:
        return _single_part("a program of torch.export", "pytorch", path, "model.pt2")
    if "constants.pkl" in inner and any(name.startswith("code/") for name in inner):
        return _single_part("a TorchScript model", "pytorch", path, "model.pt", has_signature=False)
    if "data.pkl" in inner or any(name.endswith(".pkl") for name in names):
        raise InvalidArgument(f"{path} {PICKLED_TORCH}")
    if "schema.json" in names:
        return _single_part("a scikit-learn model saved by skops", "sklearn", path, "model.skops")
    for name, text in ZIPS:
        if name in names or name in inner:
            raise InvalidArgument(f"{path} {text}")
    shown = ", ".join(names[:5])
    raise _unknown(path, f"is a zip archive of an unknown format ({shown[:200]})")


def _unknown(path: Path, what: str) -> InvalidArgument:
    """Return the error for a file of no known format; if its suffix promises one, only that one is named."""
    promised = _SUFFIXES.get(path.suffix.lower())
    if promised is None:
        return InvalidArgument(f"{path} {what}. Known are: {KNOWN}")
    return InvalidArgument(
        f"{path} is not a valid {promised} file: it is damaged or incomplete, or it has another format. Copy or export it "
        "again"
    )


def _plan(path: Path, head: bytes) -> Detected | None:
    # The first bytes differ between versions of TensorRT: these are of 7, and of 8 to 10. Others only have the suffix.
    named = path.suffix in (".plan", ".engine", ".trt")
    if head[:4] in (b"ptrt", b"ftrt") or (named and not _is_text(head)):
        return _single_part("a TensorRT engine", "tensorrt", path, "model.plan")
    return None


def _xgboost(path: Path, head: bytes) -> Detected | None:
    if _XGBOOST_JSON.match(head):
        if b'"learner"' not in head:
            return None
        return _single_part("an XGBoost model (JSON)", "xgboost", path, "model.json")
    # Universal Binary JSON: an object whose first key has its length before it, in 1 or 8 bytes.
    if head.startswith((b"{L", b"{i", b"{U")) and b"learner" in head[:32]:
        return _single_part("an XGBoost model (UBJSON)", "xgboost", path, "model.ubj")
    return None


def _lightgbm(path: Path, head: bytes) -> Detected | None:
    if head.replace(b"\r\n", b"\n").startswith(b"tree\nversion="):
        return _single_part("a LightGBM model", "lightgbm", path, "model.txt")
    return None


def _openvino(path: Path, head: bytes) -> Detected | None:
    if not head.lstrip(b"\xef\xbb\xbf \r\n").startswith(b"<") or not _XML_NET.search(head):
        return None
    weights = path.with_suffix(".bin")
    if not weights.is_file():
        raise InvalidArgument(f"{path} is an OpenVINO model without its weights: put {weights.name} beside it")
    return Detected("an OpenVINO model", "openvino", "", (Part(path, "model.xml"), Part(weights, "model.bin")))


def _python(path: Path, _: bytes) -> Detected | None:
    if path.suffix != ".py":
        return None
    try:
        parse_python(path.read_bytes())
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None) or 1
        raise InvalidArgument(f"{path}:{line}: this is not Python that can be read; correct it") from None
    return _single_part("a Python model", "python", path, "model.py")


def _protobuf(path: Path, _: bytes) -> Detected | None:
    message = detect_message(path)
    if message == "onnx":
        beside = tuple(Part(path.parent / name, name) for name in external_files(path))
        return Detected("an ONNX model", "onnxruntime", "", (Part(path, "model.onnx"), *beside))
    if message == "graphdef":
        return _single_part("a TensorFlow GraphDef", "tensorflow", path, "model.graphdef", "tensorflow_graphdef")
    if message == "saved_model":
        raise InvalidArgument(
            f"{path} is a part of a TensorFlow SavedModel: give the folder it is in, {path.resolve().parent}"
        )
    if message in ("netdef", "init_netdef"):
        return _netdef(path, is_init=message == "init_netdef")
    return None


_DETECTORS: tuple[Callable[[Path, bytes], Detected | None], ...] = (
    _python,
    _xgboost,
    _lightgbm,
    _openvino,
    _protobuf,
    _plan,
)


def _netdef(path: Path, *, is_init: bool) -> Detected:
    """Return both files of a Caffe2 model; the other file is found by its name or its content."""
    other_kind = "netdef" if is_init else "init_netdef"
    names = [
        path.name.replace("init", "predict", 1) if is_init else path.name.replace("predict", "init", 1),
        path.name.removeprefix("init_") if is_init else f"init_{path.name}",
    ]
    named = [path.with_name(name) for name in names if name != path.name]
    others = sorted(other for other in path.parent.iterdir() if other.suffix in (".pb", ".netdef") and other != path)
    for other in (*named, *others):
        if other.is_file() and detect_message(other) == other_kind:
            net, init = (other, path) if is_init else (path, other)
            parts = (Part(net, "model.netdef"), Part(init, "init_model.netdef"))
            return Detected("a Caffe2 model", "netdef", "", parts, has_signature=False)
    missing = "network (predict_net.pb)" if is_init else "weights (init_net.pb)"
    raise InvalidArgument(f"{path} is one half of a Caffe2 model, and its {missing} is not beside it: put it there")


def _folder(path: Path) -> Detected:
    if (path / "saved_model.pb").is_file() or (path / "saved_model.pbtxt").is_file():
        return _single_part("a TensorFlow SavedModel", "tensorflow", path, "model.savedmodel", "tensorflow_savedmodel")
    if (path / "model.py").is_file():
        _python(path / "model.py", b"")
        # The model may need all files beside it: helpers, weights.
        beside = tuple(
            Part(file, file.name)
            for file in sorted(path.iterdir())
            if file.name not in ("model.py", "__pycache__") and not file.name.startswith((".", "config."))
        )
        return Detected("a Python model", "python", "", (Part(path / "model.py", "model.py"), *beside))
    if is_hub_folder(path):
        config, *others = sorted(hub_files(path), key=lambda file: file.name != "config.json")
        what = "a Hugging Face model"
        return Detected(what, hub_backend(path), "", tuple(Part(file, file.name) for file in (config, *others)))
    models: dict[Path, Detected] = {}
    reasons: list[str] = []
    for child in sorted(path.iterdir()):
        if child.name.startswith(".") or not (child.is_file() or (child / "saved_model.pb").is_file()):
            continue
        try:
            detected = detect(child)
        except InvalidArgument as error:
            reasons.append(error.message)
            continue
        models.setdefault(detected.parts[0].source, detected)
    if len(models) == 1:
        return next(iter(models.values()))
    if models:
        names = ", ".join(file.name for file in models)
        raise InvalidArgument(f"{path} has several models, {names}: give one of them")
    _refuse_unexported(path)
    if len(reasons) == 1:
        raise InvalidArgument(reasons[0])
    raise InvalidArgument(f"{path} has no model that is known. Known are: {KNOWN}")


def _refuse_unexported(path: Path) -> None:
    """Refuse a Hugging Face folder without safetensors."""
    try:
        kind = json.loads((path / "config.json").read_text()).get("model_type")
    except (OSError, ValueError, AttributeError, RecursionError):
        return
    if kind:
        raise InvalidArgument(
            f"{path} has a model of the library transformers without safetensors: save it again with "
            "model.save_pretrained(FOLDER), then give FOLDER; or export a graph with "
            f"`optimum-cli export onnx --model {path} OUT`, and give OUT"
        )


def _single_part(
    what: str, backend: str, path: Path, name: str, platform: str = "", *, has_signature: bool = True
) -> Detected:
    return Detected(what, backend, platform, (Part(path, name),), has_signature)


def _is_text(head: bytes) -> bool:
    try:
        head[:4096].decode()
    except UnicodeDecodeError as error:
        return error.start > 4000
    return b"\0" not in head[:4096]
