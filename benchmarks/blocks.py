"""Throughput of exact block-causal sampling and likelihoods (KV cache of finished blocks).

    python -m benchmarks.blocks [--only sampling] [--rounds 1] [--lengths 64 256 1024] [--out FILE]

`sampling` runs half as many denoise steps as slots, with the same weights in four ways:
- bidirectional policy in d1's schedule: blocks of 32, each step runs the whole canvas;
- block-causal policy (blocks of 4), each step runs the whole canvas, as in a loop without a cache;
- block-causal policy, each step runs the canvas up to its block;
- block-causal policy with a KV cache of the finished blocks.
The last two must commit the same tokens with the same log-probabilities.

`replay` times forward and backward of each token's likelihood at its own denoise step. It compares one forward for each
step's canvas with one row for each completion. Each case runs in a fresh process on one thread; times are CPU time.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.measure import in_fresh_process, in_turn
from benchmarks.models import CASES, make_prompts
from learner.estimators.block_views import views_of_blocks
from learner.estimators.views import Views, deduplicated_views, token_logps
from learner.model.networks import make_model
from learner.model.transformer import Transformer, init_weights
from rollout.config import EngineConfig
from rollout.request import Completion, Request, SamplingParams
from rollout.sampler import Sampler

SHAPE = CASES["d 256, 6 layers, V 1,536"]
PROMPT_TOKENS, BLOCK, STEPS_PER_BLOCK = 64, 4, 2
Row = dict[str, Any]


def policies(num_slots: int) -> dict[str, Transformer]:
    """Make a bidirectional and a block-causal policy with the same weights."""
    config = SHAPE.config(PROMPT_TOKENS + num_slots)
    found = {}
    for name, changes in {"bidirectional": {}, "block-causal": {"family": "sdar", "block_length": BLOCK}}.items():
        model = make_model(config.model_copy(update=changes))
        init_weights(model, seed=0)
        assert model.head is not None, "the shape does not tie it"
        with torch.no_grad():
            # Sharpen the random head: near-uniform predictions would give no meaningful commit order.
            model.head.weight.mul_(8.0)
        found[name] = model
    return found


def sampling(num_slots: int, num_rows: int, rounds: int) -> list[Row]:
    """Time one length and batch, and compare the samples of the two block-causal samplers."""
    of_model = policies(num_slots)
    warm: dict[str, Any] = {"gen_length": num_slots, "temperature": 1.0, "stop_ids": ()}
    whole = SamplingParams(**warm, block_length=32, num_denoise_steps=num_slots // 2)
    blocks = SamplingParams(**warm, block_length=BLOCK, steps_per_block=STEPS_PER_BLOCK)
    samplers = {
        "d1's schedule, bidirectional": (Sampler(of_model["bidirectional"], 0), whole),
        "block-causal, whole canvases": (Sampler(of_model["block-causal"], 0, EngineConfig(block_cache=False)), blocks),
        "block-causal, remembered": (Sampler(of_model["block-causal"], 0), blocks),
    }
    prompts = make_prompts(num_rows, PROMPT_TOKENS, SHAPE.vocab_size, "cpu")
    answers: dict[str, list[Completion]] = {}
    works: dict[str, Callable[[], object]] = {
        "block-causal, full forwards": lambda: full_forwards(of_model["block-causal"], prompts, num_slots)
    }
    for name, (sampler, params) in samplers.items():
        requests = [Request(prompt_ids=tuple(ids), params=params, seed=i) for i, ids in enumerate(prompts.tolist())]
        works[name] = partial(_sample, answers, name, sampler, requests)
    taken = in_turn(works, rounds, "cpu")
    remembered, plain = answers["block-causal, remembered"], answers["block-causal, whole canvases"]
    differs = max(float(np.abs(a.commit_logp - b.commit_logp).max()) for a, b in zip(remembered, plain, strict=True))
    equal = all((a.token_ids == b.token_ids).all() for a, b in zip(remembered, plain, strict=True))
    ours = "block-causal, remembered"
    return [
        {
            "what": f"{num_slots} slots, {num_rows} rows: {name}",
            "seconds": min(seconds),
            "tokens_per_s": num_slots * num_rows / min(seconds),
            "times": min(seconds) / min(taken[ours]),
            **({"tokens_equal": equal, "largest_difference": differs} if name == ours else {}),
        }
        for name, seconds in taken.items()
    ]


@torch.inference_mode()
def full_forwards(model: Transformer, prompts_BP: torch.Tensor, num_slots: int) -> torch.Tensor:
    """Sample greedily without a cache: each step runs the whole canvas and commits half of a block.

    Unlike most such loops, the head runs on the block only. Returns tokens [B, num_slots].
    """
    mask_id, num_prompt = model.config.mask_token_id, prompts_BP.shape[1]
    slots_BK = prompts_BP.new_full((len(prompts_BP), num_slots), mask_id)
    canvas_BL = torch.cat((prompts_BP, slots_BK), dim=1)
    for begin in range(num_prompt, num_prompt + num_slots, BLOCK):
        queries_BQ = torch.arange(begin, begin + BLOCK).expand(len(canvas_BL), -1)
        for _ in range(STEPS_PER_BLOCK):
            logits = model(canvas_BL, queries_BQ=queries_BQ).view(len(canvas_BL), BLOCK, -1)
            logits[..., mask_id] = -torch.inf
            best = logits.log_softmax(-1).max(-1)
            is_open = canvas_BL.gather(1, queries_BQ) == mask_id
            picked = best.values.where(is_open, -torch.inf).topk(BLOCK // STEPS_PER_BLOCK, dim=1).indices
            canvas_BL.scatter_(1, queries_BQ.gather(1, picked), best.indices.gather(1, picked))
    return canvas_BL[:, num_prompt:]


def _sample(answers: dict[str, list[Completion]], name: str, sampler: Sampler, requests: Sequence[Request]) -> None:
    answers[name] = sampler.generate(requests)


def replay(num_slots: int, num_rows: int, rounds: int, steps_per_block: int) -> list[Row]:
    """Time the gradient of exact likelihoods both ways, and report the largest difference between them."""
    model = policies(num_slots)["block-causal"]
    params = SamplingParams(
        gen_length=num_slots, block_length=BLOCK, steps_per_block=steps_per_block, temperature=1.0, stop_ids=()
    )
    prompts = make_prompts(num_rows, PROMPT_TOKENS, SHAPE.vocab_size, "cpu")
    requests = [Request(prompt_ids=tuple(ids), params=params, seed=i) for i, ids in enumerate(prompts.tolist())]
    completions = Sampler(model, 0).generate(requests)
    views = _views(model, prompts, completions)
    found: dict[str, torch.Tensor] = {}

    def work(name: str) -> None:
        model.zero_grad()
        parts = []
        # One micro-batch at a time, as in the learner.
        for some in views[name]:
            logps = token_logps(model, some)
            logps.sum().backward()
            parts.append(logps.detach())
        found[name] = torch.cat(parts)

    taken = in_turn({name: partial(work, name) for name in views}, rounds, "cpu")
    one, other = found["a forward of each step"], found["one row a completion"]
    rows = [
        {
            "what": f"{num_slots} slots, {num_rows} rows, {steps_per_block} steps a block: {name}",
            "seconds": min(seconds),
            "slots": sum(int(some.lengths.sum()) for some in views[name]),
            "times": min(seconds) / min(taken["one row a completion"]),
        }
        for name, seconds in taken.items()
    ]
    rows[-1]["largest_difference"] = float((one.sort().values - other.sort().values).abs().max())
    return rows


def _views(model: Transformer, prompts: torch.Tensor, completions: list[Completion]) -> Mapping[str, list[Views]]:
    """Build the views of every denoise step both ways, one entry per completion."""
    plain, rows = [], []
    for prompt, completion in zip(prompts, completions, strict=True):
        tokens = torch.from_numpy(completion.token_ids.astype(np.int64))
        steps = torch.from_numpy(completion.step_map.astype(np.int64))
        clean, num_steps = torch.cat((prompt, tokens)), int(steps.max()) + 1
        masked = steps >= torch.arange(num_steps)[:, None]
        hidden = torch.cat((torch.zeros(num_steps, len(prompt), dtype=torch.bool), masked), dim=1)
        noisy = torch.where(hidden, model.config.mask_token_id, clean)
        order = steps.argsort(stable=True)
        asked = torch.full((num_steps,), len(clean)), steps[order], len(prompt) + order, tokens[order]
        plain.append(deduplicated_views(noisy, *asked))
        rows.append(views_of_blocks(noisy, *asked, clean_RS=clean.expand(num_steps, -1), block_length=BLOCK))
    return {"a forward of each step": plain, "one row a completion": rows}


COLUMNS = {
    "what": "what",
    "seconds": "seconds",
    "tokens_per_s": "tokens/s",
    "slots": "slots run",
    "times": "times as long",
    "tokens_equal": "tokens equal",
    "largest_difference": "largest |Δlogp|, nats",
}


def table(title: str, rows: list[Row]) -> Table:
    """Build a table, with the columns that occur in any row."""
    shown = Table(title=title)
    columns = {key: heading for key, heading in COLUMNS.items() if any(key in row for row in rows)}
    for key, heading in columns.items():
        shown.add_column(heading, justify="left" if key == "what" else "right")
    for row in rows:
        shown.add_row(*(_cell(row.get(key, "")) for key in columns))
    return shown


def _cell(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def main() -> None:
    """Run the selected benchmarks, print tables, and write the rows to `--out`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["sampling", "replay"])
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--lengths", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    found: dict[str, list[Row]] = {}
    if args.only != "replay":
        cases = [(length, rows) for rows in args.batches for length in args.lengths]
        found["sampling"] = [row for case in cases for row in in_fresh_process(sampling, *case, args.rounds)]
        Console(width=140).print(table("half as many steps as slots", found["sampling"]))
    if args.only != "sampling":
        cases = [(length, steps) for length in args.lengths for steps in (2, 4)]
        found["replay"] = [
            row for length, steps in cases for row in in_fresh_process(replay, length, 8, args.rounds, steps)
        ]
        Console(width=140).print(table("exact likelihood of a trajectory, forward and backward", found["replay"]))
    if args.out is not None:
        args.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
