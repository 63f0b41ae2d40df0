"""From a body to a frozen request: the table applied, then what binds two fields together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from mstar.validation.body import decode_body
from mstar.validation.errors import RequestInvalid
from mstar.validation.fields import CHAT, COMPLETION, Field, table
from mstar.validation.kinds import describe, token_array

__all__ = [
    "MAX_SEQUENCES",
    "ChatRequest",
    "CompletionRequest",
    "Limits",
    "check_tokens",
    "parse_chat",
    "parse_completion",
]

MAX_SEQUENCES = 1024
COMPLETION_MAX_TOKENS = 16  # OpenAI's default of the older endpoint

Prompt = str | NDArray[np.int64]


class Limits(NamedTuple):
    """What of the model bounds a request: vocabulary size and window, both in tokens."""

    vocab_size: int
    window: int


class Common(msgspec.Struct, frozen=True, kw_only=True):
    """What both endpoints take. None means that the request left the choice to the defaults."""

    model: str | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    n: int = 1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    stream: bool = False
    include_usage: bool = False
    user: str | None = None
    scores: int = -1
    """Alternatives whose log-probabilities are wanted, 0 to 20; -1 for no log-probabilities at all."""


class ChatRequest(Common, frozen=True, kw_only=True):
    """A checked body of /v1/chat/completions; messages are in the plain form of templates."""

    messages: list[dict[str, Any]]
    chat_template_kwargs: dict[str, Any] = {}


class CompletionRequest(Common, frozen=True, kw_only=True):
    """A checked body of /v1/completions: one prompt or several, each text or int64 token ids [n]."""

    prompts: list[Any]


_CHAT, _COMPLETION = table(CHAT), table(COMPLETION)
_Request = TypeVar("_Request", ChatRequest, CompletionRequest)


def parse_chat(body: bytes | Mapping[str, Any], limits: Limits) -> ChatRequest:
    """Check a body of /v1/chat/completions, JSON or already decoded. Raises RequestInvalid."""
    values = _checked(body, _CHAT)
    newer = values.pop("max_completion_tokens", None)
    older = values.get("max_tokens")
    if newer is not None and older is not None and newer != older:
        raise RequestInvalid(
            f"`max_tokens` ({older}) and `max_completion_tokens` ({newer}) differ; send one of them.",
            "max_tokens",
            "invalid_value",
        )
    name = "max_tokens" if newer is None else "max_completion_tokens"
    if newer is not None:
        values["max_tokens"] = newer
    wanted, top = values.pop("logprobs", False), values.pop("top_logprobs", None)
    if top and not wanted:
        raise RequestInvalid(
            f"`top_logprobs` ({top}) needs `logprobs` to be true.", "top_logprobs", "invalid_value"
        )
    values["scores"] = (top or 0) if wanted else -1
    if "messages" not in values:
        raise _missing("messages")
    return _request(ChatRequest, values, limits, name)


def parse_completion(body: bytes | Mapping[str, Any], limits: Limits) -> CompletionRequest:
    """Check a body of /v1/completions, JSON or already decoded. Raises RequestInvalid."""
    values = _checked(body, _COMPLETION)
    values["scores"] = values.pop("logprobs", -1)
    if "prompt" not in values:
        raise _missing("prompt")
    values["prompts"] = _prompts(values.pop("prompt"), limits)
    values.setdefault("max_tokens", COMPLETION_MAX_TOKENS)
    request = _request(CompletionRequest, values, limits)
    if len(request.prompts) * request.n > MAX_SEQUENCES:
        raise RequestInvalid(
            f"{len(request.prompts)} prompts with `n` {request.n} are {len(request.prompts) * request.n} "
            f"sequences; at most {MAX_SEQUENCES} are allowed in one request.",
            "prompt",
            "invalid_value",
        )
    return request


def _missing(name: str) -> RequestInvalid:
    return RequestInvalid(f"`{name}` is required.", name, "missing_required_parameter")


def _checked(body: bytes | Mapping[str, Any], fields: dict[str, Field]) -> dict[str, Any]:
    """Apply the table. Null stands for a field that was left out, whatever the field."""
    given = decode_body(body) if isinstance(body, bytes | bytearray) else body
    values: dict[str, Any] = {}
    for name, value in given.items():
        if value is None:
            continue
        field = fields.get(name)
        if field is None:
            raise RequestInvalid(f"Unknown parameter: {describe(name)}.", str(name)[:80], "unknown_parameter")
        if field.supported:
            values[name] = field.kind.check(value, name)
        elif not any(type(value) is type(one) and value == one for one in field.neutral):
            raise RequestInvalid(
                f"`{name}` is not supported; leave it out or at its default, {field.default}.",
                name,
                "unsupported_parameter",
            )
    return values


def _request(
    kind: type[_Request], values: dict[str, Any], limits: Limits, budget_name: str = "max_tokens"
) -> _Request:
    """What binds two fields together, or a field to the model."""
    options = values.pop("stream_options", None)
    if options and not values.get("stream", False):
        raise RequestInvalid(
            "`stream_options` is allowed only when `stream` is true.", "stream_options", "invalid_value"
        )
    values["include_usage"] = bool(options and options.get("include_usage", False))
    budget = values.get("max_tokens")
    if budget is not None and budget > limits.window:
        raise RequestInvalid(
            f"`{budget_name}` is {describe(budget)}; the window of this model is {limits.window} tokens.",
            budget_name,
            "context_length_exceeded",
        )
    least = values.get("min_tokens", 0)
    most = limits.window if budget is None else budget
    if least > most:
        raise RequestInvalid(
            f"`min_tokens` is {describe(least)}; it must be at most {most}.", "min_tokens", "invalid_value"
        )
    for index, token in enumerate(values.get("stop_token_ids", ())):
        if token >= limits.vocab_size:
            raise _out_of_vocabulary(token, f"stop_token_ids[{index}]", limits)
    for token, _ in values.get("logit_bias", ()):
        if token >= limits.vocab_size:
            raise _out_of_vocabulary(token, f"logit_bias[{token}]", limits)
    return kind(**values)


def _out_of_vocabulary(token: int, path: str, limits: Limits) -> RequestInvalid:
    return RequestInvalid(
        f"`{path}` names token {describe(token)}; token ids are 0 to {limits.vocab_size - 1}.",
        path,
        "invalid_value",
    )


def _prompts(value: Any, limits: Limits) -> list[Prompt]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, np.ndarray):
        return [check_tokens(value, "prompt", limits)]
    if not isinstance(value, list):
        raise RequestInvalid(
            "`prompt` must be a string, a list of strings, a list of token ids or a list of lists of "
            f"token ids, not {describe(value)}.",
            "prompt",
            "invalid_type",
        )
    if not value:
        raise RequestInvalid("`prompt` must not be empty.", "prompt", "empty_array")
    if not isinstance(value[0], str | list | np.ndarray):
        return [check_tokens(value, "prompt", limits)]
    if len(value) > MAX_SEQUENCES:
        raise RequestInvalid(
            f"`prompt` holds {len(value)} prompts; at most {MAX_SEQUENCES} are allowed.",
            "prompt",
            "invalid_value",
        )
    text = isinstance(value[0], str)
    prompts: list[Prompt] = []
    for index, one in enumerate(value):
        path = f"prompt[{index}]"
        if text and isinstance(one, str):
            prompts.append(one)
        elif not text and isinstance(one, list | np.ndarray):
            prompts.append(check_tokens(one, path, limits))
        else:
            kind = "a string" if text else "a list of token ids"
            raise RequestInvalid(
                f"`{path}` must be {kind} like `prompt[0]`, not {describe(one)}.", path, "invalid_type"
            )
    return prompts


def check_tokens(value: list[Any] | NDArray[np.int64], path: str, limits: Limits) -> NDArray[np.int64]:
    """Token ids of the vocabulary as int64 [n], one at least. Raises RequestInvalid with the index."""
    if not len(value):
        raise RequestInvalid(f"`{path}` must hold at least one token.", path, "empty_array")
    tokens = token_array(value, path)
    if int(tokens.max()) >= limits.vocab_size:
        index = int(np.argmax(tokens >= limits.vocab_size))
        raise _out_of_vocabulary(int(tokens[index]), f"{path}[{index}]", limits)
    return tokens
