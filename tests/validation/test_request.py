"""The table of fields, applied: what is honoured, what is refused by name, and both sides of every range."""

from __future__ import annotations

import typing
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params

from mstar.validation.errors import RequestInvalid
from mstar.validation.fields import CHAT, COMPLETION, FIELDS, Field, table
from mstar.validation.request import Limits, parse_chat, parse_completion

LIMITS = Limits(vocab_size=300, window=512)
HELLO = [{"role": "user", "content": "hello"}]
Parse = Callable[..., Any]


def chat(**fields: Any) -> Any:
    return parse_chat({"model": "m", "messages": HELLO, **fields}, LIMITS)


def completion(**fields: Any) -> Any:
    return parse_completion({"model": "m", "prompt": "hello", **fields}, LIMITS)


PARSERS: dict[str, Parse] = {CHAT: chat, COMPLETION: completion}


def refused(parse: Parse, **fields: Any) -> RequestInvalid:
    with pytest.raises(RequestInvalid) as found:
        parse(**fields)
    assert found.value.status == 400
    return found.value


def named(fields: list[tuple[str, Field]]) -> list[Any]:
    return [pytest.param(endpoint, field, id=f"{endpoint}-{field.name}") for endpoint, field in fields]


EVERY = [(endpoint, field) for endpoint in (CHAT, COMPLETION) for field in table(endpoint).values()]
REFUSED = [(endpoint, field) for endpoint, field in EVERY if not field.supported]
OTHER_VALUES: list[Any] = [{"a": 1}, ["a"], "other", 17, True, False, 0]


@pytest.mark.behaviour("F-27")
@pytest.mark.parametrize(
    ("endpoint", "schema"),
    [
        (CHAT, chat_create_params.CompletionCreateParamsStreaming),
        (COMPLETION, completion_create_params.CompletionCreateParamsStreaming),
    ],
)
def test_every_field_of_openais_schema_stands_in_the_table(endpoint: str, schema: Any) -> None:
    assert set(typing.get_type_hints(schema)) - set(table(endpoint)) == set()
    ours = {field.name for field in table(endpoint).values() if not field.openai}
    assert ours & set(typing.get_type_hints(schema)) == set()


def test_no_endpoint_has_a_field_twice() -> None:
    for endpoint in (CHAT, COMPLETION):
        names = [field.name for field in FIELDS if endpoint in field.endpoints]
        assert len(names) == len(set(names))


@pytest.mark.behaviour("F-27")
@pytest.mark.parametrize(("endpoint", "field"), named(REFUSED))
def test_what_is_not_honoured_is_refused_by_name_unless_it_changes_nothing(
    endpoint: str, field: Field
) -> None:
    parse = PARSERS[endpoint]
    for neutral in (None, *field.neutral):
        assert parse(**{field.name: neutral}) == parse()
    for value in OTHER_VALUES:
        if value in field.neutral and any(type(value) is type(one) for one in field.neutral):
            continue
        error = refused(parse, **{field.name: value})
        assert error.param == field.name
        assert error.code == "unsupported_parameter"
        assert field.default in error.message


@pytest.mark.behaviour("F-27")
@pytest.mark.parametrize(("endpoint", "field"), named([(e, f) for e, f in EVERY if f.supported]))
def test_null_stands_for_a_field_that_is_left_out(endpoint: str, field: Field) -> None:
    if field.default == "required" and field.name != "model":
        assert refused(PARSERS[endpoint], **{field.name: None}).code == "missing_required_parameter"
    else:
        PARSERS[endpoint](**{field.name: None})


@pytest.mark.behaviour("F-27")
def test_an_unknown_field_is_refused_by_name() -> None:
    for parse in PARSERS.values():
        error = refused(parse, temprature=1)
        assert error.param == "temprature"
        assert error.code == "unknown_parameter"
        assert "temprature" in error.message


GOOD: dict[str, list[tuple[Any, Any]]] = {
    "max_tokens": [(1, 1), (512, 512), (16.0, 16)],
    "min_tokens": [(0, 0), (3, 3)],
    "temperature": [(0, 0.0), (2, 2.0), (0.7, 0.7)],
    "top_p": [(1, 1.0), (0.001, 0.001)],
    "top_k": [(-1, -1), (1, 1), (2**31 - 1, 2**31 - 1)],
    "min_p": [(0, 0.0), (1, 1.0)],
    "seed": [(-(2**63), -(2**63)), (2**63 - 1, 2**63 - 1), (0, 0)],
    "n": [(1, 1), (128, 128), (2.0, 2)],
    "stop": [("a", ("a",)), (["a", "b", "a"], ("a", "b")), ([], ()), (["x"] * 16, ("x",))],
    "stop_token_ids": [([0, 299], (0, 299)), ([], ())],
    "ignore_eos": [(True, True), (False, False)],
    "presence_penalty": [(-2, -2.0), (2, 2.0)],
    "frequency_penalty": [(-2, -2.0), (2, 2.0)],
    "repetition_penalty": [(0.01, 0.01), (10, 10.0)],
    "logit_bias": [({"0": -100, "299": 100.0}, ((0, -100.0), (299, 100.0))), ({}, ())],
    "stream": [(True, True), (False, False)],
    "user": [("somebody", "somebody"), ("", "")],
}
BAD: dict[str, list[Any]] = {
    "max_tokens": [0, -1, 513, 10**30, 1.5, True, "3", [1]],
    "max_completion_tokens": [0, 513, 1.5, False],
    "min_tokens": [-1, 513, True, "1"],
    "temperature": [-0.01, 2.01, True, "1", [1], 10**400],
    "top_p": [0, -0.1, 1.01, True, "1"],
    "top_k": [0, -2, 2**31, 1.5, True],
    "min_p": [-0.01, 1.01, True],
    "seed": [2**63, -(2**63) - 1, 1.5, True, "1", 1e300],
    "n": [0, 129, 1.5, True, "2"],
    "stop": ["", [""], ["a"] * 17, [1], 1, {"a": 1}, ["a" * 1025], True],
    "stop_token_ids": [[-1], [300], [1.5], [True], 1, ["1"], list(range(129))],
    "ignore_eos": [1, 0, "true"],
    "presence_penalty": [-2.01, 2.01, True],
    "frequency_penalty": [-2.01, 2.01, "0"],
    "repetition_penalty": [0, 1e-320, 0.009, -1, 10.1, True],
    "logit_bias": [
        {"300": 1},
        {"-1": 1},
        {"a": 1},
        {"1": 101},
        {"1": True},
        {"1": "1"},
        [1],
        {"1.0": 1},
        {"\u0661": 1},
    ],
    "logprobs": ["1", [1], -1, 6, 21],
    "top_logprobs": [-1, 21, True, 1.5],
    "stream": [1, 0, "true"],
    "stream_options": [1, [], {"include_usage": 1}, {"other": True}, {"include_obfuscation": True}],
    "user": [1, ["a"]],
    "model": [1, ["m"], True],
    "chat_template_kwargs": [1, [1], {"messages": []}, {"tokenize": True}],
}


@pytest.mark.behaviour("F-24")
@pytest.mark.parametrize("name", list(GOOD))
def test_values_within_the_range_are_taken_in_their_plain_form(name: str) -> None:
    for parse in PARSERS.values():
        for value, expected in GOOD[name]:
            fields = {"max_tokens": 512} if name == "min_tokens" else {}
            found = getattr(parse(**fields, **{name: value}), name)
            assert found == expected
            assert type(found) is type(expected)


@pytest.mark.behaviour("F-24")
@pytest.mark.parametrize("name", list(BAD))
def test_values_outside_the_range_are_refused_with_the_field_and_what_is_allowed(name: str) -> None:
    fields = {"stream": True} if name == "stream_options" else {}
    for endpoint, parse in PARSERS.items():
        field = table(endpoint).get(name)
        for value in BAD[name] if field is not None else []:
            error = refused(parse, **fields, **{name: value})
            assert error.param is not None
            assert error.param.startswith(name)
            assert f"`{error.param}" in error.message


def test_every_ranged_field_has_values_on_both_sides_of_its_range() -> None:
    checked = set(GOOD) | set(BAD)
    supported = {field.name for field in FIELDS if field.supported} - {"messages", "prompt"}
    assert supported - set(BAD) == set()
    assert checked - supported == set()


def test_the_two_names_of_the_budget_may_agree_but_not_differ() -> None:
    assert chat(max_tokens=4, max_completion_tokens=4).max_tokens == 4
    assert chat(max_completion_tokens=5).max_tokens == 5
    error = refused(chat, max_tokens=4, max_completion_tokens=5)
    assert "(4)" in error.message
    assert "(5)" in error.message


def test_fields_that_need_another_say_so() -> None:
    assert refused(chat, top_logprobs=2).param == "top_logprobs"
    assert refused(chat, stream_options={"include_usage": True}).param == "stream_options"
    assert refused(completion, min_tokens=17).param == "min_tokens"
    assert chat(logprobs=True, top_logprobs=2).scores == 2
    assert chat(logprobs=True).scores == 0
    assert chat(top_logprobs=0).scores == -1
    assert completion(logprobs=0).scores == 0
    assert completion().scores == -1
    assert chat(stream=True, stream_options={"include_usage": True}).include_usage


def test_a_completion_has_openais_budget_of_16_and_a_chat_the_rest_of_the_window() -> None:
    assert completion().max_tokens == 16
    assert chat().max_tokens is None


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("text", ["text"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([1.0, 2], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
        (np.array([5, 6]), [[5, 6]]),
    ],
)
def test_prompts_come_in_four_forms(prompt: Any, expected: Any) -> None:
    found = [one if isinstance(one, str) else one.tolist() for one in completion(prompt=prompt).prompts]
    assert found == expected


@pytest.mark.behaviour("F-24")
@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        ([], "prompt"),
        ([[]], "prompt[0]"),
        ([[1], []], "prompt[1]"),
        ([1, 300], "prompt[1]"),
        ([1, -1], "prompt[1]"),
        ([1, True], "prompt[1]"),
        ([1, 2.5], "prompt[1]"),
        ([1, "a"], "prompt[1]"),
        ([0, 2**70], "prompt[1]"),
        ([[0], [1, 300]], "prompt[1][1]"),
        (["a", 1], "prompt[1]"),
        (["a", ["b"]], "prompt[1]"),
        ([[1], "b"], "prompt[1]"),
        ([None], "prompt[0]"),
        (1, "prompt"),
        ({"a": 1}, "prompt"),
        (["a"] * 1025, "prompt"),
    ],
)
def test_a_bad_prompt_is_refused_with_the_offending_index(prompt: Any, param: str) -> None:
    assert refused(completion, prompt=prompt).param == param


def test_prompts_times_choices_are_bounded() -> None:
    assert "2048 sequences" in refused(completion, prompt=["a"] * 16, n=128).message


MESSAGES: list[tuple[Any, Any]] = [
    ({"role": "system", "content": "s"}, {"role": "system", "content": "s"}),
    ({"role": "developer", "content": "s"}, {"role": "system", "content": "s"}),
    (
        {
            "role": "user",
            "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
            "name": "n",
        },
        {"role": "user", "content": "ab", "name": "n"},
    ),
    ({"role": "assistant", "content": "a", "refusal": None}, {"role": "assistant", "content": "a"}),
    (
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
        },
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
        },
    ),
    (
        {"role": "tool", "content": "42", "tool_call_id": "1"},
        {"role": "tool", "content": "42", "tool_call_id": "1"},
    ),
    ({"role": "function", "content": "42", "name": "f"}, {"role": "function", "content": "42", "name": "f"}),
]


@pytest.mark.parametrize(("message", "plain"), MESSAGES)
def test_messages_come_out_in_the_plain_form_of_templates(message: Any, plain: Any) -> None:
    assert chat(messages=[message]).messages == [plain]


@pytest.mark.behaviour("F-24")
@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ("hello", "messages"),
        ({}, "messages"),
        ([1], "messages[0]"),
        ([{}], "messages[0].role"),
        ([{"role": "robot", "content": "x"}], "messages[0].role"),
        ([{"role": ["user"], "content": "x"}], "messages[0].role"),
        ([*HELLO, {"role": "user"}], "messages[1].content"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "assistant", "content": None}], "messages[0].content"),
        ([{"role": "assistant", "content": None, "tool_calls": []}], "messages[0].content"),
        ([{"role": "user", "content": 1}], "messages[0].content"),
        ([{"role": "user", "content": []}], "messages[0].content"),
        ([{"role": "user", "content": ["x"]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
            "messages[0].content[0].type",
        ),
        ([{"role": "user", "content": "x", "weight": 1}], "messages[0].weight"),
        ([{"role": "user", "content": "x", "tool_calls": [1]}], "messages[0].tool_calls"),
        ([{"role": "user", "content": "x", "name": 1}], "messages[0].name"),
        ([{"role": "assistant", "content": "x", "audio": {"id": "1"}}], "messages[0].audio"),
        (
            [{"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f"}}]}],
            "messages[0].tool_calls[0].function.arguments",
        ),
        ([{"role": "tool", "content": "x"}], "messages[0].tool_call_id"),
        ([{"role": "function", "content": "x"}], "messages[0].name"),
    ],
)
def test_a_bad_message_is_refused_with_the_path_of_what_is_wrong(messages: Any, param: str) -> None:
    assert refused(chat, messages=messages).param == param


anything = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=4), st.just(10**400)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=6,
)


@pytest.mark.behaviour("F-24")
@settings(deadline=None)
@given(st.data())
def test_no_value_of_any_field_gets_past_the_table_or_breaks_it(data: st.DataObject) -> None:
    endpoint = data.draw(st.sampled_from([CHAT, COMPLETION]))
    names = st.sampled_from(sorted(table(endpoint)))
    fields = data.draw(st.dictionaries(names, anything, max_size=3))
    try:
        found = PARSERS[endpoint](**fields)
    except RequestInvalid:
        pass
    else:
        assert found.max_tokens is None or 1 <= found.max_tokens <= LIMITS.window
        assert found.temperature is None or 0 <= found.temperature <= 2
        assert found.top_p is None or 0 < found.top_p <= 1
        assert 1 <= found.n <= 128
