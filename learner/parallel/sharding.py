"""FSDP2 behind one door: a policy that is whole on one process or sharded over many, with the same code.

Collectives run on gloo for CPUs and NCCL for GPUs. Every method that gathers is a collective: all ranks call it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils.checkpoint import checkpoint

from learner.hardware import placed_on
from learner.model.adapter import Adapter
from learner.model.attention.within import has_kernel
from learner.model.config import TransformerConfig
from learner.model.lora import (
    adapted_layers,
    adapter_names,
    adapters_off,
    add_adapters,
    fresh_adapter,
    is_adapter,
    merged,
    plain_name,
    set_start,
)
from learner.model.lora_config import WHOLE, LoraConfig
from learner.model.moe.experts import expert_biases
from learner.model.networks import make_on_meta
from learner.model.quantized import Nf4Linear, quantize_blocks, quantized_layers
from learner.model.storage.throughput import Say
from learner.model.storage.weights import StoredWeights
from learner.model.transformer import Transformer
from learner.parallel.compiling import compile_blocks
from learner.parallel.patience import COLLECTIVE_TIMEOUT_S
from learner.parallel.sharding_config import ShardingConfig

_PLAIN = ShardingConfig()
# The name from torch 2.13 on, or else the one that torch 2.14 warns of.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
# Over the ranks of a copy; in each copy, if there are several.
_BY_ROWS = ((Shard(0),), (Replicate(), Shard(0)))


def _fsdp_options(config: ShardingConfig) -> dict[str, Any]:
    """What `fully_shard` is told."""
    options: dict[str, Any] = {}
    if config.compute_dtype == "bfloat16":
        # What goes from block to block is in it by itself. FSDP would cast the rotary tables too, and samplers do not.
        options["mp_policy"] = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
    if config.cpu_offload:
        options["offload_policy"] = CPUOffloadPolicy()
    return options


def _wrap_blocks(model: Transformer, config: ShardingConfig) -> None:
    """Change how blocks are run, inside of what FSDP wraps."""
    if config.compile:
        compile_blocks(model)
    if config.activation_checkpointing:
        for block in model.blocks:
            # Inside of what FSDP wraps: the block is gathered once for the second forward and the backward.
            block.forward = partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False)


def make_mesh(
    device_type: str, workers_per_copy: int = 0, timeout_s: float = COLLECTIVE_TIMEOUT_S
) -> DeviceMesh | None:
    """A mesh over all ranks; None where no process group runs (a single process).

    Args:
        device_type: "cpu" or "cuda".
        workers_per_copy: how many ranks, which divide theirs, one copy of the policy is sharded over: the mesh is then
            [copies, ranks of a copy], neighbours in one copy. 0 or all of them: one copy, [ranks].
        timeout_s: that of the process group that runs.
    """
    if not dist.is_initialized():
        return None
    num_ranks = dist.get_world_size()
    if workers_per_copy in (0, num_ranks):
        return init_device_mesh(device_type, (num_ranks,), mesh_dim_names=("dp",))
    ranks = torch.arange(num_ranks).view(-1, workers_per_copy)
    # A mesh would make them too, but with another timeout than that of all ranks.
    timeout = timedelta(seconds=timeout_s)
    groups = [dist.new_subgroups_by_enumeration(along.tolist(), timeout=timeout)[0] for along in (ranks.T, ranks)]
    return DeviceMesh.from_group(groups, device_type, ranks, mesh_dim_names=("copies", "dp"))


class Rows(Protocol):
    """A whole tensor, in memory or in a file, of which rows are taken."""

    def __getitem__(self, rows: slice, /) -> Tensor: ...


class ShardedPolicy:
    """A transformer whose parameters are sharded over a mesh, block by block; all of them are trained, or an adapter.

    Parameters go by the model's own names, whatever wraps them. Under LoRA the weights are frozen: beside them are what
    earlier stages added, frozen too and whole on every rank, and the adapter that is trained.
    """

    def __init__(
        self,
        model: Transformer,
        mesh: DeviceMesh | None,
        config: ShardingConfig = _PLAIN,
        *,
        lora: LoraConfig = WHOLE,
        seed: int = 0,
        device: torch.device | None = None,
    ) -> None:
        """Shard `model` in place over `mesh`; None leaves it whole.

        Args:
            model: the policy; every rank must pass equal weights. On the meta device it has none: then its shards are
                made on `device`, and hold anything until `load_full_weights`.
            mesh: from `make_mesh`.
            config: how it is held and computed.
            lora: what of it is trained.
            seed: determines the adapter that training starts with.
            device: where the shards of a model on the meta device are made.

        Raises:
            ValueError: `config` asks of a single process what only FSDP does, or `lora` of the policy what it has not,
                or `config` to compile what cannot be.
        """
        if mesh is None and _fsdp_options(config):
            raise ValueError("compute_dtype and cpu_offload are FSDP's, and this process is in no process group")
        if refusal := lora.refusal(model.config) or config.refusal(model.config, lora):
            raise ValueError(refusal)
        self.config = model.config
        self.mesh = mesh
        self.rank = dist.get_rank() if mesh is not None else 0
        self.world_size = mesh.size() if mesh is not None else 1
        self.module = model
        self._lobby: dist.ProcessGroup | None = None
        self.lora = lora
        self._sharding, self._seed = config, seed
        if lora.rank:
            add_adapters(model, lora)
        if lora.base_weights == "nf4":
            quantize_blocks(model, self.device)
        _wrap_blocks(model, config)
        if mesh is not None:
            for block in model.blocks:
                # A router's bias is small, and would be gathered in `compute_dtype`.
                fully_shard(block, mesh=mesh, ignored_params=set(expert_biases(block)), **_fsdp_options(config))
            fully_shard(model, mesh=mesh, **_fsdp_options(config))
        if device is not None:
            # Shards alone: the whole policy never is anywhere.
            model.to_empty(device="cpu" if config.cpu_offload else device)
        self.begin_adapter()

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        if self.mesh is not None and self.mesh.device_type == "cuda":
            return placed_on("cuda")
        return next(self.module.parameters()).device

    @property
    def spares_padding(self) -> bool:
        """Whether rows of unequal length go through it back to back: where attention is bidirectional and one kernel
        attends within them all (`has_kernel`, of what it computes on and in). Elsewhere they are padded: row after row
        a GPU would launch as many kernels, and on a CPU the bits of a loss would be others."""
        is_eager = not self._sharding.compile
        may_look_anywhere = not self.config.is_block_causal
        return is_eager and may_look_anywhere and has_kernel(self.device, self._computes_in, self.config.head_dim)

    @property
    def trained_parameters(self) -> dict[str, nn.Parameter]:
        """What the optimizer steps, by name: every parameter, or the adapter's."""
        return {name: parameter for name, parameter in self._parameters().items() if parameter.requires_grad}

    def tensors(self) -> Iterator[Tensor]:
        """All that this rank holds of it: parameters, their gradients, and what is held in 4 bits."""
        for parameter in self.module.parameters():
            yield parameter
            if parameter.grad is not None:
                yield parameter.grad
        yield from self.module.buffers()

    @property
    def has_learned(self) -> bool:
        """Whether the adapter changes anything yet: a B that is not zero. A collective."""
        matrices = (
            local_part(one.detach()) for name, one in self._parameters().items() if name.endswith(".lora_B.weight")
        )
        any_nonzero = torch.stack([matrix.any() for matrix in matrices]).any()
        return bool(self.max_over_ranks(any_nonzero.float()[None]).item())

    def adapters_off(self) -> AbstractContextManager[None]:
        """Within the block the module is the policy that the stage began with: a reference that needs no memory."""
        return adapters_off(self.module)

    def full_weights(self) -> dict[str, Tensor]:
        """Every parameter, whole, on the CPU, detached from the live ones. Adapters are merged into them, in their
        precision: one set of weights that computes what the policy computes."""
        return {name: on_cpu(weight) for name, weight in self._gathered_weights()}

    def weights_on_rank_0(self) -> dict[str, Tensor]:
        """The same on rank 0 alone, empty on the others: what is written or sent once is held in memory once."""
        return {name: on_cpu(weight) for name, weight in self._gathered_weights() if self.rank == 0}

    def load_full_weights(self, weights: Mapping[str, Rows], say: Say | None = None) -> None:
        """Take over whole parameters, each rank its rows; `weights` has exactly the policy's names. They are rounded
        where 4 bits hold them. An adapter begins anew on them, with nothing of earlier stages beside it. `say` is told
        at which rate files are read."""
        held = {name: parameter for name, parameter in self._parameters().items() if not is_adapter(name)}
        quantized = self._quantized()
        if isinstance(weights, StoredWeights):
            rows = {name: own_rows(parameter) for name, parameter in held.items()}
            weights.read_into({name: local_part(parameter) for name, parameter in held.items()}, rows, say)
            to_round = weights.whole_ones(quantized, say)
        else:
            self._load({name: weights[name] for name in held})
            to_round = ((name, weights[name][:]) for name in quantized)
        for name, weight in to_round:
            quantized[name].load(weight, self.device)
        self.begin_adapter()

    def own_shards(self) -> dict[str, Tensor]:
        """What this rank has to hand over of a policy without an adapter: its rows of each parameter, as they are held.

        One rank's after the other's they are the policy, once: what is not sharded has rank 0, and what another copy of
        the policy has too, the first. They are the live ones, to be copied.
        """
        held = ((name, parameter.detach()) for name, parameter in self._parameters().items())
        return {name: local_part(tensor) for name, tensor in held if self._hands_over(tensor)}

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each parameter, whole."""
        return {name: tuple(parameter.shape) for name, parameter in self._parameters().items()}

    @property
    def dtypes(self) -> dict[str, torch.dtype]:
        """What each parameter is held in."""
        return {name: parameter.dtype for name, parameter in self._parameters().items()}

    def adapter_on_rank_0(self) -> dict[str, Tensor]:
        """The adapter's matrices by name, whole, on rank 0's CPU, empty on the others and without LoRA."""
        adapter = {name: parameter for name, parameter in self._parameters().items() if is_adapter(name)}
        return gather_on_rank_0(self.rank, adapter)

    def load_adapter(self, adapter: Mapping[str, Tensor]) -> None:
        """Take over what `adapter_on_rank_0` gave."""
        self._load({name: adapter[name] for name in self._parameters() if is_adapter(name)})

    def begin_adapter(self, start: Adapter | None = None, lora: LoraConfig | None = None) -> None:
        """Reset the adapter to zero effect, and set the frozen `start` adapter. Without LoRA, do nothing.

        `lora` may have another alpha than before, and nothing else. Raises ValueError where earlier stages adapted
        layers that have no adapter now.
        """
        self.lora = lora or self.lora
        for layer in adapted_layers(self.module).values():
            layer.scaling = self.lora.scaling
        matrices, scaling = ({}, 0.0) if start is None else (start.matrices, start.scaling)
        set_start(self.module, matrices, scaling, self.device, self._computes_in)
        shapes = {name: parameter.shape for name, parameter in self._parameters().items() if is_adapter(name)}
        self._load(fresh_adapter(shapes, self._seed))

    def frozen_copy(self) -> ShardedPolicy:
        """Another policy of the same weights, shape and sharding without gradients: a reference."""
        copy = self.frozen_like(self.config)
        copy.take(self)
        return copy

    def frozen_like(self, config: TransformerConfig) -> ShardedPolicy:
        """A policy of another shape without gradients, sharded as this one. Its weights are not initialised.

        It is held in the precision that it computes in: what FSDP gathers of it is rounded to that in any case.
        """
        model = make_on_meta(config).requires_grad_(False).to(self._computes_in)
        return ShardedPolicy(model, self.mesh, self._sharding, device=self.device)

    def gathered_head(self) -> Tensor:
        """[V, D] the matrix of the output layer, whole, where the policy computes. A collective."""
        held = self._parameters()
        return gathered(held["embed.weight" if self.config.tied_embeddings else "head.weight"]).to(self.device)

    @torch.no_grad()
    def take(self, other: ShardedPolicy) -> None:
        """Take over the weights of a policy of the same shape and sharding, without an adapter: each rank its shard."""
        theirs = other._parameters()
        for name, parameter in self._parameters().items():
            local_part(parameter).copy_(local_part(theirs[name]))

    @contextmanager
    def without_gradients(self) -> Iterator[None]:
        """Forwards that no backward follows. All ranks enter and leave it.

        After such a forward FSDP holds the root's parameters whole, in `compute_dtype`: memory that a reference would
        keep for the round. `parameters()` would give these too, and an optimizer made then, or weights loaded then,
        would miss the sharded ones. So they are sharded again.
        """
        with torch.no_grad():
            yield
        if isinstance(self.module, FSDPModule):
            self.module.reshard()

    def wait_for_all(self, what: str, timeout_s: float) -> None:
        """Go on when all ranks are here.

        Raises TimeoutError, on rank 0, that names the ranks that did not come, but the first time: a collective would
        wait for them in silence.
        """
        if self.mesh is None:
            return
        limit = timedelta(seconds=timeout_s)
        try:
            if self._lobby is None:
                # NCCL has no barrier that can say who is missing. This waits for all ranks too, and names none.
                self._lobby = dist.new_group(backend="gloo", timeout=limit)
            dist.monitored_barrier(self._lobby, limit, wait_all_ranks=True)
        except RuntimeError as error:
            if self.rank:
                raise
            named = re.search(r"Ranks ([\d, ]+) failed", str(error))
            ranks = f"rank {named[1]}" if named else "some rank"
            raise TimeoutError(f"{what}: {ranks} of the learner did not come within {timeout_s:g} s") from error

    def sum_over_ranks(self, values: Tensor) -> Tensor:
        """The sum of a small tensor over all ranks, where the tensor is."""
        if self.mesh is None:
            return values
        total = values.to(self.device)
        dist.all_reduce(total)
        return total.to(values.device)

    def max_over_ranks(self, values: Tensor) -> Tensor:
        """The greatest of each value of a small tensor over all ranks, where the tensor is."""
        if self.mesh is None:
            return values
        greatest = values.to(self.device)
        dist.all_reduce(greatest, op=dist.ReduceOp.MAX)
        return greatest.to(values.device)

    @property
    def _computes_in(self) -> torch.dtype:
        """What FSDP gathers its weights in, or what they are held in."""
        in_half = self._sharding.compute_dtype == "bfloat16"
        return torch.bfloat16 if in_half else next(self.module.parameters()).dtype

    def _parameters(self) -> dict[str, nn.Parameter]:
        return {plain_name(name): parameter for name, parameter in self.module.named_parameters()}

    def _hands_over(self, tensor: Tensor) -> bool:
        if not isinstance(tensor, DTensor):
            return self.rank == 0
        mesh = tensor.device_mesh
        return mesh.ndim == 1 or mesh.get_local_rank(0) == 0

    def _quantized(self) -> dict[str, Nf4Linear]:
        """The layers that are held in 4 bits, by the names of their weights."""
        return {plain_name(f"{name}.weight"): layer for name, layer in quantized_layers(self.module)}

    def _gathered_weights(self) -> Iterator[tuple[str, Tensor]]:
        """The policy's parameters, one by one, whole and merged, where its shards are."""
        adapter = {name: parameter for name, parameter in self._parameters().items() if is_adapter(name)}
        # What adapters stand beside may be held in less.
        precision = next((matrix.dtype for matrix in adapter.values()), None)
        layers = {f"{plain_name(name)}.weight": layer for name, layer in adapted_layers(self.module).items()}
        for name, held in self._gathered_base():
            weight = held if precision is None else held.to(precision)
            if (layer := layers.get(name)) is not None:
                assert precision is not None
                a, b = (gathered(adapter[part]) for part in adapter_names(name))
                weight = merged(weight, a, b, layer.scaling)
                if layer.start_A is not None and layer.start_B is not None:
                    start_A, start_B = layer.start_A.to(weight), layer.start_B.to(weight)
                    weight = merged(weight, start_A, start_B, layer.start_scaling)
            yield name, weight

    def _gathered_base(self) -> Iterator[tuple[str, Tensor]]:
        """The same without adapters."""
        for name, parameter in self._parameters().items():
            if not is_adapter(name):
                yield name, gathered(parameter)
        for name, layer in self._quantized().items():
            yield name, layer.weight_as(torch.float32)

    @torch.no_grad()
    def _load(self, weights: Mapping[str, Rows]) -> None:
        parameters = self._parameters()
        for name, weight in weights.items():
            local_part(parameters[name]).copy_(weight[own_rows(parameters[name])])


def gather_on_rank_0(rank: int, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Whole tensors on the CPU of rank 0. A collective; the other ranks hold one tensor at a time and keep none."""
    whole = {}
    for name, tensor in tensors.items():
        full = gathered(tensor)
        if rank == 0:
            whole[name] = on_cpu(full)
    return whole


def gathered(tensor: Tensor) -> Tensor:
    """A sharded tensor, whole, where its shards are."""
    whole = tensor.detach()
    return _all_gathered(whole) if isinstance(whole, DTensor) else whole


def _all_gathered(sharded: DTensor) -> Tensor:
    """What `full_tensor` gives, by another collective: on gloo that one corrupts the heap.

    The two threads of a gloo group store the name of what they did last in one `std::string`, without a lock
    (`lastCompletedWorkName`, torch 2.13). `full_tensor` asks for ALLGATHER_COALESCED, which is too long to be held
    within the string: each thread frees the name that it replaces, and where a busy machine lets both replace the same
    one, it is freed twice. This one is called ALLGATHER, and nothing is freed.
    """
    assert sharded.placements in _BY_ROWS, "FSDP shards by rows"
    num_rows, *row = sharded.shape
    # From the ranks of this copy; there may be others.
    sharing = sharded.device_mesh.get_group(sharded.device_mesh.ndim - 1)
    rows_each = -(-num_rows // sharing.size())
    local = sharded.to_local()
    # The last ranks may have fewer rows, or none.
    padded = torch.cat((local, local.new_zeros(rows_each - local.shape[0], *row)))
    whole = local.new_empty(rows_each * sharing.size(), *row)
    _all_gather(whole, padded, group=sharing)
    return whole[:num_rows]


def on_cpu(whole: Tensor) -> Tensor:
    """A tensor, copied to the CPU."""
    return whole.to("cpu", copy=True)


def local_part(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor; all of one that is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def own_rows(tensor: Tensor) -> slice:
    """Which rows of a tensor this rank holds; all of one that is not sharded."""
    if not isinstance(tensor, DTensor):
        return slice(None)
    assert tensor.placements in _BY_ROWS, "FSDP shards by rows"
    num_rows, mesh = tensor.shape[0], tensor.device_mesh
    along = mesh.ndim - 1
    rows_each = -(-num_rows // mesh.size(along))
    begin = min(mesh.get_local_rank(along) * rows_each, num_rows)
    return slice(begin, min(begin + rows_each, num_rows))


def shard_like(whole: Tensor, like: Tensor) -> Tensor:
    """A copy of this rank's part of a whole tensor, sharded as `like` is and where it is."""
    mine = whole[own_rows(like)].to(like.device, copy=True)
    if isinstance(like, DTensor):
        return DTensor.from_local(
            mine, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
        )
    return mine
