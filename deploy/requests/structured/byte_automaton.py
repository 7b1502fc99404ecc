"""Byte automaton of a JSON schema or regular expression, built by outlines-core in a subprocess.

An expression of twenty characters can have an automaton of a million states. So the subprocess has a memory limit and a
time limit, and an expression that exceeds them is rejected. It exchanges plain JSON
and arrays of numbers.

As a program, it reads a structure from standard input and writes its automaton to standard output.
"""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollout.grammar.grammar import NOWHERE

MAX_STATES = 2048
MAX_TEXT = 2**16
"""Maximum characters of a schema or an expression."""
_MAX_BYTES = 2**30
_MAX_CPU_S = 5
_TIMEOUT_S = 60.0
# Exit status of the subprocess for a structure without a supported automaton; its output says why.
_REFUSED = 3
_EOS = 256
# Bytes that a pattern must not match between the quotes of a JSON string.
_FORBIDDEN_IN_STRINGS = (*range(0x20), ord('"'), ord("\\"), 0x7F)
# The library also builds, and drops, an unanchored automaton: for `.{0,30}` it has 2 ** 30 states. A prefix prevents
# that, if it is longer than the repetition counts of expressions and does not overlap itself.
_PREFIX = b"\x01" + 63 * b"\x00"
# Detects an expression that closes a group it has not opened. No text contains this byte.
_SUFFIX = 2
_NO_EXPRESSION = (
    "is not a supported regular expression: it is invalid, or has an anchor, a word boundary, a lookaround or a "
    "reference, which no finite automaton has"
)
_ASCII = re.compile(r"((?<!\\)(?:\\\\)*)\\([dws])")
_CLASSES = {"d": "[0-9]", "w": "[0-9A-Za-z_]", "s": r"[ \t\n\r\f\v]"}
_ROOT = Path(__file__).parents[3]


class AutomatonError(ValueError):
    """Error for a structure without a supported automaton: a sentence without a full stop."""


def check_length(text: str) -> None:
    """Raise AutomatonError if a schema or an expression is too long."""
    if len(text) > MAX_TEXT:
        raise AutomatonError(f"has {len(text)} characters; {MAX_TEXT} are the most")


def byte_automaton(kind: str, text: str) -> tuple[NDArray[np.int16], NDArray[np.bool_]]:
    """Build the automaton of a schema rewritten for the library (`schema`), or of an expression (`regex`).

    Returns:
        [S, 256] the next state for each byte, -1 for none, and [S] whether a text may end; state 0 is the start.

    Raises:
        AutomatonError: there is no automaton, or it is too large.
    """
    too_large = f"is too large: building its automaton takes more than {_MAX_CPU_S} s or {_MAX_BYTES >> 30} GiB"
    check_length(text)
    environment = {"PATH": os.environ.get("PATH", ""), "PYTHONPATH": str(_ROOT), "OPENBLAS_NUM_THREADS": "1"}
    try:
        done = subprocess.run(  # noqa: S603  # our own module
            [sys.executable, "-m", __name__],
            input=json.dumps([kind, text]).encode(),
            capture_output=True,
            env=environment,
            timeout=_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise AutomatonError(too_large) from error
    if done.returncode == _REFUSED:
        raise AutomatonError(done.stdout.decode())
    if done.returncode < 0 or b"MemoryError" in done.stderr or not (done.stdout or done.returncode):
        raise AutomatonError(too_large)
    if done.returncode:
        # The error output of the subprocess goes to the log of this process.
        sys.stderr.buffer.write(done.stderr)
        raise AutomatonError("cannot be read by the grammar library")
    arrays = np.load(BytesIO(done.stdout))
    return arrays["next_state"], arrays["accepting"]


def _main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (_MAX_BYTES, _MAX_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (_MAX_CPU_S, _MAX_CPU_S))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    kind, text = json.load(sys.stdin)
    try:
        next_state, accepting = _automaton(kind, text)
    except AutomatonError as error:
        sys.stdout.buffer.write(str(error).encode(errors="backslashreplace"))
        sys.exit(_REFUSED)
    np.savez(sys.stdout.buffer, next_state=next_state, accepting=accepting)


def _automaton(kind: str, text: str) -> tuple[NDArray[np.int16], NDArray[np.bool_]]:
    from outlines_core.json_schema import build_regex_from_schema

    if kind == "regex":
        return _numbered(_index(text))
    schema = json.loads(text)
    for pattern in _patterns(schema):
        # Checked without the surrounding group, which the pattern might close.
        next_state, _ = _numbered(_index(pattern[1:-1]))
        if (next_state[:, _FORBIDDEN_IN_STRINGS] != NOWHERE).any():
            raise AutomatonError(
                f"has the pattern {pattern[1:-1]!r}, which quotes, backslashes or control characters match; name the "
                "characters that it means"
            )
    try:
        expression = build_regex_from_schema(text)
    except (ValueError, TypeError) as error:
        raise AutomatonError(f"is not served: {str(error).strip().partition(chr(10))[0][:200]}") from error
    return _numbered(_index(expression))


def _patterns(schema: Any) -> list[str]:
    """Return the patterns of all strings of a schema rewritten for the library."""
    if isinstance(schema, list):
        return [pattern for part in schema for pattern in _patterns(part)]
    if not isinstance(schema, dict) or "enum" in schema:
        return []
    if isinstance(schema.get("pattern"), str):
        return [schema["pattern"]]
    # Property names are not keywords.
    properties = schema.get("properties", {})
    others = [value for key, value in schema.items() if key != "properties"]
    return [pattern for part in (*properties.values(), *others) for pattern in _patterns(part)]


def _index(expression: str) -> Any:
    """Build the automaton of an expression framed by `_PREFIX` and `_SUFFIX`."""
    from outlines_core import Index, Vocabulary

    _check_classes(expression)
    # In outlines-core these classes match all of Unicode.
    expression = _ASCII.sub(lambda found: found[1] + _CLASSES[found[2]], expression)
    framed = f"\\x01\\x00{{{len(_PREFIX) - 1}}}(?:{expression})\\x0{_SUFFIX}"
    try:
        return Index(framed, Vocabulary(_EOS, {bytes([byte]): [byte] for byte in range(256)}))
    except ValueError as error:
        raise AutomatonError(_NO_EXPRESSION) from error


def _check_classes(expression: str) -> None:
    """Raise AutomatonError for character class syntax that libraries interpret differently."""
    place, begun = 0, -1
    while place < len(expression):
        pair = expression[place : place + 2]
        if pair[0] == "\\":
            place += 1
        elif begun < 0 and pair[0] == "[":
            place += pair == "[^"
            begun = place + 1
        elif begun >= 0 and pair[0] == "]" and place > begun:
            begun = -1
        elif begun >= 0 and (pair[0] == "[" or pair in ("&&", "--", "~~")):
            raise AutomatonError(
                "has `[`, `&&`, `--` or `~~` within a class, which libraries read differently; escape it"
            )
        place += 1


def _numbered(index: Any) -> tuple[NDArray[np.int16], NDArray[np.bool_]]:
    """Extract the automaton between `_PREFIX` and `_SUFFIX`, without dead states, renumbered from the start state."""
    transitions, finals, first = index.get_transitions(), index.get_final_states(), index.get_initial_state()
    for byte in _PREFIX:
        first = transitions.get(first, {}).get(byte)
    strays = {
        target for reached in transitions.values() for byte, target in reached.items() if byte not in (_SUFFIX, _EOS)
    } & finals
    if first is None or first in finals or strays:
        raise AutomatonError(_NO_EXPRESSION)
    accepting = {state for state, reached in transitions.items() if reached.get(_SUFFIX) in finals}
    useful = _useful(transitions, accepting)
    numbers = {first: 0}
    reached_from = {state: set(reached.values()) for state, reached in transitions.items()}
    for state in sorted((useful & _closure({first}, reached_from)) - {first}):
        numbers[state] = len(numbers)
    if len(numbers) > MAX_STATES:
        raise AutomatonError(f"has an automaton of {len(numbers)} states; {MAX_STATES} are the most")
    next_state = np.full((len(numbers), 256), NOWHERE, dtype=np.int16)
    for state, number in numbers.items():
        for byte, target in transitions.get(state, {}).items():
            if byte not in (_SUFFIX, _EOS) and target in useful:
                next_state[number, byte] = numbers[target]
    return next_state, np.array([state in accepting for state in numbers])


def _useful(transitions: dict[int, dict[int, int]], accepting: set[int]) -> set[int]:
    """Return the states from which a text can end."""
    before: dict[int, set[int]] = {}
    for state, reached in transitions.items():
        for target in reached.values():
            before.setdefault(target, set()).add(state)
    return _closure(accepting, before)


def _closure(begun: set[int], neighbours: dict[int, set[int]]) -> set[int]:
    """Return the states that are reachable from `begun`."""
    found, waiting = set(begun), list(begun)
    while waiting:
        new = neighbours.get(waiting.pop(), set()) - found
        found |= new
        waiting += new
    return found


if __name__ == "__main__":
    _main()
