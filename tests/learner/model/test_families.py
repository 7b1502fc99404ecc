"""Real families' checkpoints read and written by our transformer: same function, names and config."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from learner.model.checkpoint import load_policy, save_checkpoint
from learner.model.checkpoint_files import load_config
from learner.model.config import TransformerConfig
from learner.model.networks import make_model
from learner.parallel.sharding import ShardedPolicy
from tests.tiny_policy import random_policy

# From the config.json of LLaDA-8B-Instruct and Dream-v0-Instruct-7B on the hub.
LLADA_8B: dict[str, Any] = {
    "activation_type": "silu",
    "alibi": False,
    "alibi_bias_max": 8.0,
    "architectures": ["LLaDAModelLM"],
    "attention_dropout": 0.0,
    "attention_layer_norm": False,
    "attention_layer_norm_with_affine": True,
    "auto_map": {"AutoModel": "modeling_llada.LLaDAModelLM"},
    "bias_for_layer_norm": False,
    "block_group_size": 1,
    "block_type": "llama",
    "d_model": 4096,
    "embedding_dropout": 0.0,
    "embedding_size": 126464,
    "eos_token_id": 126081,
    "flash_attention": False,
    "include_bias": False,
    "include_qkv_bias": False,
    "init_cutoff_factor": None,
    "init_device": "meta",
    "init_fn": "mitchell",
    "init_std": 0.02,
    "input_emb_norm": False,
    "layer_norm_type": "rms",
    "layer_norm_with_affine": True,
    "mask_token_id": 126336,
    "max_sequence_length": 4096,
    "mlp_hidden_size": 12288,
    "mlp_ratio": 4,
    "model_type": "llada",
    "multi_query_attention": None,
    "n_heads": 32,
    "n_kv_heads": 32,
    "n_layers": 32,
    "pad_token_id": 126081,
    "precision": "amp_bf16",
    "residual_dropout": 0.0,
    "rms_norm_eps": 1e-05,
    "rope": True,
    "rope_full_precision": True,
    "rope_theta": 500000.0,
    "scale_logits": False,
    "transformers_version": "4.46.3",
    "use_cache": False,
    "vocab_size": 126464,
    "weight_tying": False,
}
DREAM_7B: dict[str, Any] = {
    "architectures": ["DreamModel"],
    "attention_dropout": 0.0,
    "auto_map": {"AutoModel": "modeling_dream.DreamModel"},
    "bos_token_id": 151643,
    "eos_token_id": 151643,
    "hidden_act": "silu",
    "hidden_size": 3584,
    "initializer_range": 0.02,
    "intermediate_size": 18944,
    "mask_token_id": 151666,
    "max_position_embeddings": 131072,
    "max_window_layers": 28,
    "model_type": "Dream",
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "pad_token_id": 151643,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.46.2",
    "use_cache": True,
    "use_mrope": False,
    "use_sliding_window": False,
    "vocab_size": 152064,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "llada": {"num_kv_heads": 4},
    "llada, grouped": {},
    "llada, biased": {"qkv_bias": True},
    "llada, tied": {"tied_embeddings": True},
    "dream": {"family": "dream", "predicts_next": True, "qkv_bias": True, "rms_norm_eps": 1e-6, "rope_theta": 1e6},
    "dream, tied": {
        "family": "dream",
        "predicts_next": True,
        "qkv_bias": True,
        "tied_embeddings": True,
        "num_kv_heads": 4,
    },
}


@pytest.fixture(params=VARIANTS)
def variant(request: pytest.FixtureRequest, config: TransformerConfig, tmp_path: Path) -> Path:
    """A random checkpoint of each variant of the families, with nontrivial norms and biases."""
    shape = TransformerConfig(**config.model_dump() | VARIANTS[request.param])
    model = random_policy(shape)
    save_checkpoint(tmp_path / "variant", shape, model.state_dict(), tmp_path)
    return tmp_path / "variant"


def _llada_layer(tensors: dict[str, Tensor], index: int) -> dict[str, Tensor]:
    names = {
        "norm1": "attn_norm.weight",
        "q": "q_proj.weight",
        "k": "k_proj.weight",
        "v": "v_proj.weight",
        "o": "attn_out.weight",
        "norm2": "ff_norm.weight",
        "gate": "ff_proj.weight",
        "up": "up_proj.weight",
        "down": "ff_out.weight",
    }
    layer = {short: tensors[f"model.transformer.blocks.{index}.{name}"] for short, name in names.items()}
    zero = torch.zeros((), dtype=torch.float64)
    biases = {f"{x}_bias": tensors.get(f"model.transformer.blocks.{index}.{x}_proj.bias", zero) for x in "qkv"}
    return layer | biases


def _dream_layer(tensors: dict[str, Tensor], index: int) -> dict[str, Tensor]:
    names = {
        "norm1": "input_layernorm.weight",
        "o": "self_attn.o_proj.weight",
        "norm2": "post_attention_layernorm.weight",
        "gate": "mlp.gate_proj.weight",
        "up": "mlp.up_proj.weight",
        "down": "mlp.down_proj.weight",
    }
    names |= {x: f"self_attn.{x}_proj.weight" for x in "qkv"} | {f"{x}_bias": f"self_attn.{x}_proj.bias" for x in "qkv"}
    return {short: tensors[f"model.layers.{index}.{name}"] for short, name in names.items()}


def _rms(x_D: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    return x_D / math.sqrt(sum(float(value) ** 2 for value in x_D) / len(x_D) + eps) * weight_D


def _turned(x_E: Tensor, position: int, theta: float) -> Tensor:
    """RoPE: rotate the pair (i, i + E/2) by position / theta^(2i / E)."""
    half, out = len(x_E) // 2, x_E.clone()
    for i in range(half):
        angle = position * theta ** (-2 * i / len(x_E))
        cos, sin = math.cos(angle), math.sin(angle)
        out[i] = x_E[i] * cos - x_E[i + half] * sin
        out[i + half] = x_E[i + half] * cos + x_E[i] * sin
    return out


def _attended(x_LD: Tensor, layer: dict[str, Tensor], num_heads: int, num_kv_heads: int, theta: float) -> Tensor:
    """Compute the attention output one head at a time; a key-value head serves the query heads of its group."""
    head_dim, length = x_LD.shape[1] // num_heads, len(x_LD)
    q_LD, k_LD, v_LD = (x_LD @ layer[x].T + layer[f"{x}_bias"] for x in "qkv")
    out_LD = torch.zeros_like(x_LD)
    for head in range(num_heads):
        own = slice(head * head_dim, (head + 1) * head_dim)
        group = head // (num_heads // num_kv_heads)
        kept = slice(group * head_dim, (group + 1) * head_dim)
        keys = [_turned(k_LD[position, kept], position, theta) for position in range(length)]
        for position in range(length):
            query = _turned(q_LD[position, own], position, theta)
            scores_L = torch.stack([query @ key for key in keys]) / math.sqrt(head_dim)
            out_LD[position, own] = scores_L.softmax(-1) @ v_LD[:, kept]
    return out_LD @ layer["o"].T


def _original_logits(directory: Path, ids_L: Tensor) -> Tensor:
    """Compute logits [L, V] of one canvas as the original modeling code and sampler do, in float64, slowly.

    Reads the checkpoint by the original names and uses none of our code.
    """
    raw = json.loads((directory / "config.json").read_text())
    tensors = {name: tensor.double() for name, tensor in load_file(directory / "model.safetensors").items()}
    if raw["model_type"] == "Dream":
        num_layers, num_heads, num_kv_heads = (
            raw[f"num_{name}"] for name in ("hidden_layers", "attention_heads", "key_value_heads")
        )
        layer_of: Callable[[dict[str, Tensor], int], dict[str, Tensor]] = _dream_layer
        embed, norm, head, is_tied = "model.embed_tokens", "model.norm", "lm_head", raw["tie_word_embeddings"]
    else:
        num_layers, num_heads, num_kv_heads = raw["n_layers"], raw["n_heads"], raw["n_kv_heads"]
        layer_of = _llada_layer
        embed, norm, head, is_tied = "wte", "ln_f", "ff_out", raw["weight_tying"]
        embed, norm, head = (f"model.transformer.{name}" for name in (embed, norm, head))
    eps, theta = raw["rms_norm_eps"], raw["rope_theta"]
    x_LD = tensors[f"{embed}.weight"][ids_L]
    for index in range(num_layers):
        layer = layer_of(tensors, index)
        normed_LD = torch.stack([_rms(x_D, layer["norm1"], eps) for x_D in x_LD])
        x_LD = x_LD + _attended(normed_LD, layer, num_heads, num_kv_heads, theta)
        normed_LD = torch.stack([_rms(x_D, layer["norm2"], eps) for x_D in x_LD])
        gate = normed_LD @ layer["gate"].T
        x_LD = x_LD + (gate * torch.sigmoid(gate) * (normed_LD @ layer["up"].T)) @ layer["down"].T
    x_LD = torch.stack([_rms(x_D, tensors[f"{norm}.weight"], eps) for x_D in x_LD])
    assert (f"{head}.weight" in tensors) is not is_tied
    logits_LV = x_LD @ tensors[f"{embed if is_tied else head}.weight"].T
    return torch.cat([logits_LV[:1], logits_LV[:-1]]) if raw["model_type"] == "Dream" else logits_LV


def test_logits_equal_a_slow_reimplementation(variant: Path) -> None:
    ids = torch.randint(0, 38, (2, 9), generator=torch.Generator().manual_seed(5))
    expected = torch.stack([_original_logits(variant, row) for row in ids])
    with torch.no_grad():
        logits = load_policy(variant)(ids)
    assert expected.std() > 0.1
    torch.testing.assert_close(logits.double(), expected, atol=1e-5, rtol=1e-5)


def test_the_slow_reimplementation_equals_the_original_code(shared: Path) -> None:
    for name in ("llada-tiny", "dream-tiny"):
        directory = shared / "fixtures" / name
        expected = load_file(directory / "expected.safetensors")
        ids, logits = expected["input_ids"][0], expected["logits"][0]
        if name == "dream-tiny":
            logits = torch.cat([logits[:1], logits[:-1]])
        torch.testing.assert_close(_original_logits(directory, ids).float(), logits, atol=1e-4, rtol=0)


def test_dream_logits_equal_the_original_shifted_by_one(shared: Path) -> None:
    directory = shared / "fixtures" / "dream-tiny"
    expected = load_file(directory / "expected.safetensors")
    with torch.no_grad():
        logits = load_policy(directory)(expected["input_ids"])
    unshifted = expected["logits"]
    torch.testing.assert_close(logits[:, 1:], unshifted[:, :-1], atol=1e-4, rtol=0)
    torch.testing.assert_close(logits[:, 0], unshifted[:, 0], atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["llada-tiny", "dream-tiny", "sdar-tiny", "sdar-moe-tiny", "llada2-tiny"])
def test_an_original_checkpoint_round_trips(shared: Path, tmp_path: Path, name: str) -> None:
    original = shared / "fixtures" / name
    save_checkpoint(tmp_path / "again", load_config(original), load_policy(original).state_dict(), original)
    before, after = (load_file(directory / "model.safetensors") for directory in (original, tmp_path / "again"))
    assert before.keys() == after.keys()
    for key, tensor in before.items():
        assert (tensor.dtype, tensor.shape) == (after[key].dtype, after[key].shape)
        assert tensor.numpy().tobytes() == after[key].numpy().tobytes(), key
    old, new = (json.loads((directory / "config.json").read_text()) for directory in (original, tmp_path / "again"))
    # Weight initialization, keys overridden by others, and the version that wrote the file.
    unused = {"alibi_bias_max", "init_cutoff_factor", "init_fn", "init_std", "mlp_ratio", "precision"}
    unused |= {"max_window_layers", "transformers_version"}
    # Newer code writes `torch_dtype` as `dtype`, and LLaDA2's code ignores `sliding_window`.
    unused |= {"llada2-tiny": {"dtype", "sliding_window"}, "sdar-moe-tiny": {"use_cache"}}.get(name, set())
    assert {key: value for key, value in old.items() if key not in unused}.items() <= new.items()


def test_variants_round_trip(variant: Path, tmp_path: Path) -> None:
    policy = load_policy(variant)
    save_checkpoint(tmp_path / "again", policy.config, policy.state_dict(), variant)
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "again" / name).read_bytes() == (variant / name).read_bytes()
    assert load_config(tmp_path / "again") == policy.config


def test_copies_of_a_policy_keep_its_family(variant: Path) -> None:
    policy = load_policy(variant)
    reference = ShardedPolicy(policy, None).frozen_copy()
    assert reference.config == policy.config


def _directory(path: Path, raw: dict[str, Any]) -> Path:
    (path / "config.json").write_text(json.dumps(raw))
    return path


def test_the_published_configs_are_read(tmp_path: Path) -> None:
    assert load_config(_directory(tmp_path, LLADA_8B)) == TransformerConfig(
        family="llada",
        vocab_size=126464,
        d_model=4096,
        num_layers=32,
        num_heads=32,
        num_kv_heads=32,
        mlp_hidden_size=12288,
        max_sequence_length=4096,
        rope_theta=500000.0,
        rms_norm_eps=1e-5,
        mask_token_id=126336,
        eos_token_id=126081,
        pad_token_id=126081,
    )
    assert load_config(_directory(tmp_path, DREAM_7B)) == TransformerConfig(
        family="dream",
        predicts_next=True,
        vocab_size=152064,
        d_model=3584,
        num_layers=28,
        num_heads=28,
        num_kv_heads=4,
        mlp_hidden_size=18944,
        max_sequence_length=131072,
        qkv_bias=True,
        rope_theta=1000000.0,
        rms_norm_eps=1e-6,
        mask_token_id=151666,
        eos_token_id=151643,
        pad_token_id=151643,
    )


@pytest.mark.parametrize(("raw", "num_parameters"), [(LLADA_8B, 8_015_581_184), (DREAM_7B, 7_615_616_512)])
def test_parameter_counts_equal_the_published_models(tmp_path: Path, raw: dict[str, Any], num_parameters: int) -> None:
    """LLaDA's index.json states 16,031,162,368 bytes of bfloat16; Dream has the shape of Qwen2.5-7B."""
    with torch.device("meta"):
        model = make_model(load_config(_directory(tmp_path, raw)))
    assert sum(parameter.numel() for parameter in model.parameters()) == num_parameters


def _field(directory: Path, raw: dict[str, Any], field: str) -> Any:
    return getattr(load_config(_directory(directory, raw)), field)


def test_null_and_missing_keys_have_the_originals_defaults(tmp_path: Path) -> None:
    llada = LLADA_8B | {"embedding_size": None, "vocab_size": 130_000, "mlp_hidden_size": None, "n_kv_heads": None}
    for raw in (llada, {key: value for key, value in llada.items() if value is not None}):
        fields = ("vocab_size", "mlp_hidden_size", "num_kv_heads")
        assert [_field(tmp_path, raw, name) for name in fields] == [130_000, 4 * 4096, 32]
    assert _field(tmp_path, LLADA_8B | {"n_kv_heads": 8}, "num_kv_heads") == 8
    assert _field(tmp_path, LLADA_8B | {"include_qkv_bias": True}, "qkv_bias")
    assert _field(tmp_path, LLADA_8B | {"weight_tying": True}, "tied_embeddings")
    dream = DREAM_7B | {"eos_token_id": None, "pad_token_id": 7, "num_key_value_heads": None}
    assert [_field(tmp_path, dream, name) for name in ("eos_token_id", "num_kv_heads")] == [7, 28]
    assert _field(tmp_path, {key: dream[key] for key in dream if key != "eos_token_id"}, "eos_token_id") == 7
    assert _field(tmp_path, DREAM_7B | {"tie_word_embeddings": True}, "tied_embeddings")


@pytest.mark.parametrize(
    ("raw", "key", "value", "right"),
    [
        (LLADA_8B, "activation_type", "swiglu", "'silu'"),
        (LLADA_8B, "alibi", True, "False"),
        (LLADA_8B, "architectures", ["LLaDAMoEModel"], "['LLaDAModelLM']"),
        (LLADA_8B, "attention_dropout", 0.1, "0.0"),
        (LLADA_8B, "attention_layer_norm", True, "False"),
        (LLADA_8B, "bias_for_layer_norm", True, "False"),
        (LLADA_8B, "block_group_size", 2, "1"),
        (LLADA_8B, "block_type", "sequential", "'llama'"),
        (LLADA_8B, "embedding_dropout", 0.1, "0.0"),
        (LLADA_8B, "include_bias", True, "False"),
        (LLADA_8B, "input_emb_norm", True, "False"),
        (LLADA_8B, "layer_norm_type", "default", "'rms'"),
        (LLADA_8B, "layer_norm_with_affine", False, "True"),
        (LLADA_8B, "multi_query_attention", True, "False"),
        (LLADA_8B, "quantization_config", {"bits": 4}, "None"),
        (LLADA_8B, "residual_dropout", 0.1, "0.0"),
        (LLADA_8B, "rope", False, "True"),
        (LLADA_8B, "rope_full_precision", False, "True"),
        (LLADA_8B, "scale_logits", True, "False"),
        (DREAM_7B, "architectures", ["DreamForCausalLM"], "['DreamModel']"),
        (DREAM_7B, "attention_dropout", 0.1, "0.0"),
        (DREAM_7B, "hidden_act", "gelu", "'silu'"),
        (DREAM_7B, "quantization_config", {"bits": 4}, "None"),
        (DREAM_7B, "use_mrope", True, "False"),
        (DREAM_7B, "use_sliding_window", True, "False"),
    ],
)
def test_unsupported_settings_are_refused(
    tmp_path: Path, raw: dict[str, Any], key: str, value: Any, right: str
) -> None:
    with pytest.raises(ValueError, match="computes") as refused:
        load_config(_directory(tmp_path, raw | {key: value}))
    assert str(refused.value) == f"{tmp_path}/config.json has {key} = {value!r}; d1 computes {key} = {right} only"


_LLADA_NEEDS = ("activation_type", "attention_dropout", "block_type", "embedding_dropout", "layer_norm_type")
_LLADA_NEEDS += ("residual_dropout", "rope", "d_model", "n_layers", "n_heads", "max_sequence_length", "weight_tying")
_LLADA_NEEDS += ("rope_theta", "rms_norm_eps", "mask_token_id", "eos_token_id", "model_type")
_DREAM_NEEDS = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
_DREAM_NEEDS += ("intermediate_size", "max_position_embeddings", "rope_theta", "rms_norm_eps", "mask_token_id")
_DREAM_NEEDS += ("model_type",)


@pytest.mark.parametrize(
    ("raw", "key"), [(LLADA_8B, key) for key in _LLADA_NEEDS] + [(DREAM_7B, key) for key in _DREAM_NEEDS]
)
def test_a_missing_key_is_named(tmp_path: Path, raw: dict[str, Any], key: str) -> None:
    with pytest.raises(ValueError, match="has no") as refused:
        load_config(_directory(tmp_path, {name: raw[name] for name in raw if name != key}))
    assert str(refused.value) == f"{tmp_path}/config.json has no {key}"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("{", "is not JSON: Expecting property name"),
        ("[1]", "is not a JSON object: it is a list"),
        (json.dumps(LLADA_8B | {"model_type": "bert"}), "has model_type 'bert'; d1 reads 'llada', 'Dream', 'sdar'"),
        (json.dumps(LLADA_8B | {"n_layers": "many"}), "makes no policy: num_layers: Input should be a valid integer"),
        (json.dumps(LLADA_8B | {"n_heads": 30}), "makes no policy: num_heads 30 must split d_model 4096"),
    ],
)
def test_invalid_configs_are_refused_in_one_line(tmp_path: Path, text: str, sentence: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match="config") as refused:
        load_config(tmp_path)
    assert str(refused.value).startswith(f"{tmp_path}/config.json {sentence}")
    assert "\n" not in str(refused.value)
