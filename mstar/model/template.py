"""Chat templates: Jinja in a sandbox, with what templates written for transformers expect to find."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from mstar.model.errors import BadModelFiles, TemplateError

__all__ = ["ChatTemplate", "read_template"]

_RENDERING_ERRORS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)


class ChatTemplate:
    """A compiled template. BadModelFiles where it does not parse."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = _strftime_now
        self.source = source
        self._special_tokens = dict(special_tokens)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise BadModelFiles(
                f"The chat template does not parse: line {error.lineno}: {error.message}."
            ) from error

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool, values: Mapping[str, Any]
    ) -> str:
        """The prompt's text. `values` are further variables, `tools` and `documents` among them.

        Raises TemplateError where the template refuses the messages or cannot be rendered with them, and
        where `values` would replace a variable that is not the caller's.
        """
        reserved = sorted({"messages", "add_generation_prompt"} & values.keys())
        if reserved:
            raise TemplateError(f"chat_template_kwargs may not set {reserved[0]!r}.")
        context = {
            "tools": None,
            "documents": None,
            **self._special_tokens,
            **values,
            "messages": messages,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return self._template.render(context)
        except _RENDERING_ERRORS as error:
            raise TemplateError(f"The chat template refused the messages: {error}") from error


def read_template(directory: Path, config: Mapping[str, Any]) -> str | None:
    """The template's text from chat_template.jinja, else from tokenizer_config.json's content `config`; or
    None.

    Of a list of named templates, the one named `default` counts.
    """
    path = directory / "chat_template.jinja"
    if path.exists():
        return path.read_text(encoding="utf-8")
    found = config.get("chat_template")
    if isinstance(found, list):
        named = {entry.get("name"): entry.get("template") for entry in found if isinstance(entry, Mapping)}
        found = named.get("default")
    if found is not None and not isinstance(found, str):
        raise BadModelFiles(
            f"{directory / 'tokenizer_config.json'}: chat_template is a {type(found).__name__}; "
            "it must be text or a list of named texts."
        )
    return found


class _Generation(jinja2.ext.Extension):
    # Marks the assistant's words for training; here only its body counts.
    tags = {"generation"}  # noqa: RUF012 - jinja2's own declaration

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node | list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes for HTML, which a prompt must not be.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.datetime.now().strftime(layout)
