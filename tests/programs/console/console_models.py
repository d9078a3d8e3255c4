# SPDX-License-Identifier: Apache-2.0
"""A repository for the console: a few plain models, one that fails to load, and, if wanted, ones that see and write."""

from __future__ import annotations

from pathlib import Path

_IDENTITY = """name: "{name}" backend: "identity" max_batch_size: 8 dynamic_batching {{ }}
input [ {{ name: "INPUT0" data_type: TYPE_FP32 dims: [ 4 ] }} ]
output [ {{ name: "OUTPUT0" data_type: TYPE_FP32 dims: [ 4 ] }} ]
"""
_FINDER = '''
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Finds the bright part of a picture: one box, in pixels, with a name."""

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        image = pb_utils.get_input_tensor_by_name(request, "IMAGE").as_numpy()
        rows, columns = np.nonzero(image.mean(axis=2) > 128)
        box = [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1] if len(rows) else [0, 0, 0, 0]
        return pb_utils.InferenceResponse(
            [
                pb_utils.Tensor("boxes", np.array([box, [0, 0, 8, 8]], np.float32)),
                pb_utils.Tensor("scores", np.array([0.9 if len(rows) else 0.0, 0.1], np.float32)),
                pb_utils.Tensor("labels", np.array([b"lamp", b"dust"], np.object_)),
            ]
        )
'''
_FINDER_CONFIG = """name: "finder" backend: "python" max_batch_size: 0
input [ { name: "IMAGE" data_type: TYPE_UINT8 dims: [ 64, 64, 3 ] } ]
output [ { name: "boxes" data_type: TYPE_FP32 dims: [ -1, 4 ] } ]
output [ { name: "scores" data_type: TYPE_FP32 dims: [ -1 ] } ]
output [ { name: "labels" data_type: TYPE_STRING dims: [ -1 ] } ]
"""


def write_identity(folder: Path, name: str, versions: tuple[str, ...] = ("1",)) -> None:
    for version in versions:
        (folder / name / version).mkdir(parents=True)
    (folder / name / "config.pbtxt").write_text(_IDENTITY.format(name=name))


def write_plain(folder: Path) -> Path:
    """`echo`, `river` with two versions, and `broken`, whose file is none."""
    write_identity(folder, "echo")
    write_identity(folder, "river", ("1", "2"))
    config = (folder / "river" / "config.pbtxt").read_text()
    (folder / "river" / "config.pbtxt").write_text(config + "version_policy { all { } }\n")
    (folder / "broken" / "1").mkdir(parents=True)
    (folder / "broken" / "1" / "model.onnx").write_bytes(b"not a model")
    return folder


def write_all(folder: Path) -> Path:
    """Those, a detector in Python, a classifier and a detector of Hugging Face's, and a tiny language model."""
    from cases.vision import write

    write_plain(folder)
    write_finder(folder)
    for kind in ("resnet", "rt_detr"):
        (folder / kind).mkdir()
        write(kind, folder / kind)
    write_llama(folder)
    return folder


def write_finder(folder: Path) -> None:
    """A detector in Python."""
    (folder / "finder" / "1").mkdir(parents=True)
    (folder / "finder" / "config.pbtxt").write_text(_FINDER_CONFIG)
    (folder / "finder" / "1" / "model.py").write_text(_FINDER)


def write_llama(folder: Path) -> None:
    """A tiny language model."""
    from language_model_server import configure

    from support.llm_models import tiny_llama

    tiny_llama(folder / "llama" / "1")
    configure(folder / "llama", max_model_len="512")


def write_seer(folder: Path) -> None:
    """One that sees."""
    from language_model_server import configure, make_vision_model

    make_vision_model(folder / "seer" / "1")
    configure(folder / "seer")
