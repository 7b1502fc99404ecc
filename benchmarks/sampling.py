"""How fast the sampler is, against the plain algorithm and against what the machine's matrix multiplication allows.

    python benchmarks/sampling.py [cpu|cuda]

The plain algorithm is LLaDA's published one: every forward scores every slot of every row, prompts included, and rows
that have ended go on. Both run in turn on the same requests, and commit the same tokens at temperature 0; a figure is
the median of the rounds, a ratio the median of the paired ratios. Times are process CPU time on a CPU, wall time on a
GPU.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from learner.model.transformer import Transformer, TransformerConfig, init_weights
from rollout.request import Request, SamplingParams
from rollout.sampler import Sampler, commit_quotas

ROUNDS = 3
PROMPT_TOKENS = 32
NUM_REQUESTS = 16


@torch.inference_mode()
def plain(model: Transformer, requests: list[Request]) -> Tensor:
    """LLaDA's sampler at temperature 0 on prompts of equal length: the completion tokens [B, C]."""
    params, config = requests[0].params, model.config
    device = next(model.parameters()).device
    prompts = torch.tensor([request.prompt_ids for request in requests], device=device)
    masks = torch.full((len(requests), params.gen_length), config.mask_token_id, device=device)
    tokens, start = torch.cat((prompts, masks), dim=1), prompts.shape[1]
    for block in range(params.num_blocks):
        end = start + (block + 1) * params.block_length
        for quota in commit_quotas(params.block_length, params.steps_per_block):
            logits = model(tokens).float()
            logits[..., config.mask_token_id] = -torch.inf
            confidence, drawn = logits.softmax(dim=-1).max(dim=-1)
            confidence = torch.where(tokens == config.mask_token_id, confidence, -torch.inf)
            confidence[:, end:] = -torch.inf
            chosen = confidence.sort(dim=-1, descending=True, stable=True).indices[:, :quota]
            tokens.scatter_(1, chosen, drawn.gather(1, chosen))
    return tokens[:, start:]


def seconds(work: Callable[[], object], device: str) -> float:
    """Time of one call."""
    if device == "cpu":
        began = time.process_time()
        work()
        return time.process_time() - began
    torch.cuda.synchronize()
    began = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - began


def matmul_flops_per_s(device: str, width: int) -> float:
    """The machine's rate on the model's own kind of product: [4096, width] x [width, 4 width]."""
    a, b = torch.randn(4096, width, device=device), torch.randn(width, 4 * width, device=device)
    work = lambda: [a @ b for _ in range(20)]  # noqa: E731
    work()
    return 20 * 2 * 4096 * width * 4 * width / min(seconds(work, device) for _ in range(5))


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """What is measured."""

    name: str
    """How the table calls it."""
    vocab_size: int
    """Width of the head."""
    params: SamplingParams
    """The schedule."""
    group_size: int
    """Requests with the same prompt."""


CASES = (
    Case(
        name="64 steps, vocabulary 1,536",
        vocab_size=1536,
        params=SamplingParams(gen_length=128, block_length=32, num_denoise_steps=64, temperature=0.0),
        group_size=1,
    ),
    Case(
        name="64 steps, vocabulary 16,384",
        vocab_size=16384,
        params=SamplingParams(gen_length=128, block_length=32, num_denoise_steps=64, temperature=0.0),
        group_size=1,
    ),
    Case(
        name="1 step, groups of 16",
        vocab_size=1536,
        params=SamplingParams(gen_length=32, block_length=32, num_denoise_steps=1, temperature=0.0),
        group_size=16,
    ),
)


def plain_flops(model: Transformer, params: SamplingParams) -> float:
    """Multiplications and additions of the plain algorithm, in matrix products with weights."""
    weights = [weight for name, weight in model.named_parameters() if weight.ndim == 2 and "embed" not in name]
    per_token = 2.0 * sum(weight.numel() for weight in weights)
    return NUM_REQUESTS * (PROMPT_TOKENS + params.gen_length) * params.num_denoise_steps * per_token


def make_policy(case: Case, device: str) -> Transformer:
    """A random policy, sharper than random: one that is nearly uniform has no order to find."""
    config = TransformerConfig(
        vocab_size=case.vocab_size,
        d_model=256,
        num_layers=6,
        num_heads=8,
        num_kv_heads=8,
        mlp_hidden_size=704,
        max_sequence_length=PROMPT_TOKENS + case.params.gen_length,
        mask_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
    )
    model = Transformer(config)
    init_weights(model, seed=0)
    with torch.no_grad():
        model.head.weight.mul_(4.0)
    return model.to(device)


def make_requests(case: Case) -> list[Request]:
    """Groups of equal prompts."""
    shape = (NUM_REQUESTS // case.group_size, PROMPT_TOKENS)
    prompts = torch.randint(2, case.vocab_size, shape, generator=torch.Generator().manual_seed(0)).tolist()
    return [Request(prompt_ids=tuple(p), params=case.params, seed=0) for p in prompts for _ in range(case.group_size)]


def row(case: Case, device: str) -> tuple[str, ...]:
    """One row of the table."""
    model, requests = make_policy(case, device), make_requests(case)
    sampler = Sampler(model, 0)
    expected = plain(model, requests).cpu()
    for index, completion in enumerate(sampler.generate(requests)):
        ours = torch.from_numpy(completion.token_ids).long()
        assert torch.equal(ours, expected[index, : len(ours)]), "both commit the same tokens"
    pairs = [
        (seconds(lambda: plain(model, requests), device), seconds(lambda: sampler.generate(requests), device))
        for _ in range(ROUNDS)
    ]
    slow, fast = (statistics.median(column) for column in zip(*pairs, strict=True))
    ratios = [one / other for one, other in pairs]
    limit = plain_flops(model, case.params) / matmul_flops_per_s(device, model.config.d_model)
    shown = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
    return case.name, f"{slow:.3f}", f"{fast:.3f}", shown, f"{limit:.3f}"


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    device = sys.argv[1] if len(sys.argv) > 1 else "cpu"
    columns = (f"{NUM_REQUESTS} requests", "plain, s", "d1, s", "plain / d1", "plain, were all of it matmul, s")
    table = Table(*columns, title=f"sampling, {device}")
    for case in CASES:
        table.add_row(*row(case, device))
    Console().print(table)


if __name__ == "__main__":
    main()
