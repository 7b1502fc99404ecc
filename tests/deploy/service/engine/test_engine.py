"""Engine: jobs that join, leave and keep their policy version, and failover from a dead engine."""

import asyncio
import re
import threading
import time
from contextlib import aclosing
from dataclasses import replace

import pytest
import torch

from deploy.service.checkpoints import Checkpoints
from deploy.service.contract import Began, BlocksDone, CanvasSeen, Done, EngineLostError, Job, Refused
from deploy.service.engine.engine import Engine
from deploy.service.engine.engine_host import EngineHost, Mailbox
from deploy.service.engine.loading import VersionLoader
from deploy.service.engine.versions import NoRoomError, NoSuchVersionError, RefusedVersionError, Versions
from deploy.service.failover import MAX_LOST, with_failover
from rollout.config import EngineConfig
from rollout.request import Request, SamplingParams

PARAMS = SamplingParams(gen_length=32, block_length=8, num_denoise_steps=16, temperature=0.9, stop_ids=())


def request(seed=1, **changes):
    return Request(prompt_ids=(5, 6, 7), params=PARAMS.model_copy(update=changes), seed=seed)


def job(*seeds, **facts):
    return Job(requests=dict(enumerate(map(request, seeds or (1,)))), **{"wanted": "policy"} | facts)


async def collect(stream):
    async with aclosing(stream):
        return [event async for event in stream]


async def flat(stream):
    async with aclosing(stream):
        return [event async for events in stream for event in events]


def of(kind, events):
    return [event for event in events if isinstance(event, kind)]


def ids(events):
    return {event.choice: event.completion.token_ids.tolist() for event in of(Done, events)}


def wait_until(condition, what, timeout_s=20):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout_s} s for {what}"
        time.sleep(0.005)


@pytest.fixture
def held(versions, monkeypatch):
    """An engine whose steps the test releases one by one."""
    steps = threading.Semaphore(0)
    step = Engine._step

    def wait(self, live):
        if steps.acquire(timeout=0.05):
            step(self, live)

    monkeypatch.setattr(Engine, "_step", wait)
    engine = Engine(versions, max_pending=3)
    engine.let = lambda count=1: steps.release(count)
    yield engine
    engine.let(10_000)
    engine.close()


def test_a_job_equals_the_samplers_completion_and_sends_each_block_once(host, make_sampler):
    events = asyncio.run(flat(host.stream(job(1, 2))))
    expected = make_sampler(1).generate([request(1), request(2)])
    assert isinstance(events[0], Began)
    assert events[0].policy.version == 1
    assert ids(events) == {0: expected[0].token_ids.tolist(), 1: expected[1].token_ids.tolist()}
    for choice in (0, 1):
        blocks = [event for event in of(BlocksDone, events) if event.choice == choice]
        assert [block.start for block in blocks] == [0, 8, 16]
        told = [token for block in blocks for token in block.slots.token_ids.tolist()]
        assert told == ids(events)[choice][:24]
    assert not of(CanvasSeen, events)


def test_a_job_that_sends_no_blocks_is_one_message(host, make_sampler):
    async def lists():
        async with aclosing(host.stream(job(1, tells_blocks=False))) as stream:
            return [events async for events in stream]

    (events,) = asyncio.run(lists())
    assert [type(event) for event in events] == [Began, Done]
    assert ids(events)[0] == make_sampler(1).generate([request(1)])[0].token_ids.tolist()
    backend = DyingBackend(host, 0, 1)
    again = asyncio.run(collect(with_failover(backend, job(1, tells_blocks=False), may_restart=True)))
    assert ids(again) == ids(events)


def test_a_job_that_shows_its_canvas_sends_every_step(versions, engine):
    seen = []
    done = threading.Event()

    def tell(event):
        seen.append(event)
        if isinstance(event, Done):
            done.set()

    engine.submit(job(shows_canvas=True), versions.acquire("policy"), tell)
    assert done.wait(20)
    assert [event.progress.num_steps for event in of(CanvasSeen, seen)] == list(range(1, 16))


def test_a_job_that_joins_does_not_change_running_jobs(held, versions, make_sampler):
    events = []
    held.submit(job(1), versions.acquire("policy"), events.append)
    held.let(3)
    wait_until(lambda: held.num_running == 1, "the first to run")
    held.submit(job(2), versions.acquire("policy"), events.append)
    held.let(100)
    wait_until(lambda: len(of(Done, events)) == 2, "both")
    done = [event.completion.token_ids.tolist() for event in of(Done, events)]
    assert done == [c.token_ids.tolist() for c in make_sampler(1).generate([request(1), request(2)])]


def test_a_client_that_disconnects_frees_its_slots_at_the_next_step(held, versions):
    async def leave():
        async with aclosing(EngineHost(versions, held).stream(job(1, 2))) as stream:
            assert isinstance((await anext(stream))[0], Began)
            held.let(1)
            await asyncio.to_thread(wait_until, lambda: held.num_running == 2, "two rows")

    asyncio.run(leave())
    wait_until(lambda: held.num_running == 0 and held.num_waiting == 0, "the slots to be free")
    assert versions.acquire("policy").num_jobs == 1, "the version is still in use"


def test_a_job_ends_on_the_version_that_it_began_with(held, versions, make_policy, make_sampler):
    events, later = [], []
    old = versions.acquire("policy")
    held.submit(job(1), old, events.append)
    held.let(2)
    wait_until(lambda: held.num_running == 1, "it to begin")
    versions.adopt(make_policy(2))
    assert versions.policy.version == 2
    held.submit(job(1), versions.acquire("policy"), later.append)
    held.let(200)
    wait_until(lambda: of(Done, events) and of(Done, later), "both")
    assert of(Done, events)[0].completion.policy_version == 1
    assert of(Done, later)[0].completion.policy_version == 2
    assert ids(events)[0] == make_sampler(1).generate([request(1)])[0].token_ids.tolist()
    assert ids(later)[0] == make_sampler(2).generate([request(1)])[0].token_ids.tolist() != ids(events)[0]


def test_a_job_that_does_not_fit_is_refused_with_retry_after(held, versions):
    held.submit(job(1, 2), versions.acquire("policy"), lambda event: None)
    live = versions.acquire("policy")
    refused = held.submit(job(1, 2), live, lambda event: None)
    assert (refused.status, refused.retry_after_s) == (429, 1)
    held.submit(job(3), live, lambda event: None)


def test_a_job_that_times_out_frees_its_slots(held, versions):
    events = []
    held.submit(job(1, timeout_s=0.1), versions.acquire("policy"), events.append)
    wait_until(lambda: events, "the refusal")
    assert (events[0].status, events[0].code) == (503, "timeout")
    wait_until(lambda: held.num_running == 0 and held.num_waiting == 0, "the slot to be free")


def test_an_error_in_one_version_fails_only_its_own_jobs(held, versions, make_policy):
    events, others = [], []
    broken = versions.acquire("policy")
    held.submit(job(1), broken, events.append)
    held.let(1)
    wait_until(lambda: held.num_running == 1, "it to begin")
    versions.adopt(make_policy(2))
    held.submit(job(1), versions.acquire("policy"), others.append)

    def fail():
        raise FloatingPointError("no number")

    broken.batch.step = fail
    held.let(200)
    wait_until(lambda: of(Refused, events) and of(Done, others), "both")
    assert of(Refused, events)[0].status == 500
    assert "no number" not in of(Refused, events)[0].message
    again = []
    held.submit(job(1), versions.acquire(1), again.append)
    wait_until(lambda: of(Done, again), "the next job of that version")


def test_a_failure_is_logged_with_its_traceback_and_without_the_prompt(engine, versions, capsys):
    events, live = [], versions.acquire("policy")

    def fail(*_, **__):
        raise FloatingPointError("no number")

    live.sampler.model.forward = fail
    asked = replace(request(), prompt_ids=(211, 213, 217))
    engine.submit(replace(job(), requests={0: asked}), live, events.append)
    wait_until(lambda: events, "the refusal")
    log = capsys.readouterr().out
    assert re.search(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d \[error *\] engine_step_failed", log)
    assert "Traceback (most recent call last)" in log
    assert "FloatingPointError: no number" in log
    # Line numbers in the traceback can be the same numbers.
    assert not re.search(r"(?<!line )\b21[137]\b,", log)


def test_an_invalid_request_is_refused_and_releases_the_version(host, versions):
    events = asyncio.run(flat(host.stream(Job(requests={0: replace(request(), prompt_ids=())}, wanted="policy"))))
    assert [(event.status, event.code) for event in events] == [(400, "invalid_request")]
    assert versions.acquire("policy").num_jobs == 1


def test_a_closed_engine_refuses_running_and_new_jobs(held, versions):
    events = []
    held.submit(job(1), versions.acquire("policy"), events.append)
    held.let(1)
    wait_until(lambda: held.num_running == 1, "it to begin")
    held.close()
    assert [(event.status, event.code) for event in of(Refused, events)] == [(503, "unavailable")]
    assert not held.is_alive
    assert held.submit(job(2), versions.acquire("policy"), events.append).status == 503


def test_a_slow_reader_gets_the_latest_canvas_and_every_block():
    async def read():
        mailbox = Mailbox(asyncio.get_running_loop())
        for progress in (1, 2):
            for choice in (0, 1):
                mailbox.put(CanvasSeen(choice=choice, progress=progress))
        mailbox.put(BlocksDone(choice=0, start=0, slots=None))
        mailbox.put(CanvasSeen(choice=0, progress=3))
        await asyncio.sleep(0)
        return await asyncio.wait_for(mailbox.take(), 5)

    got = asyncio.run(read())
    assert [(event.choice, getattr(event, "progress", None)) for event in got] == [(0, 2), (1, 2), (0, None), (0, 3)]


def test_a_job_cancelled_while_its_version_loads_releases_the_version(versions, engine, make_policy):
    may_load, loading = threading.Event(), threading.Event()

    class Slow:
        def acquire(self, *arguments):
            loading.set()
            assert may_load.wait(20)
            return versions.acquire(*arguments)

        def __getattr__(self, name):
            return getattr(versions, name)

    async def run():
        task = asyncio.create_task(flat(EngineHost(Slow(), engine).stream(job(wanted="base"))))
        await asyncio.to_thread(loading.wait, 20)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        may_load.set()
        deadline = time.monotonic() + 20
        while versions.policy.version not in {live.policy.version for live in released}:
            assert time.monotonic() < deadline, "it is kept"
            await asyncio.sleep(0.01)

    released, release = [], versions.release
    versions.release = lambda live: (released.append(live), release(live))
    asyncio.run(run())


def test_a_failed_submission_ends_all_jobs_of_the_batch(held, versions, monkeypatch):
    told = {"first": [], "second": []}
    live = versions.acquire("policy")
    held.submit(job(1), live, told["first"].append)
    wait_until(lambda: held._jobs and live.batch is not None, "the first to join")
    monkeypatch.setattr(live.batch, "submit", lambda _: (_ for _ in ()).throw(RuntimeError("out of memory")))
    held.submit(job(2), versions.acquire("policy"), told["second"].append)
    wait_until(lambda: all(told.values()), "both to be told")
    assert [[event.code for event in events] for events in told.values()] == [["engine_failed"]] * 2
    assert held.is_alive


def test_a_batch_that_does_not_fit_in_memory_fails_only_its_job(host, engine, versions, monkeypatch):
    sampler = versions._live[0].sampler
    opened = sampler.open
    monkeypatch.setattr(sampler, "open", lambda *_: (_ for _ in ()).throw(RuntimeError("out of memory")))
    events = asyncio.run(flat(host.stream(job())))
    assert [event.code for event in of(Refused, events)] == ["engine_failed"]
    monkeypatch.setattr(sampler, "open", opened)
    assert ids(asyncio.run(flat(host.stream(job()))))
    assert engine.is_alive
    assert engine.num_waiting == 0


# Policy versions.


def test_a_version_with_weights_that_are_not_finite_is_refused(versions, make_policy, make_sampler):
    sampler = make_sampler(2)
    with torch.no_grad():
        sampler.model.embed.weight[3, 3] = torch.nan
    versions._load = lambda policy: sampler
    with pytest.raises(RefusedVersionError, match="weights that are not finite"):
        versions.adopt(make_policy(2))
    assert (versions.policy.version, versions.num_swaps) == (1, 0)
    assert [(refused.version, refused.why) for refused in versions.refused] == [
        (2, "Policy version 2 is not served: policy version 2 has weights that are not finite")
    ]


def test_a_version_with_predictions_that_are_not_finite_is_refused(versions, make_policy, make_sampler):
    sampler = make_sampler(2)
    with torch.no_grad():
        sampler.model.head.weight.fill_(3e38)
    versions._load = lambda policy: sampler
    with pytest.raises(RefusedVersionError, match="predictions that are not finite"):
        versions.adopt(make_policy(2))


def test_a_version_with_damaged_weights_is_refused(make_policy, versions):
    def damaged(policy):
        raise ValueError("the checksum of head.weight differs")

    versions._load = damaged
    with pytest.raises(RefusedVersionError, match="checksum"):
        versions.adopt(make_policy(2))


def test_a_version_is_loaded_once_and_stays_in_memory_while_in_use(run_dir, make_policy, make_sampler):
    loaded = []

    def load(policy):
        loaded.append(policy.version)
        return make_sampler(policy.version)

    versions = Versions(make_sampler(1), make_policy(1), load=load, locate=lambda wanted: None, most_live=3)
    first = versions.acquire("policy")
    for version in (2, 3, 4, 5):
        versions.adopt(make_policy(version))
    assert loaded == [2, 3, 4, 5]
    assert [policy.version for policy in versions.live] == [1, 4, 5]
    assert versions.acquire(1) is first
    versions.release(first)
    versions.release(first)
    versions.adopt(make_policy(6))
    assert len(versions.live) == 3
    with pytest.raises(NoSuchVersionError, match="no policy version 77"):
        versions.acquire(77)


def test_an_unused_version_is_unloaded(versions, make_policy, monkeypatch):
    versions.adopt(make_policy(2))
    live = versions.acquire(1)
    monkeypatch.setattr("deploy.service.engine.versions._LINGER_S", 0.0)
    versions.forget_idle()
    assert [policy.version for policy in versions.live] == [1, 2]
    versions.release(live)
    assert [policy.version for policy in versions.live] == [1, 2]
    versions.forget_idle()
    assert [policy.version for policy in versions.live] == [2]


def test_a_version_in_memory_is_found_without_reading_the_disk(versions, make_policy):
    def locate(wanted):
        raise AssertionError(f"looked for {wanted}")

    versions._locate = locate
    versions.adopt(make_policy(2))
    for wanted, version in (("policy", 2), (1, 1), (2, 2)):
        live = versions.acquire_live(wanted)
        assert (live.policy.version, live.num_jobs) == (version, 1)
        versions.release(live)
    assert versions.acquire_live("base") is versions.acquire_live(3) is None


def test_a_version_without_weights_is_not_listed_as_refused(versions, make_policy):
    def gone(policy):
        raise LookupError("the store moved on")

    versions._load = gone
    versions.learn(make_policy(3))
    with pytest.raises(NoSuchVersionError, match="moved on"):
        versions.acquire(3)
    assert versions.refused == ()
    assert versions._loading.acquire(timeout=1)


def test_loading_without_room_in_memory_times_out(make_policy, make_sampler, monkeypatch):
    monkeypatch.setattr("deploy.service.engine.versions._BRING_TIMEOUT_S", 0.1)
    versions = Versions(
        make_sampler(1),
        make_policy(1),
        load=lambda policy: make_sampler(policy.version),
        locate=lambda wanted: make_policy(wanted) if isinstance(wanted, int) else None,
        most_live=2,
    )
    versions.acquire(2)
    with pytest.raises(NoRoomError, match="All 2 policy versions"):
        versions.acquire(3)


def test_base_is_the_version_before_the_rounds(run_dir, add_checkpoint, versions):
    assert versions.located("base") == 1
    add_checkpoint(run_dir, 5, "rl", round_index=4)
    assert versions.acquire("base").policy.version == 1
    assert versions.acquire(5).policy.version == 5
    assert [policy.version for policy in versions.live] == [1, 5]


def test_a_version_that_its_store_dropped_is_loaded_from_its_checkpoint(
    run_dir, add_checkpoint, versions, make_policy, make_sampler
):
    def load(policy):
        if policy.checkpoint is None:
            raise LookupError("the store moved on")
        return make_sampler(policy.version)

    versions._load = load
    announced = make_policy(5, weight_store="d1-weights-tiny", manifest_digest="abc")
    versions.learn(announced)
    with pytest.raises(NoSuchVersionError, match="moved on"):
        versions.acquire(5)
    versions._locate = Checkpoints(run_dir).locate
    directory = add_checkpoint(run_dir, 5, "rl", round_index=4)
    assert versions.acquire(5).policy == replace(announced, checkpoint=str(directory))


def test_a_checkpoint_with_other_weights_than_announced_is_not_loaded(versions, make_policy):
    def gone(_):
        raise LookupError("the store moved on")

    versions._load = gone
    versions._locate = lambda version: make_policy(version, checkpoint="/other", manifest_digest="def")
    versions.learn(make_policy(5, weight_store="d1-weights-tiny", manifest_digest="abc"))
    with pytest.raises(NoSuchVersionError, match="moved on"):
        versions.acquire(5)


def test_a_checkpoint_is_verified_when_it_is_loaded_only(run_dir, add_checkpoint, make_policy, make_sampler):
    add_checkpoint(run_dir, 5, "rl", round_index=4)
    versions = Versions(
        make_sampler(5),
        make_policy(5),
        load=lambda policy: VersionLoader(run_dir / "checkpoints" / "rl-5", EngineConfig()).load(policy),
        locate=Checkpoints(run_dir).locate,
    )
    weights = run_dir / "checkpoints" / "sft-1" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert versions.located("base") == 1
    with pytest.raises(RefusedVersionError, match="is not served"):
        versions.acquire("base")


def test_a_score_updates_the_metadata_without_a_swap(versions, make_policy):
    versions.learn(replace(versions.policy, num_correct=3, num_problems=4))
    assert (versions.policy.num_correct, versions.scored.version, versions.num_swaps) == (3, 1, 0)
    versions.learn(make_policy(7, num_correct=1, num_problems=4))
    assert (versions.policy.version, versions.scored.version, versions.announced.version) == (1, 7, 7)
    versions.adopt(make_policy(2))
    assert (versions.policy.version, versions.announced.version) == (2, 7), "what is served need not be the newest"


# Failover.


class DyingBackend:
    """Backend whose engines each die after the given number of events. The one after them does not."""

    def __init__(self, host, *lives):
        self.host, self.lives, self.jobs = host, list(lives), []

    async def stream(self, job):
        self.jobs.append(job)
        life = self.lives.pop(0) if self.lives else 10_000
        async with aclosing(self.host.stream(job)) as stream:
            async for events in stream:
                for event in events:
                    if not life:
                        raise EngineLostError("SIGKILL")
                    life -= 1
                    yield [event]

    async def states(self):
        return []


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("lives", [(0,), (1,), (2,), (3, 2), (4, 0, 5)])
def test_failover_continues_a_job_with_identical_tokens(host, lives, temperature):
    work = Job(requests={seed: request(seed, temperature=temperature) for seed in (0, 1)}, wanted="policy")
    whole = asyncio.run(collect(with_failover(DyingBackend(host), work, may_restart=False)))
    backend = DyingBackend(host, *lives)
    again = asyncio.run(collect(with_failover(backend, work, may_restart=False)))
    assert len(backend.jobs) == len(lives) + 1
    assert len(of(Began, again)) == 1
    assert ids(again) == ids(whole)
    steps = {event.choice: event.completion.step_map.tolist() for event in of(Done, again)}
    assert steps == {event.choice: event.completion.step_map.tolist() for event in of(Done, whole)}
    for choice in (0, 1):
        starts = [event.start for event in of(BlocksDone, again) if event.choice == choice]
        assert starts == [0, 8, 16]
    assert not of(Refused, again)
    if lives == (4, 0, 5):
        assert backend.jobs[-1].began_with is not None
        assert any(one.committed is not None for one in backend.jobs[-1].requests.values())


def test_without_its_version_a_stream_fails_and_a_whole_answer_restarts(host, versions, make_policy, make_sampler):
    class Forgetful(DyingBackend):
        """The second engine has other weights under the same version number."""

        async def stream(self, job):
            if len(self.jobs) == 1:
                begun = versions.policy.version
                versions.adopt(make_policy(begun, manifest_digest="new"))
                versions.adopt(make_policy(begun + 10, manifest_digest="c"))
            async with aclosing(super().stream(job)) as stream:
                async for events in stream:
                    yield events

    versions.learn(replace(versions.policy, manifest_digest="a"))
    versions._most_live = 2
    events = asyncio.run(collect(with_failover(Forgetful(host, 3), job(), may_restart=False)))
    assert isinstance(events[-1], Refused)
    assert (events[-1].status, events[-1].code) == (503, "version_gone")
    versions.adopt(make_policy(2, manifest_digest="b"))
    again = asyncio.run(collect(with_failover(Forgetful(host, 3), job(), may_restart=True)))
    assert [event.policy.manifest_digest for event in of(Began, again)] == ["b", "c"]
    assert not of(Refused, again)
    assert len(of(Done, again)) == 1


def test_a_job_that_loses_too_many_engines_is_refused(host, monkeypatch):
    monkeypatch.setattr("deploy.service.failover._PAUSE_S", 0)
    backend = DyingBackend(host, *[0] * MAX_LOST)
    events = asyncio.run(collect(with_failover(backend, job(), may_restart=True)))
    assert [event.code for event in events] == ["engine_unavailable"]
