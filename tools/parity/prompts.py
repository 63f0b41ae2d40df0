"""Fifty prompts of many kinds: chats of one and several turns, plain text, code, numbers, scripts, emoji,
long ones."""

from __future__ import annotations

from typing import Any

__all__ = ["CHATS", "TEXTS"]


def _ask(question: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": question}]


CHATS: list[list[dict[str, Any]]] = [
    _ask("What is the capital of France? Answer in one sentence."),
    _ask("Explain in two sentences why the sky is blue."),
    _ask("Write a haiku about the sea."),
    _ask("List three fruits that are red."),
    _ask("How many legs does a spider have?"),
    _ask("Translate 'good morning' into Spanish."),
    _ask("What is 17 + 25?"),
    _ask("Write a Python function that reverses a string."),
    _ask("Give me a recipe for pancakes, as short as you can."),
    _ask("Who wrote Romeo and Juliet?"),
    _ask("Summarise: The cat sat on the mat, and then it fell asleep in the sun for three hours."),
    _ask("What does the word 'ubiquitous' mean?"),
    _ask("Name the planets of the solar system in order."),
    _ask("Is a whale a fish? Say why."),
    _ask("Tell me a joke about computers."),
    _ask("¿Cuál es la capital de España?"),
    _ask("Qu'est-ce que la photosynthèse ?"),
    _ask("Write one sentence with the words lamp, river and seven."),
    _ask("Turn this into a question: The train leaves at noon."),
    _ask("I feel tired today 😴. What should I do?"),
    [
        {"role": "system", "content": "You answer with a single word."},
        {"role": "user", "content": "What colour is grass?"},
    ],
    [
        {"role": "system", "content": "You are a pirate. Speak like one."},
        {"role": "user", "content": "Where is the treasure?"},
    ],
    [
        {"role": "user", "content": "My name is Ada."},
        {"role": "assistant", "content": "Nice to meet you, Ada! How can I help?"},
        {"role": "user", "content": "What is my name?"},
    ],
    [
        {"role": "user", "content": "Pick a number between 1 and 10."},
        {"role": "assistant", "content": "7"},
        {"role": "user", "content": "Double it."},
        {"role": "assistant", "content": "14"},
        {"role": "user", "content": "Now subtract four."},
    ],
    _ask("Correct the grammar: he go to school yesterday and learn many thing."),
]

_STORY = (
    "The lighthouse keeper climbed the stairs every evening, counted the steps aloud, and lit the lamp. "
    "On the third day of the storm a small boat came out of the fog, and nobody was aboard. "
)

TEXTS: list[str] = [
    "Once upon a time",
    "The quick brown fox jumps over the lazy dog. The quick brown fox",
    "def fibonacci(n):\n    ",
    "import numpy as np\n\n\ndef softmax(x):\n    ",
    "1, 1, 2, 3, 5, 8, 13,",
    "2 + 2 = 4\n3 + 3 = 6\n4 + 4 =",
    "The capital of Italy is",
    "Water boils at 100 degrees",
    "In 1969, the first humans",
    "<html>\n<head>\n<title>",
    '{"name": "Alice", "age": 30, "city": "',
    "SELECT name, COUNT(*) FROM users WHERE",
    "Roses are red,\nViolets are blue,\n",
    "Dear Sir or Madam,\n\nI am writing to",
    "To make tea, first",
    "La lune est",
    "Der Hund und die Katze",
    "こんにちは、私は",
    "Привет, как",
    "Emoji: 😀 😃 😄",
    "A: Hello!\nB: Hi there, how are you?\nA:",
    "# Chapter 1\n\nIt was a dark and stormy night;",
    "The derivative of x^2 is 2x. The derivative of x^3 is",
    "    indented\n        deeper\n            ",
    _STORY * 6 + "In the end",
]
