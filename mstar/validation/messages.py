"""Chat messages: roles, text content, and what each role may carry; the plain form templates receive."""

from __future__ import annotations

from typing import Any

from mstar.validation.errors import RequestInvalid
from mstar.validation.kinds import describe

__all__ = ["ROLES", "check_messages"]

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_EVERY_ROLE = frozenset({"role", "content", "name"})
_BY_ROLE = {
    "assistant": frozenset({"tool_calls", "function_call", "refusal", "audio", "annotations"}),
    "tool": frozenset({"tool_call_id"}),
}
_REFUSED = ("audio", "refusal", "function_call", "annotations")  # allowed only as null or empty


def check_messages(value: Any, path: str = "messages") -> list[dict[str, Any]]:
    """Check a list of messages and return it in the plain form of chat templates.

    Content comes out as one string: text parts are joined without a separator, and the null content of
    an assistant message with tool calls is "". A developer message is a system message. Raises
    RequestInvalid with the path of the offending member.
    """
    if not isinstance(value, list):
        raise _wrong(value, path, "a list of messages")
    if not value:
        raise RequestInvalid(f"`{path}` must hold at least one message; it is empty.", path, "empty_array")
    return [_message(one, f"{path}[{index}]") for index, one in enumerate(value)]


def _wrong(value: object, path: str, allowed: str) -> RequestInvalid:
    return RequestInvalid(f"`{path}` must be {allowed}, not {describe(value)}.", path, "invalid_type")


def _message(value: Any, path: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _wrong(value, path, "an object")
    role = value.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise RequestInvalid(
            f"`{path}.role` must be one of {', '.join(ROLES)}, not {describe(role)}.",
            f"{path}.role",
            "invalid_value",
        )
    allowed = _EVERY_ROLE | _BY_ROLE.get(role, frozenset())
    for name, one in value.items():
        if name not in allowed and one is not None:
            raise RequestInvalid(
                f"`{path}.{name}` is not supported in a message of role {role!r}.",
                f"{path}.{name}",
                "unsupported_parameter",
            )
    for name in _REFUSED:
        if value.get(name):
            raise RequestInvalid(
                f"`{path}.{name}` is not supported; leave it out or null.",
                f"{path}.{name}",
                "unsupported_parameter",
            )
    plain: dict[str, Any] = {"role": "system" if role == "developer" else role}
    calls = _tool_calls(value.get("tool_calls"), f"{path}.tool_calls")
    content = value.get("content")
    if content is None and role == "assistant" and calls:
        plain["content"] = ""
    else:
        plain["content"] = _content(content, f"{path}.content")
    if calls:
        plain["tool_calls"] = calls
    for name, needed in (("name", role == "function"), ("tool_call_id", role == "tool")):
        one = value.get(name)
        if one is None and not needed:
            continue
        if not isinstance(one, str):
            raise _wrong(one, f"{path}.{name}", "a string")
        plain[name] = one
    return plain


def _content(value: Any, path: str) -> str:
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise _wrong(value, path, "a string or a list of text parts")
    if not value:
        raise RequestInvalid(f"`{path}` must hold at least one part; it is empty.", path, "empty_array")
    return "".join([_part(part, f"{path}[{index}]") for index, part in enumerate(value)])


def _part(part: Any, path: str) -> str:
    if not isinstance(part, dict):
        raise _wrong(part, path, "an object")
    kind = part.get("type")
    if kind != "text":
        raise RequestInvalid(
            f"`{path}.type` must be 'text', not {describe(kind)}; this model takes text alone.",
            f"{path}.type",
            "unsupported_content",
        )
    for name, one in part.items():
        if name not in ("type", "text") and one is not None:
            raise RequestInvalid(
                f"`{path}.{name}` is not supported in a text part.", f"{path}.{name}", "unsupported_parameter"
            )
    text = part.get("text")
    if not isinstance(text, str):
        raise _wrong(text, f"{path}.text", "a string")
    return text


def _tool_calls(value: Any, path: str) -> list[dict[str, Any]]:
    if value is None:
        return []
    if not isinstance(value, list):
        raise _wrong(value, path, "a list of tool calls")
    return [_tool_call(call, f"{path}[{index}]") for index, call in enumerate(value)]


def _tool_call(call: Any, path: str) -> dict[str, Any]:
    if not isinstance(call, dict):
        raise _wrong(call, path, "an object")
    if call.get("type", "function") != "function":
        raise RequestInvalid(
            f"`{path}.type` must be 'function', not {describe(call.get('type'))}.",
            f"{path}.type",
            "invalid_value",
        )
    function = call.get("function")
    if not isinstance(call.get("id"), str):
        raise _wrong(call.get("id"), f"{path}.id", "a string")
    if not isinstance(function, dict):
        raise _wrong(function, f"{path}.function", "an object")
    for name in ("name", "arguments"):
        if not isinstance(function.get(name), str):
            raise _wrong(function.get(name), f"{path}.function.{name}", "a string")
    function = {"name": function["name"], "arguments": function["arguments"]}
    return {"id": call["id"], "type": "function", "function": function}
