"""The first d1's training update against ours: the same adapter, completions, prompt masks and optimizer settings.

A round is one group. As its trainer does, the peer first computes old and reference log-probabilities under all prompt
masks, each in one forward of all rows. Then it makes the inner updates by its `compute_loss`, on peft's adapter.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch
from peft import LoraConfig as PeftConfig
from peft import PeftModel, get_peft_model
from torch import Tensor

from benchmarks import rounds
from benchmarks.gpu.peers.checkouts import Peers
from benchmarks.gpu.setting import Row, Setting, random_policy
from benchmarks.measure import in_turn, ratio
from benchmarks.reference_update import UpdateSettings
from learner.batch import RolloutBatch
from learner.estimators import SamplerFacts
from learner.hardware import free_unused_memory, peak_memory_bytes, reset_peak_memory
from learner.learner import Learner
from learner.model.families import FAMILIES
from learner.model.families.llada import BLOCK_NAMES, BLOCK_PREFIX
from learner.model.lora_config import TARGETS, LoraConfig
from learner.parallel.sharding import ShardedPolicy

_ALPHA = 64
_PEFT_PREFIX = "base_model.model."


def compare(setting: Setting, dtype: torch.dtype, peers: Peers, num_rounds: int) -> Iterator[Row]:
    """Time rounds of both in turn, with the paper's prompt masks and without."""
    for p_mask_prompt in (0.15, 0.0):
        yield _compare(setting, dtype, peers, num_rounds, p_mask_prompt)


def _compare(setting: Setting, dtype: torch.dtype, peers: Peers, num_rounds: int, p_mask_prompt: float) -> Row:
    of_round = rounds.Setting(
        shape=setting.shape,
        prompt_tokens=setting.prompt_tokens,
        gen_length=setting.gen_length,
        p_mask_prompt=p_mask_prompt,
        device=setting.device,
    )
    batch = rounds.make_round(of_round)
    masks = rounds.prompt_masks(of_round, batch)
    policy = random_policy(setting, dtype)
    # Before an adapter is added to the policy. The frozen weights are in memory once.
    network = peers.fast_dllm.network(policy)
    ours = Learner(
        ShardedPolicy(policy, None, lora=LoraConfig(rank=setting.rank, alpha=_ALPHA)),
        rounds.learner_config(of_round),
        SamplerFacts(has_reproducible_logps=False),
    )
    start = ours.policy.adapter_on_rank_0()
    theirs = FirstUpdate(peers.first_trainer, network, setting, start)
    works: dict[str, Callable[[], object]] = {
        "peer": partial(theirs.update, batch, masks),
        "d1": partial(ours.update, batch, 0),
    }
    # The warm-up, whose updates are compared.
    added = {name: _added_gigabytes(work, torch.device(setting.device)) for name, work in works.items()}
    moved = _flat(ours.policy.adapter_on_rank_0()) - _flat(start)
    expected = _flat(theirs.adapter()) - _flat(start)
    taken = in_turn(works, num_rounds, setting.device)
    return {
        "what": f"the first d1, {of_round.num_updates} updates, p_mask_prompt {p_mask_prompt:g}",
        "rows": of_round.num_rows,
        "peer_seconds": median(taken["peer"]),
        "seconds": median(taken["d1"]),
        "speed_up": ratio(taken, "peer", "d1"),
        "distance": float((moved - expected).norm() / expected.norm()),
        "peer_gigabytes": added["peer"],
        "gigabytes": added["d1"],
    }


def _added_gigabytes(work: Callable[[], object], device: torch.device) -> float | None:
    """Measure the peak memory of a GPU during `work`, above what is allocated before; None on a CPU."""
    free_unused_memory(device)
    reset_peak_memory(device)
    before = peak_memory_bytes(device)
    work()
    return (peak_memory_bytes(device) - before) / 1e9 if device.type == "cuda" else None


class FirstUpdate:
    """The first d1's trainer without its loop: an adapter on LLaDA's modeling code, and AdamW."""

    def __init__(self, trainer: type, network: Any, setting: Setting, start: Mapping[str, Tensor]) -> None:
        """Add the adapter `start`, of our names, to the network."""
        self.settings = UpdateSettings()
        theirs = "|".join(BLOCK_NAMES[name] for name in BLOCK_NAMES if name.rpartition(".")[2] in TARGETS)
        config = PeftConfig(
            r=setting.rank, lora_alpha=_ALPHA, target_modules=rf"{BLOCK_PREFIX}\.\d+\.({theirs})", lora_dropout=0.0
        )
        self.model: PeftModel = get_peft_model(network, config)
        self._names = {name: _peft_name(name) for name in start}
        self.model.load_state_dict({self._names[name]: matrix for name, matrix in start.items()}, strict=False)
        self._trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(
            self._trained,
            lr=self.settings.lr,
            betas=self.settings.betas,
            weight_decay=self.settings.weight_decay,
        )
        self._trainer: Any = object.__new__(trainer)
        self._trainer.__dict__.update(self._attributes(network.config.mask_token_id))

    def _attributes(self, mask_id: int) -> dict[str, Any]:
        """Return the attributes of a trainer that the measured methods read."""
        return {
            "args": SimpleNamespace(cfg_scale=0.0, mask_id=mask_id, num_iterations=0),
            "beta": self.settings.kl_coef,
            "epsilon": self.settings.clip,
            "num_iterations": 0,
            "control": SimpleNamespace(should_evaluate=False),
            "accelerator": SimpleNamespace(gather_for_metrics=lambda value: value),
            "_metrics": defaultdict(lambda: defaultdict(list)),
        }

    def update(self, batch: RolloutBatch, prompt_masked_UBP: Tensor) -> None:
        """Train on a group whose prompts have equal length, under given prompt masks [U, B, P]."""
        trainer, num_updates = self._trainer, len(prompt_masked_UBP)
        batch, masked_UBP = batch.to(self.model.device), prompt_masked_UBP.to(self.model.device)
        trainer.args.num_iterations = trainer.num_iterations = num_updates

        def mask(ids: Tensor, is_prompt: Tensor, mask_id: int, seed: int) -> tuple[Tensor, None]:
            """Mask the completion, and of the prompt what our estimator masks in the update number `seed`."""
            masked = ~is_prompt.expand_as(ids).clone()
            masked[:, : masked_UBP.shape[2]] = masked_UBP[seed]
            return torch.where(masked, mask_id, ids), None

        trainer.forward_process = mask
        inputs = self._inputs(batch, num_updates)
        for index in range(num_updates):
            trainer._step = index
            trainer.compute_loss(self.model, inputs).backward()
            torch.nn.utils.clip_grad_norm_(self._trained, self.settings.max_grad_norm)
            self.optimizer.step()
            self.optimizer.zero_grad()

    @torch.no_grad()
    def _inputs(self, batch: RolloutBatch, num_updates: int) -> dict[str, Any]:
        """Compute what the trainer computes once in a round."""
        seeds = list(range(num_updates))
        ids_UBS = torch.cat((batch.prompt_ids, batch.completion_ids), dim=1).expand(num_updates, -1, -1)
        score = partial(self._trainer._get_per_token_logps, self.model, ids_UBS, batch.num_slots, seeds)
        old_UBL = score()
        with self.model.disable_adapter():
            reference_UBL = score()
        return {
            "prompt_ids": batch.prompt_ids,
            "prompt_mask": torch.ones_like(batch.prompt_ids),
            "completion_ids": batch.completion_ids,
            "completion_mask": batch.completion_mask().int(),
            "old_per_token_logps": old_UBL,
            "ref_per_token_logps": reference_UBL,
            "advantages": batch.rewards - batch.rewards.mean(),
            "mask_seeds": seeds,
        }

    def adapter(self) -> dict[str, Tensor]:
        """Return the adapter's matrices under our names."""
        state = self.model.state_dict()
        return {name: state[theirs].cpu() for name, theirs in self._names.items()}


def _peft_name(name: str) -> str:
    """Return peft's name of a matrix, `blocks.0.attn.q_proj.lora_A.weight` of ours."""
    layer, matrix, _ = name.rsplit(".", 2)
    theirs = FAMILIES["llada"].checkpoint_name(f"{layer}.weight").removesuffix(".weight")
    return f"{_PEFT_PREFIX}{theirs}.{matrix}.default.weight"


def _flat(matrices: Mapping[str, Tensor]) -> Tensor:
    return torch.cat([matrix.detach().flatten().double() for _, matrix in sorted(matrices.items())])
