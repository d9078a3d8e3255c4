# SPDX-License-Identifier: Apache-2.0
"""Files that are no NetDef, or nets that cannot be: an error that says what to do, whatever the bytes are."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from netdef_nets import Nets, computed, rows

from headrace.backends.netdef.files import Pair, parse_net
from headrace.backends.netdef.operators.table import OPERATORS
from headrace.backends.netdef.translation import InputTensor, translate
from headrace.core.dtypes import FP32
from headrace.core.errors import HeadraceError, InvalidArgument
from support.properties import examples

INPUT = [InputTensor("data", FP32, (-1, 3, 8, 8))]


def sound() -> Nets:
    net = Nets()
    net.weight("w", rows(4, 3, 3, 3))
    net.weight("b", rows(4))
    net.op("Conv", ["data", "w", "b"], ["conv"], kernel=3, pad=1, stride=2)
    net.op("Relu", ["conv"], ["conv"])
    net.op("AveragePool", ["conv"], ["pool"], global_pooling=1)
    net.op("Softmax", ["pool"], ["y"])
    net.net.external_output.append("y")
    return net


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"", "has no operators: it is empty, or no NetDef"),
        (b"\x0a\x03net", "has no operators"),
        (b'name: "net"\nop {\n  type: "Relu"\n}\n', "is text, and a NetDef is served from its binary form"),
        (b'\n  op { input: "data" }', "is text"),
        (b"PK\x03\x04" + bytes(64), "is damaged, cut short or no NetDef"),
        (b"\x12\x04\x0a\x02\xff\xfe", "has a name that is not UTF-8 text"),
    ],
)
def test_a_file_that_is_not_a_netdef_is_named(content: bytes, text: str) -> None:
    with pytest.raises(InvalidArgument, match=f"'model.netdef' {text}"):
        parse_net(content, "model.netdef")


def test_every_cut_of_a_file_is_an_error() -> None:
    net = sound()
    whole, weights = net.net.SerializeToString(), net.init.SerializeToString()
    pair = net.pair(["y"])
    end = whole.rindex(b"\x3a\x04data")  # behind it only external inputs and outputs are lost
    for cut in range(0, end, 3):
        with pytest.raises(InvalidArgument):
            translate(Pair(pair.init, parse_net(whole[:cut], "model.netdef")), INPUT, ["y"])
    for cut in range(0, len(weights) - 1, 11):
        with pytest.raises(InvalidArgument):
            translate(Pair(parse_net(weights[:cut], "init_model.netdef"), pair.net), INPUT, ["y"])


def test_operators_that_are_not_known_are_named_with_their_place() -> None:
    net = sound()
    net.op("RoIAlign", ["y"], ["boxes"])
    net.op("Relu", ["boxes"], ["boxes"])
    net.op("MyOwn", ["boxes"], ["z"])
    with pytest.raises(
        InvalidArgument,
        match=r"unsupported operators: operator 4 \(RoIAlign\) of 'model\.netdef', operator 6 \(MyOwn\) of 'model\.netdef'$",
    ):
        net.run({"data": rows(1, 3, 8, 8)}, ["z"])
    # What the outputs do not need is not looked at.
    assert net.run({"data": rows(1, 3, 8, 8)}, ["y"])["y"].shape == (1, 4, 1, 1)


def test_weights_that_are_missing_are_named() -> None:
    net = sound()
    del net.init.op[1]
    with pytest.raises(
        InvalidArgument, match=r"operator 0 \(Conv\) .* reads 'b', which neither 'init_model\.netdef' fills"
    ):
        net.run({"data": rows(1, 3, 8, 8)}, ["y"])


def test_files_of_two_different_models_are_refused() -> None:
    net, other = sound().pair(["y"]).net, Nets()
    other.weight("w", rows(4, 3, 5, 5))
    other.weight("b", rows(4))
    other.op("Copy", ["data"], ["y"])
    with pytest.raises(InvalidArgument, match=r"operator 0 \(Conv\) .* has kernel \[3, 3\] and weights \[4, 3, 5, 5\]"):
        translate(Pair(other.pair().init, net), INPUT)
    for shape, reader in (((4, 2, 3, 3), "Conv"), ((2, 3, 3, 3), "ConvTranspose")):
        with pytest.raises(InvalidArgument, match=rf"operator 0 \({reader}\) .* which do not fit: are both files"):
            computed(reader, rows(1, 3, 8, 8), weights=[rows(*shape)], kernel=3)
    with pytest.raises(InvalidArgument, match=r"operator 0 \(FC\) .* reads \[-1, 5\] with weights \[3, 4\]"):
        computed("FC", rows(1, 5), weights=[rows(3, 4), rows(3)])


def test_swapped_files_are_reported() -> None:
    pair = sound().pair(["y"])
    with pytest.raises(InvalidArgument, match="unexpected inference input 'data'"):
        translate(Pair(pair.net, pair.init), INPUT, ["w"])
    net = sound()
    net.init.op.add(type="Conv", input=["nothing", "w"], output=["v"])
    net.op("Copy", ["v"], ["z"])
    with pytest.raises(InvalidArgument, match="which nothing before it makes: are the two files swapped"):
        net.run({"data": rows(1, 3, 8, 8)}, ["z"])


def test_a_cycle_is_named() -> None:
    net = Nets()
    net.op("Add", ["data", "later"], ["early"])
    net.op("Relu", ["early"], ["later"])
    with pytest.raises(
        InvalidArgument, match=r"reads 'later', which only operator 1 \(Relu\) .* makes: the net has a cycle"
    ):
        net.run({"data": rows(1, 4)}, ["later"])
    alone = Nets()
    alone.op("Relu", ["x"], ["x"])
    with pytest.raises(InvalidArgument, match="the net has a cycle"):
        alone.run({"data": rows(1, 4)}, ["x"])


def test_an_output_that_no_operator_produces_is_reported() -> None:
    net = Nets()
    net.op("Dropout", ["data"], ["y", "mask"], is_test=1)
    net.op("Cast", ["mask"], ["z"], to=1)
    with pytest.raises(InvalidArgument, match=r"reads 'mask', an unsupported output of operator 0 \(Dropout\)"):
        net.run({"data": rows(1, 4)}, ["z"])
    with pytest.raises(InvalidArgument, match="output 'mask' is not computed by an operator"):
        net.run({"data": rows(1, 4)}, ["mask"])
    with pytest.raises(InvalidArgument, match="names no outputs"):
        translate(Pair(net.pair().init, parse_net(b"\x12\x06\x22\x04Relu", "model.netdef")), [])


def test_without_shapes_the_error_names_the_inputs_that_need_them() -> None:
    net = sound()
    assert translate(net.pair(["pool"]), [InputTensor("data", FP32, None)], ["pool"]).graph.output[0].name == "pool"
    open_net = Nets()
    open_net.op("Softmax", ["data"], ["y"])
    with pytest.raises(InvalidArgument, match="needs the shape of its input"):
        translate(open_net.pair(["y"]), [InputTensor("data", FP32, None)], ["y"])


def attempt(init: bytes, net: bytes) -> None:
    """All the way to a session; every error must be ours up to there."""
    try:
        pair = Pair(parse_net(init, "init_model.netdef"), parse_net(net, "model.netdef"))
        model = translate(pair, INPUT, ["y"])
    except HeadraceError:
        return
    try:
        ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    except Exception:
        return  # what the backend tells of it is tested beside it


FUZZ = settings(max_examples=examples(150), deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)


@FUZZ
@given(st.binary(max_size=200), st.binary(max_size=200))
def test_random_bytes_are_an_error(init: bytes, net: bytes) -> None:
    with pytest.raises(InvalidArgument):
        translate(Pair(parse_net(init, "init_model.netdef"), parse_net(net, "model.netdef")), INPUT, ["y"])


@FUZZ
@given(st.lists(st.tuples(st.integers(0, 2**16), st.integers(0, 255)), min_size=1, max_size=8), st.booleans())
def test_flipped_bytes_never_crash(changes: list[tuple[int, int]], weights: bool) -> None:
    net = sound()
    init, whole = bytearray(net.init.SerializeToString()), bytearray(net.net.SerializeToString())
    target = init if weights else whole
    for place, value in changes:
        target[place % len(target)] = value
    attempt(bytes(init), bytes(whole))


NUMBERS = st.one_of(st.integers(-4, 8), st.sampled_from([2**31 - 1, -(2**31), 2**62, 2**16]))
VALUES: Any = st.one_of(
    NUMBERS,
    st.floats(width=32),
    st.lists(NUMBERS, max_size=6),
    st.sampled_from(["NCHW", "NHWC", "C", "reflect", "double"]),
)
ARGUMENTS = """
kernel kernels stride strides pad pads pad_t dilation dilations group order axis axes dims shape legacy_pad k split starts
ends add_axis broadcast axis_str global_pooling keepdims num_reduce_dim to dtype value values size alpha beta height_scale
width_scale scale tiles adj mode is_test trans_a trans_b axis_w exponent min max
"""
NAMES = st.sampled_from(ARGUMENTS.split())


@FUZZ
@given(
    st.sampled_from(sorted(OPERATORS)),
    st.lists(st.sampled_from(["data", "w", "b", "v"]), max_size=5),
    st.integers(0, 3),
    st.dictionaries(NAMES, VALUES, max_size=6),
)
def test_any_operator_with_any_arguments_never_crashes(
    kind: str, inputs: list[str], outputs: int, arguments: dict[str, Any]
) -> None:
    net = Nets()
    net.weight("w", rows(4, 3, 3, 3))
    net.weight("b", rows(4))
    net.weight("v", np.array([0, -1], np.int64))
    net.op(kind, inputs, ["y", "y2", "y3"][:outputs], **arguments)
    attempt(net.init.SerializeToString(), net.net.SerializeToString())
