"""A row of a data file as a conversation: one form for what templates read, or the reason why it is none."""

from __future__ import annotations

import json
from typing import Any

from afmoe.data.rows import Message, RowError

ROLES = ("system", "user", "assistant", "tool")


def parse_row(line: bytes) -> dict[str, Any]:
    """One line of a JSON Lines file as an object. Raises `RowError`."""
    try:
        record = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise RowError("not UTF-8", f"byte {error.start}") from error
    except (ValueError, RecursionError) as error:
        raise RowError("bad JSON", str(error)) from error
    if not isinstance(record, dict):
        raise RowError("not an object", f"a {type(record).__name__}")
    return record


def read_conversation(record: dict[str, Any]) -> tuple[list[Message], list[dict[str, Any]] | None]:
    """The checked `messages` and `tools` of a row.

    Keys without a value are left out (tables fill them with null), content parts are joined to one text, tool
    arguments written as text are read. Raises `RowError`.
    """
    messages = record.get("messages")
    if messages is None:
        raise RowError("no messages", f"keys: {', '.join(list(record)[:5]) or 'none'}")
    if not isinstance(messages, list):
        raise RowError("messages are no list", f"a {type(messages).__name__}")
    if not messages:
        raise RowError("empty conversation")
    checked = [_read_message(message) for message in messages]
    if all(message["role"] != "assistant" for message in checked):
        raise RowError("no assistant turn")
    tools = _read_tools(record.get("tools"))
    try:
        json.dumps([checked, tools], ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        raise RowError("text is not valid Unicode", "half of a surrogate pair") from error
    return checked, tools


def _read_message(message: Any) -> Message:
    if not isinstance(message, dict):
        raise RowError("message is no object", f"a {type(message).__name__}")
    checked = {key: value for key, value in message.items() if value is not None}
    role = checked.get("role")
    if role not in ROLES:
        raise RowError("unknown role", repr(role))
    if "content" not in checked and role != "assistant":
        raise RowError("message without content", f"from {role}")
    checked["content"] = _read_content(checked.get("content", ""))
    if "tool_calls" in checked:
        checked["tool_calls"] = [
            _read_tool_call(call) for call in _objects("tool_calls", checked["tool_calls"])
        ]
    for key in ("reasoning_content", "name", "tool_call_id"):
        if not isinstance(checked.get(key, ""), str):
            raise RowError(f"{key} is no text", f"a {type(checked[key]).__name__}")
    if role == "assistant" and not (checked["content"] or checked.get("tool_calls")):
        raise RowError("empty answer")
    return checked


def _read_content(content: Any) -> str:
    """A text, or a list of parts that are texts, as one text."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RowError("content is no text", f"a {type(content).__name__}")
    texts: list[str] = []
    for part in content:
        text = part.get("text") if isinstance(part, dict) else part
        if not isinstance(text, str):
            kind = part.get("type", "without text") if isinstance(part, dict) else type(part).__name__
            raise RowError("content part is no text", str(kind))
        texts.append(text)
    return "".join(texts)


def _read_tool_call(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function", call)
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RowError("tool call without a name")
    arguments = function.get("arguments")
    if arguments in (None, ""):
        arguments = {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError as error:
            raise RowError("tool arguments are not JSON", str(error)) from error
    if not isinstance(arguments, dict):
        raise RowError("tool arguments are no object", f"a {type(arguments).__name__}")
    rest = {
        key: value for key, value in call.items() if value is not None and key not in ("name", "arguments")
    }
    return rest | {"type": "function", "function": {"name": function["name"], "arguments": arguments}}


def _read_tools(tools: Any) -> list[dict[str, Any]] | None:
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except ValueError as error:
            raise RowError("tools are not JSON", str(error)) from error
    return _objects("tools", tools) if tools else None


def _objects(key: str, value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise RowError(f"{key} are no list of objects")
    return value
