"""Adapter directories of peft: loaded with peft's outputs, or refused with an error that says why."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from learner.model.adapter import read_adapter
from learner.model.checkpoint import load_merged, load_policy, save_checkpoint
from learner.model.checkpoint_files import checkpoint_chain, load_config, open_tokenizer
from learner.model.config import TransformerConfig
from learner.model.lora import adapted_layers
from learner.model.networks import make_model
from learner.model.peft_directory.config import PeftAdapterConfig
from learner.model.tokenizer import make_tokenizer
from learner.model.transformer import Transformer, init_weights
from tests.learner.model.on_disk.original import Original, change_config, make_adapter, merged_by_peft

IDS = torch.arange(36).view(3, 12)
WEIGHTS = "adapter_model.safetensors"
A = "base_model.model.model.transformer.blocks.0.q_proj.lora_A.weight"
B = A.replace("lora_A", "lora_B")
SDAR = {"family": "sdar", "block_length": 4, "qk_norm": True}
SDAR_MOE = SDAR | {
    "family": "sdar_moe",
    "moe": {"num_experts": 4, "experts_per_token": 2, "expert_width": 16, "router": "softmax"},
}
# Adapted layers of each family, specified in different ways.
TARGETS: dict[str, dict[str, Any]] = {
    # The head and a layer of the blocks have the same name.
    "llada": {"target_modules": ["q_proj", "attn_out", "ff_out"], "use_rslora": True, "r": 3},
    "dream": {"target_modules": r"model\.layers\.\d+\.(self_attn\.[qkvo]_proj|mlp\.up_proj)", "lora_alpha": 3},
    "sdar": {
        "target_modules": ["q_proj", "v_proj", "down_proj"],
        "rank_pattern": {"v_proj": 2, r"1\.self_attn.q_proj": 5},
        "alpha_pattern": {"down_proj": 32, r"layers.0.*q_proj": 1},
    },
    "sdar_moe": {"target_modules": ["k_proj", "o_proj"], "layers_to_transform": [1]},
    "a2d-llama": {"target_modules": ["o_proj", "up_proj"], "r": 2},
    "a2d-qwen2": {"target_modules": ["q_proj", "gate_proj"], "layers_to_transform": [0]},
    # Query, key and value are a single layer.
    "llada2_moe": {"target_modules": ["query_key_value", "shared_experts.up_proj"], "lora_alpha": 16},
    "illada": {"target_modules": ["q_proj", "down_proj"]},
    "llada_moe": {"target_modules": ["v_proj", "o_proj"]},
    "fast_dllm": {"target_modules": ["k_proj", "gate_proj"]},
}


def _base(directory: Path, shape: TransformerConfig, seed: int = 0) -> Path:
    """Write a checkpoint of random weights."""
    model = make_model(shape)
    init_weights(model, seed)
    save_checkpoint(directory, shape, model.state_dict(), directory)
    return directory


@pytest.fixture
def shapes(config: TransformerConfig, moe_config: TransformerConfig) -> dict[str, TransformerConfig]:
    values = {
        "llada": {},
        "dream": {"family": "dream", "predicts_next": True, "qkv_bias": True},
        "sdar": SDAR,
        "sdar_moe": SDAR_MOE,
        "a2d-llama": {"family": "a2d-llama", "block_length": 4},
        "a2d-qwen2": {"family": "a2d-qwen2", "predicts_next": True, "qkv_bias": True},
        "illada": {"family": "illada"},
        "llada_moe": {"family": "llada_moe", "qk_norm": True, "moe": SDAR_MOE["moe"] | {"is_normalised": False}},
        "fast_dllm": {"family": "fast_dllm", "block_length": 4, "predicts_next": True, "qkv_bias": True},
    }
    of_config = {name: TransformerConfig(**config.model_dump() | value) for name, value in values.items()}
    return of_config | {"llada2_moe": moe_config}


@pytest.fixture
def adapter(config: TransformerConfig, tmp_path: Path) -> Path:
    """An adapter of a LLaDA checkpoint."""
    base = _base(tmp_path / "base", config)
    make_adapter(base, tmp_path / "adapter", r=4, target_modules=["q_proj", "ff_proj"])
    return tmp_path / "adapter"


def _logits(model: Transformer) -> Tensor:
    with torch.no_grad():
        return model(IDS)


@pytest.mark.parametrize("family", TARGETS)
def test_an_adapter_equals_pefts_unmerged_and_merged(
    family: str, shapes: dict[str, TransformerConfig], tmp_path: Path
) -> None:
    base, directory = _base(tmp_path / "base", shapes[family]), tmp_path / "adapter"
    make_adapter(base, directory, **{"r": 4} | TARGETS[family])
    beside, merged = load_policy(directory), load_merged(directory)
    shutil.copytree(base, tmp_path / "expected")
    save_file(merged_by_peft(base, directory), tmp_path / "expected" / "model.safetensors")
    expected = load_policy(tmp_path / "expected")
    for name, weight in expected.state_dict().items():
        torch.testing.assert_close(merged.state_dict()[name], weight, rtol=0, atol=1e-6, msg=name)
    torch.testing.assert_close(_logits(beside), _logits(expected), rtol=1e-5, atol=1e-5)
    assert not torch.allclose(_logits(beside), _logits(load_policy(base)), atol=1e-2)


def test_a_layer_computes_what_pefts_layer_computes(adapter: Path, config: TransformerConfig) -> None:
    from peft import PeftModel

    original = PeftModel.from_pretrained(Original(adapter.parent / "base"), adapter)
    theirs = original.base_model.model.get_submodule("model.transformer.blocks.1.ff_proj")
    x = torch.randn(2, 5, config.d_model)
    with torch.no_grad():
        ours = load_policy(adapter).get_submodule("blocks.1.mlp.gate_proj")(x)
        torch.testing.assert_close(ours, theirs(x), rtol=1e-5, atol=1e-5)


def test_targets_ranks_and_scalings_equal_pefts() -> None:
    from peft.tuners.tuners_utils import check_target_module_exists
    from peft.utils.other import get_pattern_key

    modules = [
        f"{prefix}{number}.{name}"
        for prefix, number, name in product(
            ("model.transformer.blocks.", "model.layers.", "layers."),
            (0, 1, 11),
            ("q_proj", "self_attn.q_proj", "mlp.experts.1.up_proj"),
        )
    ] + ["model.transformer.ff_out", "lm_head"]
    targets = (["q_proj"], ["attn.q_proj", "up_proj"], [modules[0]], r".*\.(1|11)\..*q_proj", "lm_head", ["ff_out"])
    excluded = (None, [], ["self_attn.q_proj"], r".*layers\.0.*")
    layers = ((None, None), ([1], None), (1, "layers"), ([0, 11], ["blocks", "layers"]), ([], None))
    patterns = ({}, {"q_proj": 2}, {r".*\.1\..*": 3, "q_proj": 2}, {"1.q_proj": 5}, {"proj": 7}, {"^lm_head": 9})
    for names, others, (indices, lists), pattern in product(targets, excluded, layers, patterns):
        about = {"target_modules": names, "exclude_modules": others, "layers_to_transform": indices}
        about |= {"layers_pattern": lists, "rank_pattern": pattern, "alpha_pattern": pattern}
        config = PeftAdapterConfig(peft_type="LORA", r=4, lora_alpha=6, **about)
        for module in modules:
            is_target = check_target_module_exists(SimpleNamespace(**about), module)
            assert config.is_target(module) == bool(is_target), (module, about)
            key = get_pattern_key(list(pattern), module)
            assert config.rank_of(module) == pattern.get(key, 4), (module, pattern)
            assert config.scaling_of(module) == pattern.get(key, 6) / pattern.get(key, 4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_matrices_are_read(adapter: Path, dtype: torch.dtype) -> None:
    halves = {name: tensor.to(dtype) for name, tensor in load_file(adapter / WEIGHTS).items()}
    save_file(halves, adapter / WEIGHTS)
    # Converted to float32 before any arithmetic.
    assert {matrix.dtype for matrix in read_adapter(adapter).matrices.values()} == {torch.float32}
    layer = adapted_layers(load_policy(adapter))["blocks.0.attn.q_proj"]
    assert torch.equal(layer.lora_A, halves[A].float())


@pytest.mark.parametrize(
    "rename",
    [
        lambda name: name.removeprefix("base_model.model."),
        lambda name: name.replace(".weight", ".default.weight"),
        lambda name: name.replace("base_model.model.model.", "base_model.model."),
        lambda name: f"module.{name}",
        lambda name: name.replace("base_model.model.", "base_model.model._orig_mod."),
        lambda name: name.replace(".q_proj", "._fsdp_wrapped_module.q_proj"),
    ],
)
def test_names_with_wrappers_and_without_prefix_are_read(adapter: Path, rename: Callable[[str], str]) -> None:
    expected = _logits(load_policy(adapter))
    save_file({rename(name): tensor for name, tensor in load_file(adapter / WEIGHTS).items()}, adapter / WEIGHTS)
    assert torch.equal(_logits(load_policy(adapter)), expected)


def test_unchanged_embedding_and_head_are_accepted(adapter: Path, tmp_path: Path) -> None:
    expected, base = _logits(load_policy(adapter)), load_file(tmp_path / "base" / "model.safetensors")
    # In the adapter's training precision, and under the name of an adapted layer.
    copies = {
        f"base_model.model.model.transformer.{stored}.weight": base[f"model.transformer.{name}.weight"].bfloat16()
        for stored, name in (("wte", "wte"), ("ff_out.base_layer", "ff_out"))
    }
    tensors = load_file(adapter / WEIGHTS)
    save_file(tensors | copies, adapter / WEIGHTS)
    assert torch.equal(_logits(load_policy(adapter)), expected)
    load_policy(adapter, torch.bfloat16)
    for name, copy in copies.items():
        for other in (copy + 1, copy[:-1].clone()):
            save_file(tensors | copies | {name: other}, adapter / WEIGHTS)
            with pytest.raises(ValueError, match=rf"{name}, which is not that of the base"):
                load_policy(adapter)


def test_inert_settings_are_accepted(adapter: Path) -> None:
    """Training and initialization settings, null and empty values, a byte order mark, and files that a Trainer
    leaves."""
    expected = _logits(load_policy(adapter))
    neutral = {"lora_dropout": 0.1, "inference_mode": False, "task_type": "CAUSAL_LM", "init_lora_weights": "gaussian"}
    neutral |= {"eva_config": {"rho": 2.0}, "modules_to_save": [], "a_key_of_tomorrow": None, "rank_pattern": None}
    change_config(adapter, **neutral, exclude_modules=[], revision="main")
    about = adapter / "adapter_config.json"
    about.write_text("\ufeff" + about.read_text())
    for name in ("optimizer.pt", "training_args.bin", "rng_state.pth"):
        (adapter / name).write_bytes(b"\x80\x04")
    (adapter / "trainer_state.json").write_text('{"global_step": 500}')
    shutil.copyfile(adapter.parent / "base" / "config.json", adapter / "config.json")
    assert torch.equal(_logits(load_policy(adapter)), expected)


@pytest.mark.parametrize(
    ("key", "value", "what"),
    [
        ("peft_type", "IA3", "'IA3'; d1 reads 'LORA' only"),
        ("use_dora", True, "d1 reads adapters of lora_A and lora_B only, without use_dora"),
        ("modules_to_save", ["lm_head"], "without modules_to_save"),
        ("trainable_token_indices", [3], "without trainable_token_indices"),
        ("layer_replication", [[0, 2]], "without layer_replication"),
        ("lora_bias", True, "without lora_bias"),
        ("a_key_of_tomorrow", {"a": 1}, "without a_key_of_tomorrow"),
        ("bias", "all", "without trained biases only, bias = 'none'"),
        ("init_lora_weights", "pissa_niter_4", "with which peft also changes the base's weights"),
        ("init_lora_weights", "olora", "path_initial_model_for_weight_conversion"),
        ("base_model_name_or_path", None, "None; write the base's path or hub id there"),
    ],
)
def test_unsupported_settings_are_refused_by_name(adapter: Path, key: str, value: object, what: str) -> None:
    change_config(adapter, **{key: value})
    with pytest.raises(ValueError, match=key) as refused:
        load_config(adapter)
    assert str(refused.value).startswith(f"{adapter / 'adapter_config.json'} has {key} = ")
    assert what in str(refused.value)


@pytest.mark.parametrize(
    ("values", "what"),
    [
        (
            {"r": 8},
            "lora_A of model.transformer.blocks.0.ff_proj is [4, 32]; the base and adapter_config.json make it [8,",
        ),
        ({"r": 0}, "adapter_config.json is no config of an adapter: r: Input should be greater than 0"),
        ({"rank_pattern": {"(": 2}}, "rank_pattern: '(' is no regular expression"),
        (
            {"target_modules": ["q_proj"]},
            "has matrices of model.transformer.blocks.0.ff_proj, which adapter_config.json",
        ),
        ({"target_modules": ["q_proj", "ff_proj", "up_proj"]}, "lacks matrices of model.transformer.blocks.0.up_proj"),
        ({"exclude_modules": ["q_proj"]}, "has matrices of model.transformer.blocks.0.q_proj"),
    ],
)
def test_a_config_that_the_matrices_do_not_fit_is_refused(adapter: Path, values: dict[str, Any], what: str) -> None:
    change_config(adapter, **values)
    with pytest.raises(ValueError, match="adapter") as refused:
        load_policy(adapter)
    assert what in str(refused.value)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({A: None}, "has no lora_A of model.transformer.blocks.0.q_proj"),
        ({B: None}, "has no lora_B of model.transformer.blocks.0.q_proj"),
        ({A: None, B: None}, "lacks matrices of model.transformer.blocks.0.q_proj"),
        ({A: torch.zeros(4, 9)}, "lora_A of model.transformer.blocks.0.q_proj is [4, 9]"),
        ({A: torch.zeros(4, 32, dtype=torch.int8)}, "is torch.int8; an adapter is in float32, bfloat16 or float16"),
        (
            {A.replace(".weight", ".other.weight"): torch.zeros(4, 32)},
            "has lora_A of model.transformer.blocks.0.q_proj t",
        ),
        (
            {A.replace("blocks.0.q_proj", "blocks.7.q_proj"): torch.zeros(4, 32)},
            "adapts model.transformer.blocks.7.q_proj, and the base has no such layer",
        ),
        (
            {
                A.replace("blocks.0.q_proj", "wte"): torch.zeros(4, 32),
                B.replace("blocks.0.q_proj", "wte"): torch.zeros(40, 4),
            },
            "adapts model.transformer.wte, which can have no adapter in d1",
        ),
        ({"base_model.model.model.transformer.ln_f.weight": torch.zeros(32)}, "ln_f.weight; d1 reads lora_A and"),
        (
            {A.replace("A.weight", "magnitude_vector"): torch.zeros(4)},
            "lora_magnitude_vector; d1 reads lora_A and lora_B",
        ),
    ],
)
def test_unsupported_matrices_are_refused_by_name(adapter: Path, change: dict[str, Tensor | None], what: str) -> None:
    tensors = load_file(adapter / WEIGHTS) | change
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, adapter / WEIGHTS)
    with pytest.raises(ValueError, match="adapter") as refused:
        load_policy(adapter)
    assert str(refused.value).startswith(str(adapter / WEIGHTS))
    assert what in str(refused.value)


def test_experts_are_refused_by_name(shapes: dict[str, TransformerConfig], tmp_path: Path) -> None:
    base = _base(tmp_path / "base", shapes["sdar_moe"])
    make_adapter(base, tmp_path / "adapter", target_modules=["q_proj", "up_proj"])
    with pytest.raises(
        ValueError, match=r"adapts model\.layers\.0\.mlp\.experts\.0\.up_proj, which can have no adapter"
    ):
        load_policy(tmp_path / "adapter")


def test_invalid_files_are_refused_by_name(adapter: Path) -> None:
    def refusal() -> str:
        with pytest.raises(ValueError, match="adapter") as refused:
            load_policy(adapter)
        return str(refused.value)

    about, weights = adapter / "adapter_config.json", adapter / WEIGHTS
    shutil.copyfile(adapter.parent / "base" / "model.safetensors", adapter / "model.safetensors")
    assert "has both an adapter and model.safetensors, so it is unclear which is meant" in refusal()
    (adapter / "model.safetensors").unlink()
    weights.rename(adapter / "adapter_model.bin")
    assert "adapter_model.bin is pickled, which d1 never reads; save the adapter as adapter_model.saf" in refusal()
    (adapter / "adapter_model.bin").unlink()
    assert f"{adapter} has no adapter_model.safetensors" in refusal()
    weights.write_bytes(b"{}")
    assert "adapter_model.safetensors cannot be read, get it again" in refusal()
    save_file({}, weights)
    assert "is empty: it has no lora_A and lora_B" in refusal()
    about.write_text("[]")
    assert refusal() == f"{about} is no config of an adapter: it is a list, and should be an object"
    about.unlink()
    assert f"{adapter} has an adapter's weights and no adapter_config.json" in refusal()
    (adapter / "checkpoint-500").mkdir()
    weights.unlink()
    (adapter / "checkpoint-500" / "adapter_config.json").write_text("{}")
    assert (
        refusal() == f"{adapter} is not a checkpoint: it has no config.json; {adapter}/checkpoint-500 holds an adapter"
    )


def test_a_relative_base_is_found_from_the_directory_or_the_adapter(
    adapter: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, base in (("base", Path("base")), ("../base", adapter / "../base")):
        change_config(adapter, base_model_name_or_path=name)
        assert checkpoint_chain(adapter) == [adapter, base]
    shutil.copytree(tmp_path / "base", adapter / "base")
    change_config(adapter, base_model_name_or_path="base")
    assert checkpoint_chain(adapter) == [adapter, Path("base")], "what is here goes first, as in peft"
    (tmp_path / "base" / "config.json").unlink()
    assert checkpoint_chain(adapter) == [adapter, adapter / "base"], "what is here is no checkpoint"
    change_config(adapter, base_model_name_or_path="adapter")
    for read in (load_config, checkpoint_chain):
        with pytest.raises(ValueError, match=r"the adapter in .*adapter stands on adapter, which stands on it"):
            read(adapter)


@pytest.mark.parametrize(
    ("base", "why"),
    [
        (
            "/nowhere/llada",
            "`d1 adapt MODEL /nowhere/llada sft.num_steps=0` makes",
        ),
        ("../smollm2", "`d1 adapt smollm2 {adapter}/smollm2 sft.num_steps=0` makes"),
        ("org/llada", "there is no directory org/llada, and the model org/llada is not in the cache"),
    ],
)
def test_a_missing_base_is_named(
    adapter: Path, base: str, why: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    change_config(adapter, base_model_name_or_path=base)
    with pytest.raises(ValueError, match="is not here") as refused:
        load_config(adapter)
    why = why.format(adapter=os.path.relpath(adapter.parent))
    assert str(refused.value).startswith(f"the base {base} of the adapter in {adapter} is not here: {why}")
    assert str(refused.value).endswith(
        f"; if it has moved, write its path into base_model_name_or_path of {adapter / 'adapter_config.json'}"
    )


def test_a_base_without_a_config_is_named(adapter: Path, tmp_path: Path) -> None:
    (tmp_path / "base" / "config.json").unlink()
    with pytest.raises(
        ValueError, match=r"the base .*base of the adapter in .*adapter is not a checkpoint: it has no conf"
    ):
        load_policy(adapter)


def test_an_unsupported_base_is_named(adapter: Path, tmp_path: Path) -> None:
    path = tmp_path / "base" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": {"bits": 4}}))
    with pytest.raises(
        ValueError, match=r"the base of the adapter in .*adapter cannot be used: .*has quantization_conf"
    ):
        load_policy(adapter)


def test_an_adapter_on_an_adapter_equals_their_sum(adapter: Path, tmp_path: Path) -> None:
    """Also if they adapt different layers."""
    make_adapter(tmp_path / "base", tmp_path / "second", r=2, lora_alpha=3, target_modules=["v_proj", "q_proj"])
    change_config(tmp_path / "second", base_model_name_or_path=str(adapter))
    base, first, both = (load_merged(tmp_path / name).state_dict() for name in ("base", "adapter", "second"))
    change_config(tmp_path / "second", base_model_name_or_path=str(tmp_path / "base"))
    second = load_merged(tmp_path / "second").state_dict()
    for name, weight in base.items():
        torch.testing.assert_close(both[name], first[name] + second[name] - weight, msg=name)
    assert not torch.equal(first["blocks.0.mlp.gate_proj.weight"], base["blocks.0.mlp.gate_proj.weight"])
    change_config(tmp_path / "second", base_model_name_or_path=str(adapter), lora_alpha=0)
    for name, weight in load_merged(tmp_path / "second").state_dict().items():
        torch.testing.assert_close(weight, first[name], msg=name)


def test_the_adapters_tokenizer_takes_precedence_over_the_bases(adapter: Path, tmp_path: Path) -> None:
    base = tmp_path / "base"
    make_tokenizer(["3 7 9 = 24"], base, 300)
    shape = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(shape | {"embedding_size": 300, "vocab_size": 300}))
    template = open_tokenizer(adapter).chat_template
    assert template == open_tokenizer(base).chat_template != ""
    for path in base.glob("*token*"):
        shutil.copyfile(path, adapter / path.name)
    (adapter / "chat_template.jinja").write_text("of the adapter")
    assert open_tokenizer(adapter).chat_template == "of the adapter"
    (base / "config.json").write_text(json.dumps(shape))
    with pytest.raises(
        ValueError, match=r"the tokenizer in .*adapter has \d+ tokens, and the base .* embeds 40; remove"
    ):
        open_tokenizer(adapter)
