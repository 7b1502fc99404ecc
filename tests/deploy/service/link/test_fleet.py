"""Jobs from an ingress to engines, over connections of their own: who is asked, who may ask, what a broken one is."""

import asyncio
import struct
from contextlib import aclosing
from dataclasses import fields, is_dataclass, replace
from pathlib import Path

import msgpack
import numpy as np
import pytest

from actors.registry.records import PolicyVersion
from deploy.service.contract import Began, BlocksDone, CanvasSeen, Done, EngineLostError, Job, NoEngineError, Refused
from deploy.service.engine.engine_server import EngineServer
from deploy.service.link import connection as wire_module
from deploy.service.link import fleet as fleet_module
from deploy.service.link.connection import Connection, ProtocolError
from deploy.service.link.contact import LOOPBACK
from deploy.service.link.failover import MAX_LOST, with_failover
from deploy.service.link.fleet import Fleet
from deploy.service.link.serialization import pack, unpack
from rollout.request import FinishReason, Request, SamplingParams, Writes

PARAMS = SamplingParams(gen_length=16, block_length=8, num_denoise_steps=8, temperature=0.9, stop_ids=())
TIMEOUT_S = 20.0
FACTS = dict.fromkeys(("num_correct", "num_problems", "checkpoint", "weight_store", "manifest_digest"))
POLICY = PolicyVersion(version=3, round=2, phase="rl", **FACTS)


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """However busy the machine is: an engine that is there is reached."""
    monkeypatch.setattr(fleet_module, "_CONNECT_TIMEOUT_S", 60.0)


def job(*seeds):
    requests = tuple(Request(prompt_ids=(5, 6, 7), params=PARAMS, seed=seed) for seed in seeds or (1,))
    return Job(requests=requests, wanted="policy")


class Known:
    """A directory of engines that listen in this process."""

    def __init__(self, *listeners):
        self.listeners, self.num_asked = list(listeners), 0

    async def contacts(self):
        self.num_asked += 1
        return [listener.contact() for listener in self.listeners]

    async def states(self):
        return []


class Slow:
    """An engine that answers when it is let."""

    def __init__(self):
        self.num_begun = self.num_left = 0
        self.may_end = False

    async def stream(self, _job):
        self.num_begun += 1
        try:
            yield [Began(policy=POLICY)]
            while not self.may_end:
                await asyncio.sleep(0.005)
            yield [Refused(status=400, code="enough", message="That was it.")]
        finally:
            self.num_left += 1


class Failing:
    """An engine that fails after its first event."""

    def __init__(self, error, policy=POLICY):
        self.error, self.policy = error, policy

    async def stream(self, _job):
        yield [Began(policy=self.policy)]
        raise self.error


class Lingering:
    """An engine that is not done when it has said its last."""

    def __init__(self):
        self.num_lingered = 0

    async def stream(self, _job):
        yield [Refused(status=400, code="enough", message="That was it.")]
        self.num_lingered += 1
        await asyncio.sleep(0.2)


@pytest.fixture
def listen():
    """Makes engines listen."""
    listeners = []

    def one(host, replica="a"):
        listeners.append(EngineServer(host, replica))
        return listeners[-1]

    yield one
    for listener in listeners:
        if listener.is_alive:
            listener.close(0.0)


def with_fleet(directory, use):
    """What `use` makes of a fleet, which is closed then."""

    async def run():
        async with aclosing(Fleet(directory)) as fleet:
            return await use(fleet)

    return asyncio.run(run())


async def all_of(stream):
    async with aclosing(stream):
        return [event async for events in stream for event in events]


async def all_events(stream):
    async with aclosing(stream):
        return [event async for event in stream]


async def until(condition):
    async with asyncio.timeout(TIMEOUT_S):
        while not condition():
            await asyncio.sleep(0.005)


def texts(events):
    return {event.choice: event.completion.token_ids.tolist() for event in events if isinstance(event, Done)}


def test_a_job_over_the_wire_is_the_job_in_the_engine(listen, host):
    there = with_fleet(Known(listen(host)), lambda fleet: all_of(fleet.stream(job(1, 2))))
    here = asyncio.run(all_of(host.stream(job(1, 2))))
    assert isinstance(there[0], Began)
    assert there[0] == here[0]
    assert texts(there) == texts(here)
    assert set(texts(there)) == {0, 1}


def test_the_engine_with_the_fewest_choices_is_asked(listen, monkeypatch):
    monkeypatch.setattr(fleet_module, "_LOOK_EVERY_S", 600.0)  # However busy the machine is.
    slow = [Slow(), Slow()]
    known = Known(listen(slow[0], "a"), listen(slow[1], "b"))

    async def run(fleet):
        tasks = []
        for seeds, begun in (((1, 2, 3), (1, 0)), ((1,), (1, 1)), ((1,), (1, 2)), ((1,), (1, 3))):
            tasks.append(asyncio.create_task(all_of(fleet.stream(job(*seeds)))))
            await until(lambda: sum(one.num_begun for one in slow) == len(tasks))
            assert tuple(one.num_begun for one in slow) == begun
        for one in slow:
            one.may_end = True
        await asyncio.gather(*tasks)
        # Nothing is under way: they take turns.
        for _ in range(4):
            await all_of(fleet.stream(job()))

    with_fleet(known, run)
    assert [one.num_begun for one in slow] == [3, 5]
    assert known.num_asked == 1


def test_who_leaves_ends_the_job_at_once(listen):
    slow = Slow()

    async def run(fleet):
        async with aclosing(fleet.stream(job())) as stream:
            assert isinstance((await anext(stream))[0], Began)
        await until(lambda: slow.num_left == 1)

    with_fleet(Known(listen(slow)), run)


def test_an_engine_whose_connection_breaks_is_lost_and_another_goes_on(listen, host):
    dying = listen(Failing(ConnectionResetError("SIGKILL"), host.versions.policy), "a")

    with pytest.raises(EngineLostError, match="IncompleteReadError"):
        with_fleet(Known(dying), lambda fleet: all_of(fleet.stream(job())))

    # The one that is lost is not asked again before the directory has been.
    known = Known(dying, listen(host, "b"))
    events = with_fleet(known, lambda fleet: all_events(with_failover(fleet, job(), may_restart=True)))
    assert texts(events) == texts(asyncio.run(all_of(host.stream(job()))))


class Starting(Known):
    """A directory whose engines come late."""

    async def contacts(self):
        found = await super().contacts()
        return found if self.num_asked > 2 * MAX_LOST else []


def test_a_job_waits_for_an_engine_as_long_as_it_may_take(listen, host, monkeypatch):
    monkeypatch.setattr("deploy.service.link.failover._LOOK_EVERY_S", 0.0)

    def asked(known, work):
        return with_fleet(known, lambda fleet: all_events(with_failover(fleet, work, may_restart=True)))

    assert texts(asked(Starting(listen(host)), job())) == texts(asyncio.run(all_of(host.stream(job()))))
    (refused,) = asked(Known(), replace(job(), timeout_s=0.1))
    assert (refused.status, refused.code) == (503, "engine_unavailable")


def test_a_contact_that_does_not_answer_is_no_engine(listen):
    gone = listen(Slow())
    known = Known(gone)
    contact = gone.contact()
    gone.close(0.0)

    async def contacts():
        return [contact]

    known.contacts = contacts
    with pytest.raises(NoEngineError, match="ConnectionRefusedError"):
        with_fleet(known, lambda fleet: all_of(fleet.stream(job())))


def test_a_mistake_of_the_engine_is_no_death(listen):
    known = Known(listen(Failing(ZeroDivisionError())))
    events = with_fleet(known, lambda fleet: all_of(fleet.stream(job())))
    assert [event.code for event in events if isinstance(event, Refused)] == ["engine_failed"]


def test_the_log_of_a_mistake_shows_neither_the_prompt_nor_the_secret(listen, capsys):
    class Careless:
        async def stream(self, job):
            secret, asked = contact.secret, job  # noqa: F841 - what a debugger would show
            yield [Began(policy=POLICY)]
            raise ZeroDivisionError

    listener = listen(Careless())
    contact = listener.contact()
    with_fleet(Known(listener), lambda fleet: all_of(fleet.stream(job())))
    log = capsys.readouterr().out
    assert "job_failed" in log
    assert "Traceback (most recent call last)" in log
    assert "ZeroDivisionError" in log
    assert "5, 6, 7" not in log
    assert repr(contact.secret)[2:12] not in log


def test_engines_that_come_later_are_found_and_those_that_stopped_are_not_asked(listen, host, monkeypatch):
    monkeypatch.setattr(fleet_module, "_LOOK_EVERY_S", 0.0)
    first, second = listen(Slow(), "a"), Slow()

    known = Known()

    async def run(fleet):
        with pytest.raises(EngineLostError, match="no engine answers"):
            await all_of(fleet.stream(job()))
        known.listeners = [first]
        under_way = fleet.stream(job())
        await anext(under_way)
        # It takes no more, and what is under way goes on.
        closing = asyncio.create_task(asyncio.to_thread(first.close, TIMEOUT_S))
        await until(lambda: not first._servers[LOOPBACK].is_serving())
        known.listeners = [listen(second, "b")]
        second.may_end = True
        num_lost = 0
        while not second.num_begun:
            try:
                await all_of(fleet.stream(job()))
            except EngineLostError:
                num_lost += 1
        assert num_lost <= 1
        assert first.is_alive
        first._host.may_end = True
        assert [event.code for event in await anext(under_way)] == ["enough"]
        await under_way.aclose()
        await closing
        assert not first.is_alive

    with_fleet(known, run)


def test_who_was_asked_how_engines_stand_has_found_them(listen, host, monkeypatch):
    monkeypatch.setattr(fleet_module, "_LOOK_EVERY_S", 600.0)  # However busy the machine is.
    known = Known(listen(host))

    async def run(fleet):
        await fleet.states()
        num_asked = known.num_asked
        assert texts(await all_of(fleet.stream(job())))
        assert (num_asked, known.num_asked) == (1, 1)

    with_fleet(known, run)


def test_a_connection_is_used_again_and_another_opened_where_one_is_in_use(listen, host, monkeypatch):
    listener, calls, call = listen(host), [], Connection.call
    monkeypatch.setattr(Connection, "call", lambda *arguments: (calls.append(arguments), call(*arguments))[1])

    async def run(fleet):
        for _ in range(3):
            await all_of(fleet.stream(job()))
        assert len(calls) == 1
        first, second = fleet.stream(job(1)), fleet.stream(job(2))
        await anext(first)
        await anext(second)
        assert len(calls) == 2
        # Left before its end, a job's connection is not: what still comes is not the next one's.
        await first.aclose()
        expected = texts(await all_of(second))
        await until(lambda: len(listener._connections) == 1)
        assert texts(await all_of(fleet.stream(job(2)))) == expected
        assert len(calls) == 2

    with_fleet(Known(listener), run)


def test_connections_that_were_idle_for_long_are_not_used(listen, host, monkeypatch):
    listener = listen(host)

    async def run(fleet):
        await all_of(fleet.stream(job()))
        # The engine has closed it.
        for connection in list(listener._connections):
            listener._loop.call_soon_threadsafe(connection.cancel)
        await until(lambda: not listener._connections)
        monkeypatch.setattr(fleet_module, "_MOST_IDLE_S", 0.0)
        assert texts(await all_of(fleet.stream(job())))

    with_fleet(Known(listener), run)


def test_an_engine_that_is_closing_takes_no_job_on_a_connection_that_it_has(listen):
    slow = Slow()
    listener = listen(slow)

    async def run(fleet):
        slow.may_end = True
        first, second = fleet.stream(job()), fleet.stream(job())
        await anext(first)
        await anext(second)
        # One connection is idle then, the other is not.
        await all_of(first)
        closing = asyncio.create_task(asyncio.to_thread(listener.close, TIMEOUT_S))
        await until(lambda: listener._is_closing)
        with pytest.raises(EngineLostError):
            await all_of(fleet.stream(job()))
        await second.aclose()
        await closing
        assert slow.num_begun == 2

    with_fleet(Known(listener), run)


def test_an_engine_that_says_nothing_for_too_long_is_lost(listen, monkeypatch):
    monkeypatch.setattr(fleet_module, "_GRACE_S", 0.05)
    with pytest.raises(EngineLostError, match="TimeoutError"):
        with_fleet(Known(listen(Slow())), lambda fleet: all_of(fleet.stream(replace(job(), timeout_s=0.0))))


def test_nothing_listens_beyond_loopback_until_it_is_asked_to(listen):
    listener = listen(Slow())
    assert listener._servers == {}
    contact = listener.contact()
    assert (contact.host, contact) == (LOOPBACK, listener.contact())
    assert [server.sockets[0].getsockname()[0] for server in listener._servers.values()] == [LOOPBACK]
    assert contact.secret.hex() not in repr(contact)
    assert listener.contact("127.0.0.2").host == "127.0.0.2"


def test_a_stranger_is_not_listened_to(listen):
    slow = Slow()
    contact = listen(slow).contact()

    async def run():
        # The listener proves itself first; this caller does not mind.
        reader, writer = await asyncio.open_connection(contact.host, contact.port)
        writer.write(b"n" * 16)
        await reader.readexactly(48)
        payload = pack(job())
        writer.write(b"p" * 32 + struct.pack("!I32s", len(payload), b"s" * 32) + payload)
        assert await reader.read() == b""
        writer.close()

    asyncio.run(run())
    assert slow.num_begun == 0


def test_what_was_recorded_opens_no_second_connection(listen):
    slow = Slow()
    slow.may_end = True
    contact = listen(slow).contact()

    async def run():
        said, heard = [], await asyncio.open_connection(contact.host, contact.port)

        async def pass_on(reader, writer):
            said.append(await reader.readexactly(16))
            heard[1].write(said[0])
            writer.write(await heard[0].readexactly(48))
            while data := await reader.read(4096):
                said.append(data)
                heard[1].write(data)
            writer.close()

        between = await asyncio.start_server(pass_on, LOOPBACK, 0)
        wire = await Connection.call(LOOPBACK, between.sockets[0].getsockname()[1], contact.secret)
        await wire.send(job())
        await until(lambda: slow.num_begun == 1)
        await wire.close()
        reader, writer = await asyncio.open_connection(contact.host, contact.port)
        writer.write(b"".join(said))
        await reader.readexactly(48)
        assert await reader.read() == b""
        for one in (writer, heard[1], between):
            one.close()

    asyncio.run(run())
    assert slow.num_begun == 1


def test_who_took_the_port_of_a_dead_engine_is_told_nothing():
    said = []

    async def impostor(reader, writer):
        said.append(await reader.readexactly(16))
        writer.write(b"n" * 16 + b"p" * 32)
        said.append(await reader.read())
        writer.close()

    async def run():
        server = await asyncio.start_server(impostor, LOOPBACK, 0)
        with pytest.raises(ProtocolError, match="does not know the secret"):
            await Connection.call(LOOPBACK, server.sockets[0].getsockname()[1], b"k" * 32)
        await until(lambda: len(said) == 2)
        server.close()

    asyncio.run(run())
    assert said[1] == b""


def test_a_message_that_was_changed_on_its_way_is_refused(listen):
    slow = Slow()
    contact = listen(slow).contact()

    async def run():
        wire = await Connection.call(contact.host, contact.port, contact.secret)
        write = wire._writer.write
        wire._writer.write = lambda data: write(data[:-1] + bytes([data[-1] ^ 1]))
        await wire.send(job())
        with pytest.raises((EOFError, OSError)):
            await wire.receive()
        await wire.close()

    asyncio.run(run())
    assert slow.num_begun == 0


def test_the_next_job_may_come_as_soon_as_the_last_event_has(listen):
    lingering = Lingering()
    contact = listen(lingering).contact()

    async def run():
        wire = await Connection.call(contact.host, contact.port, contact.secret)
        for _ in range(3):
            await wire.send(job())
            is_last, _ = await wire.receive()
            assert is_last
        await wire.close()

    asyncio.run(run())
    assert lingering.num_lingered == 0


def test_a_message_has_a_limit(listen, monkeypatch):
    contact = listen(Slow()).contact()

    async def run():
        wire = await Connection.call(contact.host, contact.port, contact.secret)
        monkeypatch.setattr(wire_module, "MAX_MESSAGE_BYTES", 10)
        with pytest.raises(ValueError, match="too large"):
            await wire.send(job())
        wire._writer.write(struct.pack("!I32s", 1000, b"s" * 32))
        with pytest.raises((EOFError, OSError)):
            await wire.receive()
        await wire.close()

    asyncio.run(run())


def test_every_message_comes_back_as_it_was(host):
    asked = replace(job(1, 2**63 - 1), shows_canvas=True, began_with=POLICY)
    events = asyncio.run(all_of(host.stream(replace(job(1, 2), shows_canvas=True))))
    kinds = {type(event) for event in events}
    assert kinds == {Began, BlocksDone, CanvasSeen, Done}
    committed = next(event.slots for event in events if isinstance(event, BlocksDone))
    infill = replace(asked.requests[0], fixed_tokens={3: 7}, committed=committed)
    refused = Refused(status=429, code="overloaded", message="Too much: é", retry_after_s=1)
    finished = [event.completion.finish_reason for event in unpack(pack(events)) if isinstance(event, Done)]
    assert {type(reason) for reason in finished} == {FinishReason}
    done = next(event for event in events if isinstance(event, Done))
    edited = replace(done, completion=replace(done.completion, writes=Writes.none()))
    for message in (asked, replace(asked, requests=(infill,)), refused, edited, *events):
        assert_same(unpack(pack(message)), message)


def assert_same(got, wanted):
    # A field that takes any text may have held a word of an enumeration.
    assert type(got) is type(wanted) or type(got) is str
    if is_dataclass(wanted):
        for column in fields(wanted):
            assert_same(getattr(got, column.name), getattr(wanted, column.name))
    elif isinstance(wanted, np.ndarray):
        assert got.dtype == wanted.dtype
        np.testing.assert_array_equal(got, wanted)
    elif isinstance(wanted, tuple):
        assert len(got) == len(wanted)
        for one, other in zip(got, wanted, strict=True):
            assert_same(one, other)
    else:
        assert got == wanted


def test_what_is_no_message_is_refused():
    with pytest.raises(TypeError, match="Path is no message"):
        pack(Path("x"))
    for data in (b"", b"\xc1", msgpack.packb(msgpack.ExtType(9, b"")), record("Path", {}), record("Job", {"x": 1})):
        with pytest.raises(ValueError, match="this is no message"):
            unpack(data)
    deep = None
    for _ in range(200):
        deep = msgpack.ExtType(1, msgpack.packb(["Began", deep]))
    with pytest.raises(ValueError, match="nested too deeply"):
        unpack(msgpack.packb(deep))
    array = msgpack.ExtType(2, msgpack.packb(["O", [1], b"\0" * 8]))
    with pytest.raises(ValueError, match="no part of a message"):
        unpack(msgpack.packb(array))


def record(name, known):
    return msgpack.packb(msgpack.ExtType(1, msgpack.packb([name, known])))
