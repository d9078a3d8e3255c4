# SPDX-License-Identifier: Apache-2.0
"""Target `modelconfigs`: model configurations as protobuf text, JSON and YAML.

Refused with lines, or read; and what is read is shown so that it reads as the same again.
"""

from __future__ import annotations

from pathlib import Path

from fuzz.target import Check, Target, require
from headrace.core.errors import HeadraceError
from headrace.models.config.completion import complete
from headrace.models.config.drafts import _parse
from headrace.models.config.messages import to_json, to_text
from headrace.models.config.problems import ConfigError
from headrace.models.config.schema_check import Syntax

_FOLDER = Path("/nowhere/model")


def _open(syntax: Syntax) -> Check:
    def check(data: bytes) -> None:
        try:
            draft = _parse(_FOLDER, None, "model/config", data, syntax)
        except ConfigError as error:
            require(bool(str(error)), "a refusal without a word")
            return
        second = _parse(_FOLDER, None, "model/config", to_text(draft.message).encode(), "text")
        require(
            second.message.SerializeToString(deterministic=True) == _written(draft.message), "shown, it reads otherwise"
        )
        to_json(draft.message)
        try:
            complete(draft, None)
        except HeadraceError as error:
            require(bool(str(error)), "a refusal without a word")

    return check


def _written(message: object) -> bytes:
    written: bytes = message.SerializeToString(deterministic=True)  # type: ignore[attr-defined]
    return written


_TEXT = (
    b'name: "m"',
    b'backend: "onnxruntime"',
    b"max_batch_size: 8",
    b'input [ { name: "I" data_type: TYPE_FP32 dims: [ 4, -1 ] } ]',
    b'output { name: "O" data_type: TYPE_STRING dims: 1 label_filename: "l" }',
    b"dynamic_batching { preferred_batch_size: [ 2 ] max_queue_delay_microseconds: 5 }",
    b"instance_group [ { count: 2 kind: KIND_GPU gpus: [ 0 ] } ]",
    b'parameters { key: "k" value { string_value: "v" } }',
    b"sequence_batching { max_sequence_idle_microseconds: 1 oldest { max_candidate_sequences: 4 } }",
    b'ensemble_scheduling { step [ { model_name: "a" model_version: -1 input_map { key: "x" value: "y" } } ] }',
    b"version_policy: { latest { num_versions: 2 } }",
    b"model_warmup { name: 'w' batch_size: 1 inputs { key: 'I' value { data_type: TYPE_FP32 dims: 4 zero_data: true } } }",
    b"optimization { priority: PRIORITY_MAX }",
    b"response_cache { enable: true }",
    b"\\x41",
    b"<",
    b">",
    b"#",
    b"inf",
    b"0x7f",
)
_JSON = (
    b'{"name":"m","input":[{"name":"I","data_type":"TYPE_FP32","dims":[4]}]}',
    b'"max_batch_size":8',
    b'"parameters":{"k":{"string_value":"v"}}',
    b'"instance_group":[{"count":1}]',
    b'"dynamic_batching":{}',
    b"//",
    b",",
    b"null",
    b"\\u0000",
    b"1e99",
)
_YAML = (
    b"name: m\n",
    b"input:\n- name: I\n  data_type: TYPE_FP32\n  dims: [4]\n",
    b"&a",
    b"*a",
    b"!!python/object",
    b"? ",
    b"|\n",
    b"<<: ",
    b"---\n",
    b"2001-01-01",
    b"~",
    b"0o7",
    b"%YAML 1.1\n",
)

PBTXT = Target(
    "config.pbtxt: refused with words, or shown so that it reads as the same", lambda: _open("text"), _TEXT, 2048
)
JSON = Target(
    "config.json: the same",
    lambda: _open("json"),
    (*_JSON, *(b'"%b"' % word for word in (b"output", b"backend"))),
    2048,
)
YAML = Target("config.yaml: the same", lambda: _open("yaml"), _YAML, 2048)
