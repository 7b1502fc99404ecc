"""Speed and peak memory of the learner's update, compared with the first d1's (arXiv 2504.12216).

    python -m benchmarks.learner [same speed memory methods curves limit] [--rounds 3] [--device cpu] [--out DIR]

- `same` checks that both make the same update for the same weights, completions and prompt masks.
- `speed` times whole rounds of 12 inner updates with a KL penalty, alternating between the two.
- `memory` measures the peak memory of each in a fresh process.
- `methods` times rounds of other algorithms and counts their forwards.
- `curves` plots speed and memory over vocabulary size and completion length.
- `limit` counts the FLOP of both and reports the ratio that they allow.
- `gpu` (on a GPU only) reports the model FLOP utilisation of a 1.4-billion-parameter network of LLaDA's shape.

Both use one group as a micro-batch, as the first d1 does. Times are process CPU time on a CPU, wall time on a GPU.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from benchmarks import learner_curves, update_flops
from benchmarks.measure import Ratio, in_fresh_process, in_turn, peak_bytes, ratio, seconds
from benchmarks.models import CASES, LLADA_8B, Shape, make_policy
from benchmarks.rounds import (
    BLOCK_LENGTH,
    Setting,
    make_learner,
    make_reference,
    make_round,
    method_config,
    prompt_masks,
)
from benchmarks.sampler import table
from learner.batch import RolloutBatch
from learner.estimators import SamplerFacts
from learner.hardware import peak_flop_per_s
from learner.learner import Learner
from learner.parallel.sharding import ShardedPolicy

Row = dict[str, Any]
WIDE = CASES["d 128, 4 layers, V 16,384"].with_vocabulary(32768)
SHAPES = {"d 128, 4 layers, V 32,768": WIDE, "d 256, 6 layers, V 1,536": CASES["d 256, 6 layers, V 1,536"]}
MASKS = (0.15, 0.0)
METHODS = ("diffu-grpo", "espo", "spg", "stepmerge")
LLADA_1B = Shape(d_model=2048, num_layers=16, num_heads=16, vocab_size=126464)


def same(setting: Setting) -> Row:
    """Compare our update with the reference's: gradients of the first and last inner update, and final weights.

    Distances are Euclidean, relative to the norm of the reference's gradient and of its weight change.
    """
    batch = make_round(setting)
    ours, theirs = make_learner(setting), make_reference(setting)
    start = _flat(list(theirs.model.parameters()))
    learned = _gradients(lambda: ours.update(batch, 0))
    expected = _gradients(lambda: theirs.update(batch, prompt_masks(setting, batch)))
    moved = _flat(list(theirs.model.parameters())) - start
    off = _flat(list(ours.policy.module.parameters())) - start - moved
    return {
        "p_mask_prompt": setting.p_mask_prompt,
        "updates": len(expected),
        "first_gradient": _distance(learned[0], expected[0]),
        "last_gradient": _distance(learned[-1], expected[-1]),
        "weights": float(off.norm() / moved.norm()),
    }


def _gradients(update: Callable[[], object]) -> list[Tensor]:
    """Record the clipped gradient of each optimizer step of an update."""
    gradients: list[Tensor] = []

    def keep(optimizer: Optimizer, _args: object, _kwargs: object) -> None:
        gradients.append(_flat([p.grad for group in optimizer.param_groups for p in group["params"]]))

    hook = register_optimizer_step_pre_hook(keep)
    try:
        update()
    finally:
        hook.remove()
    return gradients


def _flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().flatten().double() for tensor in tensors])


def _distance(one: Tensor, other: Tensor) -> float:
    return float((one - other).norm() / other.norm())


def speed(setting: Setting, name: str, rounds: int) -> Row:
    """Time a round of each in turn, after an untimed round of two updates."""
    batch = make_round(setting)
    masks, ours, theirs = prompt_masks(setting, batch), make_learner(setting), make_reference(setting)
    short = make_learner(replace(setting, num_updates=2))
    theirs.update(batch, masks[:2])
    short.update(batch, 0)
    works: dict[str, Callable[[], object]] = {
        "reference": lambda: theirs.update(batch, masks),
        "d1": lambda: ours.update(batch, 0),
    }
    taken = in_turn(works, rounds, setting.device)
    num_tokens = int(batch.completion_lengths.sum())
    return {
        "case": name,
        "p_mask_prompt": setting.p_mask_prompt,
        "reference_tokens_per_s": num_tokens / float(np.median(taken["reference"])),
        "tokens_per_s": num_tokens / float(np.median(taken["d1"])),
        "ratio": ratio(taken, "reference", "d1"),
        "arithmetic": allowed(setting),
    }


def allowed(setting: Setting) -> float:
    """Compute the speed-up that the FLOP counts allow."""
    config = setting.shape.config(setting.canvas_tokens)
    counts, shared = _counts(setting)
    first, *_, least, _ = update_flops.round_flops(config, counts).values()
    return first / (least if setting.p_mask_prompt > 0 else update_flops.shared_flops(config, shared))


def _counts(setting: Setting) -> tuple[update_flops.Counts, update_flops.Counts]:
    """Count all canvases, and the distinct ones if prompts are not masked."""
    small = replace(setting, device="cpu", shape=setting.shape.with_vocabulary(8))
    lengths = make_round(small).completion_lengths.view(setting.num_groups, setting.group_size)
    counts = update_flops.Counts(
        num_canvases=setting.num_rows,
        canvas_tokens=setting.canvas_tokens,
        asked_tokens=setting.gen_length,
        text_tokens=int(lengths.sum()),
        num_updates=setting.num_updates,
    )
    return counts, replace(counts, num_canvases=setting.num_groups, text_tokens=int(lengths.amax(dim=1).sum()))


def memory(setting: Setting, name: str) -> Row:
    """Measure the peak bytes of a round of each in fresh processes, weights and optimizer included."""
    peaks = {which: peak_bytes(_one_round, which, setting) for which in ("stacked", "reference", "d1")}
    weights = sum(p.numel() for p in make_policy(setting.shape, setting.canvas_tokens, "cpu").parameters())
    return {
        "case": name,
        "p_mask_prompt": setting.p_mask_prompt,
        **{f"peak_bytes_{which}": peak for which, peak in peaks.items()},
        "share_of_stacked": peaks["d1"] / peaks["stacked"],
        "share_of_reference": peaks["d1"] / peaks["reference"],
        # Five float32 copies: policy, gradient, two Adam moments, reference.
        "state_bytes": 5 * 4 * weights,
    }


def _one_round(is_warm_up: bool, which: str, setting: Setting) -> None:
    if is_warm_up:
        setting = replace(setting, shape=setting.shape.with_vocabulary(64), gen_length=32, group_size=2, num_updates=2)
    elif which != "stacked":
        # Peak memory does not grow after the second update.
        setting = replace(setting, num_updates=2)
    batch = make_round(setting)
    if which == "d1":
        make_learner(setting).update(batch, 0)
    else:
        make_reference(setting, is_stacked=which == "stacked").update(batch, prompt_masks(setting, batch))


def methods(setting: Setting, rounds: int) -> list[Row]:
    """Time a round of several algorithms, each with its own number of updates, and count its canvases."""
    batch = make_round(setting)
    num_tokens, rows, learners = int(batch.completion_lengths.sum()), [], {}
    for name in METHODS:
        config = method_config(setting, name)
        model = make_policy(setting.shape, setting.canvas_tokens, setting.device)
        facts = SamplerFacts(block_length=BLOCK_LENGTH, has_reproducible_logps=False)
        learners[name] = Learner(ShardedPolicy(model, None), config, facts)
    counted = {name: _canvases(learner, batch) for name, learner in learners.items()}
    works = {name: (lambda learner=learner: learner.update(batch, 0)) for name, learner in learners.items()}
    taken = in_turn(works, rounds, setting.device)
    for name, learner in learners.items():
        forwards, trained = counted[name]
        taken_s = float(np.median(taken[name]))
        rows.append(
            {
                "method": name,
                "updates": learner.config.inner_updates,
                "seconds": taken_s,
                "tokens_per_s": num_tokens / taken_s,
                "forwards": forwards / batch.num_rows,
                "backwards": trained / batch.num_rows,
            }
        )
    return rows


def _canvases(learner: Learner, batch: RolloutBatch) -> tuple[int, int]:
    """Count the canvases of a round: forwards of policy and reference, and those with a backward."""
    forwards, trained = 0, 0

    def count(_module: torch.nn.Module, args: tuple[Any, ...]) -> None:
        nonlocal forwards, trained
        forwards += len(args[0])
        trained += len(args[0]) if torch.is_grad_enabled() else 0

    modules = [learner.policy.module] + ([] if learner.reference is None else [learner.reference.module])
    hooks = [module.register_forward_pre_hook(count) for module in modules]
    learner.update(batch, 0)
    for hook in hooks:
        hook.remove()
    return forwards, trained


def sweep(rounds: int, device: str, base: Setting | None = None) -> list[Row]:
    """Measure speed ratio and peak memory over vocabulary and completion length, in rounds of four updates."""
    base, rows = base or Setting(shape=WIDE, num_updates=4, device=device), []
    axes: dict[str, tuple[int, ...]] = {"vocab_size": (1536, 8192, 32768), "gen_length": (64, 128, 256)}
    for axis, values in axes.items():
        for value in values:
            setting = (
                replace(base, gen_length=value)
                if axis == "gen_length"
                else replace(base, shape=base.shape.with_vocabulary(value))
            )
            row: Row = {"axis": axis, "value": value}
            for p in MASKS:
                timed = in_fresh_process(speed, replace(setting, p_mask_prompt=p), "", rounds)
                row |= {f"ratio_p{p:g}": timed["ratio"], f"arithmetic_p{p:g}": timed["arithmetic"]}
                if device == "cpu":
                    for which in ("reference", "d1") if p else ("d1",):
                        peak = peak_bytes(_one_round, which, replace(setting, p_mask_prompt=p))
                        row[f"peak_bytes_{which}" + (f"_p{p:g}" if which == "d1" else "")] = peak
            rows.append(row)
    return rows


def limit(settings: dict[str, Setting]) -> list[Row]:
    """Tabulate the FLOP of both updates for each network."""
    return [
        row
        for name, setting in settings.items()
        for row in update_flops.rows(name, setting.shape.config(setting.canvas_tokens), *_counts(setting))
    ]


def utilisation(setting: Setting, dtype: torch.dtype, product_size: int) -> Row:
    """Measure model FLOP utilisation of our rounds, recomputation in the backward excluded.

    Args:
        setting: the network and the round, with prompt masks.
        dtype: of weights and activations.
        product_size: rows and columns of the square matmul that measures the device's rate.
    """
    batch, learner = make_round(setting), make_learner(setting, dtype)
    learner.update(batch, 0)
    taken_s = seconds(lambda: learner.update(batch, 0), setting.device)
    square = torch.randn(product_size, product_size, device=setting.device).to(dtype)
    square @ square
    product_s = seconds(lambda: [square @ square for _ in range(10)], setting.device) / 10
    stated = peak_flop_per_s(torch.device(setting.device))
    return {
        "parameters": sum(p.numel() for p in learner.policy.module.parameters()),
        "tokens_per_s": int(batch.completion_lengths.sum()) / taken_s,
        "flop_per_s": learner.model_flops / taken_s,
        "of_stated": None if stated is None else learner.model_flops / taken_s / stated,
        "of_a_product": learner.model_flops / taken_s / (2 * product_size**3 / product_s),
    }


SAME = {
    "p_mask_prompt": "p_mask_prompt",
    "updates": "updates",
    "first_gradient": "first gradient, relative distance",
    "last_gradient": "last gradient",
    "weights": "weights",
}
SPEED = {
    "case": "case",
    "p_mask_prompt": "p_mask_prompt",
    "reference_tokens_per_s": "reference, tokens/s",
    "tokens_per_s": "d1, tokens/s",
    "ratio": "times as fast",
    "arithmetic": "what the arithmetic allows",
}
MEMORY = {
    "case": "case",
    "p_mask_prompt": "p_mask_prompt",
    "peak_bytes_stacked": "the first d1",
    "peak_bytes_reference": "a mask at a time",
    "peak_bytes_d1": "d1",
    "share_of_stacked": "of the first d1",
    "share_of_reference": "of a mask at a time",
    "state_bytes": "weights, optimizer",
}
METHOD = {
    "method": "method",
    "updates": "updates",
    "seconds": "seconds a round",
    "tokens_per_s": "tokens/s",
    "forwards": "forwards a completion",
    "backwards": "backwards a completion",
}
GPU = {
    "parameters": "parameters",
    "tokens_per_s": "tokens/s",
    "flop_per_s": "FLOP/s",
    "of_stated": "of the stated rate",
    "of_a_product": "of a square product's",
}


def main() -> None:
    """Run the selected parts, print tables, and write JSON and a plot to `--out`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = ("same", "speed", "memory", "methods", "curves", "limit", "gpu")
    parser.add_argument(
        "parts", nargs="*", help=f"some of {', '.join(parts)}; all that the device can, if none is named"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    unfit = {"gpu"} if args.device == "cpu" else {"memory"}
    chosen = set(args.parts) or set(parts) - unfit
    if unknown := chosen - (set(parts) - unfit):
        parser.error(f"there is no part {min(unknown)} on {args.device}; there are {', '.join(parts)}")
    torch.set_num_threads(1)
    console, results = Console(width=180), {}
    for part, (title, columns) in _TABLES.items():
        if part in chosen:
            results[part] = _run(part, args.rounds, args.device)
            console.print(table(title, results[part], columns))
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        text = json.dumps(results, indent=2, default=lambda value: asdict(value) if isinstance(value, Ratio) else value)
        (args.out / "learner.json").write_text(text + "\n")
        learner_curves.draw(results, args.out / "learner.png")
        console.print(f"wrote {args.out}/learner.json")


_TABLES = {
    "same": ("ours against the restated update", SAME),
    "speed": ("a round: 6 completions of 128 slots, prompt 64, 12 updates", SPEED),
    "memory": ("peak bytes of a round", MEMORY),
    "methods": ("a round of several methods", METHOD),
    "curves": ("over vocabulary and length", learner_curves.COLUMNS),
    "limit": ("arithmetic of a round", update_flops.COLUMNS),
    "gpu": ("a network of LLaDA's shape in bfloat16", GPU),
}


def _run(part: str, rounds: int, device: str) -> list[Row]:
    settings = {name: Setting(shape=shape, device=device) for name, shape in SHAPES.items()}
    narrow = Setting(shape=WIDE.with_vocabulary(1536), device=device)
    d1s = Setting(shape=LLADA_8B, prompt_tokens=200, gen_length=256)
    large = replace(d1s, shape=LLADA_1B, num_groups=4, num_updates=4, device=device)
    cases = [(replace(setting, p_mask_prompt=p), name) for name, setting in settings.items() for p in MASKS]
    works: dict[str, Callable[[], list[Row]]] = {
        "same": lambda: [in_fresh_process(same, replace(narrow, gen_length=64, p_mask_prompt=p)) for p in MASKS],
        "speed": lambda: [in_fresh_process(speed, *case, rounds) for case in cases],
        "memory": lambda: [memory(*case) for case in cases],
        "methods": lambda: list(in_fresh_process(methods, narrow, rounds)),
        "curves": lambda: sweep(rounds, device),
        "limit": lambda: limit(settings | {"LLaDA-8B, prompt 200, 256 slots": d1s}),
        "gpu": lambda: [utilisation(large, torch.bfloat16, 8192)],
    }
    return works[part]()


if __name__ == "__main__":
    main()
