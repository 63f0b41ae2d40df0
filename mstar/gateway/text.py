"""From token ids to text that may leave: decoding, stop strings and the flush, in one object per sequence."""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol

__all__ = ["StopStrings", "TextStream", "TokenizerLike", "Vocabulary"]

_UNKNOWN = "\ufffd"


class TokenizerLike(Protocol):
    """What decoding needs of a tokenizer."""

    special_ids: frozenset[int]
    has_bytes: bool

    def token_bytes(self, token: int) -> bytes | None: ...

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool) -> str: ...


class Vocabulary:
    """What each token adds to a text, looked up once and kept; shared by all streams of a model."""

    def __init__(self, tokenizer: TokenizerLike) -> None:
        self.tokenizer = tokenizer
        self.special_ids = tokenizer.special_ids
        self.has_bytes = tokenizer.has_bytes
        self._raw: dict[int, bytes] = {}
        self.whole: dict[int, str] = {}
        """Tokens seen so far that are complete UTF-8 by themselves, with special tokens as ""."""

    def raw(self, token: int) -> bytes:
        """The bytes of a token, special or not; b"" for an id outside the vocabulary."""
        found = self._raw.get(token)
        if found is None:
            found = self._raw[token] = self.tokenizer.token_bytes(token) or b""
        return found

    def visible(self, token: int) -> bytes:
        """The bytes that a token adds to a text without special tokens; fills `whole` where it can."""
        if token in self.special_ids:
            self.whole[token] = ""
            return b""
        raw = self.raw(token)
        with suppress(UnicodeDecodeError):
            self.whole[token] = raw.decode("utf-8")
        return raw

    def show(self, token: int) -> tuple[str, bytes | None]:
        """A token by itself, as log-probabilities name it: its text, and its bytes where it has any."""
        if self.has_bytes:
            raw = self.raw(token)
            return raw.decode("utf-8", "replace"), raw
        return self.tokenizer.decode([token], skip_special_tokens=False), None


class StopStrings:
    """Finds stop strings in a growing text and holds back only what may be the beginning of one.

    Of several stops the one that is complete first counts, and of those complete at the same character the
    longest: the outcome does not depend on how the text was cut into pieces.
    """

    __slots__ = ("_held", "_stops", "matched")

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Take more text and return what may leave; nothing follows a match."""
        if self.matched is not None:
            return ""
        text = self._held + text
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = text.find(stop)
            if start >= 0 and (best is None or (start + len(stop), start) < best[:2]):
                best = (start + len(stop), start, stop)
        if best is not None:
            self.matched, self._held = best[2], ""
            return text[: best[1]]
        keep = self._prefix(text)
        self._held = text[keep:]
        return text[:keep]

    def _prefix(self, text: str) -> int:
        """Where the longest end of ``text`` starts that is a proper prefix of a stop, or len(text)."""
        keep = len(text)
        for stop in self._stops:
            start = max(0, len(text) - len(stop) + 1)
            while (start := text.find(stop[0], start, keep)) >= 0:
                if stop.startswith(text[start:]):
                    keep = start
                    break
                start += 1
        return keep

    def flush(self) -> str:
        """What was held back; the text has ended."""
        held, self._held = self._held, ""
        return held

    @property
    def held(self) -> str:
        """Text that is held back now."""
        return self._held


class TextStream:
    """The text of one sequence: tokens in, deltas out, whatever way the characters are split over tokens.

    Deltas joined equal the decoding of all visible bytes at once with errors="replace", cut before the first
    stop string. A delta never ends inside a character. Special tokens are not shown. ``position`` is the
    number of characters decoded so far, those held back included; ``delivered`` those that left.
    """

    __slots__ = ("_rest", "_special", "_stops", "_vocabulary", "_whole", "_window", "delivered", "position")

    def __init__(self, vocabulary: Vocabulary, stops: Sequence[str] = ()) -> None:
        self._vocabulary = vocabulary
        self._whole = vocabulary.whole
        self._special = vocabulary.special_ids
        self._rest = b""
        self._stops = StopStrings(stops) if stops else None
        self._window = None if vocabulary.has_bytes else _Window(vocabulary.tokenizer)
        self.position = 0
        self.delivered = 0

    @property
    def stopped(self) -> bool:
        """Whether a stop string was completed: nothing more will leave."""
        return self._stops is not None and self._stops.matched is not None

    @property
    def pending(self) -> bool:
        """Whether anything is held back: part of a character, or what may become a stop string."""
        if self._stops is not None and self._stops.held:
            return True
        return bool(self._rest) or (self._window is not None and self._window.pending)

    def push(self, token: int) -> str:
        """Take one token and return the text that may leave now: none, or several characters."""
        if self._rest or self._window is not None or (text := self._whole.get(token)) is None:
            text = self._decode(token)
        self.position += len(text)
        if self._stops is not None:
            text = self._stops.push(text)
        self.delivered += len(text)
        return text

    def flush(self) -> str:
        """The sequence has ended: what was held back, an unfinished character as U+FFFD."""
        if self._window is not None:
            text = self._window.flush()
        else:
            text, self._rest = self._rest.decode("utf-8", "replace"), b""
        self.position += len(text)
        if self._stops is not None:
            text = self._stops.push(text) + self._stops.flush()
        self.delivered += len(text)
        return text

    def _decode(self, token: int) -> str:
        if self._window is not None:
            return "" if token in self._special else self._window.push(token)
        raw = self._rest + self._vocabulary.visible(token)
        text, used = utf_8_decode(raw, "replace", False)
        self._rest = raw[used:]
        return text


class _Window:
    """Decoding for vocabularies whose tokens have no bytes: the tail is decoded again with each token.

    Text that ends in U+FFFD is held back, since the next token may complete the character. The window
    starts at a token whose text already left, so that spaces between words come out as in the whole.
    """

    def __init__(self, tokenizer: TokenizerLike) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._read = 0

    @property
    def pending(self) -> bool:
        return self._read < len(self._tokens)

    def push(self, token: int) -> str:
        self._tokens.append(token)
        text = self._new()
        if not text or text.endswith(_UNKNOWN):
            return ""
        self._tokens, self._read = self._tokens[self._read :], len(self._tokens) - self._read
        return text

    def flush(self) -> str:
        text = self._new() if self.pending else ""
        self._read = len(self._tokens)
        return text

    def _new(self) -> str:
        decode = self._tokenizer.decode
        before = decode(self._tokens[: self._read], skip_special_tokens=True)
        return decode(self._tokens, skip_special_tokens=True)[len(before) :]
