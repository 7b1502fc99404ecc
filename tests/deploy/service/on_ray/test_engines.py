"""Calls from an ingress to engines, through a stand-in for a handle of Ray Serve."""

import asyncio
import pickle
from contextlib import aclosing
from dataclasses import replace

import pytest
from ray.exceptions import RayActorError

from deploy.service.contract import Began, BlocksDone, Done, EngineLostError, Job
from deploy.service.failover import with_failover
from rollout.request import Request, SamplingParams

pytestmark = pytest.mark.filterwarnings("ignore:Using extra keyword arguments on `Field`:DeprecationWarning")
PARAMS = SamplingParams(gen_length=16, block_length=8, num_denoise_steps=8, temperature=0.9, stop_ids=())


@pytest.fixture
def ingress():
    """The module, imported while the warning of Ray Serve's schema is ignored."""
    from deploy.service.on_ray import ingress

    return ingress


def job(*seeds):
    requests = [Request(prompt_ids=(5, 6, 7), params=PARAMS, seed=seed) for seed in seeds or (1,)]
    return Job(requests=dict(enumerate(requests)), wanted="policy")


class Response:
    """A streaming response of Serve's: serializes what an engine yields."""

    def __init__(self, events, error=None, dies_after=None):
        self.events, self.error, self.dies_after = events, error, dies_after
        self.is_cancelled = False

    async def __anext__(self):
        if self.dies_after == 0:
            raise self.error
        if self.dies_after is not None:
            self.dies_after -= 1
        return pickle.loads(pickle.dumps(await anext(self.events)))

    def cancel(self):
        self.is_cancelled = True


class Handle:
    """A handle whose calls fail as told, one after another, and then succeed."""

    def __init__(self, host, *failures):
        self.host, self.failures, self.responses = host, list(failures), []

    def options(self, *, method_name, stream):
        assert (method_name, stream) == ("stream", True)
        return self

    def remote(self, work):
        error, after = self.failures.pop(0) if self.failures else (None, None)
        self.responses.append(Response(self.host.stream(pickle.loads(pickle.dumps(work))), error, after))
        return self.responses[-1]


async def all_of(stream):
    async with aclosing(stream):
        return [event async for events in stream for event in events]


async def all_events(stream):
    async with aclosing(stream):
        return [event async for event in stream]


def texts(events):
    return {event.choice: event.completion.token_ids.tolist() for event in events if isinstance(event, Done)}


def test_a_job_through_a_handle_equals_the_job_in_the_engine(ingress, host):
    handle = Handle(host)
    there = asyncio.run(all_of(ingress.ServeEngines(handle).stream(job(1, 2))))
    here = asyncio.run(all_of(host.stream(job(1, 2))))
    assert isinstance(there[0], Began)
    assert there[0] == here[0]
    assert texts(there) == texts(here)
    assert set(texts(there)) == {0, 1}
    assert not handle.responses[0].is_cancelled


@pytest.mark.parametrize("is_refused", [False, True])
def test_an_engine_that_dies_or_refuses_is_lost_and_another_continues(ingress, host, monkeypatch, is_refused):
    from ray.serve.exceptions import BackPressureError

    error = BackPressureError(1, 1) if is_refused else RayActorError()
    monkeypatch.setattr("deploy.service.failover._PAUSE_S", 0)
    with pytest.raises(EngineLostError, match=type(error).__name__):
        asyncio.run(all_of(ingress.ServeEngines(Handle(host, (error, 1))).stream(job())))
    handle = Handle(host, (error, 0), (error, 2), (error, 1))
    events = asyncio.run(all_events(with_failover(ingress.ServeEngines(handle), job(), may_restart=False)))
    whole = asyncio.run(all_of(host.stream(job())))
    assert texts(events) == texts(whole)
    assert [event.start for event in events if isinstance(event, BlocksDone)] == [
        event.start for event in whole if isinstance(event, BlocksDone)
    ]
    assert len(handle.responses) == 4


def test_a_client_that_disconnects_cancels_the_call(ingress, host):
    handle = Handle(host)

    async def leave():
        async with aclosing(ingress.ServeEngines(handle).stream(job())) as stream:
            assert isinstance((await anext(stream))[0], Began)

    asyncio.run(leave())
    assert handle.responses[0].is_cancelled


class Silent:
    """An engine that never answers, as if there were none."""

    async def stream(self, _job):
        await asyncio.sleep(60)
        yield []


def test_a_job_that_no_engine_accepts_is_refused_after_its_timeout(ingress, monkeypatch):
    monkeypatch.setattr(ingress, "_GRACE_S", 0.05)
    handle = Handle(Silent())
    work = replace(job(), timeout_s=0.1)
    (refused,) = asyncio.run(all_events(with_failover(ingress.ServeEngines(handle), work, may_restart=True)))
    assert (refused.status, refused.code, refused.retry_after_s) == (503, "engine_unavailable", 5)
    assert [response.is_cancelled for response in handle.responses] == [True]
