"""Conversations as files have them: a list of objects with role and content."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rewards.data.rows import shown
from rewards.problem import Message

_ROLES = ("system", "user", "assistant")


def turns_of(messages: object, what: str) -> tuple[Message, ...]:
    """The turns of a conversation. `what` says what kind of list it should be, for the sentence.

    Raises ValueError, in one sentence, for what is no conversation.
    """
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"messages is {shown(messages)}; it should be a list that {what}")
    return tuple(_turn(message, f"messages[{index}]") for index, message in enumerate(messages))


def text_of(data: Mapping[str, Any], key: str, meaning: str, prefix: str = "") -> str:
    """A text that is there, says something, and can be encoded. Raises ValueError, in one sentence, otherwise."""
    value = data.get(key)
    if not isinstance(value, str):
        raise ValueError(f"{prefix}{key} is {shown(value)}; it should be a text: {meaning}")
    if not value.strip():
        raise ValueError(f"{prefix}{key} is empty; it should be {meaning}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{prefix}{key} has half of a surrogate pair, which is no character; leave it out") from error
    return value


def _turn(message: object, name: str) -> Message:
    if not isinstance(message, dict):
        raise ValueError(f"{name} is {shown(message)}; it should be an object with role and content")
    role = message.get("role")
    if role not in _ROLES:
        raise ValueError(f"{name}.role is {shown(role)}; it should be system, user or assistant")
    return Message(role=role, content=text_of(message, "content", f"what the {role} says", name + "."))
