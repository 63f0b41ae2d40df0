"""The table of fields: every field a body may carry, what it may hold, and whether it is honoured.

Parsing, the documentation and the tests are generated from this table and from nothing else. A field of
OpenAI's schema that is not honoured stands here too, with the values at which it changes nothing.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from mstar.validation.kinds import (
    Kind,
    anything,
    bias_map,
    boolean,
    integer,
    integer_list,
    mapping,
    number,
    one_of,
    record,
    stop_list,
    string,
)
from mstar.validation.messages import ROLES, check_messages

__all__ = ["CHAT", "COMPLETION", "FIELDS", "MAX_BIASES", "MAX_CHOICES", "MAX_STOPS", "Field", "table"]

CHAT, COMPLETION = "chat", "completion"
BOTH = frozenset({CHAT, COMPLETION})
ONLY_CHAT, ONLY_COMPLETION = frozenset({CHAT}), frozenset({COMPLETION})

MAX_CHOICES = 128
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 1024
MAX_STOP_TOKENS = 128
MAX_BIASES = 1024


class Field(NamedTuple):
    """One field of a body. ``neutral`` lists the values at which an unsupported field is accepted."""

    name: str
    endpoints: frozenset[str]
    kind: Kind
    default: str
    supported: bool = True
    openai: bool = True
    neutral: tuple[Any, ...] = ()
    note: str = ""


_MESSAGES = Kind("list of messages", f"a list of messages, roles {', '.join(ROLES)}", check_messages)
_PROMPT = anything("a string, a list of strings, a list of token ids, or a list of lists of token ids")
_TEMPLATE = frozenset({"messages", "conversation", "add_generation_prompt", "tokenize"})
_STREAM_OPTIONS = record({"include_usage": boolean(), "include_obfuscation": one_of(False)})
_REST_OF_WINDOW = "the rest of the window"


def _refused(name: str, default: str, *neutral: Any, endpoints: frozenset[str] = ONLY_CHAT) -> Field:
    return Field(name, endpoints, anything("null or its default"), default, supported=False, neutral=neutral)


FIELDS: tuple[Field, ...] = (
    Field("model", BOTH, string(), "required", note="a name that /v1/models lists"),
    Field("messages", ONLY_CHAT, _MESSAGES, "required", note="content is a string or text parts"),
    Field("prompt", ONLY_COMPLETION, _PROMPT, "required"),
    Field("max_tokens", BOTH, integer(1), f"{_REST_OF_WINDOW}; 16 for completions"),
    Field(
        "max_completion_tokens", ONLY_CHAT, integer(1), _REST_OF_WINDOW, note="`max_tokens` by its newer name"
    ),
    Field("min_tokens", BOTH, integer(0), "0", openai=False, note="at most `max_tokens`"),
    Field("temperature", BOTH, number(0, 2), "generation_config.json, else 1"),
    Field("top_p", BOTH, number(0, 1, above=True), "generation_config.json, else 1"),
    Field(
        "top_k", BOTH, integer(1, 2**31 - 1, also=-1), "generation_config.json, else -1 (off)", openai=False
    ),
    Field("min_p", BOTH, number(0, 1), "generation_config.json, else 0 (off)", openai=False),
    Field("seed", BOTH, integer(-(2**63), 2**63 - 1), "drawn at intake"),
    Field("n", BOTH, integer(1, MAX_CHOICES), "1"),
    Field("stop", BOTH, stop_list(MAX_STOPS, MAX_STOP_CHARACTERS), "null"),
    Field("stop_token_ids", BOTH, integer_list(MAX_STOP_TOKENS), "null", openai=False),
    Field("ignore_eos", BOTH, boolean(), "false", openai=False),
    Field("presence_penalty", BOTH, number(-2, 2), "0"),
    Field("frequency_penalty", BOTH, number(-2, 2), "0"),
    Field(
        "repetition_penalty",
        BOTH,
        number(0.01, 10),
        "generation_config.json, else 1 (off)",
        openai=False,
    ),
    Field("logit_bias", BOTH, bias_map(MAX_BIASES), "null", note="token ids of the vocabulary"),
    Field("logprobs", ONLY_CHAT, boolean(), "false"),
    Field("top_logprobs", ONLY_CHAT, integer(0, 20), "0", note="needs `logprobs`: true"),
    Field("logprobs", ONLY_COMPLETION, integer(0, 5), "null"),
    Field("stream", BOTH, boolean(), "false"),
    Field("stream_options", BOTH, _STREAM_OPTIONS, "null", note="needs `stream`: true"),
    Field("user", BOTH, string(), "null", note="accepted, changes nothing"),
    Field("chat_template_kwargs", ONLY_CHAT, mapping(_TEMPLATE), "null", openai=False),
    _refused("audio", "null"),
    _refused("function_call", '"none"', "none"),
    _refused("functions", "[]", []),
    _refused("metadata", "{}", {}),
    _refused("modalities", '["text"]', ["text"]),
    _refused("moderation", "null"),
    _refused("parallel_tool_calls", "true", True),
    _refused("prediction", "null"),
    _refused("prompt_cache_key", "null"),
    _refused("prompt_cache_options", "null"),
    _refused("prompt_cache_retention", "null"),
    _refused("reasoning_effort", "null"),
    _refused("response_format", '{"type": "text"}', {"type": "text"}),
    _refused("safety_identifier", "null"),
    _refused("service_tier", '"auto"', "auto"),
    _refused("store", "false", False),
    _refused("tool_choice", '"none"', "none"),
    _refused("tools", "[]", []),
    _refused("verbosity", '"medium"', "medium"),
    _refused("web_search_options", "null"),
    _refused("best_of", "1", 1, endpoints=ONLY_COMPLETION),
    _refused("echo", "false", False, endpoints=ONLY_COMPLETION),
    _refused("suffix", "null", endpoints=ONLY_COMPLETION),
)


def table(endpoint: str) -> dict[str, Field]:
    """The fields of one endpoint, CHAT or COMPLETION, by name."""
    return {field.name: field for field in FIELDS if endpoint in field.endpoints}
