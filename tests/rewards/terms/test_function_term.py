"""Tests of the function reward term, which calls a user's Python function."""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from pydantic import ValidationError

from rewards import Sample
from rewards.sample import TextBlock
from rewards.terms.function_term import FunctionConfig, FunctionTerm
from rewards.terms.term import BlockValues, NoValue

_NUMBERS = itertools.count()


@pytest.fixture
def config(tmp_path: Path) -> Callable[[str], FunctionConfig]:
    """Factory of function configs by source: `value` of a new module, because Python imports a name only once."""

    def make(source: str) -> FunctionConfig:
        name = f"own_reward_{next(_NUMBERS)}"
        (tmp_path / f"{name}.py").write_text(source)
        return FunctionConfig(path=f"{name}:value", directory=tmp_path)

    return make


def test_the_function_is_called_with_each_samples_facts(
    config: Callable[[str], FunctionConfig], sample: Callable[..., Sample]
) -> None:
    term = FunctionTerm(config("seen = []\ndef value(**facts):\n    seen.append(facts)\n    return len(seen)"))
    assert term.values([sample("a"), sample("b", num_tokens=8, is_truncated=True)]) == [1.0, 2.0]
    seen = term._function.__globals__["seen"]
    assert seen[0] == {
        "problem_id": "sums/3,7,9",
        "messages": [{"role": "user", "content": "3 7 9"}],
        "completion": "a",
        "answer": "309",
        "metadata": {"k": "v"},
        "num_tokens": 6,
        "num_forwards": 3,
        "is_truncated": False,
        "blocks": [],
    }
    assert (seen[1]["completion"], seen[1]["num_tokens"], seen[1]["is_truncated"]) == ("b", 8, True)


def test_a_list_is_a_value_for_each_block(
    config: Callable[[str], FunctionConfig], sample: Callable[..., Sample]
) -> None:
    own = config("def value(blocks, **rest):\n    return [float(block) for block in blocks[:2]]")
    blocks = [(TextBlock("1", 4), TextBlock(text, 6)) for text in ("2.5", "nan")]
    three = (*blocks[0], TextBlock("3", 7))
    found = FunctionTerm(own).values([sample(blocks=some) for some in (*blocks, three)])
    assert found[0] == BlockValues((1.0, 2.5))
    assert found[1] == NoValue(detail=f"{own.path} gave nan (float) and no finite number")
    assert found[2] == NoValue(detail=f"{own.path} gave 2 numbers for a completion of 3 blocks")


@pytest.mark.parametrize(
    ("expression", "sentence"),
    [
        ("None", "gave no value"),
        ("float('nan')", r"gave nan \(float\) and no finite number"),
        ("10 ** 400", r"gave 10+ \(int\) and no finite number"),
        ("'1'", r"gave '1' \(str\) and no finite number"),
        ("{1.0}", r"gave \{1.0\} \(set\) and no finite number"),
        ("[1.0]", r"gave 1 numbers for a completion of 0 blocks"),
        ("1 / 0", "raised ZeroDivisionError: division by zero"),
    ],
)
def test_an_invalid_value_affects_its_sample_only(
    expression: str, sentence: str, config: Callable[[str], FunctionConfig], sample: Callable[..., Sample]
) -> None:
    own = config(f"def value(completion, **rest):\n    return {expression} if completion == 'bad' else True")
    good, bad, other = FunctionTerm(own).values([sample("good"), sample("bad"), sample("other")])
    assert (good, other) == (1.0, 1.0)
    assert isinstance(bad, NoValue)
    assert re.fullmatch(rf"{own.path} {sentence}", bad.detail)


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("value = 3", "is a int and no function"),
        ("valve = len", "cannot be imported, installed or from .*: AttributeError"),
        ("import no_such_module", "cannot be imported, .*: ModuleNotFoundError: No module named 'no_such_module'"),
        ("def value(:", "cannot be imported, .*: SyntaxError"),
        ("def value(completion, answer): ...", "does not take what it is called with .*got an unexpected keyword"),
        (
            "def value(text, **rest): ...",
            "does not take .*missing a required argument: 'text'.*name those that it needs, and \\*\\*rest",
        ),
    ],
)
def test_an_uncallable_function_is_refused_at_the_start(
    source: str, sentence: str, config: Callable[[str], FunctionConfig]
) -> None:
    own = config(source)
    with pytest.raises(ValueError, match=rf"{own.path} {sentence}") as refusal:
        own.check()
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("path", ["os.getcwd", "a b:c", ":value", "module:", "../x:y"])
def test_a_path_is_a_module_and_a_name(path: str) -> None:
    with pytest.raises(ValidationError, match="pattern"):
        FunctionConfig(path=path)


def test_an_installed_module_is_not_shadowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    (tmp_path / "colorsys.py").write_text("def rgb_to_yiq(**facts): return 1.0")
    with pytest.raises(ValueError, match="does not take what it is called with"):
        FunctionConfig(path="colorsys:rgb_to_yiq", directory=tmp_path).check()
