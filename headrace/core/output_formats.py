# SPDX-License-Identifier: Apache-2.0
"""Names of the formats in which models write reasoning and tool calls, and how a chat template reveals them.

`api.openai.output_formats` has the formats themselves.
"""

from __future__ import annotations

TOOL_FORMAT, REASONING_FORMAT = "tool_format", "reasoning_format"
"""Parameters of a model."""
DEFAULT_TOOL_FORMAT = "hermes"

_TOOL_MARKS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("harmony", ("<|channel|>", "<|constrain|>")),
    ("deepseek_v3", ("<｜tool▁calls▁begin｜>", "```json")),
    ("deepseek_v31", ("<｜tool▁calls▁begin｜>",)),
    ("kimi_k2", ("<|tool_calls_section_begin|>",)),
    ("minimax_m2", ("<minimax:tool_call>",)),
    ("glm45", ("<arg_key>",)),
    ("qwen3_coder", ("<function=",)),
    ("command_r", ("<|START_ACTION|>",)),
    ("mistral", ("[TOOL_CALLS]",)),
    ("phi4", ("functools[",)),
    ("phi4", ("<|/tool_call|>",)),
    ("granite", ("<|tool_call|>",)),
    ("pythonic", ("<|python_start|>",)),
    ("pythonic", ("func_name1(params_name1=params_value1",)),
    ("hermes", ("<tool_call>",)),
    ("minimax", ("<tool_calls>",)),
    ("llama3", ("<|python_tag|>",)),
    ("llama3", ('"parameters": dictionary of argument name',)),
)
"""What a template contains that belongs to a format; the first that fits wins."""

_REASONING_MARKS: tuple[tuple[str, str], ...] = (
    ("harmony", "<|channel|>analysis"),
    ("seed", "<seed:think>"),
    ("command_r", "<|START_THINKING|>"),
    ("mistral", "[THINK]"),
    ("kimi_vl", "◁think▷"),
    ("granite", "Here is my thought process"),
    ("think", "<think>"),
    ("think", "</think>"),
)


def formats_of_template(template: str) -> tuple[str, str]:
    """Return the names of the tool format and the reasoning format that a chat template uses; "" for none."""
    tools = next((name for name, marks in _TOOL_MARKS if all(mark in template for mark in marks)), "")
    return tools, next((name for name, mark in _REASONING_MARKS if mark in template), "")
