"""Speed of the sampler against the reference sampler, and the accuracy cost of its approximations.

    python -m benchmarks.sampler [exact adapters queue caches curves roofline] [--rounds 3] [--device cpu]
        [--out DIR]

- `exact` and `queue` compare with the reference sampler (benchmarks/reference.py) in one interleaved run: same weights,
  same prompts, one thread.
- `adapters` measures the cost of unmerged LoRA adapters per denoise step. The rank is 1/32 of the width, which for
  LLaDA-8B is rank 128.
- `caches` compares the approximate speed-ups with d1's exact sampler on a trained toy (benchmarks/toy.py).
- `curves` plots the ratio and the peak memory over batch, length and vocabulary.
- `roofline` prints the limit of LLaDA-8B on an H200, and on a GPU the share that a network of its shape reaches.

Times are process CPU time on a CPU, wall time on a GPU. A ratio is the median of the paired ratios, with minimum and
maximum. Each case runs in a fresh process, as in real use: after other cases the allocator retains memory that a fresh
process returns to the system, and page faults take up to a third of the reference's time.
"""

from __future__ import annotations

import argparse
import copy
import json
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from benchmarks import curves, roofline, toy
from benchmarks.measure import Ratio, in_fresh_process, in_turn, ratio
from benchmarks.models import CASES, make_policy, make_prompts, peak_of_step, random_adapter
from benchmarks.reference import Net, ReferenceNet, Work, generate, generate_lockstep
from benchmarks.replay import replay
from learner.model.adapter import attach_adapters
from learner.model.transformer import Transformer
from rollout.config import EngineConfig
from rollout.request import Completion, Request, SamplingParams
from rollout.sampler import Sampler

SCHEDULE: dict[str, Any] = {"gen_length": 128, "block_length": 32, "num_denoise_steps": 64}
PROMPT_TOKENS, BATCH = 64, 8
TOY_STEPS = 1000
Row = dict[str, Any]


def requests_of(prompts: torch.Tensor, params: SamplingParams) -> list[Request]:
    """Make one request for each prompt, each with a different seed."""
    return [Request(prompt_ids=tuple(p), params=params, seed=seed) for seed, p in enumerate(prompts.tolist())]


def agreement(completions: list[Completion], expected: list[list[int]]) -> float:
    """Compute the share of tokens, up to each completion's end, that equal another sampler's."""
    same = [
        one == other
        for completion, row in zip(completions, expected, strict=True)
        for one, other in zip(completion.token_ids[: completion.num_tokens].tolist(), row, strict=False)
    ]
    return sum(same) / len(same)


def exact(rounds: int, device: str) -> list[Row]:
    """Compare d1's exact sampler with the reference on random networks, at temperatures 0 and 0.9."""
    return [
        row
        for name in CASES
        for temperature in (0.0, 0.9)
        for row in in_fresh_process(_exact_case, name, temperature, rounds, device)
    ]


def _exact_case(name: str, temperature: float, rounds: int, device: str) -> list[Row]:
    shape = CASES[name]
    model = make_policy(shape, PROMPT_TOKENS + SCHEDULE["gen_length"], device)
    prompts = make_prompts(BATCH, PROMPT_TOKENS, shape.vocab_size, device)
    params = SamplingParams(**SCHEDULE, temperature=temperature, stop_ids=())
    return _against_reference(f"{name}, T={temperature:g}", model, prompts, params, rounds)


def _against_reference(
    name: str, model: Transformer, prompts: torch.Tensor, params: SamplingParams, rounds: int
) -> list[Row]:
    device, requests, sampler = prompts.device.type, requests_of(prompts, params), Sampler(model, 0)
    reference, shared_net = ReferenceNet(model), _plain_net(model)
    works: dict[str, Callable[[], object]] = {
        "reference": lambda: generate(reference, prompts, params),
        "reference loop, our network": lambda: generate(shared_net, prompts, params),
        "d1, exact": lambda: sampler.generate(requests),
    }
    work = Work()
    expected = generate(reference, prompts, params, work).tolist()
    completions = sampler.generate(requests)
    ours_forwarded, ours_forwards = sampler.counts.num_tokens, sampler.counts.num_forwards
    taken = in_turn(works, rounds, device)
    rows = []
    for which, times in taken.items():
        is_ours = which.startswith("d1")
        rows.append(
            {
                "case": name,
                "sampler": which,
                "tokens_per_s": prompts.shape[0] * params.gen_length / float(np.median(times)),
                "forwards": ours_forwards if is_ours else work.num_forwards,
                "tokens_forwarded": ours_forwarded if is_ours else work.num_tokens,
                "ratio": ratio(taken, "reference", which),
                "agreement": agreement(completions, expected) if is_ours and params.temperature == 0 else None,
            }
        )
    return rows


def adapters(rounds: int, device: str) -> list[Row]:
    """Time a denoise step with no adapter, with one, and with two (a frozen SFT adapter and the trained one)."""
    return [row for name in CASES for row in in_fresh_process(_adapters_case, name, rounds, device)]


def _adapters_case(name: str, rounds: int, device: str) -> list[Row]:
    shape = CASES[name]
    plain = make_policy(shape, PROMPT_TOKENS + SCHEDULE["gen_length"], device)
    requests = requests_of(
        make_prompts(BATCH, PROMPT_TOKENS, shape.vocab_size, device), SamplingParams(**SCHEDULE, stop_ids=())
    )
    adapter = random_adapter(plain, shape.d_model // 32)
    one, two = copy.deepcopy(plain), copy.deepcopy(plain)
    attach_adapters(one, adapter.matrices, adapter.scaling, None)
    attach_adapters(two, adapter.matrices, adapter.scaling, adapter)
    policies = {"no adapter": plain, "one adapter": one, "two adapters": two}
    works = {which: partial(Sampler(model, 0).generate, requests) for which, model in policies.items()}
    taken = in_turn(works, rounds, device)
    return [
        {
            "case": name,
            "sampler": which,
            "ms_per_step": 1e3 * float(np.median(times)) / SCHEDULE["num_denoise_steps"],
            "ratio": ratio(taken, "no adapter", which),
        }
        for which, times in taken.items()
    ]


def _plain_net(model: Transformer) -> Net:
    """Wrap our network to compute all logits of all slots, to separate the network's gain from the sampler's."""

    class Plain(torch.nn.Module):
        config = model.config

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return model(ids)

    return Plain()


def queue(weights: Path, rounds: int, device: str) -> list[Row]:
    """Compare continuous batching (refilled slots) with static batches: 32 requests of unequal lengths on 8 slots."""
    model = toy.load(weights, device)
    prompts, _, _ = (tensor.to(device) for tensor in toy.problems(32, seed=7))
    batches, reference = prompts.split(BATCH), ReferenceNet(model)
    quota = SamplingParams(**SCHEDULE, temperature=0.0)
    bold = SamplingParams(**SCHEDULE, temperature=0.0, threshold=0.9)
    engine = EngineConfig(num_slots=BATCH)
    rows = []
    for case, params, static in (
        ("the reference's schedule", quota, lambda work: [generate(reference, b, quota, work) for b in batches]),
        ("threshold 0.9", bold, lambda work: [generate_lockstep(model, b, bold, work) for b in batches]),
    ):
        requests, sampler, work = requests_of(prompts, params), Sampler(model, 0, engine), Work()
        expected = torch.cat(static(work)).tolist()
        completions, counts = sampler.generate(requests), asdict(sampler.counts)
        alone = [Sampler(model, 0).generate([request])[0] for request in requests]
        works = {"static": lambda: static(Work()), "slots": lambda: sampler.generate(requests)}  # noqa: B023
        taken = in_turn(works, rounds, device)
        useful = sum(completion.num_tokens for completion in completions)
        for which, times in taken.items():
            is_ours = which == "slots"
            rows.append(
                {
                    "case": f"queue, {case}",
                    "sampler": "d1, slots" if is_ours else "static batches",
                    "tokens_per_s": useful / float(np.median(times)),
                    "forwards": counts["num_forwards"] if is_ours else work.num_forwards,
                    "tokens_forwarded": counts["num_tokens"] if is_ours else work.num_tokens,
                    "ratio": ratio(taken, "static", which),
                    "agreement": agreement(completions, expected) if is_ours else None,
                    "equal_to_alone": sum(map(_is_same, completions, alone)) if is_ours else None,
                }
            )
    return rows


def _is_same(one: Completion, other: Completion) -> bool:
    return one.token_ids.tolist() == other.token_ids.tolist()


FP8 = "exact quota, FP8"
CACHE_CASES: dict[str, dict[str, Any]] = {
    "exact quota": {},
    FP8: {},
    "prefix cache": {"cache": "prefix"},
    "dual cache": {"cache": "dual"},
    "dual cache, refresh every 4": {"cache": "dual", "cache_refresh_steps": 4},
    "threshold 0.9": {"threshold": 0.9},
    "threshold 0.9, prefix cache": {"threshold": 0.9, "cache": "prefix"},
    "threshold 0.9, dual cache": {"threshold": 0.9, "cache": "dual"},
}


def caches(weights: Path, rounds: int, device: str) -> list[Row]:
    """Measure speed and accuracy of caches and thresholds on a trained toy: a static batch of 8, no early end."""
    model = toy.load(weights, device)
    prompts, answers, lengths = toy.problems(BATCH, seed=9)
    prompts = prompts.to(device)
    samplers, all_requests = {}, {}
    for name, changes in CACHE_CASES.items():
        params = SamplingParams(**SCHEDULE, temperature=0.0, stop_ids=(), **changes)
        samplers[name], all_requests[name] = _sampler(model, name), requests_of(prompts, params)
    results = {name: samplers[name].generate(all_requests[name]) for name in CACHE_CASES}
    counts = {name: asdict(samplers[name].counts) for name in CACHE_CASES}
    works = {name: (lambda name=name: samplers[name].generate(all_requests[name])) for name in CACHE_CASES}
    taken = in_turn(works, rounds, device)
    expected = [completion.token_ids.tolist() for completion in results["exact quota"]]
    num_tokens = BATCH * SCHEDULE["gen_length"]
    return [
        {
            "case": "trained toy, T=0",
            "sampler": name,
            "tokens_per_s": num_tokens / float(np.median(taken[name])),
            "forwards": counts[name]["num_forwards"],
            "tokens_forwarded": counts[name]["num_tokens"],
            "tokens_per_forward": num_tokens / sum(completion.num_forwards for completion in results[name]),
            "ratio": ratio(taken, "exact quota", name),
            "agreement": agreement(results[name], expected),
            "accuracy": toy.accuracy([c.token_ids.tolist() for c in results[name]], answers, lengths),
            **_mismatch(model, name),
        }
        for name in CACHE_CASES
    ]


def _sampler(model: Transformer, name: str) -> Sampler:
    """Make a sampler. One in FP8 has a copy of the policy, whose layers it replaces."""
    return Sampler(copy.deepcopy(model), 0, EngineConfig(fp8=True)) if name == FP8 else Sampler(model, 0)


def _mismatch(model: Transformer, name: str) -> Row:
    """Compare recorded with replayed log-probabilities at temperature 1, and measure accuracy there: 32 requests."""
    prompts, answers, lengths = toy.problems(32, seed=11)
    params = SamplingParams(**SCHEDULE, temperature=1.0, **CACHE_CASES[name])
    requests = requests_of(prompts, params)
    completions = _sampler(model, name).generate(requests)
    differences = [
        completion.commit_logp - replay(model, request, completion).logp
        for request, completion in zip(requests, completions, strict=True)
    ]
    flat = np.abs(np.concatenate(differences))
    ratios = np.exp(np.concatenate(differences))
    texts = [completion.token_ids.tolist() for completion in completions]
    return {
        "mismatch_mean": float(flat.mean()),
        "mismatch_p99": float(np.quantile(flat, 0.99)),
        "mismatch_max": float(flat.max()),
        "ratios_outside_0.8_1.2": float(((ratios < 0.8) | (ratios > 1.2)).mean()),
        "mismatch_sequence": float(np.mean([abs(difference.sum()) for difference in differences])),
        "accuracy_warm": toy.accuracy(texts, answers, lengths),
    }


def sweep(rounds: int, device: str) -> list[Row]:
    """Measure speed ratio to the reference and peak memory of a step over batch, completion length and vocabulary."""
    rows = []
    for axis, values in {"batch": (1, 4, 16), "gen_length": (64, 128, 256), "vocab_size": (1536, 8192, 32768)}.items():
        for value in values:
            setting = {"batch": 4, "gen_length": 128, "vocab_size": 8192} | {axis: value}
            shape = CASES["d 128, 4 layers, V 16,384"].with_vocabulary(setting["vocab_size"])
            model = make_policy(shape, PROMPT_TOKENS + setting["gen_length"], device)
            prompts = make_prompts(setting["batch"], PROMPT_TOKENS, shape.vocab_size, device)
            length = setting["gen_length"]
            row: Row = {"axis": axis, "value": value}
            for temperature in (0.0, 0.9):
                params = SamplingParams(
                    gen_length=length,
                    block_length=32,
                    num_denoise_steps=length // 8,
                    temperature=temperature,
                    stop_ids=(),
                )
                reference, requests, sampler = ReferenceNet(model), requests_of(prompts, params), Sampler(model, 0)
                works: dict[str, Callable[[], object]] = {
                    "reference": lambda: generate(reference, prompts, params),  # noqa: B023
                    "d1": lambda: sampler.generate(requests),  # noqa: B023
                }
                row[f"ratio_T{temperature:g}"] = ratio(in_turn(works, rounds, device), "reference", "d1")
            if device == "cpu":
                for which in ("reference", "d1"):
                    row[f"peak_bytes_{which}"] = peak_of_step(which, shape, setting["batch"], length)
            rows.append(row)
    return rows


def table(title: str, rows: list[Row], columns: dict[str, str]) -> Table:
    """Build a table. Missing values are left blank."""
    shown = Table(title=title)
    for index, heading in enumerate(columns.values()):
        shown.add_column(heading, justify="left" if index < 2 else "right")
    for row in rows:
        shown.add_row(*(_cell(row.get(key)) for key in columns))
    return shown


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.4f}" if value < 10 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


SPEED = {
    "case": "case",
    "sampler": "sampler",
    "tokens_per_s": "tokens/s",
    "forwards": "forwards",
    "tokens_forwarded": "tokens forwarded",
    "ratio": "times as fast",
    "agreement": "tokens equal",
}
STEP = {"case": "case", "sampler": "sampler", "ms_per_step": "ms a step", "ratio": "times as fast"}
COST = {
    "case": "case",
    "sampler": "sampler",
    "ratio": "times as fast",
    "tokens_per_forward": "tokens per forward",
    "agreement": "tokens equal",
    "accuracy": "accuracy, T=0",
    "accuracy_warm": "accuracy, T=1",
    "mismatch_mean": "mean |Δlogp|, nats",
    "mismatch_p99": "p99",
    "ratios_outside_0.8_1.2": "ratios outside [.8, 1.2]",
    "mismatch_sequence": "|Σ Δlogp| of a sequence",
}


def main() -> None:
    """Run the selected parts, print tables, and write JSON and plots to `--out`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = ("exact", "adapters", "queue", "caches", "curves", "roofline")
    parser.add_argument("parts", nargs="*", default=list(parts), help=f"some of {', '.join(parts)}")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if unknown := set(args.parts) - set(parts):
        parser.error(f"there is no part {min(unknown)}; there are {', '.join(parts)}")
    torch.set_num_threads(1)
    console, results = Console(width=180), {}
    if "exact" in args.parts:
        results["exact"] = exact(args.rounds, args.device)
        console.print(table("against the reference: batch 8, prompt 64, 128 tokens, 64 steps", results["exact"], SPEED))
    if "adapters" in args.parts:
        results["adapters"] = adapters(args.rounds, args.device)
        console.print(table("adapters beside the weights: batch 8, 192 slots", results["adapters"], STEP))
    with tempfile.TemporaryDirectory() as directory:
        weights = Path(directory) / "toy.safetensors"
        if {"queue", "caches"} & set(args.parts):
            toy.save(toy.train(TOY_STEPS), weights)
        if "queue" in args.parts:
            results["queue"] = in_fresh_process(queue, weights, args.rounds, args.device)
            console.print(
                table("32 requests on 8 slots", results["queue"], SPEED | {"equal_to_alone": "equal to alone"})
            )
        if "caches" in args.parts:
            results["caches"] = in_fresh_process(caches, weights, args.rounds, args.device)
            console.print(table("approximate speed-ups against d1's exact sampler", results["caches"], COST))
    if "curves" in args.parts:
        results["curves"] = sweep(args.rounds, args.device)
        console.print(table("over batch, length and vocabulary", results["curves"], curves.COLUMNS))
    if "roofline" in args.parts:
        results["roofline"] = roofline.rows(args.device)
        console.print(table("LLaDA-8B on one H200, tokens/s", results["roofline"], roofline.COLUMNS))
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        text = json.dumps(results, indent=2, default=lambda value: asdict(value) if isinstance(value, Ratio) else value)
        (args.out / "sampler.json").write_text(text + "\n")
        curves.draw(results, args.out / "sampler.png")
        console.print(f"wrote {args.out}/sampler.json and {args.out}/sampler.png")


if __name__ == "__main__":
    main()
