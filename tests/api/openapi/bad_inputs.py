# SPDX-License-Identifier: Apache-2.0
"""The corpus of bad input: names, tensors, and what the protocols wrap around them. Sent by `test_bad_input_corpus`."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import quote

NAMES = {
    "parent": "..",
    "parents": "../../../../etc/passwd",
    "encoded parent": "%2e%2e",
    "encoded parents": "%2e%2e%2f%2e%2e%2fcanary",
    "twice encoded": "%252e%252e%252fcanary",
    "dot": ".",
    "hidden": ".git",
    "absolute": "%2fetc%2fpasswd",
    "backslash": "..%5c..%5ccanary",
    "nul": "echo%00.txt",
    "unicode": quote("модель"),
    "full-width dots": quote("．．"),
    "right to left": quote("echo\u202etxt"),
    "no utf-8": "%ff%fe",
    "4 KB": "a" * 4096,
    "option": "--help",
    "newline": "echo%0d%0aset-cookie:%20a=b",
    "space": "echo%20echo",
    "markup": "%3Cscript%3Ealert(1)%3C%2Fscript%3E",
    "format": "%25s%25n{0}",
    "quote": "'%22;$(id)`id`",
}


def one(**changes: Any) -> dict[str, Any]:
    tensor = {"name": "INPUT0", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4], **changes}
    return {"inputs": [{key: value for key, value in tensor.items() if value is not ...}]}


def nested(depth: int) -> bytes:
    return b'{"inputs":[{"name":"INPUT0","datatype":"FP32","shape":[1,4],"data":%b1%b}]}' % (b"[" * depth, b"]" * depth)


WRONG_TENSORS: dict[str, Any] = {
    "negative size": one(shape=[1, -4]),
    "huge size": one(shape=[1, 2**62]),
    "sizes that overflow": one(shape=[2**32, 2**32]),
    "more than 64 bits": one(shape=[1, 2**80]),
    "no rows": one(shape=[0, 4], data=[]),
    "too many rows": one(shape=[9, 4], data=[0] * 36),
    "too few elements": one(data=[1, 2, 3]),
    "too many elements": one(data=[1] * 5),
    "a wrong rank": one(shape=[4]),
    "too many dimensions": one(shape=[1] * 100),
    "size as text": one(shape=[1, "4"]),
    "size as flag": one(shape=[True, 4]),
    "size as fraction": one(shape=[1, 4.0]),
    "no shape": one(shape=...),
    "shape as number": one(shape=4),
    "another type": one(datatype="INT32"),
    "no such type": one(datatype="FP31"),
    "type as list": one(datatype=["FP32"]),
    "text for numbers": one(data=["a", "b", "c", "d"]),
    "nothing for numbers": one(data=[None] * 4),
    "numbers over FP32": one(data=[1e300] * 4),
    "objects": one(data=[{}] * 4),
    "rows of different lengths": one(data=[[1, 2], [3]]),
    "no data": one(data=...),
    "data as number": one(data=1),
    "data as text": one(data="1234"),
    "another name": one(name="OTHER"),
    "name as number": one(name=1),
    "no name": one(name=...),
    "twice": {"inputs": one()["inputs"] * 2},
    "none": {"inputs": []},
    "no inputs": {},
    "inputs as object": {"inputs": {}},
    "inputs as text": {"inputs": ["x"]},
    "a list": [],
    "nothing": None,
    "too many": {"inputs": one()["inputs"] * 1025},
    "outputs as text": one() | {"outputs": "OUTPUT0"},
    "another output": one() | {"outputs": [{"name": "OTHER"}]},
    "parameters as list": one() | {"parameters": []},
    "binary without bytes": one(data=..., parameters={"binary_data_size": 16}),
    "binary and data": one(parameters={"binary_data_size": 16}),
    "negative binary size": one(data=..., parameters={"binary_data_size": -1}),
    "shared memory": one(data=..., parameters={"shared_memory_region": "r", "shared_memory_byte_size": 16}),
    "10,000 deep beside a NaN": b'{"x":NaN,"inputs":' + b"[" * 10_000 + b"]" * 10_000 + b"}",
    "5,000 digits beside a NaN": b'{"x":NaN,"inputs":' + b"9" * 5000 + b"}",
    "infinity": b'{"inputs":[{"name":"INPUT0","datatype":"FP32","shape":[1,4],"data":[1e999,1,2,3]}]}',
    "10,000 deep": nested(10_000),
    "a million deep": nested(1_000_000),
    "cut short": json.dumps(one()).encode()[:-1],
    "more behind it": json.dumps(one()).encode() + b"{}",
    "no utf-8": b'{"inputs":[{"name":"\xff"}]}',
    "nul bytes": b"\x00" * 64,
    "empty": b"",
}


WRONG_GENERATES: list[Any] = [
    {"IN": "x"}, {"IN": [1, "x"]}, {"IN": [[1], [2, 3]]}, {"IN": {}}, {"IN": None}, {"IN": 2**40}, {"IN": 1.5}, {}, [], None,
    {"IN": [1], "other": {}}, {"IN": [1], "id": 1}, {"IN": [1], "triton_x": 1}, {"IN": [[[[1]]]]},
]  # fmt: skip


V1_HEADERS = [
    b"", b"{", b"batch_size: 1", b"batch_size: -1", b"batch_size: 99999999999", b"batch_size: 0", b"\xff\xfe", b"x" * 30_000,
    b'batch_size: 9 input { name: "INPUT0" byte_size: 16 }',
    b'batch_size: 1 input { name: "INPUT0" byte_size: 18446744073709551615 }',
    b'batch_size: 1 input { name: "INPUT0" dims: 4 dims: 9223372036854775807 }',
    b'batch_size: 1 input { name: "INPUT0" dims: -4 }',
    b'batch_size: 1 input { name: "OTHER" byte_size: 16 }',
    b'batch_size: 1 input { name: "INPUT0" byte_size: 16 } output { name: "OTHER" byte_size: 16 }',
    b'batch_size: 1 input { name: "INPUT0" byte_size: 16 } output { name: "OUTPUT0" cls { count: 4294967295 } } flags: 9',
    b'batch_size: 1 input { name: "INPUT0" shared_memory { name: "r" offset: 0 byte_size: 16 } }',
    b"input { " * 1000,
]  # fmt: skip
