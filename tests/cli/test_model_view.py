# SPDX-License-Identifier: Apache-2.0
"""Output of `headrace models`: sentences about scheduling, numbers of the list."""

from __future__ import annotations

from importlib.resources import files
from typing import Any, get_args

import pytest

from headrace.cli.models_view import WHY, language_model_lines, list_rows, scheduling_lines, show_model
from headrace.engine.scheduling.pending_request import BatchReason

BATCHING: dict[str, Any] = {"max_queue_delay_microseconds": 0}


def test_every_reason_of_a_batch_is_explained() -> None:
    assert set(WHY) == set(get_args(BatchReason))


def test_the_console_explains_the_reasons_with_the_same_texts() -> None:
    script = (files("headrace.programs.console") / "assets" / "requests.js").read_text("utf-8")
    for text in WHY.values():
        assert f': "{text}",' in script


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({}, "One request at a time: there is no dynamic_batching."),
        ({"dynamic_batching": BATCHING}, "A batch never waits for more requests."),
        ({"dynamic_batching": {"max_queue_delay_microseconds": 5}}, "A batch waits 5 us for more requests."),
        ({"dynamic_batching": BATCHING | {"preferred_batch_size": [2, 4]}}, "Preferred sizes: 2, 4."),
        (
            {"dynamic_batching": BATCHING | {"max_queue_delay_auto": True, "latency_target_ms": 50.0}},
            "The delay is chosen so that 99 % of requests take less than 50 ms.",
        ),
        (
            {"dynamic_batching": BATCHING | {"priority_levels": 3, "default_priority_level": 2}},
            "3 priorities; 2 for requests without one.",
        ),
        (
            {"dynamic_batching": BATCHING | {"default_queue_policy": {"max_queue_size": 9}}},
            "At most 9 requests wait; more are rejected.",
        ),
        (
            {"sequence_batching": {"oldest": {}, "max_sequence_idle_microseconds": 2_500_000}},
            "Sequence batching, strategy 'oldest'; sequences time out after 2.5 s without a request.",
        ),
        (
            {"ensemble_scheduling": {"step": [{"model_name": "a"}, {"model_name": "b"}]}},
            "An ensemble of a, b: each step waits in the queue of its own model.",
        ),
    ],
)
def test_scheduling_in_sentences(config: dict[str, Any], sentence: str) -> None:
    lines = scheduling_lines({"max_batch_size": 8} | config)
    assert lines[0] == "Maximum batch size: 8." and sentence in lines
    assert scheduling_lines({"max_batch_size": 0} | config)[0] == "No batching: max_batch_size is 0."


def test_a_language_model_says_how_it_is_served() -> None:
    def lines(**parameters: str) -> list[str]:
        return language_model_lines({"parameters": {name: {"string_value": text} for name, text in parameters.items()}})

    assert language_model_lines({}) == lines(threads="1") == []
    assert lines(weight_scheme="FP8", speculation="ngram") == [
        "Quantised weights: FP8.",
        "Speculative decoding: ngram.",
    ]
    assert lines(speculation="draft", draft_model="../../qwen-0.5b") == [
        "Speculative decoding: drafts of the model in ../../qwen-0.5b."
    ]
    assert lines(kv_host_bytes="0") == []
    assert lines(kv_host_bytes=str(2**33)) == ["Evicted KV pages: kept in 8.6 GB of host memory."]
    assert lines(kv_host_bytes=str(2**33), kv_disk_path="/mnt/pages") == [
        "Evicted KV pages: kept in 8.6 GB of host memory, and in /mnt/pages."
    ]


def test_the_list_has_averages() -> None:
    parts = dict.fromkeys(
        ("success", "fail", "queue", "compute_input", "compute_infer", "compute_output"), {"count": 4, "ns": 8_000_000}
    )
    stats = {"name": "a", "version": "1", "inference_count": 6, "execution_count": 3, "inference_stats": parts}
    index = [{"name": "a", "version": "1", "state": "READY"}, {"name": "b"}]
    first, second = list_rows(index, {"model_stats": [stats]})
    assert first == {
        "name": "a",
        "version": "1",
        "state": "READY",
        "requests": 8,
        "executions": 3,
        "average_batch": 2.0,
        "average_queue_ms": 2.0,
        "average_compute_ms": 6.0,
        "reason": "",
    }
    assert second["state"] == "" and second["average_batch"] is None


def test_text_from_a_server_cannot_control_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    show_model({"index": [{"name": "a", "state": "UNAVAILABLE", "reason": "[red]no\x1b[2J\nREADY"}]})
    shown = capsys.readouterr().out
    assert "[red]no\\x1b[2J\\nREADY" in shown and "\x1b" not in shown
