"""What a run and its stages start from: the newest checkpoint, its policy, and what an adapter stands on."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from actors.checkpoints.selection import FoundCheckpoint, Position, newest_checkpoint, to_go_on
from actors.spec import Phase, RunSpec
from learner.hardware import limit_memory, placed_on
from learner.model.adapter import Adapter, read_adapter
from learner.model.checkpoint import StoredWeights, load_policy, stored_dtype
from learner.model.checkpoint_files import ADAPTER, adapter_base, lent_weights, verify_checkpoint
from learner.parallel.loading import load_by_rows
from learner.parallel.ranks import Ranks
from learner.parallel.sharding import ShardedPolicy, make_mesh


def agreed_checkpoint(spec: RunSpec, ranks: Ranks) -> FoundCheckpoint:
    """Where to go on, by rank 0's view of the disk. Raises ValueError when there is no checkpoint, or none is whole."""

    def find() -> dict[str, Any]:
        found = newest_checkpoint(spec.checkpoints_dir, to_go_on(spec.learner.num_rounds))
        if found is None:
            raise ValueError(f"{spec.checkpoints_dir} has no checkpoint")
        position = asdict(found.position)
        return {"name": found.directory.name, "position": position, "passed_over": found.passed_over}

    found = ranks.agreed(find)
    return FoundCheckpoint(
        directory=spec.checkpoints_dir / found["name"],
        position=Position.of(found["position"]),
        passed_over=tuple(found["passed_over"]),
    )


def load_sharded(spec: RunSpec, directory: Path) -> ShardedPolicy:
    """A checkpoint's policy, spread over the ranks: whole, or an adapter beside what it stands on.

    Merged, the one in 4 bits would be rounded again, and the one in bfloat16 be rounded.
    """
    mesh = make_mesh(spec.device, spec.sharding.workers_per_copy, spec.collective_timeout_s)
    device = placed_on(spec.device)
    limit_memory(device, spec.gpus.learner)
    lora = spec.model.lora
    adapter, base = _unmerged(spec, directory)
    if lora.base_weights == "nf4":
        # It may be too large for a GPU: what the 4 bits leave of it goes there block by block.
        policy = ShardedPolicy(load_policy(base), mesh, spec.sharding, lora=lora, seed=spec.seed)
    else:
        dtype = torch.bfloat16 if _is_held_in_half(spec) else torch.float32
        policy = load_by_rows(base, mesh, spec.sharding, device=device, lora=lora, seed=spec.seed, dtype=dtype)
    if adapter is not None:
        policy.load_adapter(adapter.matrices)
    return policy


def _unmerged(spec: RunSpec, directory: Path) -> tuple[Adapter | None, Path]:
    """A checkpoint's adapter, where it has one, and the checkpoint that it stands on; else itself."""
    if not spec.model.lora.rank or not (directory / ADAPTER).is_file():
        return None, directory
    base = adapter_base(directory)
    if lent_weights(directory) is None:
        # Else it was verified with the checkpoint that it lends its weights to.
        verify_checkpoint(base)
    return read_adapter(directory), base


def _is_held_in_half(spec: RunSpec) -> bool:
    """Whether frozen weights are held in bfloat16 and lose nothing: all stages stand on the first checkpoint, which is
    in it, and FSDP rounds what it gathers to it in any case."""
    return spec.may_hold_base_in_half and stored_dtype(spec.initial_checkpoint) is torch.bfloat16


def start_of(phase: Phase, spec: RunSpec, ranks: Ranks) -> Path:
    """The checkpoint that a stage starts from: SFT from the initial one, the others from SFT's where there is one."""
    if phase is Phase.SFT:
        return spec.initial_checkpoint
    after_sft = spec.checkpoints_dir / str(Phase.SFT)
    return after_sft if ranks.agreed(after_sft.is_dir) else spec.initial_checkpoint


def verified_weights(directory: Path) -> StoredWeights:
    """The weights of a checkpoint, to be read. Raises ValueError when its files are damaged."""
    verify_checkpoint(directory)
    return StoredWeights(directory)
