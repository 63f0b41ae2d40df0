"""Text to ids, ids to exact bytes, messages to a prompt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from mstar.model.errors import BadModelFiles, TemplateError
from mstar.model.tokenizer import Tokenizer
from tests.helpers.tiny_model import write_tiny_model

TEXTS = [
    "Hello, world!",
    "  two  spaces\n\n\tand tabs ",
    "héllo wörld – naïve",
    "数学 12345 números 3.14159",
    "emoji 😀👩‍👩‍👧 end",
    "def f(x):\n    return x**2  # 10_000",
    "<|im_start|>user\nHi<|im_end|>\n",
    "It's we'll I'd they've",
    "",
    "\u200b\ufeff\x00 odd",
    "a" * 300,
    "MiXeD http://x.y/z?q=1&b=2",
]
CHAT = [
    {"role": "user", "content": "hi <b> & 'quotes'"},
    {"role": "assistant", "content": "ok"},
    {"role": "user", "content": "a\nb ☕"},
]


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "tiny")


def settings(directory: Path, **changes: Any) -> Path:
    path = directory / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return directory


@pytest.fixture(scope="module")
def pair(model_dir: Path) -> tuple[Tokenizer, Any]:
    """The default model's tokenizer, ours and transformers'."""
    from transformers import AutoTokenizer

    return Tokenizer.load(model_dir), AutoTokenizer.from_pretrained(model_dir)


@pytest.mark.parametrize("text", TEXTS)
def test_ids_equal_those_of_transformers(pair: tuple[Tokenizer, Any], text: str) -> None:
    ours, theirs = pair
    ids = ours.encode(text, add_special_tokens=True)
    assert ids.dtype == "int32"
    assert ids.tolist() == theirs(text)["input_ids"]
    assert ours.decode(ids.tolist(), skip_special_tokens=False) == text
    assert ours.decode(ids.tolist(), skip_special_tokens=True) == theirs.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("text", TEXTS)
def test_bytes_of_the_tokens_join_to_the_text(pair: tuple[Tokenizer, Any], text: str) -> None:
    ours, _ = pair
    assert ours.has_bytes
    pieces = [ours.token_bytes(int(token)) for token in ours.encode(text, add_special_tokens=False)]
    assert b"".join(piece or b"?" for piece in pieces) == text.encode()


@pytest.mark.parametrize("prompt", [True, False])
def test_the_chat_template_renders_as_in_transformers(pair: tuple[Tokenizer, Any], prompt: bool) -> None:
    ours, theirs = pair
    for messages in (CHAT, [{"role": "system", "content": "Be brief."}, *CHAT], CHAT[:1]):
        expected = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
        assert ours.apply_chat_template(messages, add_generation_prompt=prompt) == expected


def test_every_token_of_a_byte_level_vocabulary_has_bytes(tiny: Path) -> None:
    tokenizer = Tokenizer.load(tiny)
    pieces = [tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size)]
    assert all(piece for piece in pieces)
    assert {bytes([byte]) for byte in range(256)} <= set(pieces)
    assert tokenizer.token_bytes(2) == b"<|im_end|>"
    assert tokenizer.token_bytes(tokenizer.vocab_size) is None
    assert tokenizer.token_bytes(-1) is None


def test_added_tokens_outside_the_alphabet_have_the_bytes_of_their_text(tiny: Path) -> None:
    engine = tokenizers.Tokenizer.from_file(str(tiny / "tokenizer.json"))
    engine.add_special_tokens(["<｜end▁of▁text｜>"])
    engine.add_tokens(["é!"])
    engine.save(str(tiny / "tokenizer.json"))
    tokenizer = Tokenizer.load(tiny)
    special, plain = tokenizer.vocab_size - 2, tokenizer.vocab_size - 1
    assert tokenizer.token_bytes(special) == "<｜end▁of▁text｜>".encode()
    assert tokenizer.token_bytes(plain) == "é!".encode()
    assert special in tokenizer.special_ids
    assert plain not in tokenizer.special_ids


def byte_fallback(directory: Path) -> Path:
    """A vocabulary in the manner of SentencePiece: pieces with spaces as U+2581, and a token a byte."""
    pieces = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "\u2581",
        "h",
        "i",
        "hi",
        "\u2581hi",
    ]
    merges = [("h", "i"), ("\u2581", "hi")]
    vocab = {piece: token for token, piece in enumerate(pieces)}
    engine = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=merges, byte_fallback=True, unk_token="<unk>")
    )
    engine.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    engine.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    engine.add_special_tokens(["<unk>", "<s>", "</s>"])
    engine.save(str(directory / "tokenizer.json"))
    return directory


def test_a_byte_fallback_vocabulary_gives_exact_bytes(tiny: Path) -> None:
    tokenizer = Tokenizer.load(byte_fallback(tiny))
    ids = tokenizer.encode("hi hi é☕", add_special_tokens=False).tolist()
    assert tokenizer.has_bytes
    assert b"".join(tokenizer.token_bytes(token) or b"?" for token in ids) == " hi hi é☕".encode()
    assert tokenizer.token_bytes(3 + 0xC3) == b"\xc3"
    assert tokenizer.decode(ids, skip_special_tokens=True) == "hi hi é☕"


def test_a_word_piece_vocabulary_has_no_bytes(tiny: Path) -> None:
    engine = tokenizers.Tokenizer(models.WordPiece({"[UNK]": 0, "hi": 1, "##gh": 2}, unk_token="[UNK]"))
    engine.pre_tokenizer = pre_tokenizers.Whitespace()
    engine.decoder = decoders.WordPiece()
    engine.save(str(tiny / "tokenizer.json"))
    tokenizer = Tokenizer.load(tiny)
    assert not tokenizer.has_bytes
    assert tokenizer.token_bytes(2) is None
    assert tokenizer.decode([1, 2], skip_special_tokens=False) == "high"


def test_padding_and_truncation_of_the_file_are_switched_off(tiny: Path) -> None:
    engine = tokenizers.Tokenizer.from_file(str(tiny / "tokenizer.json"))
    engine.enable_truncation(4)
    engine.enable_padding(length=4)
    engine.save(str(tiny / "tokenizer.json"))
    tokenizer = Tokenizer.load(tiny)
    assert len(tokenizer.encode("x" * 50, add_special_tokens=False)) == 50
    assert len(tokenizer.encode("x", add_special_tokens=False)) == 1


def test_end_ids_unite_the_files(tiny: Path) -> None:
    (tiny / "generation_config.json").write_text('{"eos_token_id": [5, 6]}')
    assert Tokenizer.load(settings(tiny, eos_token={"content": "<|endoftext|>"})).eos_ids == {0, 2, 5, 6}


def test_a_template_of_its_own_file_wins_and_default_is_taken_of_a_list(tiny: Path) -> None:
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "default"}]
    assert Tokenizer.load(settings(tiny, chat_template=named)).chat_template == "default"
    (tiny / "chat_template.jinja").write_text("file")
    assert Tokenizer.load(tiny).apply_chat_template([]) == "file"


def template(directory: Path, source: str) -> Tokenizer:
    return Tokenizer.load(settings(directory, chat_template=source))


@pytest.mark.parametrize(
    "source",
    [
        "{{ bos_token }}{% for m in messages %}\n  {% if m.role == 'user' %}\n{{ m.content | tojson }}\n"
        "  {% endif %}\n{% endfor %}{{ eos_token }}",
        "{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}{{ m['content'] }}{% endfor %}",
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
        "{{ tools is none }} {{ messages | tojson(indent=2) }} {{ custom }} {{ missing }}",
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
        "{{ strftime_now('%Y') | length }}{{ messages[0].content.split('<') | join('|') }}",
    ],
)
def test_templates_find_what_transformers_offers_them(tiny: Path, source: str) -> None:
    from transformers import AutoTokenizer

    ours = template(tiny, source)
    theirs = AutoTokenizer.from_pretrained(tiny)
    kwargs: dict[str, Any] = {"add_generation_prompt": True, "custom": "<é>"}
    assert ours.apply_chat_template(CHAT, **kwargs) == theirs.apply_chat_template(
        CHAT, tokenize=False, **kwargs
    )


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0]['content'] + 1 }}", "str"),
        ("{{ messages[7].content.x }}", "no element 7"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "'append' of 'list' object is unsafe"),
        ("{{ 1 / 0 }}", "division by zero"),
    ],
)
def test_a_template_that_refuses_is_the_requests_mistake(tiny: Path, source: str, message: str) -> None:
    with pytest.raises(TemplateError, match=message):
        template(tiny, source).apply_chat_template(CHAT)


def test_variables_of_the_server_may_not_be_replaced(tiny: Path) -> None:
    with pytest.raises(TemplateError, match="may not set 'messages'"):
        Tokenizer.load(tiny)._template.render(CHAT, add_generation_prompt=True, values={"messages": []})  # type: ignore[union-attr]


def test_a_model_without_a_template_says_so(tiny: Path) -> None:
    tokenizer = Tokenizer.load(settings(tiny, chat_template=None))
    assert tokenizer.chat_template is None
    with pytest.raises(TemplateError, match="no chat template"):
        tokenizer.apply_chat_template(CHAT)


def test_a_template_that_does_not_parse_is_refused_at_load(tiny: Path) -> None:
    with pytest.raises(BadModelFiles, match=r"does not parse: line 2"):
        template(tiny, "ok\n{% for %}")


def test_broken_tokenizer_files_are_named(tiny: Path) -> None:
    (tiny / "tokenizer.json").write_text('{"model": {"type": "Nonsense"}}')
    with pytest.raises(BadModelFiles, match=r"tokenizer\.json cannot be used"):
        Tokenizer.load(tiny)
    (tiny / "tokenizer.json").unlink()
    with pytest.raises(BadModelFiles, match=r"tokenizer\.json is missing"):
        Tokenizer.load(tiny)
