"""The objectives of every algorithm, restated from their papers: plain loops in float64 over rows, draws and tokens.

Nothing of the learner's is used but the masks, which are random: canvases are built here, one at a time, and each
formula is written out on its own. Slow.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from learner.batch import GroupedBatch
from learner.estimators import Corruption
from learner.model.transformer import Transformer


@dataclass(frozen=True, slots=True)
class Draw:
    """One canvas: the slots it masks, those it scores, and the likelihoods of their tokens by three policies."""

    part: int
    masked: list[int]
    scored: list[int]
    new: dict[int, Tensor]
    old: dict[int, Tensor]
    reference: dict[int, Tensor]
    weight: float
    top_new: dict[int, Tensor]
    top_old: dict[int, Tensor]
    places: dict[int, int]


@dataclass(frozen=True, slots=True)
class Row:
    """One completion."""

    group: int
    reward: float
    parts: list[float]
    correct: bool
    length: int
    width: int
    denoised: int
    draws: list[Draw]
    sampled: list[float]


def rows_of(
    policies: tuple[Transformer, Transformer, Transformer], batch: GroupedBatch, corruption: Corruption
) -> list[Row]:
    """Every completion with its canvases; policies are new, old and reference, in float64."""
    law = corruption.law
    rows = []
    for row in range(batch.num_rows):
        draws = []
        for canvas in (corruption.rows == row).nonzero()[:, 0].tolist():
            scored = corruption.scored[canvas].nonzero()[:, 0].tolist()
            if not scored:
                continue
            masked = corruption.masked[canvas].nonzero()[:, 0].tolist()
            prompt = batch.prompt_ids[row, : batch.prompt_lengths[row]].clone()
            mask_id = policies[0].config.mask_token_id
            if corruption.prompt_masked is not None:
                prompt[corruption.prompt_masked[canvas, : len(prompt)]] = mask_id
            completion = batch.completion_ids[row].clone()
            completion[masked] = mask_id
            ids = torch.cat((prompt, completion))[None]
            values: list[dict[int, Tensor]] = []
            tops: list[dict[int, Tensor]] = []
            places = {}
            if corruption.places is not None:
                places = {slot: int(place) for slot, place in enumerate(corruption.places[canvas]) if place >= -1}
            for policy in policies:
                logits = policy(ids)[0, len(prompt) :] / law.temperature
                if law.excludes_mask_id:
                    logits = logits.clone()
                    logits[:, mask_id] = -torch.inf
                logps = logits.log_softmax(-1)
                values.append({slot: logps[slot, batch.completion_ids[row, slot]] for slot in scored})
                others = [token for token in range(logps.shape[1]) if token != mask_id]
                tops.append({slot: logps[slot, others].max() for slot in places})
            new, old, reference = values
            part = 0 if corruption.parts is None else int(corruption.parts[canvas])
            detached = [{slot: value.detach() for slot, value in some.items()} for some in (old, reference)]
            weight = 1.0 if corruption.weights is None else float(corruption.weights[canvas, scored[0]])
            top_old = {slot: value.detach() for slot, value in tops[1].items()}
            draws.append(Draw(part, masked, scored, new, *detached, weight, tops[0], top_old, places))
        rows.append(
            Row(
                group=int(batch.group_index[row]),
                reward=float(batch.rewards[row]),
                parts=batch.reward_parts[row].tolist(),
                correct=bool(batch.correct[row]),
                length=int(batch.completion_lengths[row]),
                width=batch.num_slots,
                denoised=sum(step >= 0 for step in batch.step_map[row].tolist()),
                draws=draws,
                sampled=batch.commit_logp[row].tolist(),
            )
        )
    return rows


# Advantages, one group at a time.


def groups_of(rows: list[Row]) -> Iterator[list[Row]]:
    for _, members in groupby(rows, key=lambda row: row.group):
        yield list(members)


def group_mean(rows: list[Row]) -> list[float]:
    return [row.reward - sum(r.reward for r in group) / len(group) for group in groups_of(rows) for row in group]


def group_z(rows: list[Row]) -> list[float]:
    advantages = []
    for group in groups_of(rows):
        mean = sum(row.reward for row in group) / len(group)
        std = math.sqrt(sum((row.reward - mean) ** 2 for row in group) / len(group))
        advantages += [(row.reward - mean) / (std + 1e-4) for row in group]
    return advantages


def leave_one_out(rows: list[Row]) -> list[float]:
    advantages = []
    for group in groups_of(rows):
        for row in group:
            others = [other.reward for other in group if other is not row]
            advantages.append(row.reward - sum(others) / len(others))
    return advantages


# What several have in common.


def ppo(ratio: Tensor, advantage: float, low: float, high: float) -> Tensor:
    return -torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)


def k3(new: Tensor, against: Tensor) -> Tensor:
    return (against - new).exp() - (against - new) - 1


def tokens_of(row: Row) -> Iterator[tuple[int, Draw]]:
    for draw in row.draws:
        for slot in draw.scored:
            yield slot, draw


# The algorithms.


def diffu_grpo(rows: list[Row]) -> Tensor:
    total, count = torch.zeros((), dtype=torch.float64), 0
    for row, advantage in zip(rows, group_mean(rows), strict=True):
        for slot, draw in tokens_of(row):
            ratio = (draw.new[slot] - draw.old[slot]).exp()
            total = total + ppo(ratio, advantage, 0.5, 0.5) + 0.04 * k3(draw.new[slot], draw.reference[slot])
            count += 1
    return total / count


def diffu_grpo_parity(rows: list[Row]) -> Tensor:
    """The token mean of each group (a worker's micro-batch), averaged."""
    losses, advantages = [], iter(group_mean(rows))
    for group in groups_of(rows):
        total, count = torch.zeros((), dtype=torch.float64), 0
        for row in group:
            advantage = next(advantages)
            for slot, draw in tokens_of(row):
                ratio = (draw.new[slot] - draw.old[slot]).exp()
                total = total + ppo(ratio, advantage, 0.5, 0.5) + 0.04 * k3(draw.new[slot], draw.reference[slot])
                count += 1
        losses.append(total / count)
    return torch.stack(losses).mean()


def wd1(rows: list[Row]) -> Tensor:
    losses, advantages = [], iter(group_mean(rows))
    for group in groups_of(rows):
        own = torch.tensor([next(advantages) for _ in group], dtype=torch.float64)
        weights = own.softmax(0) - (-own).softmax(0)
        losses.append(
            sum(
                -weight * sum(draw.new[slot] for slot, draw in tokens_of(row))
                for row, weight in zip(group, weights, strict=True)
            )
        )
    return torch.stack(losses).mean()


def coupled_grpo(rows: list[Row]) -> Tensor:
    """Half the fully masked value, half 1 / t or 1 / (1 - t) times the one under the mask; t is in the batch's mask."""
    total, count = torch.zeros((), dtype=torch.float64), 0
    for row, advantage in zip(rows, leave_one_out(rows), strict=True):
        ratios = row_ratios[id(row)]
        for slot in range(row.length):
            weights = {0: 1.0, 1: 1 / ratios, 2: 1 / (1 - ratios)}
            hiding = [(weights[draw.part] / 2, draw) for draw in row.draws if slot in draw.scored]
            assert len(hiding) == 2, "once fully masked, once in the mask or its complement"
            new = sum(weight * draw.new[slot] for weight, draw in hiding)
            old = sum(weight * draw.old[slot] for weight, draw in hiding)
            reference = sum(weight * draw.reference[slot] for weight, draw in hiding)
            total = total + ppo((new - old).exp(), advantage, 0.5, 0.5) + 0.01 * k3(new, reference)
            count += 1
    return total / count


row_ratios: dict[int, float] = {}
"""What `coupled_grpo` is told: t of each row."""


def unigrpo(rows: list[Row]) -> Tensor:
    losses = []
    for row, advantage in zip(rows, group_z(rows), strict=True):
        values = [
            ppo((draw.new[slot] - draw.old[slot]).exp(), advantage, 0.2, 0.2)
            + 0.04 * k3(draw.new[slot], draw.reference[slot])
            for slot, draw in tokens_of(row)
        ]
        losses.append(torch.stack(values).mean() if values else None)
    return sum(loss for loss in losses if loss is not None) / len(rows)


def _lower(row: Row, name: str = "new") -> Tensor:
    """The mean over draws of the mean log-probability of a scored token; a draw without any is 0."""
    num_draws = NUM_DRAWS["value"]
    return sum(torch.stack([getattr(d, name)[s] for s in d.scored]).mean() for d in row.draws) / num_draws


def _upper(row: Row, beta: float) -> Tensor:
    """1 / beta times the mean over tokens of log mean over draws of p^beta / t where masked."""
    num_draws, logs = NUM_DRAWS["value"], []
    for slot in range(row.length):
        powers = [
            (beta * draw.new[slot]).exp() / (len(draw.scored) / row.length) for draw in row.draws if slot in draw.scored
        ]
        if powers:
            logs.append((sum(powers) / num_draws).log())
    return torch.stack(logs).mean() / beta


NUM_DRAWS = {"value": 2}


def _spg(rows: list[Row], mix: float) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for row, advantage in zip(rows, group_mean(rows), strict=True):
        bound = _lower(row) if advantage > 0 else mix * _upper(row, 1.5) + (1 - mix) * _lower(row)
        total = total - row.length * advantage * bound
    return total / sum(row.length for row in rows)


def spg(rows: list[Row]) -> Tensor:
    return _spg(rows, 0.5)


def spg_eubo(rows: list[Row]) -> Tensor:
    return _spg(rows, 1.0)


def stabledrl(rows: list[Row]) -> Tensor:
    losses, advantages = [], iter(group_mean(rows))
    for group in groups_of(rows):
        log_weights = torch.stack([_lower(row).detach() - _lower(row, "old") for row in group])
        weights = log_weights.clamp(max=math.log(5)).softmax(0)
        total = torch.zeros((), dtype=torch.float64)
        for row, weight in zip(group, weights, strict=True):
            advantage = next(advantages)
            bound = _lower(row) if advantage > 0 else 0.5 * _upper(row, 1.5) + 0.5 * _lower(row)
            total = total - weight * advantage * bound
        losses.append(total)
    return torch.stack(losses).mean()


def _espo_value(row: Row, name: str) -> Tensor:
    """Half of (L + 1) / x times the sum over the mask, half of the same over its complement, averaged over draws."""
    L = row.denoised
    total = torch.zeros((), dtype=torch.float64)
    for draw in row.draws:
        # The other side masks the rest; an empty side adds nothing.
        total = total + (L + 1) / len(draw.masked) * sum(getattr(draw, name)[slot] for slot in draw.scored) / 2
    return total / 2


def espo(rows: list[Row]) -> Tensor:
    losses = []
    for row, advantage in zip(rows, leave_one_out(rows), strict=True):
        new, old, reference = (_espo_value(row, name) for name in ("new", "old", "reference"))
        ratio = ((new - old) / row.denoised).exp()
        losses.append(ppo(ratio, advantage, 0.2, 0.2) + 1e-3 * (new - reference) ** 2 / 2 / row.denoised)
    return torch.stack(losses).mean()


def gdpo(rows: list[Row]) -> Tensor:
    nodes = [0.5 - math.sqrt(1 / 3) / 2, 0.5 + math.sqrt(1 / 3) / 2]
    weights = [1 / 2, 1 / 2]
    losses = []
    for row, advantage in zip(rows, group_z(rows), strict=True):
        values = []
        for name in ("new", "old"):
            value = torch.zeros((), dtype=torch.float64)
            for draw in row.draws:
                assert len(draw.masked) == math.floor(nodes[draw.part] * row.denoised)
                total = sum(getattr(draw, name)[slot] for slot in draw.scored)
                value = value + weights[draw.part] * total / nodes[draw.part]
            values.append(value)
        losses.append(ppo(((values[0] - values[1]) / row.denoised).exp(), advantage, 0.5, 0.5))
    return torch.stack(losses).mean()


def stepmerge(rows: list[Row]) -> Tensor:
    """The same sum as diffu-GRPO's: only the canvases differ."""
    return diffu_grpo(rows)


def _by_slice(rows: list[Row], kl_coef: float) -> Tensor:
    slices = []
    for row, advantage in zip(rows, group_z(rows), strict=True):
        for draw in row.draws:
            values = [
                ppo((draw.new[slot] - draw.old[slot]).exp(), advantage, 0.2, 0.2)
                + kl_coef * k3(draw.new[slot], draw.old[slot])
                for slot in draw.scored
            ]
            slices += [torch.stack(values).mean()]
    return torch.stack(slices).mean()


def tracerl(rows: list[Row]) -> Tensor:
    return _by_slice(rows, 0.01)


def cj_grpo(rows: list[Row]) -> Tensor:
    return _by_slice(rows, 0.0)


def bgpo(rows: list[Row]) -> Tensor:
    losses = []
    for row, advantage in zip(rows, group_z(rows), strict=True):
        for draw in row.draws:
            scale = row.denoised / len(draw.masked)
            d = scale * sum(draw.new[slot] - draw.old[slot] for slot in draw.scored) / row.denoised
            losses.append(-(1 + d) * advantage if advantage >= 0 else -d.exp() * advantage)
    return torch.stack(losses).mean()


def rho(rows: list[Row]) -> list[Tensor]:
    """The reference's ELBO of each completion less the old policy's."""
    return [(_ratio_elbo(row, "reference") - _ratio_elbo(row, "old")).detach() for row in rows]


def dmpo(rows: list[Row]) -> Tensor:
    losses, of_rows = [], iter(rhos)
    for group in groups_of(rows):
        rewards = torch.tensor([row.reward for row in group], dtype=torch.float64)
        tilt = torch.stack([next(of_rows) for _ in group])
        weights = (tilt + rewards / 0.04).softmax(0) - (tilt - rewards / 0.04).softmax(0)
        total = torch.zeros((), dtype=torch.float64)
        for row, weight in zip(group, weights, strict=True):
            # Four canvases: two draws with their complements; an empty one adds nothing.
            mean = sum(sum(draw.new[slot] for slot in draw.scored) / len(draw.masked) for draw in row.draws) / 4
            total = total - weight * mean
        losses.append(total)
    return torch.stack(losses).mean()


rhos: list[Tensor] = []
"""What `dmpo` is told: `rho` of each completion, once for all updates, under masks of its own."""


def _ratio_elbo(row: Row, name: str) -> Tensor:
    return sum(
        row.denoised / len(draw.masked) * sum(getattr(draw, name)[slot] for slot in draw.scored) for draw in row.draws
    ) / torch.tensor(4.0, dtype=torch.float64)


def agrpo(rows: list[Row]) -> Tensor:
    """Weights of the drawn steps are in the corruption; old likelihoods are the sampler's."""
    total = torch.zeros((), dtype=torch.float64)
    for index, (row, advantage) in enumerate(zip(rows, group_mean(rows), strict=True)):
        for slot, draw in tokens_of(row):
            weight = step_weights[index, draw.part]
            total = total + weight * ppo((draw.new[slot] - row.sampled[slot]).exp(), advantage, 0.2, 0.2)
    return total / len(rows)


step_weights: dict[tuple[int, int], float] = {}
"""What `agrpo` is told: the weight of each drawn step of each row."""


def _on_policy(rows: list[Row]) -> Tensor:
    total, count = torch.zeros((), dtype=torch.float64), 0
    for row, advantage in zip(rows, group_z(rows), strict=True):
        for slot, draw in tokens_of(row):
            total = total + ppo((draw.new[slot] - draw.old[slot]).exp(), advantage, 0.2, 0.2)
            count += 1
    return total / count


def vrpo(rows: list[Row]) -> Tensor:
    losses = []
    for group in groups_of(rows):
        gains = []
        for row in group:
            gain = torch.zeros((), dtype=torch.float64)
            for draw in row.draws:
                scale = row.denoised / len(draw.masked) / 8
                gain = gain + scale * sum(draw.new[slot] - draw.reference[slot] for slot in draw.scored)
            gains.append(gain)
        pairs = [
            -torch.nn.functional.logsigmoid(0.2 * (gains[better] - gains[worse]))
            for better in range(len(group))
            for worse in range(len(group))
            if group[better].reward > group[worse].reward
        ]
        losses.append(torch.stack(pairs).mean())
    return torch.stack(losses).mean()


def _plackett_luce(tops: dict[int, Tensor], places: dict[int, int]) -> Tensor:
    """In each block of 4, one commit after the other: the softmax over the slots that are left, at temperature 0.5."""
    total = torch.zeros((), dtype=torch.float64)
    for block in {slot // 4 for slot in places}:
        left = [slot for slot in places if slot // 4 == block]
        for slot in sorted((slot for slot in left if places[slot] >= 0), key=lambda slot: (places[slot], slot)):
            total = total + tops[slot] / 0.5 - torch.stack([tops[other] / 0.5 for other in left]).logsumexp(0)
            left.remove(slot)
    return total


def mapg(rows: list[Row]) -> Tensor:
    losses = []
    for row, advantage in zip(rows, group_z(rows), strict=True):
        difference = torch.zeros((), dtype=torch.float64)
        for draw in row.draws:
            tokens = sum(draw.new[slot] - draw.old[slot] for slot in draw.scored)
            order = _plackett_luce(draw.top_new, draw.places) - _plackett_luce(draw.top_old, draw.places)
            difference = difference + draw.weight * (tokens + order)
        losses.append(ppo((difference / row.length).exp(), advantage, 0.2, 0.2))
    return torch.stack(losses).mean()


def _round_part_z(rows: list[Row]) -> list[float]:
    """Each part's z-score in its group; their sums, in units of their root mean square over the round."""
    sums = []
    for group in groups_of(rows):
        for row in group:
            total = 0.0
            for part in range(len(row.parts)):
                values = [other.parts[part] for other in group]
                mean = sum(values) / len(values)
                std = math.sqrt(sum((value - mean) ** 2 for value in values) / len(values))
                total += (row.parts[part] - mean) / (std + 1e-4)
            sums.append(total)
    scale = math.sqrt(sum(total**2 for total in sums) / len(sums))
    return [total / (scale + 1e-4) for total in sums]


def lightningrl(rows: list[Row]) -> Tensor:
    losses, likelihoods = [], []
    for row, advantage in zip(rows, _round_part_z(rows), strict=True):
        values, logps = [], []
        for slot, draw in tokens_of(row):
            assert draw.masked == list(range(slot // 4 * 4, row.width)), "shown before the token's block, then masked"
            ratio = (draw.new[slot] - draw.old[slot]).exp()
            values.append(ppo(ratio, advantage, 0.2, 0.2) + 0.01 * k3(draw.new[slot], draw.reference[slot]))
            logps.append(draw.new[slot])
        assert len(values) == row.length
        losses.append(torch.stack(values).mean())
        likelihoods += [torch.stack(logps).mean()] if row.correct else []
    return torch.stack(losses).mean() - 0.1 * torch.stack(likelihoods).mean()


def tba(rows: list[Row]) -> Tensor:
    """The squared residual of log Z + log policy - log reference - reward / beta, log Z being the group's estimate."""
    losses = []
    for group in groups_of(rows):
        log_ratios = [sum(draw.new[slot] - draw.reference[slot] for slot, draw in tokens_of(row)) for row in group]
        wanted = [row.reward / 0.014 for row in group]
        estimates = [want - log_ratio for want, log_ratio in zip(wanted, log_ratios, strict=True)]
        log_z = torch.stack(estimates).mean().detach()
        losses += [(log_z + ours - want) ** 2 for ours, want in zip(log_ratios, wanted, strict=True)]
    return torch.stack(losses).mean()


SLOW: dict[str, Callable[[list[Row]], Tensor]] = {
    "diffu-grpo": diffu_grpo,
    "diffu-grpo-parity": diffu_grpo_parity,
    "wd1": wd1,
    "coupled-grpo": coupled_grpo,
    "unigrpo": unigrpo,
    "spg": spg,
    "spg-eubo": spg_eubo,
    "espo": espo,
    "gdpo": gdpo,
    "stepmerge": stepmerge,
    "tracerl": tracerl,
    "cj-grpo": cj_grpo,
    "mapg": mapg,
    "bgpo": bgpo,
    "stabledrl": stabledrl,
    "dmpo": dmpo,
    "agrpo": agrpo,
    "justgrpo": _on_policy,
    "forkgrpo": _on_policy,
    "vrpo": vrpo,
    "lightningrl": lightningrl,
    "tba": tba,
}
