"""Parsing of conversations in data: plain texts, or lists of turns with role and content."""

from __future__ import annotations

from typing import Any

from rewards.data.prompts import user_turn
from rewards.data.rows import json_in, preview
from rewards.problem import Message

_ROLES = ("system", "user", "assistant")
# The system role in newer APIs; policies know the older name.
_DEVELOPER = "developer"


def parse_conversation(value: object, name: str) -> tuple[Message, ...]:
    """Return the conversation of a row: a text, which becomes a user turn, or a list of turns.

    Args:
        value: the content of the row's column.
        name: its name in error messages.

    Raises ValueError for any other value.
    """
    meaning = "what the policy is asked"
    if isinstance(value, str):
        found = json_in(value)
        if not is_turns(found):
            if value.lstrip().startswith(("[{'role'", "[{'content'")):
                raise ValueError(f"{name} is a list as Python prints it; it should be a text, or turns written as JSON")
            return user_turn(text_of(value, name, meaning))
        value = found
    if not isinstance(value, list):
        raise ValueError(f"{name} is {preview(value)}; it should be a text or a list of turns: {meaning}")
    turns = turns_of(value, "says what the policy is asked", name)
    if turns[0].role == "assistant":
        raise ValueError(f"{name} begins with the assistant's turn; what it answers should come before it")
    return turns


def turns_of(messages: object, what: str, name: str = "messages") -> tuple[Message, ...]:
    """Return the turns of a conversation, which may also be written as JSON.

    Args:
        messages: the content of the row's column.
        what: the end of an error message that begins with "it should be a list that".
        name: its name in error messages.

    Raises ValueError if it is not a conversation.
    """
    if isinstance(messages, str) and is_turns(found := json_in(messages)):
        messages = found
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"{name} is {preview(messages)}; it should be a list that {what}")
    return tuple(_turn(message, f"{name}[{index}]") for index, message in enumerate(messages))


def text_of(value: object, name: str, meaning: str) -> str:
    """Return a text that is not empty and can be encoded. Raises ValueError otherwise."""
    if not isinstance(value, str):
        raise ValueError(f"{name} is {preview(value)}; it should be a text: {meaning}")
    if not value.strip():
        raise ValueError(f"{name} is empty; it should be {meaning}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name} has half of a surrogate pair, which is no character; leave it out") from error
    return value


def is_turns(value: object) -> bool:
    """Return whether it is a list of objects, each of which has a role."""
    return isinstance(value, list) and bool(value) and all(isinstance(turn, dict) and "role" in turn for turn in value)


def _turn(message: object, name: str) -> Message:
    if not isinstance(message, dict):
        raise ValueError(f"{name} is {preview(message)}; it should be an object with role and content")
    role = "system" if message.get("role") == _DEVELOPER else message.get("role")
    if role not in _ROLES:
        raise ValueError(f"{name}.role is {preview(role)}; it should be system, user or assistant")
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(_part(part, f"{name}.content[{index}]") for index, part in enumerate(content))
    return Message(role=role, content=text_of(content, f"{name}.content", f"what the {role} says"))


def _part(part: Any, name: str) -> str:
    """Return the text of one part of a turn."""
    if not isinstance(part, dict):
        raise ValueError(f"{name} is {preview(part)}; it should be an object with type and text")
    if part.get("type") != "text":
        raise ValueError(f"{name}.type is {preview(part.get('type'))}; it should be text: a policy reads nothing else")
    return text_of(part.get("text"), f"{name}.text", "a piece of the turn")
