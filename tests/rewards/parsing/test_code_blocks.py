"""Tests of extracting fenced code blocks from completions."""

from __future__ import annotations

import time
from textwrap import indent

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rewards.parsing.code_blocks import code_blocks

_CODE = "def f(x):\n    if x:\n        return x\n"
_BLOCK = f"```python\n{_CODE}```"
_IN_DOCSTRING = 'def f(x):\n    """Do it.\n\n    ```python\n    f(1)\n    ```\n    """\n    return x\n'
_IN_STRING = '"""A module.\n\n```python\nf(1)\n```\n\n```\n1\n```\n"""\n\n\ndef f(x):\n    return x\n'


def _python(text: str) -> list[str]:
    return [block.code for block in code_blocks(text) if block.is_python]


@pytest.mark.parametrize(
    "text",
    [
        _BLOCK,
        f"So:\n{_BLOCK}\nDone.",
        "1. So:\n\n" + indent(_BLOCK, "   "),
        "- " + indent(_BLOCK, "  ").lstrip(),
        "10. " + indent(_BLOCK, "    ").lstrip(),
        indent(_BLOCK, "        "),
        indent(_BLOCK, "\t"),
        indent(_BLOCK, "> "),
        indent(_BLOCK, "> > "),
        "> 1. So:\n" + indent(_BLOCK, ">    "),
        f"1. So:\n   ```python\n{_CODE}   ```\n",
        f"1. So:\n   ```python\n{indent(_CODE, '   ')}```\n",
        _BLOCK.replace("\n", "\r\n"),
        f"````python\n{_CODE}````",
        f"```python\n{_CODE}`````  ",
        f"~~~python\n{_CODE}~~~",
        f"```bash\npip install x\n```\n{_BLOCK}\n```\n3\n```",
        f"```markdown\nIt's so:\n{_BLOCK}\n```",
        f"Use ```x = 1``` or\n```x = 1``` or\n{_BLOCK}",
        f'It\'s:\n{_BLOCK}\nThat\'s """ it.',
        f"```python\n{_CODE}```</answer>",
        f"So: {_BLOCK}",
        f"**So:**{_BLOCK}",
        f"\ufeff{_BLOCK}",
    ],
)
def test_a_block_is_found_anywhere(text: str) -> None:
    assert [code.strip() for code in _python(text)] == [_CODE.strip()]


@pytest.mark.parametrize(
    "info",
    [
        "python",
        "Python",
        "python3",
        "py",
        "PY3",
        " python",
        "python3.11",
        'python title="a.py"',
        "python:a.py",
        "{.python}",
    ],
)
def test_python_has_several_names(info: str) -> None:
    assert _python(f"```{info}\n{_CODE}```") == [_CODE]


@pytest.mark.parametrize("info", ["", "text", "pycon", "python-repl", "pytb", "js", "console"])
def test_other_blocks_are_not_python(info: str) -> None:
    assert _python(f"```{info}\n{_CODE}```") == []


@pytest.mark.parametrize(
    "code",
    [
        _IN_DOCSTRING,
        _IN_STRING,
        "s = \"```\"\nt = '''\n```\n'''\n",
        '# It\'s """ here\nt = """\n```\n"""\n',
        'q = \'"""\'\nt = """\n```\n"""\n',
        "q = \"\\\"'''\"\nt = '''\n```\n'''\n",
    ],
)
@pytest.mark.parametrize("prefix", ["", "   ", "> "])
def test_fences_in_strings_do_not_close(code: str, prefix: str) -> None:
    text = indent(f"```python\n{code}```\n\n```\n1\n```", prefix, predicate=lambda _: True)
    assert [(block.info, block.code.strip()) for block in code_blocks(text)] == [("python", code.strip()), ("", "1")]


@pytest.mark.parametrize(
    ("text", "codes"),
    [
        (f'```python\ns = """\n```\nSorry.\n{_BLOCK}', ['s = """\n', _CODE]),
        ('```python\ns = """\n```\nSorry.\n```python\n"""A."""\nx = 1\n```', ['s = """\n', '"""A."""\nx = 1\n']),
        (f"```python\nx = 1\n```python\n{_CODE}```", ["x = 1\n", _CODE]),
        (f"````python\n{_CODE}```\n````", [f"{_CODE}```\n"]),
        (f"~~~python\n{_CODE}```\n~~~", [f"{_CODE}```\n"]),
        (f"```text\n```python\n{_CODE}```", []),
        (f"> ```python\n{indent(_CODE, '> ')}So.\n```\n1\n```", [_CODE]),
        (f"```python\n{_IN_STRING}", [_IN_STRING]),
        ("```python", [""]),
        ("```python\n", [""]),
    ],
)
def test_where_blocks_end(text: str, codes: list[str]) -> None:
    assert _python(text) == codes


def test_an_unterminated_block_is_not_closed() -> None:
    assert [block.is_closed for block in code_blocks(f"{_BLOCK}\n```python\nx = 1")] == [True, False]


@given(st.text(), st.text(alphabet="`~>-1.\"'#\\ \t\r\npy<"))
def test_code_blocks_never_raises(text: str, marked: str) -> None:
    for hostile in (text, marked):
        list(code_blocks(hostile))


@pytest.mark.parametrize(
    "piece",
    [
        "`",
        "```python\n",
        ">",
        "> ```\n",
        "- ",
        "1. ",
        '"""\\',
        "'a",
        '```python\n\\"""\n```\n',
        "```\n'''\n```\n\"\"\"\n",
        " ",
        "\n",
    ],
)
def test_hostile_texts_take_linear_time(piece: str) -> None:
    text = "```python\n" + piece * (400_000 // len(piece))
    start = time.process_time()
    list(code_blocks(text))
    assert time.process_time() - start < 5.0
