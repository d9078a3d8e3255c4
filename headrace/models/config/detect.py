# SPDX-License-Identifier: Apache-2.0
"""What a file or folder is, told by its content: a model of which format, and which other files belong to it.

Called by `headrace models init`. Reads beginnings, names in archives and outermost fields; runs and unpacks nothing.
Whether the model is whole is for its backend to say.
"""

from __future__ import annotations

import ast
import json
import re
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from headrace.core.errors import InvalidArgument
from headrace.models.config.detect_protobuf import external_files, message_of
from headrace.models.config.detect_refusals import PICKLED_TORCH, ZIPS, refusal
from headrace.models.config.hugging_face import backend_of, files_of, is_hub_folder

_HEAD_BYTES = 65_536
_MOST_NAMES = 200_000
_XGBOOST_JSON = re.compile(rb'\s*\{\s*"(learner|version)"\s*:')
_XML_NET = re.compile(rb"<net[\s>]")


@dataclass(frozen=True, slots=True)
class Part:
    """A file or folder of a model, and its usual name in a version's folder."""

    source: Path
    name: str


@dataclass(frozen=True, slots=True)
class Detected:
    """A model."""

    what: str
    """For people: "an ONNX model"."""
    backend: str
    platform: str
    """Where the backend has several formats and a configuration should say which; else ""."""
    parts: tuple[Part, ...]
    """The model's own file first."""
    tells: bool = True
    """Whether the format has its inputs and outputs in it; for others, somebody must write them."""


KNOWN = (
    "ONNX (.onnx), TorchScript (.pt), torch.export and AOTInductor (.pt2), TensorFlow SavedModel (a folder with "
    "saved_model.pb) and GraphDef (.graphdef, .pb), TensorRT (.plan, .engine), Caffe2 (predict_net.pb with init_net.pb), "
    "OpenVINO (.xml with .bin), Hugging Face (a folder with config.json and .safetensors), "
    "XGBoost (.ubj, .json), LightGBM (.txt), scikit-learn by skops (.skops), Python (model.py)"
)


def detect(path: Path) -> Detected:
    """Say what it is, or why it cannot be served."""
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
    for look in _LOOKS:
        found = look(path, head)
        if found is not None:
            return found
    raise InvalidArgument(f"{path} is no format that is known. Known are: {KNOWN}")


def _archive(path: Path) -> Detected:
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()[:_MOST_NAMES]
    except (zipfile.BadZipFile, NotImplementedError, ValueError):
        raise InvalidArgument(f"{path} is a zip archive that is cut off or damaged: copy it again") from None
    # What torch writes is in a folder of the file's first name.
    inner = {name.partition("/")[2] for name in names}
    if any("data/aotinductor/" in name for name in names):
        return _one("an AOTInductor package, which is machine code", "pytorch", path, "model.pt2", tells=False)
    if "archive_format" in inner or "serialized_exported_program.json" in names:
        return _one("a program of torch.export", "pytorch", path, "model.pt2")
    if "constants.pkl" in inner and any(name.startswith("code/") for name in inner):
        return _one("a TorchScript model", "pytorch", path, "model.pt", tells=False)
    if "data.pkl" in inner or any(name.endswith(".pkl") for name in names):
        raise InvalidArgument(f"{path} {PICKLED_TORCH}")
    if "schema.json" in names:
        return _one("a scikit-learn model saved by skops", "sklearn", path, "model.skops")
    for name, text in ZIPS:
        if name in names or name in inner:
            raise InvalidArgument(f"{path} {text}")
    shown = ", ".join(names[:5])
    raise InvalidArgument(f"{path} is a zip archive of no format that is known ({shown[:200]}). Known are: {KNOWN}")


def _plan(path: Path, head: bytes) -> Detected | None:
    # The first bytes differ between versions of TensorRT: these are of 7 and of 8 to 10. Others only have a name.
    named = path.suffix in (".plan", ".engine", ".trt")
    if head[:4] in (b"ptrt", b"ftrt") or (named and not _is_text(head)):
        return _one("a TensorRT engine", "tensorrt", path, "model.plan")
    return None


def _xgboost(path: Path, head: bytes) -> Detected | None:
    if _XGBOOST_JSON.match(head):
        if b'"learner"' not in head:
            return None
        return _one("an XGBoost model (JSON)", "xgboost", path, "model.json")
    # Universal Binary JSON: an object whose first key has its length before it, as 1 or as 8 bytes.
    if head.startswith((b"{L", b"{i", b"{U")) and b"learner" in head[:32]:
        return _one("an XGBoost model (UBJSON)", "xgboost", path, "model.ubj")
    return None


def _lightgbm(path: Path, head: bytes) -> Detected | None:
    if head.replace(b"\r\n", b"\n").startswith(b"tree\nversion="):
        return _one("a LightGBM model", "lightgbm", path, "model.txt")
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
        ast.parse(path.read_bytes())
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None) or 1
        raise InvalidArgument(f"{path}:{line}: this is not Python that can be read; correct it") from None
    return _one("a Python model", "python", path, "model.py")


def _protobuf(path: Path, _: bytes) -> Detected | None:
    message = message_of(path)
    if message == "onnx":
        beside = tuple(Part(path.parent / name, name) for name in external_files(path))
        return Detected("an ONNX model", "onnxruntime", "", (Part(path, "model.onnx"), *beside))
    if message == "graphdef":
        return _one("a TensorFlow GraphDef", "tensorflow", path, "model.graphdef", "tensorflow_graphdef")
    if message == "saved_model":
        raise InvalidArgument(
            f"{path} is a part of a TensorFlow SavedModel: give the folder it is in, {path.resolve().parent}"
        )
    if message in ("netdef", "init_netdef"):
        return _netdef(path, is_init=message == "init_netdef")
    return None


_LOOKS: tuple[Callable[[Path, bytes], Detected | None], ...] = (
    _python,
    _xgboost,
    _lightgbm,
    _openvino,
    _protobuf,
    _plan,
)


def _netdef(path: Path, *, is_init: bool) -> Detected:
    """Caffe2 has two files; whichever is given, the other one is found by its name, or by being the only one left."""
    wanted = "netdef" if is_init else "init_netdef"
    names = [
        path.name.replace("init", "predict", 1) if is_init else path.name.replace("predict", "init", 1),
        path.name.removeprefix("init_") if is_init else f"init_{path.name}",
    ]
    named = [path.with_name(name) for name in names if name != path.name]
    others = sorted(other for other in path.parent.iterdir() if other.suffix in (".pb", ".netdef") and other != path)
    for other in (*named, *others):
        if other.is_file() and message_of(other) == wanted:
            net, init = (other, path) if is_init else (path, other)
            parts = (Part(net, "model.netdef"), Part(init, "init_model.netdef"))
            return Detected("a Caffe2 model", "netdef", "", parts, tells=False)
    missing = "network (predict_net.pb)" if is_init else "weights (init_net.pb)"
    raise InvalidArgument(f"{path} is one half of a Caffe2 model, and its {missing} is not beside it: put it there")


def _folder(path: Path) -> Detected:
    if (path / "saved_model.pb").is_file() or (path / "saved_model.pbtxt").is_file():
        return _one("a TensorFlow SavedModel", "tensorflow", path, "model.savedmodel", "tensorflow_savedmodel")
    if (path / "model.py").is_file():
        _python(path / "model.py", b"")
        # All that lies beside it may be needed: helpers, weights.
        beside = tuple(
            Part(each, each.name)
            for each in sorted(path.iterdir())
            if each.name not in ("model.py", "__pycache__") and not each.name.startswith((".", "config."))
        )
        return Detected("a Python model", "python", "", (Part(path / "model.py", "model.py"), *beside))
    if is_hub_folder(path):
        config, *others = sorted(files_of(path), key=lambda each: each.name != "config.json")
        what = "a Hugging Face model"
        return Detected(what, backend_of(path), "", tuple(Part(each, each.name) for each in (config, *others)))
    found: dict[Path, Detected] = {}
    refused: list[str] = []
    for each in sorted(path.iterdir()):
        if each.name.startswith(".") or not (each.is_file() or (each / "saved_model.pb").is_file()):
            continue
        try:
            detected = detect(each)
        except InvalidArgument as error:
            refused.append(error.message)
            continue
        found.setdefault(detected.parts[0].source, detected)
    if len(found) == 1:
        return next(iter(found.values()))
    if found:
        names = ", ".join(each.name for each in found)
        raise InvalidArgument(f"{path} has several models, {names}: give one of them")
    _refuse_unexported(path)
    if len(refused) == 1:
        raise InvalidArgument(refused[0])
    raise InvalidArgument(f"{path} has no model that is known. Known are: {KNOWN}")


def _refuse_unexported(path: Path) -> None:
    """A folder of Hugging Face has weights and the name of a class, but no graph."""
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


def _one(what: str, backend: str, path: Path, name: str, platform: str = "", *, tells: bool = True) -> Detected:
    return Detected(what, backend, platform, (Part(path, name),), tells)


def _is_text(head: bytes) -> bool:
    try:
        head[:4096].decode()
    except UnicodeDecodeError as error:
        return error.start > 4000
    return b"\0" not in head[:4096]
