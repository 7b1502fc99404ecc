"""Tests of the service benchmark's verdicts: which answers count as lost, truncated or mixed."""

import asyncio
import json

import httpx
import pytest

from benchmarks.service import grammars, load
from benchmarks.service.deployment import Policies, Shape
from benchmarks.service.load import Answer, Ask, Client, Judge, mixed_asks
from benchmarks.service.soak import Look, growth

VERSION = 2


@pytest.fixture(scope="module")
def policies(tmp_path_factory):
    shape = Shape(d_model=32, num_layers=1, gen_length=16, block_length=8, steps=8)
    return Policies(tmp_path_factory.mktemp("bench") / "run", shape, 1)


@pytest.fixture(scope="module")
def judge(policies):
    return Judge(policies)


@pytest.fixture(scope="module")
def ask(policies):
    return mixed_asks(policies, 32, 0)[9]


def chunks(judge, ask, version, token_ids):
    """Make a stream as the service sends it."""
    part = {"index": 0, "delta": {"content": judge.text(token_ids)}, "text": judge.text(token_ids)}
    last = {"index": 0, "delta": {}, "text": "", "finish_reason": "length", "diffusion": {"token_ids": token_ids}}
    usage = {"completion_tokens": len(token_ids)}
    bodies = [
        {"policy_version": version, "choices": [part | {"finish_reason": None}]},
        {"policy_version": version, "choices": [last]},
        {"policy_version": version, "choices": [], "usage": usage},
    ]
    assert ask.is_streamed
    return [*map(json.dumps, bodies), "[DONE]"]


def answer_of(ask, lines, status=200, version=VERSION):
    """Return the client's answer to a response."""

    def respond(_request):
        text = "".join(f"data: {line}\n\n" for line in lines)
        return httpx.Response(status, text=text, headers={"x-policy-version": str(version)})

    async def fetch():
        client = Client("http://service")
        await client.aclose()
        client.http = httpx.AsyncClient(transport=httpx.MockTransport(respond), base_url="http://service")
        try:
            return await client.ask(ask)
        finally:
            await client.aclose()

    return asyncio.run(fetch())


def test_an_answer_of_one_version_is_good(judge, ask):
    answer = answer_of(ask, chunks(judge, ask, VERSION, judge.expected(ask, VERSION)))
    assert judge.judge([answer]).is_good
    assert answer.began_s < answer.first_s <= answer.ended_s


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_refusal_is_a_failure(judge, ask, status):
    assert len(judge.judge([answer_of(ask, ["no"], status)]).failed) == 1


def test_a_stream_ending_with_an_error_is_a_failure(judge, ask):
    lines = chunks(judge, ask, VERSION, judge.expected(ask, VERSION))[:1]
    found = judge.judge([answer_of(ask, [*lines, json.dumps({"error": {"message": "gone"}})])])
    assert len(found.failed) == 1
    assert not found.truncated


@pytest.mark.parametrize("missing", [1, 2, 3])
def test_a_stream_without_its_end_is_truncated(judge, ask, missing):
    lines = chunks(judge, ask, VERSION, judge.expected(ask, VERSION))
    found = judge.judge([answer_of(ask, lines[:missing] + lines[missing + 1 :])])
    assert len(found.truncated) == 1


def test_fewer_tokens_than_in_usage_are_a_truncation(judge, ask):
    ids = judge.expected(ask, VERSION)
    lines = chunks(judge, ask, VERSION, ids)
    lines[1] = chunks(judge, ask, VERSION, ids[:-1])[1]
    assert len(judge.judge([answer_of(ask, lines)]).truncated) == 1


def test_tokens_of_another_version_are_mixed(judge, ask):
    ids, others = judge.expected(ask, VERSION), judge.expected(ask, VERSION + 1)
    assert ids != others
    half = len(ids) // 2
    for wrong in (others, ids[:half] + others[half:]):
        assert len(judge.judge([answer_of(ask, chunks(judge, ask, VERSION, wrong))]).mixed) == 1


def test_chunks_of_two_versions_are_mixed(judge, ask):
    ids = judge.expected(ask, VERSION)
    lines = [chunks(judge, ask, VERSION, ids)[0], *chunks(judge, ask, VERSION + 1, ids)[1:]]
    assert len(judge.judge([answer_of(ask, lines)]).mixed) == 1


def test_text_that_differs_from_its_tokens_is_mixed(judge, ask):
    ids = judge.expected(ask, VERSION)
    lines = chunks(judge, ask, VERSION, ids)
    assert len(judge.judge([answer_of(ask, [lines[0], *lines])]).mixed) == 1


def test_requests_are_of_all_kinds(policies):
    asks = mixed_asks(policies, 32, 0)
    kinds = {(one.is_chat, one.is_streamed, one.body["temperature"]) for one in asks}
    assert len(kinds) == 8


def test_growth_is_the_slope_of_the_second_half():
    def look(second):
        # Process 1 fills up, then stays constant. Process 2 leaks 2 MiB per 1,000 requests. Another one starts late.
        sizes = {1: min(400.0, 100.0 * second), 2: 300.0 + 0.002 * 100 * second}
        late = {3: 9.0} if second > 15 else {}
        return Look(time_s=second, num_requests=100 * second, sizes={"engine": sizes | late})

    rows = growth([look(second) for second in range(20)])
    assert [row["growth per 1,000 requests"] for row in rows] == pytest.approx([0.0, 2.0])
    with pytest.raises(ValueError, match="too few"):
        growth([look(second) for second in range(4)])


def test_a_missing_answer_is_a_failure(judge, ask):
    lost = Answer(ask=ask, began_s=0.0)
    assert not judge.judge([lost]).is_good


def test_an_open_loop_limits_concurrency_and_counts_the_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise a slow machine would exceed the service's limit, and its refusals are no lost answers."""
    under_way = most = 0

    async def slow(_client: Client, ask: Ask, due_s: float | None = None) -> Answer:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await asyncio.sleep(0.01)
        under_way -= 1
        return Answer(ask=ask, began_s=due_s or 0.0)

    async def ask() -> list[Answer]:
        client, left = Client("http://127.0.0.1:9"), iter(range(30))
        answers = await client.open_loop([Ask(body={})], 1000.0, lambda: next(left, None) is not None)
        await client.aclose()
        return answers

    monkeypatch.setattr(load, "_MOST_UNDER_WAY", 5)
    monkeypatch.setattr(Client, "ask", slow)
    answers = asyncio.run(ask())
    assert most == 5
    due_s = [answer.began_s for answer in answers]
    assert [later - due_s[0] for later in due_s] == pytest.approx([place / 1000 for place in range(30)])


def test_the_grammar_benchmark_prints_a_table(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["grammars", "--tokens", "600", "--slots", "96", "--block", "16"])
    grammars.main()
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert [row[0] for row in rows] == ["| structure", *(f"| {name}" for name in grammars._STRUCTURES)]
    assert all(int(row[1]) > 1 for row in rows[1:])
