"""Checkpoints of the mixture-of-experts families: the original code's, and ours under its names."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from learner.model.checkpoint import load_policy, save_checkpoint, stored_dtype
from learner.model.checkpoint_files import load_config
from learner.model.config import TransformerConfig
from learner.model.families import FAMILIES
from learner.model.moe.config import MoEConfig
from learner.model.networks import make_meta_model, make_model
from learner.model.storage.weights import StoredWeights
from learner.model.transformer import Transformer, init_weights

BIAS = "blocks.1.mlp.router.expert_bias"


@pytest.fixture
def model(moe_config: TransformerConfig) -> Transformer:
    model = make_model(moe_config)
    init_weights(model, seed=0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name))))
    return model


@pytest.fixture
def saved(model: Transformer, tmp_path: Path) -> Path:
    """In files of at most 4 kB, so that parts of one of our tensors are in several files."""
    save_checkpoint(tmp_path / "saved", model.config, model.state_dict(), tmp_path, shard_bytes=4000)
    return tmp_path / "saved"


def test_a_checkpoint_round_trips_without_growing(saved: Path, model: Transformer, tmp_path: Path) -> None:
    loaded = load_policy(saved)
    assert loaded.config == model.config
    for name, parameter in model.named_parameters():
        assert torch.equal(loaded.state_dict()[name], parameter), name
        assert loaded.get_parameter(name).requires_grad == parameter.requires_grad
    files = sorted(saved.glob("*.safetensors"))
    index = json.loads((saved / "model.safetensors.index.json").read_text())
    experts = {index["weight_map"][f"model.layers.1.mlp.experts.{i}.up_proj.weight"] for i in range(8)}
    assert len(experts) > 1
    for path in files:
        tensors = load_file(path)
        assert len(tensors) == 1 or sum(tensor.nbytes for tensor in tensors.values()) <= 4000
    save_checkpoint(tmp_path / "again", loaded.config, loaded.state_dict(), saved, shard_bytes=4000)
    for path in (*files, saved / "config.json"):
        assert (tmp_path / "again" / path.name).read_bytes() == path.read_bytes()


def test_any_rows_of_a_tensor_can_be_read(saved: Path, model: Transformer) -> None:
    """Slices within one stored tensor, across many, and empty ones."""
    stored = StoredWeights(saved)
    assert list(stored) == [name for name, _ in model.named_parameters()]
    for name, parameter in model.named_parameters():
        for rows in (slice(None), slice(3, 7), slice(1, 2), slice(len(parameter), len(parameter))):
            part = stored[name][rows]
            assert part.shape == parameter[rows].shape, name
            assert torch.equal(part, parameter[rows]), name


def test_a_router_bias_stays_in_float32_in_half_precision(saved: Path, tmp_path: Path) -> None:
    half = load_policy(saved, torch.bfloat16)
    assert {parameter.dtype for name, parameter in half.named_parameters() if name != BIAS} == {torch.bfloat16}
    assert torch.equal(half.get_parameter(BIAS), load_policy(saved).get_parameter(BIAS))
    save_checkpoint(tmp_path / "half", half.config, half.state_dict(), saved)
    with safe_open(tmp_path / "half" / "model.safetensors", framework="pt") as file:
        kinds = {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118 (no mapping)
    assert kinds.pop("model.layers.1.mlp.gate.expert_bias") == "F32"
    assert set(kinds.values()) == {"BF16"}
    assert json.loads((tmp_path / "half" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    assert stored_dtype(tmp_path / "half") is torch.bfloat16
    assert stored_dtype(saved) is torch.float32


def _changed(saved: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> str:
    """Return the error message for a checkpoint with changed tensors."""
    for path in saved.glob("*.safetensors"):
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path)
    with pytest.raises(ValueError, match="do not fit") as refused:
        load_policy(saved)
    return str(refused.value).partition("do not fit: ")[2]


def test_wrong_tensors_have_their_stored_names_in_errors(saved: Path) -> None:
    lost, fused = "model.layers.1.mlp.experts.5.up_proj.weight", "model.layers.0.attention.query_key_value.weight"
    assert _changed(saved, lambda tensors: tensors.pop(lost, None)) == f"there is no {lost}; config.json makes [16, 32]"

    def add(tensors: dict[str, torch.Tensor]) -> None:
        if fused in tensors:
            tensors[lost] = torch.zeros(16, 31)
            tensors[fused] = torch.zeros(95, 32)

    assert _changed(saved, add) == (
        f"{fused} is [95, 32]; config.json makes [96, 32]; {lost} is [16, 31]; config.json makes [16, 32]"
    )


def _copy(shared: Path, name: str, out: Path, **changes: Any) -> Path:
    shutil.copytree(shared / "fixtures" / name, out / name, copy_function=shutil.copyfile)
    out = out / name
    out.chmod(0o755)
    raw = json.loads((out / "config.json").read_text()) | changes
    (out / "config.json").write_text(json.dumps(raw))
    return out


def test_llada2_takes_ids_from_tokenizer_and_padding(shared: Path, tmp_path: Path) -> None:
    directory = _copy(shared, "llada2-tiny", tmp_path)
    config = load_config(directory)
    assert (config.mask_token_id, config.eos_token_id, config.pad_token_id, config.stop_ids) == (510, 509, 509, (509,))
    assert (config.block_length, config.rotary_dim, config.head_dim) == (32, 12, 24)
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [509, 505]}))
    assert load_config(directory).stop_ids == (509, 505)
    policy = load_policy(directory)
    save_checkpoint(tmp_path / "saved", policy.config, policy.state_dict(), tmp_path)
    assert load_config(tmp_path / "saved") == policy.config
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (directory / name).unlink()
    with pytest.raises(ValueError, match=r"the tokenizer beside it has no token <\|mask\|>"):
        load_config(directory)


def test_dense_layers_follow_the_config(shared: Path, tmp_path: Path) -> None:
    every_second = _copy(shared, "sdar-moe-tiny", tmp_path, decoder_sparse_step=2, norm_topk_prob=False)
    config = load_config(every_second)
    assert config.moe is not None
    assert (config.moe.dense_layers, config.moe.is_normalised) == ((0, 2), False)
    listed = _copy(shared, "sdar-moe-tiny", tmp_path / "other", mlp_only_layers=[1])
    moe = load_config(listed).moe
    assert moe is not None
    assert moe.dense_layers == (1,)
    model = make_model(config)
    init_weights(model, seed=0)
    save_checkpoint(tmp_path / "saved", config, model.state_dict(), every_second)
    assert load_config(tmp_path / "saved") == config
    names = load_file(tmp_path / "saved" / "model.safetensors").keys()
    assert {name.split(".")[2] for name in names if ".experts." in name} == {"1"}
    assert {name.split(".")[2] for name in names if name.endswith("mlp.up_proj.weight")} == {"0", "2"}


@pytest.mark.parametrize(
    ("name", "key", "value", "sentence"),
    [
        ("llada2-tiny", "model_type", "llada2_moe_veomni", "its scripts/moe_convertor.py writes the published form"),
        ("llada2-tiny", "expert_capacity", 48, "expert_capacity = 48, so it is LLaDA2.2's; d1 computes 2.0 and 2.1"),
        ("llada2-tiny", "delete_token_id", 3, "delete_token_id = 3, so it is LLaDA2.2's; d1 computes 2.0 and 2.1 only"),
        ("llada2-tiny", "split_token_id", 3, "split_token_id = 3, so it is LLaDA2.2's; d1 computes 2.0 and 2.1 only"),
        ("llada2-tiny", "quantization_config", {"bits": 8}, "d1 computes quantization_config = None only"),
        ("llada2-tiny", "score_function", "softmax", "d1 computes score_function = 'sigmoid' only"),
        ("llada2-tiny", "use_qk_norm", False, "d1 computes use_qk_norm = True only"),
        ("llada2-tiny", "use_sliding_window", True, "d1 computes use_sliding_window = False only"),
        ("llada2-tiny", "n_group", 5, "num_groups 5 must divide num_experts 16"),
        ("sdar-moe-tiny", "decoder_sparse_step", 0, "has decoder_sparse_step = 0; it must be 1 or more"),
        ("sdar-moe-tiny", "architectures", ["SDARForCausalLM"], "architectures = ['SDARMoeForCausalLM'] only"),
        ("sdar-moe-tiny", "quantization_config", {"bits": 8}, "d1 computes quantization_config = None only"),
    ],
)
def test_unsupported_settings_are_refused(
    shared: Path, tmp_path: Path, name: str, key: str, value: Any, sentence: str
) -> None:
    with pytest.raises(ValueError, match="config") as refused:
        load_config(_copy(shared, name, tmp_path, **{key: value}))
    assert sentence in str(refused.value)


# Parameters and tensors. SDAR-30B-A3B has Qwen3-30B-A3B's shape; LLaDA2.X-flash's counts are from its published files.
PUBLISHED = {"sdar_moe": (30_532_122_624, 18_867), "llada2_moe": (102_889_705_216, 24_161)}
SHAPES: dict[str, dict[str, Any]] = {
    "sdar_moe": {
        "vocab_size": 151936,
        "d_model": 2048,
        "num_layers": 48,
        "mlp_hidden_size": 6144,
        "block_length": 4,
        "moe": MoEConfig(num_experts=128, experts_per_token=8, expert_width=768, router="softmax"),
    },
    "llada2_moe": {
        "vocab_size": 157184,
        "d_model": 4096,
        "num_layers": 32,
        "mlp_hidden_size": 9216,
        "rotary_width": 64,
        "block_length": 32,
        "moe": MoEConfig(
            num_experts=256,
            experts_per_token=8,
            expert_width=1024,
            router="sigmoid",
            num_groups=8,
            kept_groups=4,
            scale=2.5,
            shared_width=1024,
            dense_layers=(0,),
        ),
    },
}


@pytest.mark.parametrize("family", PUBLISHED)
def test_parameter_and_tensor_counts_equal_the_published_models(family: str) -> None:
    ids = {"mask_token_id": 2, "eos_token_id": 1, "pad_token_id": 1, "max_sequence_length": 32768}
    attention = {"num_heads": 32, "num_kv_heads": 4, "head_width": 128, "qk_norm": True}
    shape = TransformerConfig(family=family, **ids | attention | SHAPES[family])
    parameters = dict(make_meta_model(shape).named_parameters())
    layout = FAMILIES[shape.family].layout({name: parameter.shape for name, parameter in parameters.items()})
    num_parameters = sum(parameter.numel() for parameter in parameters.values())
    assert (num_parameters, len(layout.stored_shapes)) == PUBLISHED[family]
