"""Sharded checkpoints: every rank writes its rows of the tensors, planned by torch's distributed checkpoint (DCP).

DCP decides which rank writes what, so that a tensor which several ranks hold is written once. It also makes all ranks
fail if one does. Its own writers are not used: the default one pickles, and `HuggingFaceStorageWriter` serialises all
that a rank writes in memory first, which is a second copy of the staged shards. `_ShardWriter` writes the files of the
latter, which DCP's `HuggingFaceStorageReader` reads, without that copy. d1 reads them with
`learner/model/storage/shards.py`: services and samplers are in no process group.

Only plans and errors are exchanged as Python objects, between the ranks. Nothing on the disk is pickled.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from learner.model.checkpoint import fsync, partial_directory
from learner.model.checkpoint_files import LEARNER, MODEL, shard_name
from learner.model.storage.hashing import checksum
from learner.model.storage.shards import OFFSETS, SHARDING
from learner.parallel.sharded_tensors import local_part, on_cpu
from learner.parallel.timeouts import COLLECTIVE_TIMEOUT_S, transfer_timeout_s


@dataclass(frozen=True, kw_only=True, slots=True)
class StagedTensors:
    """Sharded tensors, whose rows of this rank are copied to main memory: training may continue."""

    sharded: Mapping[str, Tensor]
    """The tensors; only their shapes and placements are used."""
    local: Mapping[str, Tensor]
    """Copies of this rank's rows."""

    @classmethod
    def stage(cls, model: Mapping[str, Tensor], learner: Mapping[str, Tensor]) -> StagedTensors:
        """Copy this rank's rows of the policy's weights and the learner's state; either may be empty."""
        parts = ((MODEL, model), (LEARNER, learner))
        sharded = {f"{kind}/{name}": tensor.detach() for kind, part in parts for name, tensor in part.items()}
        return cls(sharded=sharded, local={name: on_cpu(local_part(tensor)) for name, tensor in sharded.items()})

    @property
    def num_bytes(self) -> int:
        """Size of the whole tensors, the same on all ranks."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.sharded.values())


def make_group(num_bytes: int) -> dist.ProcessGroup:
    """Make the group in which all ranks write checkpoints of up to `num_bytes`, apart from the group of training. A
    collective."""
    timeout = timedelta(seconds=transfer_timeout_s(COLLECTIVE_TIMEOUT_S, num_bytes))
    group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=timeout)
    return group


def save_shards(
    directory: Path, staged: StagedTensors, group: dist.ProcessGroup, complete: Callable[[dict[str, str]], None]
) -> None:
    """Write a sharded checkpoint. A collective of `group`, which may run in a thread if no other uses the group.

    Args:
        directory: the checkpoint's directory; its shards are written to `partial_directory(directory)`.
        staged: its tensors.
        group: the ranks, on gloo.
        complete: called on rank 0 when all shards are on the disk, with their SHA-256 by file name; it completes the
            checkpoint (`save_checkpoint`).

    Raises on all ranks: OSError if a file cannot be written on one of them, RuntimeError if another error occurs. The
    partial directory is removed.
    """
    try:
        save(
            dict(staged.sharded),
            storage_writer=_ShardWriter(directory, complete),
            planner=_StagedPlanner(staged.local),
            process_group=group,
        )
    except BaseException as error:
        if dist.get_rank(group) == 0:
            shutil.rmtree(partial_directory(directory), ignore_errors=True)
        if isinstance(error, CheckpointException):
            raise _cause_of(error) from None
        raise


def _cause_of(error: CheckpointException) -> Exception:
    """Return one rank's error for the errors of all ranks, which hold their tracebacks as text."""
    causes = {rank: cause for rank, (cause, _) in error.failures.items()}
    for rank, cause in causes.items():
        if not isinstance(cause, OSError):
            return RuntimeError(f"rank {rank} of the learner could not write its shards: {cause!r}")
    return next(cause for cause in causes.values() if isinstance(cause, OSError))


class _StagedPlanner(DefaultSavePlanner):
    """Planner of the live tensors, whose data are the staged copies."""

    def __init__(self, local: Mapping[str, Tensor]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._local = local

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self._local[index.fqn]


class _ShardWriter(StorageWriter):
    """Writer of one safetensors file of a rank for the weights, and one for the learner's state."""

    def __init__(self, directory: Path, complete: Callable[[dict[str, str]], None]) -> None:
        self._directory, self._partial, self._complete = directory, partial_directory(directory), complete

    def reset(self, _checkpoint_id: object = None) -> None:
        pass

    @classmethod
    def validate_checkpoint_id(cls, _checkpoint_id: object) -> bool:
        return False

    def set_up_storage_writer(self, is_coordinator: bool, *_args: Any, **_kwargs: Any) -> None:
        if is_coordinator:
            shutil.rmtree(self._partial, ignore_errors=True)
            self._partial.mkdir(parents=True)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return [replace(plan, storage_data=(rank, len(plans))) for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        try:
            results = [self._write(kind, plan, planner) for kind in (MODEL, LEARNER) if _of(kind, plan)]
        except (OSError, SafetensorError) as error:
            raise OSError(f"{self._directory} cannot be written: {error}") from error
        written = Future[list[WriteResult]]()
        written.set_result(results)
        return written

    def _write(self, kind: str, plan: SavePlan, planner: SavePlanner) -> WriteResult:
        path = self._partial / shard_name(kind, *plan.storage_data)
        rows, offsets = {}, {}
        for item in _of(kind, plan):
            name, tensor = item.index.fqn.removeprefix(f"{kind}/"), planner.resolve_data(item)
            assert isinstance(tensor, Tensor), "only tensors are saved"
            assert item.tensor_data is not None, "of which the plan knows the place"
            rows[name] = tensor
            offsets[name] = {OFFSETS: list(item.tensor_data.chunk.offsets)}
        # safetensors writes several keys in a random order, and equal shards should be equal files.
        save_file(rows, path, metadata={SHARDING: json.dumps(offsets)})
        fsync(path)
        index = MetadataIndex(path.name)
        return WriteResult(index=index, size_in_bytes=path.stat().st_size, storage_data=checksum(path))

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:  # noqa: ARG002
        self._complete({result.index.fqn: result.storage_data for of_rank in results for result in of_rank})


def _of(kind: str, plan: SavePlan) -> list[WriteItem]:
    """Return what a plan writes of a kind. A rank without rows of a tensor writes none of it."""
    items = (item for item in plan.items if item.index.fqn.startswith(f"{kind}/"))
    return [item for item in items if item.tensor_data is None or item.tensor_data.chunk.sizes.numel()]
