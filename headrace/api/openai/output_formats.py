# SPDX-License-Identifier: Apache-2.0
"""The formats in which models write reasoning and tool calls, and how a model's formats are detected from its chat template.

A model's parameters `tool_format` and `reasoning_format` name its formats. The backend `llm` sets them from the chat
template where a configuration does not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeVar

from headrace.api.openai.call_syntax import (
    HARMONY_MARKERS,
    JsonCalls,
    NamedCalls,
    PythonCalls,
    TaggedCalls,
    markers_of,
)
from headrace.api.openai.format_parser import FormatParser, HarmonyFormat, ReasoningFormat, ToolFormat
from headrace.api.openai.output_buffer import Functions
from headrace.api.openai.output_parser import OutputParser
from headrace.core.errors import FailedPrecondition
from headrace.core.names import nearest
from headrace.core.output_formats import DEFAULT_TOOL_FORMAT, REASONING_FORMAT, TOOL_FORMAT

_Format = TypeVar("_Format")

_DEEPSEEK_END = ("<｜tool▁calls▁end｜>",)
_HARMONY = HarmonyFormat()

TOOL_FORMATS: Mapping[str, ToolFormat | HarmonyFormat] = {
    "command_r": ToolFormat(
        ("<|START_ACTION|>", "Action: ```json"),
        JsonCalls(("<|END_ACTION|>", "```")),
        ignored=("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
    ),
    "deepseek_v3": ToolFormat(
        ("<｜tool▁calls▁begin｜>",),
        NamedCalls(
            before_name=("<｜tool▁call▁begin｜>function<｜tool▁sep｜>",),
            after_name=("\n",),
            before_arguments=("```json",),
            call_end=("```", "<｜tool▁call▁end｜>"),
            ends=_DEEPSEEK_END,
        ),
    ),
    "deepseek_v31": ToolFormat(
        ("<｜tool▁calls▁begin｜>",),
        NamedCalls(
            before_name=("<｜tool▁call▁begin｜>",),
            after_name=("<｜tool▁sep｜>",),
            call_end=("<｜tool▁call▁end｜>",),
            ends=_DEEPSEEK_END,
        ),
    ),
    "glm45": ToolFormat(
        ("<tool_call>",),
        TaggedCalls(
            before_name="",
            after_name=("\n", "<arg_key>", "</tool_call>"),
            before_key="<arg_key>",
            after_key="</arg_key>",
            before_value="<arg_value>",
            after_value="</arg_value>",
            call_end="</tool_call>",
        ),
    ),
    "granite": ToolFormat(("<|tool_call|>", "<tool_call>"), JsonCalls(("</tool_call>",)), bare="["),
    "harmony": _HARMONY,
    "hermes": ToolFormat(("<tool_call>",), JsonCalls(("</tool_call>",))),
    "kimi_k2": ToolFormat(
        ("<|tool_calls_section_begin|>",),
        NamedCalls(
            before_name=("<|tool_call_begin|>",),
            after_name=("<|tool_call_argument_begin|>",),
            call_end=("<|tool_call_end|>",),
            ends=("<|tool_calls_section_end|>",),
            name_is_id=True,
        ),
    ),
    "llama3": ToolFormat(("<|python_tag|>",), JsonCalls(separators=",;"), bare="{"),
    "minimax": ToolFormat(("<tool_calls>",), JsonCalls(("</tool_calls>",))),
    "minimax_m2": ToolFormat(
        ("<minimax:tool_call>",),
        TaggedCalls(
            before_name='<invoke name="',
            after_name=('">',),
            before_key='<parameter name="',
            after_key='">',
            before_value="",
            after_value="</parameter>",
            call_end="</invoke>",
            ends=("</minimax:tool_call>",),
        ),
    ),
    "mistral": ToolFormat(
        ("[TOOL_CALLS]",),
        NamedCalls(after_name=("[ARGS]", "{"), id_marker="[CALL_ID]"),
        alternative=JsonCalls(),
        bare="[",
        strips=False,
    ),
    "phi4": ToolFormat(("<|tool_call|>", "functools"), JsonCalls(("<|/tool_call|>",))),
    "pythonic": ToolFormat(("<|python_start|>",), PythonCalls(("<|python_end|>",)), bare="["),
    "qwen3_coder": ToolFormat(
        ("<tool_call>", "<function="),
        TaggedCalls(
            before_name="<function=",
            after_name=(">",),
            before_key="<parameter=",
            after_key=">",
            before_value="",
            after_value="</parameter>",
            call_end="</function>",
            ends=("</tool_call>",),
            strips_newlines=True,
        ),
    ),
    "xlam": ToolFormat(("<tool_call>", "[TOOL_CALLS]"), JsonCalls(("</tool_call>",)), bare="["),
}
"""Formats of tool calls by name."""

REASONING_FORMATS: Mapping[str, ReasoningFormat | HarmonyFormat] = {
    "command_r": ReasoningFormat(("<|START_THINKING|>",), ("<|END_THINKING|>",)),
    "granite": ReasoningFormat(
        ("Here is my thought process:", "Here's my thought process:"), ("Here is my response:", "Here's my response:")
    ),
    "harmony": _HARMONY,
    "kimi_vl": ReasoningFormat(("◁think▷",), ("◁/think▷",)),
    "mistral": ReasoningFormat(("[THINK]",), ("[/THINK]",)),
    "seed": ReasoningFormat(("<seed:think>",), ("</seed:think>",)),
    "think": ReasoningFormat(("<think>",), ("</think>",)),
}
"""Formats of reasoning by name. "think" is that of DeepSeek, Qwen3, GLM, Kimi K2, MiniMax, Nemotron and most others."""

NO_REASONING = "none"


class OutputFormats(NamedTuple):
    """The formats of one model."""

    tools: ToolFormat | HarmonyFormat
    reasoning: ReasoningFormat | HarmonyFormat | None

    @property
    def markers(self) -> tuple[str, ...]:
        """Every marker of these formats. Some are special tokens, which a detokenizer would leave out."""
        if isinstance(self.reasoning, HarmonyFormat) or isinstance(self.tools, HarmonyFormat):
            return HARMONY_MARKERS
        reasoning = (*self.reasoning.begins, *self.reasoning.ends) if self.reasoning is not None else ()
        return (*reasoning, *self.tools.begins, *self.tools.ignored, *markers_of(self.tools.syntax))

    @property
    def reasoning_end(self) -> str:
        """The marker at which reasoning ends; "" for a model without."""
        if self.reasoning is None:
            return ""
        return "<|channel|>final" if isinstance(self.reasoning, HarmonyFormat) else self.reasoning.ends[0]

    def parser_factory(self, functions: Functions) -> Callable[[], OutputParser] | None:
        """Return what creates the parser of a choice; None if the output is plain text for this request."""
        if isinstance(self.reasoning, HarmonyFormat) or (functions and isinstance(self.tools, HarmonyFormat)):
            return lambda: FormatParser(_HARMONY, None, functions)
        reasoning, tools = self.reasoning, self.tools if functions else None
        if reasoning is None and tools is None:
            return None
        return lambda: FormatParser(tools, reasoning, functions)


def formats_of(parameters: Mapping[str, str]) -> OutputFormats:
    """Return the formats that a model's parameters name."""
    tools = _named(parameters, TOOL_FORMAT, TOOL_FORMATS) or TOOL_FORMATS[DEFAULT_TOOL_FORMAT]
    return OutputFormats(tools, _named(parameters, REASONING_FORMAT, {**REASONING_FORMATS, NO_REASONING: None}))


def _named(parameters: Mapping[str, str], parameter: str, formats: Mapping[str, _Format]) -> _Format | None:
    name = parameters.get(parameter, "")
    if not name:
        return None
    if name not in formats:
        known, close = ", ".join(sorted(formats)), nearest(name, formats)
        hint = f"; did you mean {close}?" if close else ""
        raise FailedPrecondition(
            f"the model's parameter '{parameter}' is {name[:64]!a}; it can be one of: {known}{hint}"
        )
    return formats[name]
