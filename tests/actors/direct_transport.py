"""A Ray Direct Transport backend without a GPU: tensors travel in files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import torch
from ray.experimental.rdt import (
    CommunicatorMetadata,
    TensorTransportManager,
    TensorTransportMetadata,
    register_tensor_transport,
)
from safetensors.torch import load_file, save_file
from torch import Tensor


@dataclass
class _Place(TensorTransportMetadata):
    """The file with an object's tensors."""

    path: str = ""


class _Files(TensorTransportManager):
    """One-sided, as NIXL and CUDA IPC are: a reader needs no action of the writer."""

    @property
    def tensor_transport_backend(self) -> str:
        return "FILES"

    @staticmethod
    def is_one_sided() -> bool:
        return True

    @staticmethod
    def can_abort_transport() -> bool:
        return True

    def actor_has_tensor_transport(self, actor: Any) -> bool:
        return True

    def extract_tensor_transport_metadata(self, obj_id: str, rdt_object: list[Tensor]) -> _Place:
        path = f"{gettempdir()}/direct-{obj_id}"
        save_file({str(index): tensor.contiguous() for index, tensor in enumerate(rdt_object)}, path)
        kinds: list[Any] = [(tensor.shape, tensor.dtype) for tensor in rdt_object]
        return _Place(tensor_meta=kinds, tensor_device="cpu", path=path)

    def get_communicator_metadata(self, src_actor: Any, dst_actor: Any, backend: str | None = None) -> Any:
        return CommunicatorMetadata()

    def recv_multiple_tensors(
        self, obj_id: str, tensor_transport_metadata: Any, communicator_metadata: Any, target_buffers: Any = None
    ) -> list[Tensor]:
        found = load_file(tensor_transport_metadata.path)
        return [found[str(index)] for index in range(len(found))]

    def send_multiple_tensors(self, tensors: Any, tensor_transport_metadata: Any, communicator_metadata: Any) -> None:
        raise NotImplementedError

    def garbage_collect(self, obj_id: str, tensor_transport_meta: Any, tensors: Any) -> None:
        Path(tensor_transport_meta.path).unlink(missing_ok=True)

    def abort_transport(self, obj_id: str, communicator_metadata: Any) -> None:
        pass


def register(name: str) -> None:
    """Register the transport in this process."""
    register_tensor_transport(name, ["cpu", "cuda"], _Files, torch.Tensor)
