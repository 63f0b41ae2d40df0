"""From a body to a recipe: checked, rendered, tokenized, with budgets and the way tokens are drawn.

Plain and synchronous, so that a large body can be worked on by a thread.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from mstar.gateway.prefix import NOTHING_SHARED, Sharing
from mstar.gateway.text import TokenizerLike
from mstar.messages.request import Sampling
from mstar.model.errors import TemplateError
from mstar.model.spec import GenerationDefaults
from mstar.validation.body import decode_body
from mstar.validation.errors import RequestInvalid
from mstar.validation.fields import CHAT
from mstar.validation.request import (
    ChatRequest,
    CompletionRequest,
    Limits,
    check_tokens,
    parse_chat,
    parse_completion,
)

__all__ = ["Encoder", "Intake", "Recipe"]

Body = bytes | Mapping[str, Any]

_CHARACTERS_PER_TOKEN = 16
"""More than tokens of any text have on average: a head of so many a token is looked at first."""
_MOST_TO_TOKENIZE = 1 << 20
"""Characters of a text of /tokenize, which no window bounds: handing out its ids holds the interpreter."""


class Encoder(TokenizerLike, Protocol):
    """What intake needs of a tokenizer: the ways in, beside the ways out."""

    eos_ids: frozenset[int]

    def encode(self, text: str, *, add_special_tokens: bool) -> NDArray[np.int32]: ...

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], /, *, add_generation_prompt: bool = True, **kwargs: Any
    ) -> str: ...


class Recipe(NamedTuple):
    """A request as deciders need it: prompts int32 [n] each, and what is common to all its sequences.

    ``digests`` are those of each prompt's full pages, b"" where nothing may be shared. Choice ``i * n + j``
    is answer j to prompt i.
    """

    kind: str
    request: ChatRequest | CompletionRequest
    model: str
    prompts: list[NDArray[np.int32]]
    digests: list[bytes]
    max_tokens: list[int]
    sampling: Sampling
    stop_ids: tuple[int, ...]

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts, each counted once."""
        return sum(len(prompt) for prompt in self.prompts)


class Intake:
    """Turns bodies into recipes for one model. Every method may be called from any thread.

    ``names`` are the models that clients may ask for; the first stands for a native request without one.
    """

    def __init__(
        self,
        tokenizer: Encoder,
        limits: Limits,
        defaults: GenerationDefaults,
        names: tuple[str, ...],
        eos_ids: frozenset[int] = frozenset(),
        sharing: Sharing = NOTHING_SHARED,
    ) -> None:
        self.tokenizer = tokenizer
        self.limits = limits
        self.names = names
        self.sharing = sharing
        self._defaults = defaults
        self._eos = tuple(sorted(tokenizer.eos_ids | eos_ids))

    def recipe(self, kind: str, body: Body, *, model_required: bool = True) -> Recipe:
        """The recipe of a body of the endpoint ``kind``, CHAT or COMPLETION. Raises RequestInvalid."""
        request: ChatRequest | CompletionRequest
        if kind == CHAT:
            request = parse_chat(body, self.limits)
            model = self.model(request.model, required=model_required)
            text = self._render(request.messages, request.chat_template_kwargs, True)
            prompts = [self._encode(text, "messages", special=False)]
            budgets = [self._budget(prompts[0], request.max_tokens, "messages")]
        else:
            request = parse_completion(body, self.limits)
            model = self.model(request.model, required=model_required)
            several = len(request.prompts) > 1
            prompts, budgets = [], []
            for index, prompt in enumerate(request.prompts):
                path = f"prompt[{index}]" if several else "prompt"
                if isinstance(prompt, str):
                    tokens = self._encode(prompt, path, special=True)
                else:
                    tokens = prompt.astype(np.int32)
                prompts.append(tokens)
                budgets.append(self._budget(tokens, request.max_tokens, path))
        least = min(budgets)
        if request.min_tokens > least:
            raise RequestInvalid(
                f"`min_tokens` is {request.min_tokens}; the window leaves room for {least} tokens.",
                "min_tokens",
                "invalid_value",
            )
        eos = () if request.ignore_eos else self._eos
        stop_ids = tuple(dict.fromkeys((*request.stop_token_ids, *eos)))
        digests = self.sharing.digests(prompts, request.n)
        return Recipe(kind, request, model, prompts, digests, budgets, self._sampling(request), stop_ids)

    def tokenize(self, body: Body) -> NDArray[np.int32]:
        """Token ids of a body of /tokenize: a prompt, or messages. Raises RequestInvalid."""
        given = dict(decode_body(body) if isinstance(body, bytes) else body)
        special = given.pop("add_special_tokens", None)
        generate = given.pop("add_generation_prompt", None)
        for name, flag in (("add_special_tokens", special), ("add_generation_prompt", generate)):
            if flag is not None and not isinstance(flag, bool):
                raise RequestInvalid(f"`{name}` must be true or false.", name, "invalid_type")
        if given.get("messages") is not None:
            if given.get("prompt") is not None:
                raise RequestInvalid("Send `prompt` or `messages`, not both.", "prompt", "invalid_value")
            known = {"messages", "model", "chat_template_kwargs"}
            request = parse_chat({name: given[name] for name in given if name in known}, self.limits)
            self._refuse_others(given, known)
            text = self._render(
                request.messages, request.chat_template_kwargs, generate if generate is not None else True
            )
        else:
            self._refuse_others(given, {"prompt", "model"})
            request = None
            prompt = given.get("prompt")
            if not isinstance(prompt, str):
                raise RequestInvalid("`prompt` must be a string.", "prompt", "invalid_type")
            text = prompt
        self._check_model(given)
        if len(text) > _MOST_TO_TOKENIZE:
            path = "prompt" if request is None else "messages"
            raise RequestInvalid(
                f"`{path}` has {len(text)} characters; at most {_MOST_TO_TOKENIZE} are tokenized at once.",
                path,
                "string_above_max_length",
            )
        add = special if special is not None else request is None
        return self.tokenizer.encode(text, add_special_tokens=add)

    def detokenize(self, body: Body) -> str:
        """The text of a body of /detokenize, special tokens included. Raises RequestInvalid."""
        given = dict(decode_body(body) if isinstance(body, bytes) else body)
        tokens = given.pop("tokens", None)
        self._refuse_others(given, {"model"})
        self._check_model(given)
        if not isinstance(tokens, list | np.ndarray):
            raise RequestInvalid("`tokens` must be a list of token ids.", "tokens", "invalid_type")
        if not len(tokens):
            return ""
        ids = check_tokens(tokens, "tokens", self.limits).tolist()
        return self.tokenizer.decode(ids, skip_special_tokens=False)

    def model(self, name: str | None, *, required: bool) -> str:
        """The served name a request asks for. Raises RequestInvalid 404 for another."""
        if name is None:
            if required:
                raise RequestInvalid("`model` is required.", "model", "missing_required_parameter")
            return self.names[0]
        if name not in self.names:
            raise RequestInvalid(
                f"The model {name[:80]!r} does not exist; this server has {', '.join(self.names)}.",
                "model",
                "model_not_found",
                404,
            )
        return name

    def _check_model(self, given: Mapping[str, Any]) -> None:
        model = given.get("model")
        if model is not None and not isinstance(model, str):
            raise RequestInvalid("`model` must be a string.", "model", "invalid_type")
        self.model(model, required=False)

    def _refuse_others(self, given: Mapping[str, Any], known: set[str]) -> None:
        for name, value in given.items():
            if name not in known and value is not None:
                raise RequestInvalid(f"Unknown parameter: {name[:80]!r}.", name[:80], "unknown_parameter")

    def _render(self, messages: list[dict[str, Any]], variables: Mapping[str, Any], generate: bool) -> str:
        try:
            return self.tokenizer.apply_chat_template(messages, add_generation_prompt=generate, **variables)
        except TemplateError as error:
            raise RequestInvalid(str(error), "messages", "invalid_messages") from error

    def _encode(self, text: str, path: str, *, special: bool) -> NDArray[np.int32]:
        """Tokens of a prompt. What is far beyond the window is refused by its head alone."""
        window = self.limits.window
        head = window * _CHARACTERS_PER_TOKEN
        if len(text) > 2 * head and len(self.tokenizer.encode(text[:head], add_special_tokens=special)) > (
            2 * window
        ):
            raise RequestInvalid(
                f"`{path}` has {len(text)} characters, which are more than {2 * window} tokens; the window "
                f"of this model is {window} tokens, so a prompt may have at most {window - 1}.",
                path,
                "context_length_exceeded",
            )
        return self.tokenizer.encode(text, add_special_tokens=special)

    def _budget(self, prompt: NDArray[np.int32], asked: int | None, path: str) -> int:
        """How many tokens may be generated. The window holds the prompt and the answer."""
        window, length = self.limits.window, len(prompt)
        if not length:
            raise RequestInvalid(
                f"`{path}` holds no tokens; it must hold at least one.", path, "invalid_value"
            )
        most = self.limits.vocab_size - 1
        if int(prompt.max()) > most:  # a tokenizer may know more tokens than its model
            index = int(np.argmax(prompt > most))
            raise RequestInvalid(
                f"`{path}` holds token {int(prompt[index])} at index {index}, which the tokenizer has and "
                f"the model has not; its token ids are 0 to {most}.",
                path,
                "invalid_value",
            )
        if length >= window:
            raise RequestInvalid(
                f"`{path}` has {length} tokens; the window of this model is {window} tokens, "
                f"so a prompt may have at most {window - 1}.",
                path,
                "context_length_exceeded",
            )
        if asked is not None and length + asked > window:
            raise RequestInvalid(
                f"`{path}` has {length} tokens and `max_tokens` is {asked}, together {length + asked}; "
                f"the window of this model is {window} tokens.",
                "max_tokens",
                "context_length_exceeded",
            )
        return window - length if asked is None else asked

    def _sampling(self, request: ChatRequest | CompletionRequest) -> Sampling:
        """Request first, then the model's generation_config.json, then OpenAI's defaults."""
        defaults = self._defaults

        def choose(asked: float | None, default: float | None, last: float) -> float:
            return asked if asked is not None else default if default is not None else last

        return Sampling(
            temperature=choose(request.temperature, defaults.temperature, 1.0),
            top_p=choose(request.top_p, defaults.top_p, 1.0),
            top_k=int(choose(request.top_k, defaults.top_k, -1)),
            min_p=choose(request.min_p, defaults.min_p, 0.0),
            seed=request.seed if request.seed is not None else secrets.randbits(63),
            presence_penalty=request.presence_penalty,
            frequency_penalty=request.frequency_penalty,
            repetition_penalty=choose(request.repetition_penalty, defaults.repetition_penalty, 1.0),
            logit_bias=request.logit_bias,
            logprobs=request.scores,
        )
