# SPDX-License-Identifier: Apache-2.0
"""Files that people have in their hands and that cannot be served as they are: what each is, and what to do about it.

Called by `detect` with the first bytes of a file. Pickles above all: to read one is to run it.
"""

from __future__ import annotations

import bz2
import lzma
import zlib
from collections.abc import Callable
from pathlib import Path

_PICKLE_SUFFIXES = frozenset({".pkl", ".pickle", ".joblib", ".dill"})
_PEEK = 65_536
_LZMA_BYTES = 256 << 20
"""What a file may ask for, to say what it begins with; the largest preset needs 65 MiB."""

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
"""By a name in a zip archive that tells."""

_MAGIC: tuple[tuple[int, bytes, str], ...] = (
    (0, b"\x89HDF\r\n\x1a\n", _KERAS),
    (0, b"GGUF", "has weights for llama.cpp (GGUF), which has a server of its own; no backend here reads them"),
    (4, b"TFL3", "is a TensorFlow Lite model: convert the original to ONNX with tf2onnx, or give its SavedModel"),
    (0, b"binf", "is XGBoost's old binary format: load it with XGBoost below 3 and save_model('model.ubj')"),
    (0, b"CBM1", "is a CatBoost model: save it with save_model('model.onnx', format='onnx') and give that file"),
    (0, b"\x93NUMPY", "is an array, not a model"),
)


def refusal(path: Path, head: bytes) -> str:
    """Why this file is not served, and what to do; "" when nothing is known against it."""
    if _is_pickle(path, head):
        return _PICKLE if path.suffix not in {".pt", ".pth", ".bin"} else PICKLED_TORCH
    for place, magic, text in _MAGIC:
        if head[place : place + len(magic)] == magic:
            return text
    # A length, then JSON.
    if head[8:10] == b'{"' and int.from_bytes(head[:8], "little") < 1 << 30:
        return "has weights without a model (safetensors): load them in the model's own program and export that to ONNX"
    if b"<PMML" in head[:4096]:
        return "is PMML, which no backend here reads: export the model to ONNX"
    return ""


def _is_pickle(path: Path, head: bytes) -> bool:
    if _begins_a_pickle(head) or path.suffix in _PICKLE_SUFFIXES:
        return True
    openers: tuple[Callable[[], zlib._Decompress | bz2.BZ2Decompressor | lzma.LZMADecompressor], ...] = (
        lambda: zlib.decompressobj(47),  # zlib or gzip, whichever it is
        bz2.BZ2Decompressor,
        lambda: lzma.LZMADecompressor(memlimit=_LZMA_BYTES),
    )
    for opener in openers:
        try:
            if _begins_a_pickle(opener().decompress(head[:_PEEK], 16)):
                return True
        except (zlib.error, OSError, lzma.LZMAError, ValueError):
            continue
    return False


def _begins_a_pickle(head: bytes) -> bool:
    return len(head) > 2 and head[0] == 0x80 and 2 <= head[1] <= 5
