"""What a run and its stages start from: the newest checkpoint, its policy, and what an adapter stands on."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from actors.checkpoints.selection import FoundCheckpoint, Position, newest_checkpoint, to_go_on
from actors.spec import Phase, RunSpec
from learner.hardware import limit_memory
from learner.model.adapter import ADAPTER, Adapter, read_adapter
from learner.model.checkpoint import StoredWeights, load_policy
from learner.model.checkpoint_files import verify_checkpoint
from learner.model.transformer import Transformer
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
    """A checkpoint's policy, spread over the ranks."""
    mesh = make_mesh(spec.device)
    device = torch.device("cuda", torch.cuda.current_device()) if spec.device == "cuda" else torch.device("cpu")
    limit_memory(device, spec.gpus.learner)
    if spec.model.lora.base_weights == "nf4":
        # It may be too large for a GPU: what the 4 bits leave of it goes there block by block.
        adapter, model = _unmerged(spec, directory)
        policy = ShardedPolicy(model, mesh, spec.sharding, lora=spec.model.lora, seed=spec.seed)
        if adapter is not None:
            policy.load_adapter(adapter.matrices)
        return policy
    return load_by_rows(directory, mesh, spec.sharding, device=device, lora=spec.model.lora, seed=spec.seed)


def _unmerged(spec: RunSpec, directory: Path) -> tuple[Adapter | None, Transformer]:
    """A checkpoint's adapter, where it has one, and what it stands on.

    Rounded again with its adapter merged, it would not be the policy that the interrupted run had.
    """
    if not (directory / ADAPTER).is_file():
        return None, load_policy(directory)
    adapter = read_adapter(directory)
    base = spec.checkpoints_dir / adapter.base
    verify_checkpoint(base)
    return adapter, load_policy(base)


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
