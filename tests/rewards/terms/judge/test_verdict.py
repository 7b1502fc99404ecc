"""Tests of judging programs by test suites that they cannot access."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rewards.problem import Outcome
from rewards.sandbox import Sandbox, SandboxConfig, Suite, SuiteVerdict
from rewards.sandbox.inside import wire

_CONFIG = SandboxConfig(cpu_s=1, wall_s=60, num_processes=6, memory_bytes=256 * 2**20)
_SANDBOX = Sandbox(_CONFIG)
_SUITE = Suite(tests=("assert candidate(1) == 2", "assert candidate(5) == 6"), entry_point="f", plain_only=True)
_LOOSE = Suite(tests=_SUITE.tests, entry_point="f")


def _judge(program: str, *tests: str, setup: str = "from solution import *") -> SuiteVerdict:
    """Judge a program by tests in pytest style."""
    return _SANDBOX.judge(program, Suite(tests=tests, setup=setup))


def test_each_test_is_counted() -> None:
    verdict = _SANDBOX.judge("def f(x): return 2", _SUITE)
    assert (verdict.passed, verdict.outcome) == ((True, False), Outcome.GRADED)
    assert verdict.detail == "assert candidate(5) == 6: AssertionError"
    assert _SANDBOX.judge("def f(x): return x + 1", _SUITE).passed == (True, True)


_FORGERIES = {
    "exits before the tests": "import sys; sys.exit(0)",
    "exits at once before the tests": "import os; os._exit(0)",
    "exits in a test": "import sys\ndef f(x): sys.exit(0)",
    "exits at once in a test": "import os\ndef f(x): os._exit(0)",
    "says that all passed": "print('passed'); print('2 passed')\ndef f(x): return 0",
    "writes verdicts to every file": (
        "import os\n"
        "good = b'\\0\\0\\0\\x2ct3:s6:judgeds6:gradedt2:T0:T0:s0:'\n"
        "def f(x):\n"
        "    for fd in range(64):\n"
        "        try: os.write(fd, good)\n"
        "        except OSError: pass\n"
        "    return 0"
    ),
    "closes every file": "import os\nos.closerange(0, 1 << 20)\ndef f(x): return x + 1",
    "closes standard output": "import os, sys\nsys.stdout.close(); sys.stderr.close()\ndef f(x): return 0",
    "is equal to all": "class E:\n    def __eq__(self, other): return True\ndef f(x): return E()",
    "is an equal int": "class E(int):\n    def __eq__(self, other): return True\ndef f(x): return E(0)",
    "is a string that is equal": "class E(str):\n    def __eq__(self, other): return True\ndef f(x): return E('')",
    "is an error": "def f(x): raise AssertionError",
    "patches builtins": (
        "import builtins\nbuiltins.AssertionError = type('Silent', (BaseException,), {})\n"
        "builtins.compile = builtins.exec = lambda *a, **k: None\ndef f(x): return 0"
    ),
    "patches what serves it": (
        "import sys\n"
        "for name, module in list(sys.modules.items()):\n"
        "    if name.startswith('rewards'):\n"
        "        for key in list(vars(module)):\n"
        "            if callable(getattr(module, key)): setattr(module, key, lambda *a, **k: True)\n"
        "def f(x): return 0"
    ),
    "looks for the tests": (
        "import gc, sys\n"
        "def f(x):\n"
        "    wanted = 'etadidnac tressa'\n"
        "    found = [o for o in gc.get_objects() if isinstance(o, (dict, list, tuple)) and wanted in repr(o)[::-1]]\n"
        "    frame = sys._getframe()\n"
        "    while frame:\n"
        "        found += [v for v in frame.f_locals.values() if wanted in repr(v)[::-1]]\n"
        "        frame = frame.f_back\n"
        "    return x + 1 if found else 0"
    ),
    "exits later": "import atexit, os\natexit.register(os._exit, 0)\ndef f(x): return 0",
    "kills all": "import os, signal\ndef f(x):\n    os.kill(-1, 9) if False else os.killpg(0, 9)\n    return 0",
    "returns too much": "def f(x): return 'x' * 10**8",
    "returns what has no end": "def f(x):\n    while True: yield x",
    "returns what is too deep": "def f(x):\n    deep = []\n    for _ in range(10**5): deep = [deep]\n    return deep",
    "returns itself twice": "def f(x):\n    twice = []\n    twice += [twice, twice]\n    return twice",
    "does not load": "def f(x) return x + 1",
    "is empty": "",
    "has another function": "def g(x): return x + 1",
    "uses all memory": "def f(x): return bytearray(2**40)",
}


@pytest.mark.parametrize("program", _FORGERIES.values(), ids=list(_FORGERIES))
@pytest.mark.parametrize("suite", [_SUITE, _LOOSE], ids=["plain", "objects"])
def test_a_verdict_cannot_be_forged(program: str, suite: Suite) -> None:
    verdict = _SANDBOX.judge(program, suite)
    assert (verdict.passed, verdict.outcome) == ((False, False), Outcome.GRADED)
    assert verdict.detail


def test_a_right_program_with_side_effects_is_right() -> None:
    program = (
        "import atexit, os, threading\nprint('x' * 10**6)\natexit.register(os._exit, 1)\n"
        "def loop():\n    while True: pass\nthreading.Thread(target=loop).start()\n"
        "def f(x): return x + 1"
    )
    assert _SANDBOX.judge(program, _SUITE).passed == (True, True)


@pytest.mark.parametrize("where", ["while True: pass", "def f(x):\n    while True: pass"])
def test_an_endless_loop_fails_its_tests(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Allow for a late report by the kernel.
    monkeypatch.setattr("rewards.sandbox.sandbox._GRACE_S", 60.0)
    verdict = _SANDBOX.judge(where, _SUITE)
    assert (verdict.passed, verdict.outcome) == ((False, False), Outcome.GRADED)
    assert "used up its 1 CPU seconds" in verdict.detail


def test_waiting_too_long_is_a_timeout() -> None:
    sandbox = Sandbox(_CONFIG.model_copy(update={"wall_s": 1.0}))
    verdict = sandbox.judge("import time\ndef f(x): time.sleep(100)", _SUITE)
    assert (verdict.passed, verdict.outcome) == ((False, False), Outcome.TIMEOUT)


def test_a_fork_bomb_fails_its_tests() -> None:
    program = "import os\ndef f(x):\n    while True:\n        try: os.fork()\n        except OSError: pass"
    verdict = Sandbox(_CONFIG.model_copy(update={"wall_s": 5.0})).judge(program, _SUITE)
    assert verdict.passed == (False, False)


def test_broken_tests_are_an_error_and_not_reward_0() -> None:
    for setup in ("import numpy", "def broken(", "1 / 0"):
        verdict = _SANDBOX.judge("def f(x): return x + 1", Suite(tests=("assert True",), setup=setup))
        assert verdict.outcome is Outcome.ERROR
    verdict = _judge("def f(x): pass", "run_test(t)", setup="def t(capsys): pass")
    assert (verdict.outcome, verdict.detail) == (
        Outcome.ERROR,
        "the tests use the fixture capsys, which is not supported here",
    )


def test_a_program_that_lacks_imported_names_is_wrong() -> None:
    for setup in ("from solution import f", "import solution\nf = solution.f"):
        verdict = _SANDBOX.judge("def g(x): return x", Suite(tests=("assert True",), setup=setup))
        assert (verdict.passed, verdict.outcome) == ((False,), Outcome.GRADED)
    verdict = _SANDBOX.judge("def g(x): return x", Suite(tests=("assert True",), setup="root = Node(1)", appended=True))
    assert (verdict.passed, verdict.outcome) == ((False,), Outcome.GRADED)


def test_an_error_that_a_test_catches_still_counts() -> None:
    program = "import os\ndef f(x): os._exit(0)"
    assert _judge(program, "try:\n    f(1)\nexcept BaseException: pass", "pass").passed == (False, False)


def test_classes_and_objects_stay_in_the_program() -> None:
    program = (
        "class Empty(Exception): pass\n"
        "class Stack:\n"
        "    kind = 'stack'\n"
        "    def __init__(self, *items): self.items = list(items)\n"
        "    def push(self, item): self.items.append(item); return self\n"
        "    def pop(self):\n        if not self.items: raise Empty('nothing left')\n        return self.items.pop()\n"
        "    def __len__(self): return len(self.items)\n"
        "    def __iter__(self): return iter(self.items)\n"
        "    def __contains__(self, item): return item in self.items\n"
        "    def __eq__(self, other): return self.items == other.items\n"
        "    def __getitem__(self, i): return self.items[i]\n"
        "    def __add__(self, other): return Stack(*self.items, *other.items)\n"
        "    def __enter__(self): return self\n"
        "    def __exit__(self, *error): self.items.clear()\n"
        "    @classmethod\n    def of(cls, n): return cls(*range(n))\n"
    )
    tests = (
        "s = Stack(1, 2)\nassert len(s) == 2 and 1 in s and 5 not in s and list(s) == [1, 2] and s[0] == 1",
        "assert Stack().push(3).push(4).pop() == 4",
        "import pytest\nwith pytest.raises(Empty, match='nothing'): Stack().pop()",
        "assert Stack(1) == Stack(1) and Stack(1) != Stack(2)",
        "assert isinstance(Stack(), Stack) and not isinstance([], Stack) and not isinstance(Stack(), list)",
        "assert Stack.kind == 'stack' and Stack.of(2).items == [0, 1]",
        "assert list(Stack(1) + Stack(2)) == [1, 2]",
        "with Stack(1) as s: assert len(s) == 1\nassert len(s) == 0",
        "s = Stack(1); s.items = [7]; assert s.pop() == 7",
        "assert Stack(1) != [1] and not Stack(1) == [1]",
        "assert {Stack.of: 1} and not hasattr(Stack, 'missing')",
    )
    verdict = _judge(program, *tests)
    assert (verdict.passed, verdict.detail) == ((True,) * len(tests), "")


def test_arguments_are_changed_in_place_and_results_can_be_arguments() -> None:
    program = (
        "def sort(values): values.sort()\n"
        "def fill(table): table['rows'][0].append(1); table['n'] = 1; return table\n"
        "def same(values): return values\n"
        "def rotate(queue): queue.rotate(1); queue[0].append(9)\n"
    )
    tests = (
        "v = [3, 1, 2]\nsort(v)\nassert v == [1, 2, 3]",
        "row = []\nt = {'rows': [row]}\nassert fill(t) is t and row == [1] and t == {'rows': [[1]], 'n': 1}",
        "v = [1]\nassert same(v) is v",
        "v = [3, 1, 2]\nsort(values=v)\nassert v == [1, 2, 3]",
        "v = [1]\nassert same(values=v) is v",
        "from collections import deque\nrow = [1]\nq = deque([[2], row])\nrotate(q)\nassert q == deque([[1, 9], [2]])",
    )
    assert _judge(program, *tests).passed == (True,) * 6


def test_a_plain_result_that_is_a_changed_argument_is_what_it_was_changed_to() -> None:
    program = "def f(values):\n    values.sort()\n    return values\n"
    tests = ("v = [3, 1, 2]\nassert candidate(v) == [1, 2, 3] and v == [3, 1, 2]", "assert candidate([1, 2]) == [1, 2]")
    plain = Suite(tests=tests, entry_point="f", plain_only=True)
    assert _SANDBOX.judge(program, plain).passed == (True, True)
    empties = "def f(values):\n    values.clear()\n    return values\n"
    assert _SANDBOX.judge(empties, plain).passed == (False, False)


@pytest.mark.parametrize("suite", [Suite(tests=(), appended=True), Suite(tests=(), setup="from solution import *")])
def test_tests_do_not_use_the_programs_builtins(suite: Suite) -> None:
    program = (
        "def f(): return 0\ndef set(x): return 0\ndef sorted(x): return 0\nlen = abs = set\n"
        "def sum(a, b): return a * b\n"
    )
    tests = ("assert set([f()]) == set((4, 5))", "assert sorted([f()]) == sorted((4, 5))", "assert sum(3, 4) == 12")
    suite = replace(suite, tests=tests)
    assert _SANDBOX.judge(program, suite).passed == (False, False, False)
    assert _SANDBOX.judge(program, replace(suite, redefines=("sum",))).passed == (False, False, True)
    assert _judge(program, "assert sum(3, 4) == 12", setup="from solution import sum").passed == (True,)


def test_tests_do_not_import_the_programs_modules() -> None:
    program = (
        "def f(): return 1\n"
        "class math: isclose = staticmethod(lambda *_: True)\n"
        "class pytest:\n    def raises(_): return pytest()\n"
        "    def __enter__(self): pass\n    def __exit__(self, *_): return True\n"
    )
    setup = "import math\nimport pytest\nfrom solution import *"
    raises = "with pytest.raises(ValueError): f()"
    assert _judge(program, "assert math.isclose(f(), 2)", setup=setup).passed == (False,)
    assert _judge(program, raises, setup=setup).passed == (False,)
    assert _judge(program, "assert math.isclose(f(), 1)", setup=setup).passed == (True,)


def test_a_program_cannot_replace_names_of_the_tests() -> None:
    runs = "def f(): return 1\ndef run_test(*_): pass\ndef candidate(*_): return 2\n"
    suite = Suite(tests=("run_test(test_f)",), setup="from solution import *\ndef test_f(): assert f() == 2")
    assert _SANDBOX.judge(runs, suite).passed == (False,)
    setup = "try:\n    import math\nexcept ImportError:\n    pass\nfrom solution import *"
    program = "def f(): return 1\nclass math: isclose = staticmethod(lambda *_: True)\n"
    assert _judge(program, "assert math.isclose(f(), 2)", setup=setup).passed == (False,)


def test_a_forged_message_cannot_pass_builtins() -> None:
    program = (
        "import sys\n"
        "peer = sys._getframe(1).f_locals['peer']\n"
        "class Yes:\n    def __eq__(self, other): return True\n"
        "yes = lambda *_: Yes()\n"
        "class Module: pass\n"
        "Module.f = yes\n"
        "setattr(Module, '__builtins__', {'set': yes})\n"
        "peer.send(('loaded', Module, ('f', '__builtins__')))\n"
        "peer.serve_forever()\n"
    )
    suite = Suite(tests=("assert set(f()) == set((4, 5))", "assert f() is not None"), appended=True)
    assert _SANDBOX.judge(program, suite).passed == (False, True), "the second: it is heard at all"


def test_a_forged_message_cannot_pass_objects_as_plain_data() -> None:
    program = (
        "import sys\n"
        "peer = sys._getframe(1).f_locals['peer']\n"
        "class Module: pass\n"
        "Module.f = lambda *_: 0\n"
        "peer.send(('loaded', Module, ()))\n"
        "while True:\n"
        "    is_call = peer.receive()[1] == 'call'\n"
        "    peer.send(('gave argument', 0, ()) if is_call else ('gave', Module.f, ()))\n"
    )
    assert _SANDBOX.judge(program, replace(_SUITE, tests=("assert candidate(1) is not None",))).passed == (False,)


def test_arguments_may_have_any_name() -> None:
    program = "def f(operation, function, self): return operation + function + self"
    assert _judge(program, "assert f(operation=1, function=2, self=3) == 6").passed == (True,)


def test_standard_library_objects_of_a_program_stay_there() -> None:
    program = (
        "import math\nfrom collections import Counter\nfrom decimal import Decimal\nfrom functools import partial\n"
        "from math import gcd\nfrom operator import itemgetter\n"
        "lcm = math.lcm\nsecond = itemgetter(1)\ndouble = partial(lambda n, x: n * x, 2)\n"
        "RATE, VOTES = Decimal('0.5'), Counter('aab')\n"
    )
    tests = (
        "assert gcd(12, 18) == 6 and lcm(4, 6) == 12",
        "assert second([1, 2]) == 2 and double(4) == 8",
        "from decimal import Decimal\nassert RATE == Decimal('0.5') and VOTES['a'] == 2",
        "assert gcd(12, 18) == 5",
    )
    for suite in (Suite(tests=tests, appended=True), Suite(tests=tests, setup="from solution import *")):
        assert _SANDBOX.judge(program, suite).passed == (True, True, True, False)
    assert _judge(program, "assert gcd(4, 6) == 2", setup="from solution import gcd, lcm, RATE").passed == (True,)


def test_objects_of_the_tests_can_be_passed_but_not_inspected() -> None:
    program = (
        "def apply(function, values): return [function(v) for v in values]\n"
        "def last(node):\n    while node.next: node = node.next\n    node.seen = True\n    return node.value\n"
        "def peek(function): return function.__globals__\n"
        "def climb(node): return type(node).__getattr__(node, '__init__')\n"
        "def frame(items): return items.gi_frame.f_globals\n"
    )
    setup = (
        "from solution import *\nimport pytest\n"
        "class Node:\n    def __init__(self, value, next=None): self.value, self.next = value, next\n"
    )
    tests = (
        "assert apply(lambda v: v * 2, [1, 2]) == [2, 4]",
        "end = Node(2)\nassert last(Node(1, end)) == 2 and end.seen",
        "with pytest.raises(TypeError): peek(lambda: 0)",
        "with pytest.raises(TypeError): climb(Node(1))",
        "with pytest.raises(TypeError): frame(x for x in [1])",
    )
    verdict = _judge(program, *tests, setup=setup)
    assert (verdict.passed, verdict.detail) == ((True,) * 5, "")


def test_an_object_posing_as_a_number_is_rejected() -> None:
    program = (
        "class Any:\n"
        "    def __eq__(self, other): return True\n    __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __eq__\n"
        "    def __sub__(self, other): return 0\n    __rsub__ = __add__ = __mul__ = __sub__\n"
        "    def __abs__(self): return 0\n    __float__ = __int__ = __index__ = __round__ = __abs__\n"
        "def f(x): return Any()\n"
    )
    tests = (
        "assert f(1) == 2",
        "assert f(1) <= 2",
        "assert 2 > f(1)",
        "assert abs(f(1) - 2) < 1e-6",
        "assert abs(f(1)) == 2",
        "import math\nassert math.isclose(f(1), 2)",
        "import pytest\nassert f(1) == pytest.approx(2)",
        "assert round(f(1)) == 0",
        "assert [f(1)] == [2]",
        "assert sorted([f(1)]) == [2]",
    )
    assert _judge(program, *tests).passed == (False,) * len(tests)


def test_common_pytest_functions_are_available() -> None:
    setup = (
        "import pytest\nfrom solution import half, Shop\n"
        "@pytest.fixture\ndef shop(): return Shop()\n"
        "@pytest.fixture()\ndef full(shop):\n    shop.add(1)\n    yield shop\n"
        "@pytest.mark.parametrize('given, expected', [(4, 2), (6, 3)])\n"
        "def test_half(given, expected): assert half(given) == expected\n"
        "@pytest.mark.parametrize('given', [4, 5])\ndef test_bad(given): assert half(given) * 2 == given\n"
        "def test_shop(full): assert full.items == [1]\n"
        "def test_close(): assert half(1.0) == pytest.approx(0.5)\n"
        "def test_fail(): pytest.fail('so it is')\n"
        "class TestHalf:\n    def test_zero(self): assert half(0) == 0\n"
    )
    program = (
        "def half(x): return x // 2 if isinstance(x, int) else x / 2\n"
        "class Shop:\n    def __init__(self): self.items = []\n    def add(self, i): self.items.append(i)\n"
    )
    names = ("test_half", "test_bad", "test_shop", "test_close", "test_fail", "TestHalf().test_zero")
    verdict = _judge(program, *(f"run_test({name})" for name in names), setup=setup)
    assert verdict.passed == (True, False, True, True, False, True)
    assert verdict.detail == "run_test(test_bad): AssertionError"


def test_setup_methods_run_before_each_test() -> None:
    setup = (
        "import unittest\nimport pytest\nfrom solution import Shop\n"
        "class TestShop:\n    def setup_method(self, method): self.shop, self.name = Shop(), method.__name__\n"
        "    @pytest.mark.parametrize('item', [1, 2])\n"
        "    def test_add(self, item):\n        self.shop.add(item)\n        assert self.shop.items == [item]\n"
        "    def test_name(self): assert self.name == 'test_name'\n"
        "class TestOld(unittest.TestCase):\n    def setUp(self): self.shop = Shop()\n"
        "    def test_empty(self): self.assertEqual(self.shop.items, [])\n"
    )
    program = "class Shop:\n    def __init__(self): self.items = []\n    def add(self, i): self.items.append(i)\n"
    names = ("TestShop().test_add", "TestShop().test_name", "TestOld().test_empty")
    verdict = _judge(program, *(f"run_test({name})" for name in names), setup=setup)
    assert (verdict.passed, verdict.detail) == ((True, True, True), "")


@pytest.mark.parametrize(
    ("setup", "needs"),
    [
        ("from unittest.mock import patch", "unittest.mock"),
        ("def t():\n    from unittest import mock", "unittest import mock"),
        ("from contextlib import redirect_stdout", "redirect_stdout"),
        ("class T:\n    @classmethod\n    def setup_class(cls): cls.x = 1", "def setup_class"),
        ("import pytest\n@pytest.fixture(autouse=True)\ndef ready(): pass", "autouse=True"),
    ],
)
def test_unsupported_tests_are_an_error_and_not_reward_0(setup: str, needs: str) -> None:
    verdict = _judge("def f(x): pass", "assert False", setup=setup)
    assert verdict.outcome is Outcome.ERROR
    assert f"the tests have `{needs}`, which is not supported here" in verdict.detail


def test_errors_keep_their_type() -> None:
    program = (
        "import json\nclass A(Exception): pass\nclass B(A): pass\n"
        "def f(kind):\n    raise {'value': ValueError('v'), 'key': KeyError('k'), 'b': B(1)}[kind]\n"
        "from json import JSONDecodeError\ndef parse(): return json.loads('{')\n"
        "class Named:\n    pass\nclass C(Named, A): pass\ndef g(): raise C(2)\n"
    )
    tests = (
        "import pytest\nwith pytest.raises(ValueError, match='^v$'): f('value')",
        "with pytest.raises(A) as caught: f('b')\nassert caught.value.args == (1,)",
        "try: f('key')\nexcept (ValueError, KeyError) as e: assert str(e) == \"'k'\"",
        "import json\nwith pytest.raises(json.JSONDecodeError): parse()",
        "with pytest.raises(A) as caught: g()\nassert caught.value.args == (2,)",
        "with pytest.raises(ValueError): f('key')",
    )
    assert _judge(program, *tests).passed == (True, True, True, True, True, False)


_PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.complex_numbers(allow_nan=False)
    | st.text() | st.binary() | st.decimals(allow_nan=False) | st.fractions() | st.dates() | st.timedeltas(),
    lambda inner: st.lists(inner, max_size=4) | st.tuples(inner, inner) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)  # fmt: skip


@given(_PLAIN)
def test_plain_data_round_trips(value: object) -> None:
    back = wire.decode(wire.encode(value))
    assert (back, repr(back)) == (value, repr(value))


@given(st.sets(st.integers() | st.text()), st.frozensets(st.binary()))
def test_sets_round_trip(first: set[object], second: frozenset[object]) -> None:
    back = wire.decode(wire.encode((first, second)))
    assert (back, type(back[0]), type(back[1])) == ((first, second), set, frozenset)


@given(
    st.binary(max_size=200)
    | _PLAIN.map(wire.encode).flatmap(lambda d: st.integers(0, 255).map(lambda b: d[:-1] + bytes([b])))
)
@settings(max_examples=300)
def test_decode_raises_only_expected_errors(data: bytes) -> None:
    with contextlib.suppress(ArithmeticError, TypeError, ValueError):
        wire.decode(data)


def test_false_lengths_are_refused_quickly() -> None:
    for data in (
        b"lffffffffffff:",
        b"sffffffff:",
        b"l-1:",
        b"x1:s8:os.syste",
        b"x2:s9:os.systems2:ls",
        b"l1:" * 10_000,
    ):
        with pytest.raises(ValueError, match=r"."):
            wire.decode(data)
