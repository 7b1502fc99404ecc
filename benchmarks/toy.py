"""Toy policy and task for the cache benchmarks: each slot depends on the slot 64 columns before it.

It trains in five minutes on one thread. Each number is the successor of the one 64 columns before. A quarter of them
also depend on the token to their left. So most slots of a block are certain at once and the others depend on a
neighbour. As with a real policy, schedules and caches can therefore gain speed and lose accuracy. Lengths vary.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from learner.counter import uniform
from learner.model.config import TransformerConfig
from learner.model.transformer import Transformer, init_weights
from learner.seeds import fold
from learner.sft.documents import Documents
from learner.sft.masking import masked_logps, plan_sft

BASE = 96
"""Numbers are 0 to 95, and so are their token ids."""
MASK, EOS, END, LATER_END = BASE, BASE + 1, BASE + 2, BASE + 3
PERIOD = 64
PROMPT_TOKENS = PERIOD
GEN_LENGTH = 2 * PERIOD
_BATCH, _LR = 16, 3e-3


def config() -> TransformerConfig:
    """Return the toy network's config: width 128, 4 blocks."""
    return TransformerConfig(
        vocab_size=BASE + 4,
        d_model=128,
        num_layers=4,
        num_heads=4,
        num_kv_heads=4,
        mlp_hidden_size=352,
        max_sequence_length=PROMPT_TOKENS + GEN_LENGTH,
        mask_token_id=MASK,
        eos_token_id=EOS,
        pad_token_id=EOS,
    )


def problems(count: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Make prompts [count, 64], answers [count, 128] padded with end of text, and answer lengths [count].

    A prompt is numbers, then END if the answer ends in its first half, or LATER_END if in its second.
    """
    # Hash the seed: otherwise adjacent seeds would share most of their problems, in another order.
    rows, key = torch.arange(count), torch.tensor(fold(seed, 1))
    numbers = (uniform(key, rows[:, None], 1, torch.arange(PERIOD)) * BASE).long()
    length = (8 + uniform(key, rows, 2) * (GEN_LENGTH - 8)).long()
    end = torch.where(length < PERIOD, END, LATER_END)[:, None]
    canvas = torch.cat(
        (torch.where(torch.arange(PERIOD) < length[:, None] % PERIOD, numbers, end), numbers, numbers), 1
    )
    for column in range(PERIOD, 3 * PERIOD):
        canvas[:, column] = _next(canvas[:, column - PERIOD], canvas[:, column - 1])
    is_eos = canvas[:, PERIOD:] == EOS
    length = torch.where(is_eos, torch.arange(GEN_LENGTH), GEN_LENGTH).amin(dim=1)
    return canvas[:, :PERIOD], canvas[:, PERIOD:], length


def _next(before: Tensor, left: Tensor) -> Tensor:
    carried = (before % 4 == 0) & (left % 2 == 1)
    number = (before + 1 + carried.long()) % BASE
    special = torch.where(before == LATER_END, END, EOS)
    # End of text fills the rest of the canvas.
    return torch.where(left == EOS, EOS, torch.where(before < BASE, number, special))


def train(num_steps: int, seed: int = 0) -> Transformer:
    """Train a policy by `num_steps` steps of masked SFT."""
    model = Transformer(config())
    init_weights(model, seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LR, betas=(0.9, 0.99), weight_decay=0.01)
    for step in range(num_steps):
        prompts, answers, _ = problems(_BATCH, seed=1_000_000 + step)
        documents = Documents(
            ids=torch.cat((prompts, answers), dim=1),
            prompt_lengths=torch.full((_BATCH,), PROMPT_TOKENS),
            lengths=torch.full((_BATCH,), PROMPT_TOKENS + GEN_LENGTH),
            sample_keys=torch.arange(step * _BATCH, (step + 1) * _BATCH),
        )
        masked = plan_sft(documents, model.config.mask_token_id, step, seed, documents.num_rows)
        loss = -(masked_logps(model, masked) * masked.weights).sum() / documents.num_trained
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = _LR * min(1.0, (step + 1) / 50) * max(0.05, 1 - step / num_steps)
        optimizer.step()
        optimizer.zero_grad()
        if step % 100 == 0 or step == num_steps - 1:
            print(f"toy: step {step}, loss {loss.item():.3f}", flush=True)
    return model


def save(model: Transformer, path: Path) -> None:
    """Write the weights."""
    save_file(model.state_dict(), path)


def load(path: Path, device: str) -> Transformer:
    """Load a policy from saved weights."""
    model = Transformer(config())
    model.load_state_dict(load_file(path))
    return model.to(device)


def accuracy(tokens: list[list[int]], answers: Tensor, lengths: Tensor) -> float:
    """Compute the share of correct tokens in the answers."""
    right = total = 0
    for row, (answer, length) in enumerate(zip(answers.tolist(), lengths.tolist(), strict=True)):
        text = tokens[row][:length]
        right += sum(one == other for one, other in zip(text, answer[:length], strict=False))
        total += length
    return right / total
