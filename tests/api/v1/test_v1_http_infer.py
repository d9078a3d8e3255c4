# SPDX-License-Identifier: Apache-2.0
"""Inference over HTTP in both generations, and what is said when a request is wrong."""

from __future__ import annotations

import base64
import struct
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from google.protobuf import text_format
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from v1_site import LABELS, Answer, TrtisSite, ask, infer

from headrace.api.v1.headers import header_from_bytes, header_from_text
from headrace.api.v1.messages import message_class
from support.properties import examples
from support.serving import Serving

PAIR = np.arange(16, dtype=np.int32).tobytes()
"""Two rows of A, then two of B."""
PAIR_V0 = (
    'batch_size: 2 input { name: "A" byte_size: 16 } input { name: "B" byte_size: 16 } '
    'output { name: "Y" byte_size: 16 } output { name: "X" byte_size: 16 }'
)
PAIR_V1 = 'batch_size: 2 input { name: "A" } input { name: "B" dims: [2, 2] } output { name: "Y" } output { name: "X" }'
IMAGE = np.arange(192, dtype=np.float32)
IMAGE_V0 = (
    'batch_size: 1 input { name: "input" byte_size: 768 } output { name: "output" byte_size: 40 cls { count: 3 } }'
)


def parsed(text: str | bytes, generation: str = "") -> Any:
    return text_format.Parse(text, message_class(f"{generation}InferResponseHeader")())


def test_v0_raw_outputs_are_in_the_requested_order(server: Serving) -> None:
    answer = infer(server, "pair", PAIR, PAIR_V0)
    assert answer.outcome == (200, "SUCCESS", "")
    assert answer.fields["content-type"] == "application/octet-stream"
    assert answer.body[:64] == PAIR[32:] + PAIR[:32]
    header = parsed(answer.body[64:], "v0.")
    assert header == parsed(answer.fields["nv-inferresponse"], "v0.")
    assert (header.model_name, header.model_version, header.batch_size) == ("pair", 1, 2)
    assert [(output.name, output.raw.byte_size) for output in header.output] == [("Y", 16), ("X", 16)]


def test_v1_states_shapes_and_total_sizes(server: Serving) -> None:
    answer = infer(server, "pair", PAIR, PAIR_V1 + " id: 41")
    assert answer.outcome == (200, "SUCCESS", "")
    assert answer.body[:64] == PAIR[32:] + PAIR[:32]
    header = parsed(answer.body[64:])
    assert header.id == 41
    shown = [
        (output.name, list(output.raw.dims), output.raw.batch_byte_size, output.data_type) for output in header.output
    ]
    assert shown == [("Y", [2, 2], 32, 8), ("X", [4], 32, 8)]
    # Clients before 1.12 cannot read a header that says the type.
    assert answer.fields["nv-inferresponse"] == (
        'model_name: "pair" model_version: 1 batch_size: 2 output { name: "Y" raw { dims: 2 dims: 2 batch_byte_size: 32 } } '
        'output { name: "X" raw { dims: 4 batch_byte_size: 32 } } id: 41'
    )


@pytest.mark.parametrize(("header", "generation"), [(PAIR_V0, "v0."), (PAIR_V1, "")])
def test_the_header_at_the_end_may_be_binary(server: Serving, header: str, generation: str) -> None:
    answer = infer(server, "pair", PAIR, header, "?format=binary")
    string = message_class(f"{generation}InferResponseHeader").FromString(answer.body[64:])
    assert [output.name for output in string.output] == ["Y", "X"]
    assert string.model_version == 1


def test_classes_have_labels_as_far_as_there_are_any(server: Serving) -> None:
    answer = infer(server, "resnet", IMAGE.tobytes(), IMAGE_V0)
    header = parsed(answer.body, "v0.")
    (classes,) = header.output[0].batch_classes
    assert [(class_entry.idx, class_entry.value, class_entry.label) for class_entry in classes.cls] == [
        (9, 9.0, ""),
        (8, 8.0, LABELS[8]),
        (7, 7.0, LABELS[7]),
    ]
    assert not header.output[0].HasField("raw")


def test_v1_classes_of_a_batch_beside_raw_outputs(server: Serving) -> None:
    wanted = 'output { name: "X" cls { count: 1 } } output { name: "Y" }'
    header = f'batch_size: 2 input {{ name: "A" }} input {{ name: "B" }} {wanted}'
    answer = infer(server, "pair", PAIR, header)
    assert answer.body[:32] == PAIR[32:]
    created = parsed(answer.body[32:])
    assert [[class_entry.idx for class_entry in classes.cls] for classes in created.output[0].batch_classes] == [
        [3],
        [3],
    ]
    assert created.output[1].raw.batch_byte_size == 32


def test_many_classes_do_not_fill_the_head(server: Serving) -> None:
    header = 'batch_size: 8 input { name: "input" } output { name: "output" cls { count: 10 } }'
    answer = infer(server, "resnet", IMAGE.tobytes() * 8, header)
    assert len(parsed(answer.fields["nv-inferresponse"]).output[0].batch_classes) == 8
    # Each output again and again: what is too long for a field is only in the body.
    many = 'batch_size: 8 input { name: "input" } ' + 'output { name: "output" cls { count: 10 } } ' * 20
    answer = infer(server, "resnet", IMAGE.tobytes() * 8, many)
    assert [output.name for output in parsed(answer.fields["nv-inferresponse"]).output] == ["output"] * 20
    assert not parsed(answer.fields["nv-inferresponse"]).output[0].batch_classes
    assert len(parsed(answer.body).output[19].batch_classes) == 8


def test_without_outputs_all_are_given(server: Serving) -> None:
    header = 'batch_size: 2 input { name: "A" byte_size: 16 } input { name: "B" byte_size: 16 }'
    answer = infer(server, "pair", PAIR, header)
    assert answer.body[:64] == PAIR
    assert [output.raw.byte_size for output in parsed(answer.body[64:], "v0.").output] == [16, 16]


@pytest.mark.parametrize(("path", "version"), [("resnet", 3), ("resnet/1", 1), ("resnet/3", 3), ("resnet/01", 1)])
def test_versions(server: Serving, path: str, version: int) -> None:
    assert parsed(infer(server, path, IMAGE.tobytes(), IMAGE_V0).body, "v0.").model_version == version


def test_a_model_without_batches(server: Serving) -> None:
    header = 'batch_size: 1 input { name: "A" byte_size: 6 } output { name: "X" byte_size: 6 }'
    assert infer(server, "single", b"abcdef", header).body[:6] == b"abcdef"
    v1 = parsed(infer(server, "single", b"abcdef", 'batch_size: 1 input { name: "A" } output { name: "X" }').body[6:])
    assert list(v1.output[0].raw.dims) == [3]


def test_v0_finds_one_variable_dimension_by_the_size(server: Serving) -> None:
    header = 'batch_size: 2 input { name: "A" byte_size: 24 } output { name: "X" byte_size: 24 }'
    data = np.arange(12, dtype=np.float32).tobytes()
    assert infer(server, "variable", data, header).body[:48] == data
    wrong = header.replace("24", "20")
    assert infer(server, "variable", bytes(40), wrong).outcome == (
        400,
        "INVALID_ARG",
        "unexpected size 20 for inference input 'A', expecting a multiple of 8",
    )


def test_strings(server: Serving) -> None:
    words = [b"one", b"", b"drei \xc3\xa4"]
    data = b"".join(struct.pack("<I", len(word)) + word for word in words)
    header = f'batch_size: 1 input {{ name: "A" dims: 3 batch_byte_size: {len(data)} }} output {{ name: "X" }}'
    answer = infer(server, "words", data, header)
    assert answer.body[: len(data)] == data
    created = parsed(answer.body[len(data) :])
    assert (created.output[0].raw.batch_byte_size, created.output[0].data_type) == (len(data), 13)
    assert infer(server, "words", data, header.replace("dims: 3", "dims: 4")).code == 400
    unsaid = header.replace(f"batch_byte_size: {len(data)}", "")
    assert "batch-byte-size must be specified for input 'A'" in infer(server, "words", data, unsaid).outcome[2]
    classes = header.replace('name: "X"', 'name: "X" cls { count: 1 }')
    assert infer(server, "words", data, classes).outcome[1:] == (
        "INVALID_ARG",
        "class result not available for output 'X' due to unsupported type 'TYPE_STRING'",
    )


def test_sequences(server: Serving) -> None:
    def step(correlation: int, flags: int) -> Answer:
        header = (
            f'batch_size: 1 flags: {flags} correlation_id: {correlation} input {{ name: "A" }} output {{ name: "X" }}'
        )
        return infer(server, "stateful", bytes(4), header)

    _, code, text = step(7, 0).outcome
    assert code == "INVALID_ARG"
    assert text.startswith(
        "inference request for sequence 7 to model 'stateful' must specify the START flag on the first"
    )
    assert [step(7, flags).code for flags in (1, 0, 2)] == [200, 200, 200]
    assert step(7, 0).code == 400
    assert "non-zero or non-empty correlation ID" in step(0, 1).outcome[2]


def test_header_fields_beside_the_tensors() -> None:
    output = header_from_text(b"batch_size: 1 correlation_id: 5 flags: 3 priority: 2 timeout_microseconds: 900 id: 8")
    assert output is not None
    assert output.parameters == {
        "sequence_id": 5,
        "sequence_start": True,
        "sequence_end": True,
        "priority": 2,
        "timeout": 900,
    }
    assert output.id == 8


@pytest.mark.parametrize(
    "tail", ["", " id: 0", " id: 7", " id: 7 flags: 1", " flags: 2 id: 9", " id: 7 id: 8", " id: x"]
)
@pytest.mark.parametrize("names", ['"X"', '"} id: 3"', '"} id: 3" } output { name: "b"', "'}'"])
def test_numbered_headers_are_read_as_others_are(names: str, tail: str) -> None:
    text = f'batch_size: 1 input {{ name: "A" }} output {{ name: {names} }}{tail}'
    for _ in range(2):  # the second is remembered
        read = header_from_text(text.encode())
        try:
            message = text_format.Parse(text, message_class("InferRequestHeader")())
        except text_format.ParseError:
            assert read is None
        else:
            assert read is not None
            assert read.id == message.id
            assert [output.name for output in read.outputs] == [output.name for output in message.output]
            assert read.parameters.get("sequence_start", False) is bool(message.flags & 1)


V0 = 'batch_size: {batch} input {{ name: "{name}" byte_size: {size} }} output {{ name: "X" byte_size: {out} }}'


def v0(batch: int = 1, name: str = "A", size: int = 6, out: int = 6, more: str = "") -> str:
    return V0.format(batch=batch, name=name, size=size, out=out) + more


BATCH = (
    "inference request batch-size must be >= 1 for models that support batching, and must be 1 for models that don't "
    "support batching"
)


@pytest.mark.parametrize(
    ("model", "header", "size", "code", "text", "numbered"),
    [
        ("single", "batch_size: one", 6, "INVALID_ARG", "unable to parse request for model 'single'", False),
        ("nobody", b"\xff\xfe", 6, "INVALID_ARG", "unable to parse request for model 'nobody'", False),
        ("single", None, 6, "INVALID_ARG", BATCH, False),
        ("single", v0(batch=0), 6, "INVALID_ARG", BATCH, False),
        ("single", v0(), 7, "INVALID_ARG", "unexpected additional input data for model 'single'", False),
        ("nobody", v0(), 7, "INVALID_ARG", "unexpected additional input data for model 'nobody'", False),
        ("nobody", v0(), 6, "INVALID_ARG", "unable to find platform for requested model 'nobody'", True),
        ("..", v0(), 6, "INVALID_ARG", "unable to find platform for requested model '..'", True),
        ("single/9", v0(), 6, "NOT_FOUND", "Servable not found for request: Specific(single, 9)", True),
        ("broken", v0(), 6, "NOT_FOUND", "Servable not found for request: Latest(broken)", True),
        ("single", v0(more=' input { name: "B" }'), 6, "INVALID_ARG", "expected 1 inputs but got 2", True),
        ("single", v0(batch=2), 12, "INVALID_ARG", "unexpected batch size 2 for 'single', max allowed is 1", True),
        ("variable", v0(batch=5), 30, "INVALID_ARG", "unexpected batch size 5 for 'variable', max allowed is 4", True),
        ("single", v0(name="B"), 6, "INVALID_ARG", "unexpected inference input 'B' for 'single'", True),
        ("single", v0(size=5), 5, "INVALID_ARG", "unexpected size 5 for inference input 'A', expecting 6", True),
        ("single", v0(), 5, "INTERNAL", "expected 6 of data for inference input 'A', got 5", True),
        ("single", v0(), 0, "INTERNAL", "expected 6 of data for inference input 'A', got 0", True),
        ("single", v0(out=5), 6, "INTERNAL", "unexpected output size 5", True),
        (
            "single",
            v0().replace("byte_size: 6 }", "byte_size: 6 cls { count: 1 } }").replace("6 cls { count: 1 } }", "6 }", 1),
            6,
            "INVALID_ARG",
            "class result not available for output 'X' due to unsupported type 'TYPE_FP16'",
            True,
        ),
        (
            "single",
            v0(more=' output { name: "Z" byte_size: 6 }'),
            6,
            "INVALID_ARG",
            "unexpected inference output 'Z' for model 'single'",
            True,
        ),
    ],
)
def test_v0_refusals(
    server: Serving, model: str, header: str | None, size: int, code: str, text: str, numbered: bool
) -> None:
    answer = infer(server, model, bytes(size), header)
    http, told_code, told_text = answer.outcome
    assert (http, told_code) == (400, code)
    assert told_text.startswith(text)
    assert (answer.status.request_id > 0) is numbered
    assert answer.status.server_id == "inference:0"
    assert answer.fields["content-type"] == "application/octet-stream"
    assert answer.body == b""


V1_VARIABLE = 'batch_size: 1 id: 6 input { name: "A" dims: [3, 2] } output { name: "X" }'


@pytest.mark.parametrize(
    ("header", "size", "text"),
    [
        (V1_VARIABLE, 23, "unexpected size 23 for input 'A', expecting 24 bytes for model 'variable'"),
        (V1_VARIABLE, 25, "unexpected additional input data for model 'variable'"),
        (
            V1_VARIABLE.replace("3, 2", "3, 3"),
            36,
            "unexpected shape for input 'A' for model 'variable'. Expected [-1,2],",
        ),
        (V1_VARIABLE.replace("3, 2", "-1, 2"), 24, "unexpected shape for input 'A' for model 'variable'"),
        (
            V1_VARIABLE.replace("3, 2", "9223372036854775807, 2"),
            24,
            "the shape of tensor 'A' causes total element count to exceed maximum size of",
        ),
        (
            V1_VARIABLE.replace("dims: [3, 2]", ""),
            24,
            "model supports variable-size for input 'A', request must specify",
        ),
        (
            V1_VARIABLE.replace("3, 2]", "3, 2] batch_byte_size: 25"),
            24,
            "specific batch-byte-size for input 'A' does not",
        ),
        (V1_VARIABLE.replace('"X"', '"Q"'), 24, "unexpected inference output 'Q' for model 'variable'"),
    ],
)
def test_v1_refusals(server: Serving, header: str, size: int, text: str) -> None:
    answer = infer(server, "variable", bytes(size), header)
    assert answer.outcome[:2] == (400, "INVALID_ARG")
    assert answer.outcome[2].startswith(text)
    assert answer.status.request_id > 0
    assert answer.fields["nv-inferresponse"] == "id: 6"


@pytest.mark.parametrize("size", [400, 5000])
@pytest.mark.parametrize(("start", "kind"), [(b"\xff\xd8\xff\xe0", "JPEG"), (b"\x89PNG\r\n\x1a\n", "PNG")])
@pytest.mark.parametrize("header", [IMAGE_V0, 'batch_size: 1 input { name: "input" } output { name: "output" }'])
def test_a_picture_as_it_is_gets_an_explanation(
    server: Serving, header: str, start: bytes, kind: str, size: int
) -> None:
    answer = infer(server, "resnet", start + bytes(size), header)
    assert answer.code == 400
    text = answer.outcome[2]
    assert f"The data is a {kind} file" in text
    assert "send input 'input' as 3x8x8 values of FP32, 768 bytes for each image of the batch" in text


def test_a_model_of_any_type_is_for_v2(server: Serving, site: TrtisSite) -> None:
    # Only built-in models say so; this one is made to.
    version = site.engine.plane.find("single")
    assert version is not None
    true = version.config
    version.config = replace(true, inputs=tuple(replace(spec, dtype=None) for spec in true.inputs))
    try:
        text = infer(server, "single", bytes(6), v0()).outcome[2]
    finally:
        version.config = true
    assert text == (
        "input 'A' of model 'single' takes any type and shape, which this protocol cannot declare: use v2 "
        "(/v2/models/single/infer)"
    )


def test_shared_memory_of_the_regions_that_were_registered(site: TrtisSite, server: Serving) -> None:
    given, taken = site.shared / "in_key", site.shared / "out_key"
    given.write_bytes(b"12345678abcdef" + bytes(50))
    taken.write_bytes(bytes(64))
    for name, key in (("in", "/in_key"), ("out", "out_key")):
        answer = ask(server, "POST", f"/api/sharedmemorycontrol/register/{name}/{key}/0/64")
        assert answer.outcome == (200, "SUCCESS", "")
    second = ask(server, "POST", "/api/sharedmemorycontrol/register/in//in_key/0/64")
    assert second.outcome == (400, "ALREADY_EXISTS", "shared memory region 'in' already in manager")
    shown = ask(server, "GET", "/api/sharedmemorycontrol/status")
    assert b'shared_memory_key: "/in_key"' in shown.body
    binary = ask(server, "POST", "/api/sharedmemorycontrol/status?format=binary").body
    regions = message_class("SharedMemoryStatus").FromString(binary).shared_memory_region
    assert [(region.name, region.byte_size) for region in regions] == [("in", 64), ("out", 64)]
    header = (
        'batch_size: 1 input { name: "A" shared_memory { name: "in" offset: 8 byte_size: 6 } } '
        'output { name: "X" shared_memory { name: "out" offset: 2 byte_size: 6 } }'
    )
    answer = infer(server, "single", b"", header)
    assert answer.outcome == (200, "SUCCESS", "")
    assert answer.body.startswith(b'model_name: "single"')
    assert taken.read_bytes()[:9] == b"\0\0abcdef\0"
    small = header.replace("offset: 2 byte_size: 6", "offset: 2 byte_size: 5")
    assert (
        infer(server, "single", b"", small)
        .outcome[2]
        .endswith("(5 bytes) should be at least 6 bytes to hold the results")
    )
    wrong = header.replace("offset: 8 byte_size: 6", "offset: 8 byte_size: 5")
    assert infer(server, "single", b"", wrong).outcome[2].startswith("unexpected shared-memory size 5 for input 'A'")
    beyond = header.replace("offset: 8", "offset: 18446744073709551615")
    assert infer(server, "single", b"", beyond).outcome[2].startswith("Invalid offset for shared memory region: 'in'")
    assert ask(server, "POST", "/api/sharedmemorycontrol/unregister/in").code == 200
    assert infer(server, "single", b"", header).outcome[1:] == (
        "NOT_FOUND",
        "Unable to find shared memory region: 'in'",
    )
    # There is no GPU here; that it was asked for one is all there is to see.
    for handle in (bytes(64), b"!", base64.b64encode(bytes(64))):
        cuda = ask(server, "POST", "/api/sharedmemorycontrol/cudaregister/gpu/0/32", handle)
        assert cuda.code == 400
        assert cuda.status.msg
    assert ask(server, "POST", "/api/sharedmemorycontrol/unregisterall").code == 200
    assert ask(server, "GET", "/api/sharedmemorycontrol/status").body == b""


def test_models_are_loaded_and_unloaded(server: Serving) -> None:
    header = 'batch_size: 1 input { name: "A" } output { name: "X" }'
    assert ask(server, "POST", "/api/modelcontrol/load/spare").outcome == (200, "SUCCESS", "")
    assert infer(server, "spare", bytes(4), header).code == 200
    assert ask(server, "POST", "/api/modelcontrol/unload/spare").outcome == (200, "SUCCESS", "")
    assert infer(server, "spare", bytes(4), header).outcome[1:] == (
        "NOT_FOUND",
        "Servable not found for request: Latest(spare): unloaded",
    )
    assert ask(server, "POST", "/api/modelcontrol/load/nix").outcome == (
        400,
        "NOT_FOUND",
        "failed to load 'nix', failed to poll from model repository",
    )
    assert ask(server, "POST", "/api/modelcontrol/load/..%2Fnix").outcome[1] == "INVALID_ARG"
    index = ask(server, "GET", "/api/repository/index?format=binary").body
    names = [entry.name for entry in message_class("ModelRepositoryIndex").FromString(index).models]
    assert names == ["broken", "pair", "resnet", "single", "spare", "stateful", "variable", "words"]


@settings(max_examples=examples(300), deadline=None)
@given(
    st.one_of(st.binary(max_size=200), st.text("{}:[]<>\"'\\ abdeimnoptuz_0123456789-\n", max_size=80).map(str.encode))
)
def test_no_header_is_so_odd_that_it_raises(data: bytes) -> None:
    header_from_text(data)
    header_from_bytes(data)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(
    st.sampled_from(["single", "pair", "words", "variable", "stateful", "nobody"]),
    st.lists(
        st.sampled_from(
            [
                "batch_size: 1",
                "batch_size: 4294967295",
                'input { name: "A" }',
                'input { name: "A" dims: 0 }',
                'input { name: "A" dims: [1, 2] batch_byte_size: 18446744073709551615 }',
                'input { name: "A" byte_size: 18446744073709551615 }',
                'input { name: "A" shared_memory { name: "q" offset: 18446744073709551615 byte_size: 6 } }',
                'output { name: "X" }',
                'output { name: "X" cls { count: 4294967295 } }',
                'output { name: "\\377\\n" }',
                "correlation_id: 18446744073709551615 flags: 255",
            ]
        ),
        max_size=5,
    ),
    st.binary(max_size=24),
)
def test_no_request_is_so_odd_that_it_is_not_answered(
    server: Serving, model: str, parts: list[str], body: bytes
) -> None:
    answer = infer(server, model, body, " ".join(parts))
    assert answer.code in (200, 400)
    assert answer.outcome[1] != "INTERNAL" or "expected" in answer.outcome[2]
