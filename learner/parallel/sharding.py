"""FSDP2 wrapper: a policy that is whole on one process or sharded over many, with one interface.

Collectives run on gloo for CPUs and NCCL for GPUs. Every method that gathers is a collective: all ranks call it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from learner.hardware import indexed_device
from learner.model.adapter import Adapter
from learner.model.attention.varlen import has_kernel
from learner.model.config import TransformerConfig
from learner.model.elementwise import fuse_elementwise
from learner.model.lora import (
    adapted_layers,
    adapter_names,
    add_adapters,
    disable_adapters,
    fresh_adapter,
    is_adapter,
    merge_weight,
    plain_name,
    set_start_adapter,
)
from learner.model.lora_config import FULL_FINE_TUNING, LoraConfig
from learner.model.moe.experts import expert_biases
from learner.model.networks import make_meta_model
from learner.model.quantization.nf4 import Nf4Linear, quantize_blocks, quantized_layers
from learner.model.storage.throughput import ReportProgress
from learner.model.storage.weights import StoredWeights
from learner.model.transformer import Transformer
from learner.parallel.compiling import compile_blocks
from learner.parallel.progress import PROGRESS
from learner.parallel.sharded_tensors import Rows, gather_on_rank_0, gathered, local_part, on_cpu, own_rows
from learner.parallel.sharding_config import ShardingConfig
from learner.parallel.timeouts import COLLECTIVE_TIMEOUT_S

_PLAIN = ShardingConfig()


def _fsdp_options(config: ShardingConfig) -> dict[str, Any]:
    """Return the options of `fully_shard`."""
    options: dict[str, Any] = {}
    if config.compute_dtype == "bfloat16":
        # Activations between blocks already are bfloat16. FSDP would also cast the rotary tables; samplers do not.
        options["mp_policy"] = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
    if config.cpu_offload:
        options["offload_policy"] = CPUOffloadPolicy()
    return options


def _wrap_blocks(model: Transformer, config: ShardingConfig) -> None:
    """Apply compilation and checkpointing to the blocks, inside FSDP's wrapper."""
    if config.compiles_blocks:
        compile_blocks(model)
    elif config.compile == "elementwise":
        fuse_elementwise(model)
    if config.activation_checkpointing:
        for block in model.blocks:
            # Inside FSDP's wrapper, a block is gathered once for both the recomputed forward and the backward.
            block.forward = partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False)


def make_mesh(
    device_type: str, workers_per_copy: int = 0, timeout_s: float = COLLECTIVE_TIMEOUT_S
) -> DeviceMesh | None:
    """Make a mesh over all ranks; None if no process group runs (a single process).

    Args:
        device_type: "cpu" or "cuda".
        workers_per_copy: ranks that one copy of the policy is sharded over, a divisor of their number. The mesh is then
            [copies, ranks of a copy], with neighbouring ranks in one copy. 0 or all of them: one copy, [ranks].
        timeout_s: timeout of the running process group.
    """
    if not dist.is_initialized():
        return None
    num_ranks = dist.get_world_size()
    if workers_per_copy in (0, num_ranks):
        return init_device_mesh(device_type, (num_ranks,), mesh_dim_names=("dp",))
    ranks = torch.arange(num_ranks).view(-1, workers_per_copy)
    # `init_device_mesh` would make these groups too, but not with this timeout.
    timeout = timedelta(seconds=timeout_s)
    groups = [dist.new_subgroups_by_enumeration(along.tolist(), timeout=timeout)[0] for along in (ranks.T, ranks)]
    return DeviceMesh.from_group(groups, device_type, ranks, mesh_dim_names=("copies", "dp"))


class ShardedPolicy:
    """A transformer whose parameters are sharded over a mesh, block by block; all of them are trained, or an adapter.

    Parameters have the model's own names, whatever wraps them. Under LoRA the weights are frozen. Added to them are a
    frozen adapter of earlier stages, whole on every rank, and the adapter that is trained.
    """

    def __init__(
        self,
        model: Transformer,
        mesh: DeviceMesh | None,
        config: ShardingConfig = _PLAIN,
        *,
        lora: LoraConfig = FULL_FINE_TUNING,
        seed: int = 0,
        device: torch.device | None = None,
    ) -> None:
        """Shard `model` in place over `mesh`; None leaves it whole.

        Args:
            model: the policy; every rank must pass equal weights. On the meta device it has none: its shards are then
                made on `device`, uninitialised until `load_full_weights`.
            mesh: from `make_mesh`.
            config: how it is held and computed.
            lora: the adapter to train; without a rank all weights are trained.
            seed: determines the adapter's initial values.
            device: where the shards of a model on the meta device are made.

        Raises:
            ValueError: `config` needs FSDP in a single process, `lora` does not fit the policy, or the policy cannot be
                compiled.
        """
        if mesh is None and _fsdp_options(config):
            raise ValueError("compute_dtype and cpu_offload are FSDP's, and this process is in no process group")
        if incompatibility := lora.incompatibility(model.config) or config.incompatibility(model.config, lora):
            raise ValueError(incompatibility)
        self.config = model.config
        self.mesh = mesh
        self.rank = dist.get_rank() if mesh is not None else 0
        self.world_size = mesh.size() if mesh is not None else 1
        self.module = model
        self._barrier_group: dist.ProcessGroup | None = None
        self.lora = lora
        self._sharding, self._seed = config, seed
        if lora.rank:
            add_adapters(model, lora)
        if lora.base_weights == "nf4":
            quantize_blocks(model, self.device)
        _wrap_blocks(model, config)
        if mesh is not None:
            for block in model.blocks:
                # A router's bias is small, and gathering would round it to `compute_dtype`.
                fully_shard(block, mesh=mesh, ignored_params=set(expert_biases(block)), **_fsdp_options(config))
            fully_shard(model, mesh=mesh, **_fsdp_options(config))
        # Before FSDP's own hook, which gathers weights and so waits for other ranks.
        model.register_forward_pre_hook(lambda *_: PROGRESS.mark_forward(), prepend=True)
        if device is not None:
            # Only shards are allocated: no process ever holds the whole policy.
            model.to_empty(device="cpu" if config.cpu_offload else device)
        self.reset_adapter()

    @property
    def device(self) -> torch.device:
        """The device that it computes on."""
        if self.mesh is not None and self.mesh.device_type == "cuda":
            return indexed_device("cuda")
        return next(self.module.parameters()).device

    @property
    def concatenates_rows(self) -> bool:
        """Whether rows of unequal length are concatenated without padding.

        That needs bidirectional attention, eager blocks, and a variable-length attention kernel for the device and the
        dtype (`has_kernel`). Otherwise rows are padded: attention row by row would launch one kernel per row on a GPU,
        and change the bits of a loss on a CPU.
        """
        is_eager = not self._sharding.compiles_blocks
        may_look_anywhere = not self.config.is_block_causal
        return is_eager and may_look_anywhere and has_kernel(self.device, self._compute_dtype, self.config.head_dim)

    @property
    def trained_parameters(self) -> dict[str, nn.Parameter]:
        """The parameters that the optimizer steps, by name: all of them, or the adapter's."""
        return {name: parameter for name, parameter in self._parameters().items() if parameter.requires_grad}

    def tensors(self) -> Iterator[Tensor]:
        """Yield this rank's tensors: parameters, their gradients, and buffers, which include 4-bit weights."""
        for parameter in self.module.parameters():
            yield parameter
            if parameter.grad is not None:
                yield parameter.grad
        yield from self.module.buffers()

    @property
    def has_learned(self) -> bool:
        """Whether the adapter has an effect yet, that is, a nonzero B matrix. A collective."""
        matrices = (
            local_part(one.detach()) for name, one in self._parameters().items() if name.endswith(".lora_B.weight")
        )
        any_nonzero = torch.stack([matrix.any() for matrix in matrices]).any()
        return bool(self.max_over_ranks(any_nonzero.float()[None]).item())

    def disable_adapters(self) -> AbstractContextManager[None]:
        """Switch the adapter off within the block: the policy that the stage began with, a reference without a copy."""
        return disable_adapters(self.module)

    def full_weights(self) -> dict[str, Tensor]:
        """Gather every parameter, whole, as a copy on the CPU. A collective.

        Adapters are merged in, in their precision: the weights alone compute what the policy computes.
        """
        return {name: on_cpu(weight) for name, weight in self._gathered_weights()}

    def weights_on_rank_0(self) -> dict[str, Tensor]:
        """Gather the same on rank 0 alone, empty on the others, so that only one copy takes memory. A collective."""
        return {name: on_cpu(weight) for name, weight in self._gathered_weights() if self.rank == 0}

    def load_full_weights(self, weights: Mapping[str, Rows], report: ReportProgress | None = None) -> None:
        """Load whole parameters, each rank its rows; `weights` has exactly the policy's names.

        Layers in 4 bits round them. The adapter is reset to zero effect, and that of earlier stages is removed.
        `report` receives the throughput of reading files.
        """
        held = {name: parameter for name, parameter in self._parameters().items() if not is_adapter(name)}
        quantized = self._quantized()
        if isinstance(weights, StoredWeights):
            rows = {name: own_rows(parameter) for name, parameter in held.items()}
            weights.read_into({name: local_part(parameter) for name, parameter in held.items()}, rows, report)
            to_round = weights.iter_float32(quantized, report)
        else:
            self._load({name: weights[name] for name in held})
            to_round = ((name, weights[name][:]) for name in quantized)
        for name, weight in to_round:
            quantized[name].load(weight, self.device)
        self.reset_adapter()

    def exported_shards(self) -> dict[str, Tensor]:
        """Return this rank's part of a policy without an adapter: its rows of each parameter, in the dtype held.

        Concatenated in the order of the ranks they are the policy, exactly once. Unsharded parameters come from rank 0,
        and only the first copy of the policy contributes. They are the live tensors, to be copied.
        """
        return {name: local_part(tensor) for name, tensor in self.weights.items() if self._exports(tensor)}

    @property
    def weights(self) -> dict[str, Tensor]:
        """The parameters of a policy without an adapter, sharded: the live tensors."""
        return {name: parameter.detach() for name, parameter in self._parameters().items()}

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each whole parameter."""
        return {name: tuple(parameter.shape) for name, parameter in self._parameters().items()}

    @property
    def dtypes(self) -> dict[str, torch.dtype]:
        """The dtype that each parameter is held in."""
        return {name: parameter.dtype for name, parameter in self._parameters().items()}

    def adapter_on_rank_0(self) -> dict[str, Tensor]:
        """Gather the adapter's matrices by name on rank 0's CPU; empty on the others and without LoRA. A collective."""
        adapter = {name: parameter for name, parameter in self._parameters().items() if is_adapter(name)}
        return gather_on_rank_0(self.rank, adapter)

    def load_adapter(self, adapter: Mapping[str, Tensor]) -> None:
        """Restore what `adapter_on_rank_0` returned."""
        self._load({name: adapter[name] for name in self._parameters() if is_adapter(name)})

    def load_trained(self, weights: Mapping[str, Rows]) -> None:
        """Load the trained parameters, each rank its rows."""
        self._load({name: weights[name] for name in self.trained_parameters})

    def reset_adapter(self, start: Adapter | None = None, lora: LoraConfig | None = None) -> None:
        """Reset the adapter to zero effect, and set the frozen `start` adapter. Without LoRA, do nothing.

        `lora` may differ from before in alpha only. Raises ValueError if earlier stages adapted layers that have no
        adapter now.
        """
        self.lora = lora or self.lora
        for layer in adapted_layers(self.module).values():
            layer.scaling = self.lora.scaling
        matrices, scaling = ({}, 0.0) if start is None else (start.matrices, start.scaling)
        set_start_adapter(self.module, matrices, scaling, self.device, self._compute_dtype)
        shapes = {name: parameter.shape for name, parameter in self._parameters().items() if is_adapter(name)}
        self._load(fresh_adapter(shapes, self._seed))

    def frozen_copy(self) -> ShardedPolicy:
        """Copy the policy, with the same weights, shape and sharding, without gradients: a reference."""
        copy = self.frozen_like(self.config)
        copy.copy_weights_from(self)
        return copy

    def frozen_like(self, config: TransformerConfig) -> ShardedPolicy:
        """Make a policy of another shape without gradients, sharded as this one. Its weights are not initialised.

        It is held in its compute precision, to which FSDP would round its gathered weights in any case.
        """
        model = make_meta_model(config).requires_grad_(False).to(self._compute_dtype)
        return ShardedPolicy(model, self.mesh, self._sharding, device=self.device)

    def sharded_like(self, model: Transformer) -> ShardedPolicy:
        """Shard another network like this one, with an adapter of the same shape.

        `model` is on the meta device, and its weights are not initialised.
        """
        return ShardedPolicy(model, self.mesh, self._sharding, lora=self.lora, seed=self._seed, device=self.device)

    def gathered_head(self) -> Tensor:
        """Gather the matrix of the output layer, [V, D], on the policy's device. A collective."""
        held = self._parameters()
        return gathered(held["embed.weight" if self.config.tied_embeddings else "head.weight"]).to(self.device)

    @torch.no_grad()
    def copy_weights_from(self, other: ShardedPolicy) -> None:
        """Copy the weights of a policy of the same shape and sharding, without an adapter: each rank its shard."""
        theirs = other._parameters()
        for name, parameter in self._parameters().items():
            local_part(parameter).copy_(local_part(theirs[name]))

    @contextmanager
    def without_gradients(self) -> Iterator[None]:
        """Run forwards that no backward follows within the block. All ranks enter and leave it.

        After such a forward FSDP keeps the root's parameters unsharded, in `compute_dtype`. A reference would hold that
        memory for the round. `parameters()` would return the unsharded ones too, and an optimizer made then, or weights
        loaded then, would miss the sharded ones. So they are resharded at the end.
        """
        with torch.no_grad():
            yield
        if isinstance(self.module, FSDPModule):
            self.module.reshard()

    def backward(self, loss: Tensor, *, is_last: bool) -> None:
        """Accumulate the gradient of a loss whose sum over ranks is minimised. A collective.

        Ranks reduce the gradient at the last backward of an optimizer step only, where `ShardingConfig.sums_locally`
        allows it. Otherwise they reduce it within a copy of the policy each time, and over copies at the last.

        Args:
            loss: [] this rank's share of the step's loss.
            is_last: whether it is the last backward before the optimizer step, on all ranks.
        """
        if isinstance(self.module, FSDPModule) and self.world_size > 1:
            self.module.set_requires_gradient_sync(is_last or not self._sums_locally)
            self.module.set_requires_all_reduce(is_last)
        # FSDP averages over ranks.
        (loss * self.world_size).backward()

    @cached_property
    def _sums_locally(self) -> bool:
        num_trained = sum(parameter.numel() for parameter in self.trained_parameters.values())
        return self._sharding.sums_locally(num_trained, self.lora, self.world_size)

    def barrier(self, what: str, timeout_s: float) -> None:
        """Wait at a barrier for all ranks.

        Raises TimeoutError on rank 0, which names the missing ranks except at the first call. Other collectives would
        wait for them silently.
        """
        if self.mesh is None:
            return
        limit = timedelta(seconds=timeout_s)
        try:
            with PROGRESS.in_collective("a barrier"):
                if self._barrier_group is None:
                    # NCCL has no barrier that names missing ranks. Making this group waits for all ranks, but names
                    # none.
                    self._barrier_group = dist.new_group(backend="gloo", timeout=limit)
                dist.monitored_barrier(self._barrier_group, limit, wait_all_ranks=True)
        except RuntimeError as error:
            if self.rank:
                raise
            named = re.search(r"Ranks ([\d, ]+) failed", str(error))
            ranks = f"rank {named[1]}" if named else "some rank"
            raise TimeoutError(f"{what}: {ranks} of the learner did not arrive within {timeout_s:g} s") from error

    def sum_over_ranks(self, values: Tensor) -> Tensor:
        """Sum a small tensor over all ranks; the result is on its device."""
        if self.mesh is None:
            return values
        total = values.to(self.device)
        with PROGRESS.in_collective("an all-reduce"):
            dist.all_reduce(total)
        return total.to(values.device)

    def max_over_ranks(self, values: Tensor) -> Tensor:
        """Return the elementwise maximum of a small tensor over all ranks, on its device."""
        if self.mesh is None:
            return values
        greatest = values.to(self.device)
        with PROGRESS.in_collective("an all-reduce"):
            dist.all_reduce(greatest, op=dist.ReduceOp.MAX)
        return greatest.to(values.device)

    @property
    def _compute_dtype(self) -> torch.dtype:
        """The dtype that FSDP gathers its weights in, or that they are held in."""
        in_half = self._sharding.compute_dtype == "bfloat16"
        return torch.bfloat16 if in_half else next(self.module.parameters()).dtype

    def _parameters(self) -> dict[str, nn.Parameter]:
        return {plain_name(name): parameter for name, parameter in self.module.named_parameters()}

    def _exports(self, tensor: Tensor) -> bool:
        if not isinstance(tensor, DTensor):
            return self.rank == 0
        mesh = tensor.device_mesh
        return mesh.ndim == 1 or mesh.get_local_rank(0) == 0

    def _quantized(self) -> dict[str, Nf4Linear]:
        """Return the layers that are held in 4 bits, by the names of their weights."""
        return {plain_name(f"{name}.weight"): layer for name, layer in quantized_layers(self.module)}

    def _gathered_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the policy's parameters one by one, whole and merged, on the device of its shards."""
        adapter = {name: parameter for name, parameter in self._parameters().items() if is_adapter(name)}
        # The frozen weights may be held in a lower precision than the adapter.
        precision = next((matrix.dtype for matrix in adapter.values()), None)
        layers = {f"{plain_name(name)}.weight": layer for name, layer in adapted_layers(self.module).items()}
        for name, held in self._gathered_base():
            weight = held if precision is None else held.to(precision)
            if (layer := layers.get(name)) is not None:
                assert precision is not None
                a, b = (gathered(adapter[part]) for part in adapter_names(name))
                weight = merge_weight(weight, a, b, layer.scaling)
                if layer.start_A is not None and layer.start_B is not None:
                    start_A, start_B = layer.start_A.to(weight), layer.start_B.to(weight)
                    weight = merge_weight(weight, start_A, start_B, layer.start_scaling)
            yield name, weight

    def _gathered_base(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the same without adapters."""
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
