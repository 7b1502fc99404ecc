"""Tests of a row's prompt: a text or the turns of a conversation."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rewards import Message
from rewards.data.conversation import parse_conversation

SYSTEM, USER = Message(role="system", content="Be brief."), Message(role="user", content="3 + 4?")
TURNS = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "3 + 4?"}]


@pytest.mark.parametrize(
    ("value", "messages"),
    [
        ("3 + 4?", (USER,)),
        (TURNS, (SYSTEM, USER)),
        (json.dumps(TURNS), (SYSTEM, USER)),
        (f" \n{json.dumps(TURNS, indent=1)}", (SYSTEM, USER)),
        ([{"role": "developer", "content": "Be brief."}, TURNS[1]], (SYSTEM, USER)),
        ([{**TURNS[1], "name": None, "tool_calls": None}], (USER,)),
        (
            [{"role": "user", "content": [{"type": "text", "text": "3 "}, {"type": "text", "text": "+ 4?"}]}],
            (USER,),
        ),
        ([{"role": "user", "content": [{"type": "text", "text": "3 + 4?", "image_url": None}]}], (USER,)),
        ("[1, 2]", (Message(role="user", content="[1, 2]"),)),
        ('[{"x": 1}]', (Message(role="user", content='[{"x": 1}]'),)),
        ("[{", (Message(role="user", content="[{"),)),
    ],
)
def test_texts_and_turns_are_parsed_as_conversations(value: Any, messages: tuple[Message, ...]) -> None:
    assert parse_conversation(value, "prompt") == messages


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        (5, "prompt is 5; it should be a text or a list of turns: what the policy is asked"),
        (None, "prompt is missing; it should be a text or a list of turns"),
        ({"role": "user", "content": "a"}, 'prompt is {"role": "user", "content": "a"}; it should be a text or a list'),
        ([], "prompt is []; it should be a list that says what the policy is asked"),
        (" ", "prompt is empty; it should be what the policy is asked"),
        (["a"], 'prompt[0] is "a"; it should be an object with role and content'),
        ([{"from": "human", "value": "a"}], "prompt[0].role is missing; it should be system, user or assistant"),
        ([{"role": "tool", "content": "a"}], 'prompt[0].role is "tool"; it should be system, user or assistant'),
        ([{"role": "assistant", "content": "a"}], "prompt begins with the assistant's turn"),
        ([{"role": "user", "content": None}], "prompt[0].content is missing; it should be a text: what the user says"),
        ([{"role": "user", "content": []}], "prompt[0].content is empty; it should be what the user says"),
        (
            [{"role": "user", "content": ["a"]}],
            'prompt[0].content[0] is "a"; it should be an object with type and text',
        ),
        (
            [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {}}]}],
            'prompt[0].content[1].type is "image_url"; it should be text: a policy reads nothing else',
        ),
        (
            [{"role": "user", "content": [{"type": "text", "text": None}]}],
            "prompt[0].content[0].text is missing; it should be a text",
        ),
        ("[{'role': 'user', 'content': 'a'}]", "prompt is a list as Python prints it; it should be a text, or turns"),
        ("[{'content': 'a', 'role': 'user'}]", "prompt is a list as Python prints it"),
    ],
)
def test_prompts_without_a_question_are_refused(value: Any, sentence: str) -> None:
    with pytest.raises(ValueError) as refusal:  # noqa: PT011 - compared below, without escapes
        parse_conversation(value, "prompt")
    assert str(refusal.value).startswith(sentence)
