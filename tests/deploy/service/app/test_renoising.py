"""DiffusionGemma over HTTP: the renoising sampler's text, and the canvases that it records."""

import asyncio
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from itertools import pairwise

import pytest

from deploy.service.api.text_codec import MASKED
from deploy.service.contract import BlocksDone, CanvasSeen, Done, EngineLostError, Job
from deploy.service.engine.engine import Engine
from deploy.service.failover import with_failover
from learner.model.renoising.policy import load_renoising_policy
from learner.model.tokenizer import make_tokenizer
from learner.seeds import fold
from rollout.renoising.request import RenoisingParams, RenoisingRequest
from rollout.renoising.sampler import RenoisingSampler
from tests.deploy.service.app.asking import assert_error, events_of
from tests.tiny_renoising import make_renoising_checkpoint

SLOTS = 8
DIFFUSION = {"gen_length": 20, "steps": 5, "entropy_bound": 6.0}
ASK = {"prompt": [5, 6, 7], "seed": 1, "diffusion": DIFFUSION}
CHAT = {"messages": [{"role": "user", "content": "2"}], "seed": 1, "diffusion": DIFFUSION}
PARAMS = RenoisingParams(gen_length=20, max_denoise_steps=5, entropy_bound=6.0)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    directory = tmp_path_factory.mktemp("gemma") / "served"
    make_renoising_checkpoint(directory, vocab_size=300)
    make_tokenizer(["What is 1 + 2?", "The sum is 3."], directory, 300)
    return directory


@pytest.fixture(scope="module")
def sampler(checkpoint):
    return RenoisingSampler(load_renoising_policy(checkpoint), 0)


@pytest.fixture
def served(serve, checkpoint):
    return serve(checkpoint)


@pytest.fixture
def client(served):
    return served[1]


@pytest.fixture
def host(served):
    return served[0].backend


def request(seed=1, choice=0, ids=(5, 6, 7), **params):
    key = fold(seed, 0, choice)
    return RenoisingRequest(prompt_ids=tuple(ids), params=PARAMS.model_copy(update=params), seed=key)


def spoken(service, completion):
    return service.codec.decode(completion.token_ids[: completion.num_tokens].tolist())


def test_an_answer_equals_the_samplers_alone_and_with_other_requests(served, sampler):
    service, client = served
    asked = [ASK | {"seed": seed, "n": 2, "diffusion": DIFFUSION | {"return_step_map": True}} for seed in (1, 2, 3)]

    def tokens(ask):
        body = client.post("/v1/completions", json=ask).json()
        return [choice["diffusion"]["token_ids"] for choice in body["choices"]], body["usage"], body["choices"]

    alone = tokens(asked[0])
    with ThreadPoolExecutor(3) as pool:
        beside = list(pool.map(tokens, asked))
    assert beside[0] == alone
    for ask, (found, usage, choices) in zip(asked, beside, strict=True):
        expected = [sampler.complete(request(ask["seed"], choice)) for choice in (0, 1)]
        assert found == [one.token_ids[: one.num_tokens].tolist() for one in expected]
        assert [choice["text"] for choice in choices] == [spoken(service, one) for one in expected]
        num_forwards = sum(one.num_forwards for one in expected)
        assert usage["diffusion"]["num_forwards"] == num_forwards
        assert usage["diffusion"]["num_blocks"] == sum(len(one.canvases) for one in expected)
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (3, 40)
        for choice, one in zip(choices, expected, strict=True):
            assert choice["diffusion"]["step_map"] == [
                sum(canvas.num_steps for canvas in one.canvases[: slot // SLOTS + 1]) - 1 for slot in range(20)
            ]
            assert all(0 < confidence <= 1 for confidence in choice["diffusion"]["confidence"])


def test_chat_and_text_prompts_are_tokenized_as_in_the_other_family(served, sampler):
    service, client = served
    expected = spoken(service, sampler.complete(request(ids=service.codec.encode_chat(CHAT["messages"]))))
    chat = client.post("/v1/chat/completions", json=CHAT).json()
    assert chat["choices"][0]["message"] == {"role": "assistant", "content": expected}
    assert chat["choices"][0]["finish_reason"] == "length"
    text = client.post("/v1/completions", json=ASK | {"prompt": "2"}).json()
    by_itself = request(ids=service.codec.encode_text("2", "prompt"))
    assert text["choices"][0]["text"] == spoken(service, sampler.complete(by_itself)) != expected
    assert client.post("/v1/completions", json=ASK | {"prompt": "2", "seed": 2}).json()["choices"] != text["choices"]
    # Omitted parameters are the original code's defaults, in as many canvases as fit.
    short = client.post("/v1/completions", json={"prompt": [5], "seed": 1, "diffusion": {"steps": 1}}).json()
    assert short["usage"]["completion_tokens"] == 56


def test_a_canvas_stream_equals_the_samplers_record(served, sampler):
    service, client = served
    ask = CHAT | {"stream": True, "diffusion": DIFFUSION | {"stream": "canvas"}}
    chunks, is_done = events_of(client.post("/v1/chat/completions", json=ask))
    assert is_done
    one = sampler.complete(request(ids=service.codec.encode_chat(CHAT["messages"])))
    kept = [(number, canvas, step) for number, canvas in enumerate(one.canvases) for step in range(canvas.num_steps)]
    frames = [choice for chunk in chunks for choice in chunk["choices"] if "diffusion" in choice]
    shown = {frame["diffusion"]["step"]: frame["diffusion"]["slots"] for frame in frames}
    # A slow reader gets fewer frames, and each of them is right.
    assert {0, len(kept)} <= set(shown) <= set(range(len(kept) + 1))
    assert all(slot["masked"] for slot in shown[0])
    for at, (number, canvas, step) in enumerate(kept, start=1):
        if at not in shown:
            continue
        start, is_last = number * SLOTS, step == canvas.num_steps - 1
        slots = shown[at][start : start + SLOTS]
        # `gen_length` ends within the last canvas.
        accepted = [is_last or bool(one) for one in canvas.accepted[step]][: len(slots)]
        assert [not slot["masked"] for slot in slots] == accepted
        tokens = canvas.token_ids if is_last else canvas.drawn[step]
        for slot, token in zip(slots, tokens.tolist(), strict=False):
            if not slot["masked"]:
                # A single token is not always a whole character.
                assert slot["text"] in (service.codec.token_text(token), "") or "\ufffd" in slot["text"]
                assert slot["step"] < at
                assert 0 < slot["confidence"] <= 1
        assert all(slot["masked"] for slot in shown[at][start + SLOTS :])
    assert frames[-1]["delta"]["content"] == spoken(service, one)
    assert {frame["diffusion"]["num_steps"] for frame in frames} == {None}
    for frame in frames:
        slots = frame["diffusion"]["slots"]
        assert frame["delta"]["content"].count(MASKED) == sum(slot["masked"] for slot in slots)


def test_the_engine_sends_every_step_and_renoised_slots_are_masked(host, sampler):
    told, is_done = [], threading.Event()

    def tell(event):
        told.append(event)
        if isinstance(event, Done):
            is_done.set()

    host.engine.submit(
        Job(requests={0: request()}, wanted="policy", shows_canvas=True), host.versions.acquire("policy"), tell
    )
    assert is_done.wait(60)
    masked = [event.progress.masked for event in told if isinstance(event, CanvasSeen)]
    kept = [accepted for canvas in sampler.complete(request()).canvases for accepted in canvas.accepted]
    assert len(masked) == len(kept) - 1
    assert sum((~was & now).sum() for was, now in pairwise(masked)) > 3


def test_a_streamed_text_equals_the_whole_answer_and_ends_at_stops(served):
    _, client = served
    whole = client.post("/v1/completions", json=ASK).json()
    options = {"stream": True, "stream_options": {"include_usage": True}}
    chunks, is_done = events_of(client.post("/v1/completions", json=ASK | options))
    texts = [choice["text"] for chunk in chunks for choice in chunk["choices"]]
    assert (is_done, "".join(texts)) == (True, whole["choices"][0]["text"])
    assert len(texts) == 4, "three canvases, an end"
    assert chunks[-1]["usage"] == whole["usage"]
    cut = client.post("/v1/completions", json=ASK | {"max_tokens": 5}).json()
    assert cut["usage"]["completion_tokens"] == 5
    assert cut["usage"]["diffusion"]["num_blocks"] == 1 < whole["usage"]["diffusion"]["num_blocks"]
    stop = whole["choices"][0]["text"].rstrip("\ufffd")[-1]
    ended = client.post("/v1/completions", json=ASK | {"stop": stop}).json()["choices"][0]
    assert (ended["finish_reason"], ended["text"]) == ("stop", whole["choices"][0]["text"].partition(stop)[0])


REFUSED = [
    ({"temperature": 0}, "temperature", "temperature is not for diffusion_gemma policies; they take "),
    ({"top_p": 0.5}, "top_p", "top_p is not for"),
    ({"top_k": 3}, "top_k", "top_k is not for"),
    ({"suffix": "x"}, "suffix", "`suffix` is not for diffusion_gemma policies, which fill no gaps"),
    ({"prompt": [5] * 61}, "prompt", "The prompt has 61 tokens; this policy reads at most 40"),
    ({"prompt": [300]}, "prompt", "lie between 0 and 299"),
]
REFUSED_OF_DIFFUSION = [
    ({"threshold": 0.9}, "diffusion.threshold is not for diffusion_gemma policies; they take diffusion.gen_length, "),
    ({"remasking": "quota"}, "diffusion.remasking is not for"),
    ({"cfg_scale": 1.0}, "diffusion.cfg_scale is not for"),
    ({"steps_per_block": 2}, "diffusion.steps_per_block is not for"),
    ({"editing_threshold": 0.5}, "diffusion.editing_threshold is not for"),
    ({"block_length": 4}, "diffusion.block_length 4 is not the 8 slots of this policy's canvases; leave it out"),
    ({"constraints": {"forbidden_ids": [3]}}, "diffusion.constraints.forbidden_ids is not for"),
    ({"constraints": {"fixed": {"0": 5}}}, "diffusion.constraints.fixed is not for"),
    ({"t_min": 0.9}, "diffusion.t_min 0.9 is above diffusion.t_max 0.8"),
    ({"t_max": 0.0}, "diffusion.t_max"),
    ({"t_max": 1e-39, "t_min": 1e-39}, "diffusion.t_max is 1e-39; it should be at least 0.00001"),
]


def test_unsupported_fields_of_the_other_family_are_refused(client):
    for change, param, words in REFUSED:
        error = assert_error(client.post("/v1/completions", json=ASK | change), 400)
        assert words in error["message"]
        assert error["param"] == param
    for change, words in REFUSED_OF_DIFFUSION:
        error = assert_error(client.post("/v1/completions", json=ASK | {"diffusion": DIFFUSION | change}), 400)
        assert words in error["message"]
        assert error["param"].startswith("diffusion.")


def test_neutral_fields_of_the_other_family_are_accepted(client):
    plain = client.post("/v1/completions", json=ASK).json()["choices"]
    nothing = {"top_p": 1, "top_k": 0, "diffusion": DIFFUSION | {"cfg_scale": 0, "block_length": SLOTS}}
    assert client.post("/v1/completions", json=ASK | nothing).json()["choices"] == plain
    warmer = ASK | {"diffusion": DIFFUSION | {"t_max": 30.0, "t_min": 30.0}}
    assert client.post("/v1/completions", json=warmer).json()["choices"] != plain


class DyingOnce:
    """Backend whose engine dies after the first canvas of each choice. The next one does not."""

    def __init__(self, host):
        self.host, self.jobs = host, []

    async def stream(self, job):
        # Serialised as in transit, in both directions.
        self.jobs.append(pickle.loads(pickle.dumps(job)))
        num_left = len(job.requests)
        async with aclosing(self.host.stream(self.jobs[-1])) as stream:
            async for events in stream:
                for event in events:
                    yield [pickle.loads(pickle.dumps(event))]
                    num_left -= isinstance(event, BlocksDone)
                    if not num_left and len(self.jobs) == 1:
                        raise EngineLostError("SIGKILL")


async def collected(stream):
    async with aclosing(stream):
        return [event async for event in stream]


def test_failover_continues_at_canvas_boundaries(host, monkeypatch):
    monkeypatch.setattr("deploy.service.failover._PAUSE_S", 0)
    job = Job(requests={0: request(1), 1: request(2)}, wanted="policy")

    def done(backend):
        events = asyncio.run(collected(with_failover(backend, job, may_restart=False)))
        starts = sorted((event.choice, event.start) for event in events if isinstance(event, BlocksDone))
        ended = {event.choice: event.completion for event in events if isinstance(event, Done)}
        return starts, {
            choice: (one.token_ids.tolist(), one.step_map.tolist(), one.num_forwards) for choice, one in ended.items()
        }

    dying = DyingOnce(host)
    assert done(dying) == done(host)
    assert len(dying.jobs) == 2
    assert [len(one.committed) for one in dying.jobs[1].requests.values()] == [SLOTS, SLOTS]


def test_renoising_jobs_keep_their_version_and_free_rows_when_cancelled(
    served, sampler, make_policy, checkpoint, monkeypatch
):
    host, steps, step = served[0].backend, threading.Semaphore(0), Engine._step
    versions = host.versions

    def other(policy):
        made = load_renoising_policy(checkpoint)
        made.network.model.decoder.norm.weight.mul_(0.5)
        return RenoisingSampler(made, policy.version)

    def wait(self, live):
        if steps.acquire(timeout=0.05):
            step(self, live)

    monkeypatch.setattr(versions, "_load", other)
    monkeypatch.setattr(Engine, "_step", wait)

    async def swapped():
        found = []
        async with aclosing(host.stream(Job(requests={0: request(1)}, wanted="policy", shows_canvas=True))) as stream:
            async for events in stream:
                found += events
                if len(found) == 1:
                    steps.release()
                if isinstance(found[-1], CanvasSeen) and versions.policy.version == 0:
                    await asyncio.to_thread(versions.adopt, make_policy(5))
                    steps.release(10_000)
        return found

    found = asyncio.run(swapped())
    assert (found[0].policy.version, versions.policy.version) == (0, 5)
    completion = found[-1].completion
    expected = sampler.complete(request(1)).token_ids[:20].tolist()
    assert (completion.policy_version, completion.token_ids[:20].tolist()) == (0, expected)
    after = asyncio.run(collected(host.stream(Job(requests={0: request(1)}, wanted="policy"))))[-1][-1].completion
    assert after.policy_version == 5
    assert after.token_ids[:20].tolist() != expected

    async def left():
        async with aclosing(host.stream(Job(requests={0: request(1), 1: request(2)}, wanted="policy"))) as stream:
            await anext(stream)

    asyncio.run(left())
    ended = asyncio.run(collected(host.stream(Job(requests={0: request(1)}, wanted="policy"))))[-1][-1]
    assert isinstance(ended, Done)
    late = Job(requests={0: request(1)}, wanted="policy", timeout_s=-1.0)
    assert asyncio.run(collected(host.stream(late)))[-1][-1].code == "timeout"
    assert (host.engine.num_running, host.engine.num_waiting) == (0, 0)
