"""A fake of a family's original model, and adapters for it, written by peft."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn


class Original(nn.Module):
    """A model with the modules named by a checkpoint's tensors, which is all that peft needs."""

    def __init__(self, checkpoint: Path) -> None:
        super().__init__()
        for name, tensor in load_file(checkpoint / "model.safetensors").items():
            *path, kind = name.split(".")
            module = self._module(path, tensor)
            if isinstance(module, nn.Linear):
                setattr(module, kind, nn.Parameter(tensor))

    def _module(self, path: list[str], tensor: Tensor) -> nn.Module:
        module: nn.Module = self
        for name in path[:-1]:
            if name not in module._modules:
                module.add_module(name, nn.Module())
            module = module._modules[name]
        if path[-1] not in module._modules and tensor.ndim == 2:
            module.add_module(path[-1], nn.Linear(tensor.shape[1], tensor.shape[0], bias=False))
        return module._modules.get(path[-1], nn.Module())


def make_adapter(base: Path, directory: Path, *, std: float = 0.1, **config: Any) -> None:
    """Write an adapter of random matrices with peft; `config` is passed to its LoraConfig."""
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(Original(base), LoraConfig(**config))
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            nn.init.normal_(parameter, std=std, generator=generator)
    model.save_pretrained(str(directory))
    change_config(directory, base_model_name_or_path=str(base))


def change_config(directory: Path, **values: Any) -> None:
    """Overwrite keys of an `adapter_config.json`."""
    path = directory / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def merged_by_peft(base: Path, directory: Path) -> dict[str, Tensor]:
    """Return the original model's tensors with an adapter merged into them."""
    from peft import PeftModel

    merged = PeftModel.from_pretrained(Original(base), directory).merge_and_unload()
    return load_file(base / "model.safetensors") | {
        name: parameter.detach() for name, parameter in merged.named_parameters()
    }
