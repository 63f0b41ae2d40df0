"""Text to token ids and back. Knows nothing of requests or streams."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tokenizers

from mstar.model.errors import BadModelFiles, TemplateError
from mstar.model.spec import read_json
from mstar.model.template import ChatTemplate, read_template

__all__ = ["Tokenizer"]

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPECIALS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def _byte_level_alphabet() -> dict[int, int]:
    """Code point in a byte-level vocabulary -> byte: GPT-2's table, printable bytes standing for
    themselves."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {byte: byte for byte in printable}
    rest = (byte for byte in range(256) if byte not in table)
    return table | {0x100 + n: byte for n, byte in enumerate(rest)}


_ALPHABET = _byte_level_alphabet()


class Tokenizer:
    """A tokenizer.json with its chat template.

    Encoding and decoding may be called from any thread. `vocab_size` counts ids up to the largest one,
    added tokens included; `eos_ids` unites generation_config.json, config.json and the tokenizer's own end
    token; `special_ids` are those hidden by `skip_special_tokens`. `has_bytes`: every token stands for
    exact bytes.
    """

    def __init__(self, engine: tokenizers.Tokenizer, layout: Mapping[str, Any]) -> None:
        engine.no_padding()
        engine.no_truncation()
        self._engine = engine
        added: list[Mapping[str, Any]] = layout.get("added_tokens") or []
        self._added = {int(token["id"]): str(token["content"]) for token in added}
        self.special_ids = frozenset(int(token["id"]) for token in added if token.get("special"))
        self.vocab_size = max(engine.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        kinds = set(_types(layout.get("decoder")))
        self._byte_level = "ByteLevel" in kinds
        self._byte_fallback = "ByteFallback" in kinds
        self.has_bytes = self._byte_level or self._byte_fallback
        self.eos_ids: frozenset[int] = frozenset()
        self._template: ChatTemplate | None = None

    @classmethod
    def load(cls, directory: Path) -> Tokenizer:
        """The tokenizer of a model's directory; BadModelFiles where a file is missing or cannot be read."""
        layout = read_json(directory / "tokenizer.json")
        try:
            engine = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
        except Exception as error:  # the library raises nothing narrower
            raise BadModelFiles(f"{directory / 'tokenizer.json'} cannot be used: {error}.") from error
        tokenizer = cls(engine, layout)
        path = directory / "tokenizer_config.json"
        config = read_json(path) if path.exists() else {}
        specials = {name: text for name in _SPECIALS if (text := _text(config.get(name))) is not None}
        tokenizer.eos_ids = tokenizer._ends(directory, specials.get("eos_token"))
        source = read_template(directory, config)
        if source is not None:
            tokenizer._template = ChatTemplate(source, specials)
        return tokenizer

    @property
    def chat_template(self) -> str | None:
        """The chat template's source, or None where the model has none."""
        return None if self._template is None else self._template.source

    def encode(self, text: str, *, add_special_tokens: bool) -> npt.NDArray[np.int32]:
        """Ids of `text`, int32 [n]. Special tokens written out in the text become their ids.

        `add_special_tokens` puts what the tokenizer itself adds (a BOS, say) around it. Releases the GIL.
        """
        # encode() keeps the GIL; the batch form of one does not, and the fast form skips offsets.
        encoding = self._engine.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]
        return np.array(encoding.ids, dtype=np.int32)

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Text of `tokens` as a whole; invalid UTF-8 becomes U+FFFD."""
        return self._engine.decode(list(tokens), skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token: int) -> bytes | None:
        """The bytes that `token` adds to a text: a special token's are those of its name, a piece's space
        included.

        None where the vocabulary does not say (a word-piece vocabulary) and for ids outside of it.
        """
        if (name := self._added.get(token)) is not None:
            return name.encode()
        piece = self._engine.id_to_token(token) if 0 <= token < self.vocab_size else None
        if piece is None:
            return None
        if self._byte_level:
            plain = piece.translate(_ALPHABET)
            # A piece outside the alphabet stands for itself, as in the library's decoder.
            return plain.encode("latin-1") if all(ord(c) in _ALPHABET for c in piece) else piece.encode()
        if self._byte_fallback:
            if match := _BYTE_TOKEN.fullmatch(piece):
                return bytes([int(match[1], 16)])
            return piece.replace("\u2581", " ").encode()
        return None

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], /, *, add_generation_prompt: bool = True, **kwargs: Any
    ) -> str:
        """The prompt's text for `messages`; `kwargs` are further variables of the template.

        Raises TemplateError where the model has no template or the template refuses the messages.
        """
        if self._template is None:
            raise TemplateError(
                "This model has no chat template; use completions with a plain prompt instead."
            )
        return self._template.render(messages, add_generation_prompt=add_generation_prompt, values=kwargs)

    def _ends(self, directory: Path, eos: str | None) -> frozenset[int]:
        found: set[int] = set()
        for name in ("generation_config.json", "config.json"):
            path = directory / name
            value = read_json(path).get("eos_token_id") if path.exists() else None
            found.update(value if isinstance(value, list) else [] if value is None else [value])
        if eos is not None and (token := self._engine.token_to_id(eos)) is not None:
            found.add(token)
        return frozenset(found)


def _text(token: Any) -> str | None:
    """A special token's text: plain, or the `content` of an object."""
    if isinstance(token, Mapping):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _types(node: Any) -> Iterator[str]:
    """Types of a decoder and of those inside it."""
    if isinstance(node, Mapping):
        if isinstance(kind := node.get("type"), str):
            yield kind
        for inner in node.get("decoders") or ():
            yield from _types(inner)
