# SPDX-License-Identifier: Apache-2.0
"""Target `model_files`: Caffe2 nets, read and translated to a graph; and detection of model formats."""

from __future__ import annotations

import tempfile
from pathlib import Path

from google.protobuf.message import DecodeError

from fuzz.target import Check, Target, require
from headrace.backends.netdef.files import Net, Pair, caffe2_message, extract_weights, parse_net
from headrace.backends.netdef.translation import InputTensor, translate
from headrace.core.dtypes import FP32
from headrace.core.errors import HeadraceError
from headrace.models.config.detection import detect

_SPLIT = b"--net--"


def _open_netdef() -> Check:
    def check(data: bytes) -> None:
        first, _, second = data.partition(_SPLIT)
        _same_message(second)
        try:
            net: Net = parse_net(second, "model.netdef")
            pair = Pair(parse_net(first, "init_model.netdef"), net)
            inputs = [InputTensor(name, FP32, (-1, 3, 8, 8)) for name in net.external_inputs[:1]]
            translate(pair, inputs)
        except HeadraceError as error:
            require(bool(str(error)), "a refusal without a word")

    return check


def _same_message(data: bytes) -> None:
    """What is set aside of a net leaves one that protobuf takes where it took the whole, with as many operators."""
    message = caffe2_message("NetDef")
    try:
        whole = message.FromString(data)
    except DecodeError:
        return
    light, _ = extract_weights(data)
    require(len(message.FromString(light).op) == len(whole.op), "operators are lost")


def _open_detected() -> Check:
    folder = Path(tempfile.mkdtemp(prefix="headrace-fuzz-"))

    def check(data: bytes) -> None:
        for name in ("model.onnx", "model.bin"):
            path = folder / name
            path.write_bytes(data)
            try:
                detect(path)
            except HeadraceError as error:
                require(bool(str(error)), "a refusal without a word")
            finally:
                path.unlink()

    return check


NETDEF = Target(
    "the two nets of a Caffe2 model: an ONNX graph, or a refusal with words",
    _open_netdef,
    (
        _SPLIT,
        b"\x22\x04Conv",
        b"\x22\x04Relu",
        b"\x22\x02FC",
        b"\x22\x07Reshape",
        b"\x22\x0fGivenTensorFill",
        b"\x22\x07Softmax",
        b"\x22\x07MaxPool",
        b"\x2a\x08\x0a\x06kernel",
        b"\x0a\x05shape",
        b"\x0a\x06values",
        b"\x3a\x04data",
    ),
)
DETECTED = Target(
    "a file of any format: named, or refused with words",
    _open_detected,
    (
        b"PK\x03\x04",
        b"\x1f\x8b",
        b"\x80\x02",
        b"\x08\x07",
        b"tree\n",
        b'{"learner"',
        b"<?xml",
        b"<net",
        b"ftrt",
        b"ptrt",
        b"import ",
    ),
)
