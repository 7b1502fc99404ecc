"""From a seed to the faults of a session. Pure: the same arguments give the same list."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from random import Random

from deploy.chaos.faults import Fault, Harm, Moment, Setting, Target

_SIGNALS = (Harm.KILL, Harm.STOP, Harm.TERM)
_MACHINE = {Target.DISK: Harm.FILL, Target.CLOCK: Harm.JUMP, Target.BYTES: Harm.FLIP, Target.POOL: Harm.SCALE}
_AT_NAMED_POINTS = (
    (Moment.PUBLISHED, (Target.LEARNER, Target.COORDINATOR, Target.STORE, Target.DRIVER)),
    (Moment.CHECKPOINT, (Target.LEARNER, Target.DRIVER, Target.COORDINATOR)),
    (Moment.COLLECTIVE, (Target.LEARNER,)),
)
# Somebody has to replace these when they hang. The others nobody supervises but their user, or Ray's.
_REPLACED = {Target.SAMPLER, Target.GRADER, Target.LEARNER, Target.CONTROLLER, Target.COORDINATOR, Target.STORE}
_DELAY_S, _STOP_S, _FULL_S, _DOWN_S = (0.2, 4.0), (1.0, 10.0), (1.0, 6.0), (0.5, 8.0)
# One that comes takes some seconds to be up.
_SCALED_S = (0.5, 15.0)
_JUMPS_S = (-7200.0, -60.0, 60.0, 7200.0)

Kind = tuple[Target, Harm, Moment]


def schedule(kills: int, seed: int, targets: Collection[Target] = tuple(Target)) -> list[Fault]:
    """`kills` faults, those of one setting together.

    With enough of them each target and each named point comes at least once; with more, each signal to each role; what
    is left is drawn. A seed's faults do not depend on what happens when they are carried out.
    """
    draw = Random(seed)  # noqa: S311 - no secret
    chosen: list[Kind] = []
    for wave in (_each_once(targets), _named_points(targets), _each_signal(targets)):
        shuffled = [kind for kind in wave if kind not in chosen]
        draw.shuffle(shuffled)
        chosen += shuffled
    everything = sorted(chosen)
    while len(chosen) < kills:
        chosen.append(draw.choice(everything))
    faults = [_fault(kind, draw) for kind in chosen[:kills]]
    draw.shuffle(faults)
    faults.sort(key=lambda fault: list(Setting).index(fault.setting))
    return [replace(fault, number=number) for number, fault in enumerate(faults, start=1)]


def _each_once(targets: Collection[Target]) -> Iterator[Kind]:
    for target in targets:
        moment = Moment.WRITTEN if target is Target.BYTES else Moment.ANY
        yield target, _MACHINE.get(target, Harm.KILL), moment


def _named_points(targets: Collection[Target]) -> Iterator[Kind]:
    for moment, roles in _AT_NAMED_POINTS:
        yield from ((role, Harm.KILL, moment) for role in roles if role in targets)


def _each_signal(targets: Collection[Target]) -> Iterator[Kind]:
    for target in targets:
        if target not in _MACHINE:
            yield from ((target, signal, Moment.ANY) for signal in _SIGNALS)


def _fault(kind: Kind, draw: Random) -> Fault:
    target, harm, moment = kind
    seconds: float | None = None
    if harm is Harm.STOP:
        is_for_ever = draw.random() < 0.5 and target in _REPLACED
        seconds = None if is_for_ever else draw.uniform(*_STOP_S)
    elif harm is Harm.SCALE:
        seconds = draw.uniform(*_SCALED_S)
    elif harm is Harm.FILL:
        seconds = draw.uniform(*_FULL_S)
    elif harm is Harm.JUMP:
        seconds = draw.choice(_JUMPS_S)
    elif target is Target.GCS_ON_REDIS:
        seconds = draw.uniform(*_DOWN_S)
    delay_s, choice = draw.uniform(*_DELAY_S), draw.random()
    return Fault(number=0, target=target, harm=harm, moment=moment, delay_s=delay_s, choice=choice, seconds=seconds)
