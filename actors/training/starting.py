"""Starting points of a run and its stages: the checkpoint, its policy, and the base of an adapter."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from actors.checkpoints.selection import FoundCheckpoint, Position, newest_checkpoint, resumable
from actors.spec import Phase, RunSpec
from learner.hardware import indexed_device, limit_memory
from learner.model.adapter import read_chain
from learner.model.checkpoint import stored_dtype
from learner.model.checkpoint_files import BaseCheckpoint, chain_digest, verify_checkpoint
from learner.model.storage.throughput import ReportProgress
from learner.model.storage.weights import StoredWeights
from learner.parallel.consensus import Ranks
from learner.parallel.loading import load_by_rows
from learner.parallel.sharding import ShardedPolicy, make_mesh


def agreed_checkpoint(spec: RunSpec, ranks: Ranks, say: ReportProgress | None = None) -> FoundCheckpoint:
    """Find the checkpoint to continue from, as rank 0 sees the disk; `say` reports the read throughput. A collective.

    Raises ValueError if there is no checkpoint, or none is intact.
    """

    def find() -> dict[str, Any]:
        found = newest_checkpoint(spec.checkpoints_dir, resumable(spec.learner.num_rounds), say)
        if found is None:
            raise ValueError(f"{spec.checkpoints_dir} has no checkpoint")
        position = asdict(found.position)
        return {"name": found.directory.name, "position": position, "skipped": found.skipped}

    found = ranks.broadcast_decision(find)
    return FoundCheckpoint(
        directory=spec.checkpoints_dir / found["name"],
        position=Position.of(found["position"]),
        skipped=tuple(found["skipped"]),
    )


def load_sharded(spec: RunSpec, directory: Path, phase: Phase, say: ReportProgress | None = None) -> ShardedPolicy:
    """Load a stage's checkpoint, sharded over the ranks, with its adapters unmerged. `say` reports the read
    throughput."""
    mesh = make_mesh(spec.device, spec.sharding.workers_per_copy, spec.collective_timeout_s)
    device = indexed_device(spec.device)
    limit_memory(device, spec.gpus.learner)
    lora, chain = spec.lora_of(phase), read_chain(directory)
    dtype = torch.bfloat16 if _holds_bfloat16(spec) else torch.float32
    policy = load_by_rows(
        chain.weights, mesh, spec.sharding, device=device, lora=lora, seed=spec.seed, dtype=dtype, report=say
    )
    if chain.adapter is not None:
        policy.reset_adapter(chain.start)
        policy.load_adapter(chain.adapter.matrices)
    return policy


def _holds_bfloat16(spec: RunSpec) -> bool:
    """Return whether frozen weights are held in bfloat16. Nothing is lost: the initial checkpoint, the base of all
    stages, is in bfloat16, and FSDP rounds what it gathers to it in any case."""
    return spec.may_hold_base_in_bfloat16 and stored_dtype(spec.initial_checkpoint) is torch.bfloat16


def start_of(phase: Phase, spec: RunSpec, ranks: Ranks) -> Path:
    """Return the checkpoint that a stage starts from: after SFT the one of SFT, if there is one; else the initial
    one."""
    after_sft = spec.checkpoints_dir / str(Phase.SFT)
    is_after = phase not in (Phase.UNTRAINED, Phase.SFT)
    return after_sft if is_after and ranks.broadcast_decision(after_sft.is_dir) else spec.initial_checkpoint


def base_of(phase: Phase, spec: RunSpec, ranks: Ranks) -> BaseCheckpoint | None:
    """Return the base checkpoint of a stage's adapter; None without LoRA. A collective."""
    lora = spec.lora_of(phase)
    if not lora.rank:
        return None
    directory = start_of(phase, spec, ranks)
    digest = ranks.broadcast_decision(lambda: chain_digest(directory))
    return BaseCheckpoint(
        checkpoint=directory.name, digest=digest, scaling=lora.scaling, base_weights=lora.base_weights
    )


def verified_weights(directory: Path) -> StoredWeights:
    """Verify a checkpoint and open its weights. Raises ValueError if its files are damaged."""
    verify_checkpoint(directory)
    return StoredWeights(directory)
