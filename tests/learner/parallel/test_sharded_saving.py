"""Sharded checkpoints: what every rank writes is what a gather would have written, on any number of ranks."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from learner.model.checkpoint import load_policy, save_checkpoint, stored_dtype
from learner.model.checkpoint_files import learner_files, verify_checkpoint, weight_files
from learner.model.config import TransformerConfig
from learner.model.moe.config import MoEConfig
from learner.model.networks import make_model
from learner.model.storage.reading import Extent, read_extents
from learner.model.storage.shards import read_shards
from learner.model.storage.throughput import Throughput
from learner.model.storage.weights import StoredWeights
from learner.model.tokenizer import make_tokenizer
from learner.optimizer import PolicyOptimizer
from learner.parallel import sharded_saving
from learner.parallel.loading import load_by_rows
from learner.parallel.sharded_saving import StagedTensors, make_group, save_shards
from learner.parallel.sharded_tensors import local_part
from learner.parallel.sharding import ShardedPolicy, make_mesh
from learner.parallel.sharding_config import ShardingConfig
from tests.learner.parallel.test_gathers import OF_SHORT_NAMES, Collectives
from tests.ranks import run_ranks

# ALLGATHER, GATHER and SCATTER on gloo are as short.
OF_SHORT_NAMES_TOO = OF_SHORT_NAMES | {"c10d.allgather_", "c10d.gather_", "c10d.scatter_"}
_MOE = MoEConfig(
    num_experts=8,
    experts_per_token=3,
    expert_width=5,
    router="sigmoid",
    num_groups=4,
    kept_groups=2,
    scale=2.5,
    shared_width=5,
    dense_layers=(0,),
)
KINDS = ("learner", "model")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that one rank wrote, of experts and of matrices that do not divide by two or three."""
    directory = tmp_path_factory.mktemp("sharded")
    make_tokenizer(["3 7 9 = 24"], directory / "tokenizer", 300)
    config = TransformerConfig(
        vocab_size=301,
        d_model=6,
        num_layers=2,
        num_heads=1,
        num_kv_heads=1,
        mlp_hidden_size=7,
        family="llada2_moe",
        block_length=4,
        qk_norm=True,
        head_width=12,
        rotary_width=6,
        moe=_MOE,
        max_sequence_length=8,
        mask_token_id=299,
        eos_token_id=298,
        pad_token_id=298,
    )
    generator = torch.Generator().manual_seed(3)
    model = make_model(config)
    weights = {name: torch.randn(tensor.shape, generator=generator) for name, tensor in model.state_dict().items()}
    trained = {name: weights[name] for name, parameter in model.named_parameters() if parameter.requires_grad}
    state = {
        f"{name}/{key}": torch.randn(tensor.shape, generator=generator)
        for name, tensor in trained.items()
        for key in ("exp_avg", "exp_avg_sq")
    } | {f"{name}/step": torch.tensor(3.0) for name in trained}
    save_checkpoint(directory / "whole", config, weights, directory / "tokenizer", learner_state=state)
    return directory / "whole"


def _restored(directory: Path, workers_per_copy: int = 0) -> tuple[ShardedPolicy, PolicyOptimizer]:
    """Load a checkpoint on all ranks, as a resumed run does; each reads its own rows alone."""
    num_read = 0

    def read(extents: Sequence[Extent], progress: Throughput | None = None) -> None:
        nonlocal num_read
        num_read += sum(extent.num_bytes for extent in extents)
        read_extents(extents, progress)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("learner.model.storage.tensors.read_extents", read)
        policy, optimizer = _loaded(directory, workers_per_copy)
    own = sum(local_part(tensor).nbytes for tensor in optimizer.state().values())
    assert num_read == own, "moments and steps"
    return policy, optimizer


def _loaded(directory: Path, workers_per_copy: int) -> tuple[ShardedPolicy, PolicyOptimizer]:
    mesh = make_mesh("cpu", workers_per_copy) if dist.is_initialized() else None
    sharding = ShardingConfig(workers_per_copy=workers_per_copy)
    policy = load_by_rows(directory, mesh, sharding, device=torch.device("cpu"))
    optimizer = PolicyOptimizer(policy, betas=(0.9, 0.99), weight_decay=0.0)
    optimizer.load_full_state(read_shards(learner_files(directory)))
    return policy, optimizer


def _assert_as_in(whole: Path, policy: ShardedPolicy, optimizer: PolicyOptimizer) -> None:
    weights, state = policy.weights_on_rank_0(), optimizer.full_state()
    if policy.rank == 0:
        _assert_equal(weights, {name: tensor[:] for name, tensor in StoredWeights(whole).items()})
        _assert_equal(state, load_file(whole / "learner.safetensors"))


def _assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name, tensor in expected.items() if not torch.equal(found[name], tensor)] == []


def _complete(directory: Path, policy: ShardedPolicy) -> Callable[[dict[str, str]], None]:
    def complete(shards: dict[str, str]) -> None:
        state = {"round": 1}
        save_checkpoint(
            directory, policy.config, None, directory.parent / "tokenizer", trainer_state=state, shards=shards
        )

    return complete


def _save(directory: Path, policy: ShardedPolicy, optimizer: PolicyOptimizer, group: Any) -> None:
    """Save, while training goes on: it changes every tensor after the staging."""
    with Collectives() as seen:
        staged = StagedTensors.stage(policy.weights, optimizer.state())
        assert not seen.names, "no rank receives anything of another"
    num_bytes = sum(tensor.nbytes for tensor in staged.local.values())
    if policy.mesh is not None and policy.mesh.ndim == 1:
        assert num_bytes < staged.num_bytes / policy.world_size + 40 * len(staged.local), "a rank's rows alone"
    for tensor in (*policy.weights.values(), *optimizer.state().values()):
        local_part(tensor).zero_()
    with Collectives() as seen:
        save_shards(directory, staged, group, _complete(directory, policy))
    assert seen.names <= OF_SHORT_NAMES_TOO, seen.names
    dist.barrier()


def _on_ranks(rank: int, num: int, whole: Path) -> None:
    """Resume from one rank's checkpoint, write shards, and resume from these."""
    torch.set_num_threads(1)
    directory = whole.parent
    dist.init_process_group("gloo", init_method=f"file://{directory}/port{num}", rank=rank, world_size=num)
    group = make_group(1)
    policy, optimizer = _restored(whole)
    _assert_as_in(whole, policy, optimizer)
    _save(directory / f"of-{num}", policy, optimizer, group)
    for other in (2, 3):
        if (directory / f"of-{other}").is_dir():
            _assert_as_in(whole, *_restored(directory / f"of-{other}"))
    if num == 2:
        policy, optimizer = _restored(whole, workers_per_copy=1)
        _save(directory / "of-copies", policy, optimizer, group)
        _assert_full_disk(rank, policy, optimizer, group, directory)
    dist.destroy_process_group()


def _assert_full_disk(
    rank: int, policy: ShardedPolicy, optimizer: PolicyOptimizer, group: Any, directory: Path
) -> None:
    """The disk of one rank is full: all ranks say so, nothing is left, and the ranks can go on."""

    def full(*_: Any, **__: Any) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    staged = StagedTensors.stage(policy.weights, optimizer.state())
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(sharded_saving, "save_file", full)
        with pytest.raises(OSError, match=r"^\S*/of-full cannot be written: Error while .* \(os error 28\)$"):
            save_shards(directory / "of-full", staged, group, _complete(directory / "of-full", policy))
    dist.barrier()
    assert not [path for path in directory.iterdir() if "of-full" in path.name]


@pytest.fixture(scope="module")
def sharded(whole: Path) -> Path:
    """The directory of checkpoints that three, two, and two ranks with whole copies wrote."""
    for num in (3, 2):
        run_ranks(_on_ranks, num, whole, num=num)
    return whole.parent


def test_shards_are_what_a_gather_writes_on_one_two_and_three_ranks(whole: Path, sharded: Path) -> None:
    for name in ("of-2", "of-3", "of-copies"):
        verify_checkpoint(sharded / name)
        _assert_as_in(whole, *_restored(sharded / name))
        assert _num_written(sharded / name) == _num_written(whole), "every row is written once"
    assert {path.name for path in (sharded / "of-3").glob("*.safetensors")} == {
        f"{kind}.rank-0000{rank}-of-00003.safetensors" for kind in KINDS for rank in range(3)
    }


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_shards_are_the_format_of_torchs_reader(whole: Path, sharded: Path) -> None:
    expected = load_file(whole / "learner.safetensors")
    found = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    dcp.load(found, storage_reader=dcp.HuggingFaceStorageReader(str(sharded / "of-3")), no_dist=True)
    _assert_equal(found, expected)


def test_a_process_without_ranks_loads_the_policy_from_shards(whole: Path, sharded: Path) -> None:
    _assert_equal(*(dict(load_policy(sharded / name).named_parameters()) for name in ("of-3", "whole")))
    assert stored_dtype(sharded / "of-3") is torch.float32


@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_shard_is_refused(sharded: Path, kind: str) -> None:
    path = sharded / "of-3" / f"{kind}.rank-00001-of-00003.safetensors"
    content = path.read_bytes()
    try:
        for harmed in (content[:-1], content[:-1] + bytes([content[-1] ^ 1]), None):
            path.unlink() if harmed is None else path.write_bytes(harmed)
            with pytest.raises(ValueError, match=rf"^\S*/{path.name} is damaged: it is not what manifest.json lists$"):
                verify_checkpoint(sharded / "of-3")
        with pytest.raises(ValueError, match=r"^\S*rank-00002\S* does not have row \d+ of \S+, the next one; a shard"):
            read_shards(sorted((sharded / "of-3").glob(f"{kind}.*")))
    finally:
        path.write_bytes(content)


def _num_written(directory: Path) -> int:
    """Count the bytes of all weights in a checkpoint's files."""
    return sum(tensor.nbytes for path in weight_files(directory) for tensor in load_file(path).values())


def _killed(rank: int, whole: Path) -> None:
    torch.set_num_threads(1)
    directory = whole.parent
    dist.init_process_group("gloo", init_method=f"file://{directory}/port-killed", rank=rank, world_size=2)
    group = make_group(1)
    policy, optimizer = _loaded(whole, 0)
    staged = StagedTensors.stage(policy.weights, optimizer.state())
    if rank == 1:
        # A shard of it is in the partial directory by then.
        sharded_saving.fsync = lambda _path: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
    with pytest.raises(RuntimeError, match="gloo"):
        save_shards(directory / "of-killed", staged, group, _complete(directory / "of-killed", policy))
    assert not [path.name for path in directory.iterdir() if "of-killed" in path.name], "rank 0 removes what there is"


def test_a_rank_that_is_killed_leaves_no_checkpoint(whole: Path) -> None:
    # Not by `run_ranks`, which would end rank 0 too.
    context = multiprocessing.get_context("forkserver")
    ranks = [context.Process(target=_killed, args=(rank, whole)) for rank in (0, 1)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(120)
    assert [process.exitcode for process in ranks] == [0, -signal.SIGKILL]
