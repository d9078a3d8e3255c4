# SPDX-License-Identifier: Apache-2.0
"""Translate a request of OpenAI's Responses API to a chat request.

Its input is a list of items: messages, tool calls and their outputs, and the reasoning of earlier answers. A chat request
has the same in messages: an assistant's message carries its calls and its reasoning.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from headrace.api.openai.errors import BadRequest
from headrace.api.openai.fields import Fields
from headrace.api.openai.response_ids import RANDOM_IDS, ResponseIds

_UNSUPPORTED = {
    "conversation": "this server keeps no conversations: give 'previous_response_id', or all items in 'input'",
    "prompt": "this server keeps no prompts: send the text in 'instructions' or 'input'",
}
_RENAMED = {
    "model": "model",
    "max_output_tokens": "max_tokens",
    "temperature": "temperature",
    "top_p": "top_p",
    "parallel_tool_calls": "parallel_tool_calls",
    "stream": "stream",
    "chat_template_kwargs": "chat_template_kwargs",
    "seed": "seed",
}
"""Members that a chat request has as well, by their names there."""
_ROLES = ("user", "assistant", "system", "developer")
_SYSTEM = ("system", "developer")
_ITEMS = 4096
_ID_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc", "function_call_output": "fco"}
_TEXTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")


def chat_members(fields: Fields, earlier: Sequence[Any] = ()) -> dict[str, Any]:
    """Return the members of the chat request that a Responses request means. `earlier`: the items before its input."""
    fields.reject(_UNSUPPORTED)
    members: dict[str, Any] = {name: fields.get(own) for own, name in _RENAMED.items() if fields.get(own) is not None}
    members["messages"] = _messages(fields, earlier)
    tools = _tools(fields)
    if tools:
        members["tools"] = tools
    choice = fields.get("tool_choice")
    if choice is not None:
        members["tool_choice"] = _tool_choice(fields, choice)
    text = Fields(fields.object("text") or {}, "text")
    if (output_format := text.object("format")) is not None:
        members["response_format"] = output_format
    effort = Fields(fields.object("reasoning") or {}, "reasoning").text("effort", 32)
    if effort is not None:
        members["reasoning_effort"] = effort
    return members


def _messages(fields: Fields, earlier: Sequence[Any]) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    instructions = fields.text("instructions", 1 << 24)
    if instructions:
        messages.append({"role": "system", "content": instructions})
    conversation = [(Fields(item, "previous_response_id"), item) for item in earlier]
    given = input_items(fields)
    conversation += [(Fields(item, f"input[{index}]"), item) for index, item in enumerate(given)]
    reasoning = ""
    for members, item in conversation:
        kind = item.get("type", "message")
        if kind == "reasoning":
            reasoning += _texts(members, "content") or _texts(members, "summary")
        elif kind == "message":
            _add_message(messages, _message(members))
        elif kind == "function_call":
            _assistant(messages).setdefault("tool_calls", []).append(_call(members))
        elif kind == "function_call_output":
            messages.append(_call_output(members))
        else:
            raise members.error(
                "type",
                "must be 'message', 'reasoning', 'function_call' or 'function_call_output': others need a service",
            )
        if reasoning and messages and messages[-1]["role"] == "assistant":
            messages[-1].setdefault("reasoning_content", reasoning)
            reasoning = ""
    return messages


def input_items(fields: Fields) -> list[Any]:
    """Return the input of a request as a list of items."""
    given = fields.get("input")
    if isinstance(given, str):
        return [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": given}]}]
    if not isinstance(given, list) or not 0 < len(given) <= _ITEMS:
        raise fields.error("input", f"must be a string, or a list of 1 to {_ITEMS} items")
    for index, item in enumerate(given):
        if not isinstance(item, dict):
            raise BadRequest(f"input[{index}]", "must be an object with a 'type'")
    return given


def item_to_store(item: Mapping[str, Any]) -> dict[str, Any]:
    """Return an input item as it is listed later: with an id, a type, and its texts as parts."""
    kind = item.get("type", "message")
    given = {name: value for name, value in item.items() if value is not None}
    stored = {"id": new_item_id(str(kind)), "type": kind, "status": "completed", **given}
    if kind == "message" and isinstance(item.get("content"), str):
        part = "output_text" if item.get("role") == "assistant" else "input_text"
        stored["content"] = [{"type": part, "text": item["content"]}]
    return stored


def new_item_id(kind: str, ids: ResponseIds = RANDOM_IDS) -> str:
    """Return an id for an item of a type."""
    return f"{_ID_PREFIXES.get(kind, 'item')}_{ids.hexadecimal(16)}"


def _add_message(messages: list[dict[str, Any]], message: dict[str, Any]) -> None:
    """Add a message. System messages in a row become one, since most templates take one."""
    if messages and message["role"] in _SYSTEM and messages[-1]["role"] in _SYSTEM:
        message = {"role": "system", "content": [*_parts(messages.pop()), *_parts(message)]}
    messages.append(message)


def _parts(message: Mapping[str, Any]) -> list[Any]:
    content = message["content"]
    return content if isinstance(content, list) else [{"type": "text", "text": content}]


def _assistant(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the assistant's message that a call belongs to."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": None})
    return messages[-1]


def _message(fields: Fields) -> dict[str, Any]:
    role = fields.get("role")
    if role not in _ROLES:
        raise fields.error("role", f"must be one of: {', '.join(_ROLES)}")
    content = fields.get("content")
    if isinstance(content, list):
        content = [_part(fields, index, part) for index, part in enumerate(content)]
    return {"role": role, "content": content}


def _part(fields: Fields, index: int, part: Any) -> dict[str, Any]:
    at = f"content[{index}]"
    if not isinstance(part, dict):
        raise fields.error(at, "must be an object with a 'type'")
    kind = part.get("type")
    if kind in _TEXTS:
        return {"type": "text", "text": part.get("text")}
    if kind == "refusal":
        return {"type": "refusal", "refusal": part.get("refusal")}
    if kind == "input_image":
        if not isinstance(part.get("image_url"), str):
            raise fields.error(f"{at}.image_url", "must be a URL or a data: URL: this server keeps no files")
        return {"type": "image_url", "image_url": {"url": part["image_url"]}}
    raise fields.error(f"{at}.type", "must be 'input_text', 'output_text' or 'input_image'")


def _texts(fields: Fields, name: str) -> str:
    """Return the texts of a list of parts, joined."""
    parts = fields.list(name, _ITEMS) or []
    texts = [part.get("text") for part in parts if isinstance(part, dict) and part.get("type") in _TEXTS]
    return "".join(text for text in texts if isinstance(text, str))


def _call(fields: Fields) -> dict[str, Any]:
    for name in ("call_id", "name", "arguments"):
        if not isinstance(fields.get(name), str):
            raise fields.error(name, "must be a string")
    name = joined_name(fields.get("namespace"), fields.get("name"))
    function = {"name": name, "arguments": fields.get("arguments")}
    return {"id": fields.get("call_id"), "type": "function", "function": function}


def _call_output(fields: Fields) -> dict[str, Any]:
    call_id, output = fields.get("call_id"), fields.get("output")
    if not isinstance(call_id, str):
        raise fields.error("call_id", "is missing: an output needs the 'call_id' of its call")
    if isinstance(output, list):
        output = [
            _part(Fields({"content": output}, fields.param("output")), index, part) for index, part in enumerate(output)
        ]
    elif not isinstance(output, str):
        raise fields.error("output", "must be a string, or a list of parts")
    return {"role": "tool", "tool_call_id": call_id, "content": output}


def _tools(fields: Fields) -> list[dict[str, Any]]:
    """Return the functions of a request.

    Agents offer tools of OpenAI's service beside their own functions: these are left out. A request whose tools are all of
    that kind is refused.
    """
    tools: list[dict[str, Any]] = []
    hosted: list[tuple[str, str]] = []
    for index, tool in enumerate(fields.list("tools", _ITEMS) or []):
        at = f"tools[{index}]"
        if not isinstance(tool, dict):
            raise fields.error(at, "must be an object with a 'type'")
        kind = tool.get("type")
        if kind == "function":
            tools.append(_function(tool))
        elif kind == "namespace":
            tools += _namespace_functions(Fields(tool, at))
        elif kind == "custom":
            raise fields.error(f"{at}.type", "'custom' tools take free text, which is not supported: give functions")
        else:
            hosted.append((f"{at}.type", str(kind)[:64]))
    if hosted and not tools:
        param, kind = hosted[0]
        reason = f"{kind!a} is a tool of OpenAI's service, and this server runs no tools: give functions instead"
        raise BadRequest(param, reason, "unsupported_parameter")
    return tools


def _namespace_functions(fields: Fields) -> list[dict[str, Any]]:
    """Return the functions of a namespace; their names begin with its name."""
    namespace = fields.text("name", 64)
    if not namespace:
        raise fields.error("name", "is missing: give the name of the namespace")
    tools = fields.list("tools", _ITEMS) or []
    for index, tool in enumerate(tools):
        if not isinstance(tool, dict) or tool.get("type") != "function":
            raise fields.error(f"tools[{index}].type", "must be 'function'")
    return [_function(tool, namespace) for tool in tools]


def _function(tool: Mapping[str, Any], namespace: str = "") -> dict[str, Any]:
    names = ("name", "description", "parameters", "strict")
    function = {name: tool[name] for name in names if tool.get(name) is not None}
    if namespace:
        function["name"] = joined_name(namespace, function.get("name"))
    return {"type": "function", "function": function}


def joined_name(namespace: Any, name: Any) -> Any:
    """Return the name that the model knows a function of a namespace by."""
    return f"{namespace}.{name}" if isinstance(namespace, str) and namespace else name


def split_name(name: str, namespaces: Collection[str]) -> tuple[str, str]:
    """Return the namespace of a function, "" if it has none, and its name in it."""
    namespace, dot, rest = name.partition(".")
    return (namespace, rest) if dot and namespace in namespaces else ("", name)


def _tool_choice(fields: Fields, choice: Any) -> Any:
    if isinstance(choice, str):
        return choice
    if isinstance(choice, Mapping) and choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    raise fields.error("tool_choice", "must be 'none', 'auto', 'required' or {'type': 'function', 'name': NAME}")
