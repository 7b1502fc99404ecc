"""iLLaDA, LLaDA-MoE and Fast-dLLM v2 against their original code and published configs, and refusals."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from learner.model.checkpoint import load_policy, save_checkpoint
from learner.model.checkpoint_files import load_config
from learner.model.config import TransformerConfig
from learner.model.families import FAMILIES
from learner.model.networks import make_meta_model
from learner.model.transformer import Transformer
from tests.tiny_policy import random_policy

IDS = torch.randint(0, 38, (2, 11), generator=torch.Generator().manual_seed(5))
BLOCK = 4
EXPERTS: dict[str, Any] = {"num_experts": 8, "experts_per_token": 3, "expert_width": 16, "router": "softmax"}
SHAPES: dict[str, dict[str, Any]] = {
    "illada": {"tied_embeddings": True, "rope_theta": 1e4},
    "llada_moe": {
        "num_kv_heads": 4,
        "qk_norm": True,
        "rope_theta": 5e4,
        "moe": EXPERTS | {"is_normalised": False, "dense_layers": (0,)},
    },
    "fast_dllm": {
        "qkv_bias": True,
        "block_length": BLOCK,
        "predicts_next": True,
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-6,
    },
}


@dataclass(frozen=True, slots=True)
class Golden:
    """Output of the original code for `IDS`, run in float32 on the checkpoint that `_saved` writes."""

    source: str
    """Repository, commit and file."""
    logits: list[list[float]]
    """Logits of two tokens (7 and 20) at all slots of the second row. Fast-dLLM's are shifted by one, as in its
    `generate`."""


# With transformers 4.57.1. iLLaDA's file is in no accessible repository: a transcript of its forward was run.
GOLDEN = {
    "illada": Golden(
        "GSAI-ML/iLLaDA-8B-Base: modeling_illada.py",
        [
            [0.47381, 1.3934, 0.59169, -0.80801, 0.40535, 0.14768, -1.30033, 0.24241, 1.40271, 1.60198, -0.75967],
            [0.04346, -1.4521, 0.04054, -0.03173, 1.74647, -1.20566, -0.21415, 2.32969, -2.10748, -1.94437, 0.02856],
        ],
    ),
    "llada_moe": Golden(
        "ZHZisZZ/dllm @ ca17675: dllm/pipelines/llada/models/modeling_lladamoe.py",
        [
            [-1.6076, -0.16989, -0.82191, -1.03961, 0.05576, 0.50919, 0.71446, 1.31147, -0.10589, 0.69178, -0.72248],
            [0.54022, -0.51631, 0.9369, -1.12416, 0.16628, -1.1723, -1.12351, -0.92648, -1.08782, -1.32592, -1.59609],
        ],
    ),
    "fast_dllm": Golden(
        "Satgoy152/DualDiffusion @ 9587d1e: FastDLLM_inferencing/Fast_dLLM_v2_7B/modeling.py",
        [
            [2.73561, 2.73561, 4.33217, 1.38839, 3.51367, 0.89826, 1.47856, 3.31318, 1.23621, 3.5269, 3.00432],
            [1.21001, 1.21001, 0.46645, -0.37252, 1.42956, 1.89256, 1.53908, 0.89625, 0.38436, -0.15477, -0.19137],
        ],
    ),
}


def _model(config: TransformerConfig, family: str) -> Transformer:
    return random_policy(TransformerConfig(**config.model_dump() | {"family": family} | SHAPES[family]))


@pytest.fixture(params=SHAPES)
def saved(request: pytest.FixtureRequest, config: TransformerConfig, tmp_path: Path) -> Path:
    """A checkpoint of each family, in a directory named after it."""
    model = _model(config, request.param)
    save_checkpoint(tmp_path / request.param, model.config, model.state_dict(), tmp_path)
    return tmp_path / request.param


@torch.no_grad()
def _logits(directory: Path) -> Tensor:
    return load_policy(directory)(IDS)


def test_logits_equal_the_original_code(saved: Path) -> None:
    expected = torch.tensor(GOLDEN[saved.name].logits)
    torch.testing.assert_close(_logits(saved)[1, :, [7, 20]].T, expected, atol=1e-4, rtol=0)


# Architectures of transformers that compute the same function except for the attention mask, and their config keys.
TRANSFORMERS: dict[str, tuple[str, dict[str, str]]] = {
    "illada": ("llama", {}),
    "llada_moe": (
        "qwen3_moe",
        {"expert_intermediate_size": "moe_intermediate_size", "dense_intermediate_size": "intermediate_size"},
    ),
    "fast_dllm": ("qwen2", {}),
}


@torch.no_grad()
def test_logits_equal_transformers_under_the_same_mask(saved: Path) -> None:
    from transformers import AutoModelForCausalLM

    path, (model_type, names) = saved / "config.json", TRANSFORMERS[saved.name]
    expected, raw = _logits(saved), json.loads(path.read_text())
    raw = {names.get(key, key): value for key, value in raw.items() if key != "architectures"}
    raw |= {"model_type": model_type, "head_dim": 8, "mlp_only_layers": [0], "decoder_sparse_step": 1}
    path.write_text(json.dumps(raw))
    theirs = AutoModelForCausalLM.from_pretrained(saved, attn_implementation="eager")
    block = torch.arange(IDS.shape[1]) // BLOCK if saved.name == "fast_dllm" else torch.zeros(IDS.shape[1])
    sees = torch.where(block[:, None] >= block, 0.0, -torch.inf)
    logits = theirs(IDS, attention_mask=sees.expand(2, 1, -1, -1)).logits
    if saved.name == "fast_dllm":
        logits = torch.cat((logits[:, :1], logits[:, :-1]), dim=1)
    torch.testing.assert_close(expected, logits, atol=1e-4, rtol=0)


def test_a_checkpoint_round_trips(saved: Path, tmp_path: Path) -> None:
    policy = load_policy(saved)
    assert policy.config.family == saved.name
    save_checkpoint(tmp_path / "again", policy.config, policy.state_dict(), saved)
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "again" / name).read_bytes() == (saved / name).read_bytes()


# From the files of Efficient-Large-Model/Fast_dLLM_v2_7B on the hub.
FAST_DLLM_7B: dict[str, Any] = {
    "architectures": ["Fast_dLLM_QwenForCausalLM"],
    "attention_dropout": 0.0,
    "auto_map": {"AutoModelForCausalLM": "modeling.Fast_dLLM_QwenForCausalLM"},
    "bd_size": 32,
    "bos_token_id": 151643,
    "conplemenrary_mask": True,
    "eos_token_id": 151645,
    "hidden_act": "silu",
    "hidden_size": 3584,
    "initializer_range": 0.02,
    "intermediate_size": 18944,
    "layer_types": ["full_attention"] * 28,
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "model_type": "Fast_dLLM_Qwen",
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "pad_token_id": 151645,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.53.1",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 152064,
}
# From user reports of the config of GSAI-ML/iLLaDA-8B-Base.
ILLADA_8B: dict[str, Any] = {
    "architectures": ["ILLaDAForCausalLM"],
    "attention_bias": False,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "layer_norm_eps": None,
    "max_position_embeddings": 8192,
    "mlp_bias": False,
    "model_type": "illada",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "vocab_size": 155136,
}
# From user reports of the config of inclusionAI/LLaDA-MoE-7B-A1B-Instruct.
LLADA_MOE_7B: dict[str, Any] = {
    "architectures": ["LLaDAMoEModelLM"],
    "attention_bias": False,
    "expert_intermediate_size": 1024,
    "hidden_size": 2048,
    "max_position_embeddings": 8192,
    "model_type": "llada",
    "moe_layer_freq": [1] * 16,
    "moe_router_enable_expert_bias": False,
    "norm_topk_prob": None,
    "num_attention_heads": 16,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 16,
    "num_key_value_heads": 16,
    "pad_token_id": 156892,
    "partial_rotary_factor": 1,
    "qk_layernorm": True,
    "rms_norm_eps": 1e-05,
    "rope_theta": 50000,
    "routed_scaling_factor": 1,
    "router_num_group": None,
    "shared_expert_intermediate_size": None,
    "tie_word_embeddings": False,
    "vocab_size": 157184,
}
MASKS = {"|<MASK>|": 151665, "<[MASK]>": 5, "<|mask|>": 156895}
PUBLISHED = {"illada": ILLADA_8B, "llada_moe": LLADA_MOE_7B, "fast_dllm": FAST_DLLM_7B}


def _directory(path: Path, raw: dict[str, Any], masks: dict[str, int] = MASKS) -> Path:
    (path / "config.json").write_text(json.dumps(raw))
    added = {str(token): {"content": name} for name, token in masks.items()}
    (path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added}))
    return path


def test_published_configs_take_ids_from_neighbouring_files(tmp_path: Path) -> None:
    fast = load_config(_directory(tmp_path, FAST_DLLM_7B))
    assert (fast.block_length, fast.predicts_next, fast.qkv_bias, fast.tied_embeddings) == (32, True, True, False)
    assert (fast.mask_token_id, fast.stop_ids, fast.pad_token_id) == (151665, (151645,), 151645)
    illada = load_config(_directory(tmp_path, ILLADA_8B))
    assert (illada.block_length, illada.predicts_next, illada.tied_embeddings) == (None, False, True)
    assert (illada.mask_token_id, illada.stop_ids, illada.max_sequence_length) == (5, (2,), 8192)
    moe = load_config(_directory(tmp_path, LLADA_MOE_7B))
    assert (moe.block_length, moe.predicts_next, moe.mask_token_id, moe.stop_ids) == (None, False, 156895, (156892,))
    assert moe.moe is not None
    assert (moe.moe.router, moe.moe.is_normalised, moe.moe.dense_layers, moe.moe.shared_width) == (
        "softmax",
        False,
        (),
        0,
    )
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [151645, 151643]}))
    assert load_config(_directory(tmp_path, FAST_DLLM_7B)).stop_ids == (151645, 151643)


@pytest.mark.parametrize(
    ("family", "changes", "num_parameters", "num_tensors"),
    [
        # The model cards state 7.62B and 7.36B. The others are Qwen2.5-7B's and -1.5B's.
        ("illada", {}, 7_615_025_152, 290),
        ("llada_moe", {}, 7_356_880_896, 3_219),
        ("fast_dllm", {}, 7_615_616_512, 339),
        (
            "fast_dllm",
            {
                "hidden_size": 1536,
                "num_attention_heads": 12,
                "num_key_value_heads": 2,
                "intermediate_size": 8960,
                "vocab_size": 151936,
                "tie_word_embeddings": True,
            },
            1_543_714_304,
            338,
        ),
    ],
)
def test_parameter_and_tensor_counts_equal_the_published_models(
    tmp_path: Path, family: str, changes: dict[str, Any], num_parameters: int, num_tensors: int
) -> None:
    shape = load_config(_directory(tmp_path, PUBLISHED[family] | changes))
    parameters = dict(make_meta_model(shape).named_parameters())
    layout = FAMILIES[shape.family].layout({name: parameter.shape for name, parameter in parameters.items()})
    assert sum(parameter.numel() for parameter in parameters.values()) == num_parameters
    assert len(layout.stored_shapes) == num_tensors


def test_missing_keys_have_the_originals_defaults(tmp_path: Path) -> None:
    def read(family: str, *missing: str, **changes: Any) -> TransformerConfig:
        raw = {key: value for key, value in PUBLISHED[family].items() if key not in missing} | changes
        return load_config(_directory(tmp_path, raw))

    assert read("fast_dllm", "bd_size").block_length == 32
    assert read("fast_dllm", bd_size=8).block_length == 8
    assert not read("illada", tie_word_embeddings=False).tied_embeddings
    assert read("illada", mask_token_id=9).mask_token_id == 9
    assert read("llada_moe", "num_key_value_heads").num_kv_heads == 16
    # The base model without a head has another architecture name, and dense layers have a separate width.
    moe = read("llada_moe", architectures=["LLaDAMoEModel"], moe_layer_freq=[0] + [1] * 15, dense_intermediate_size=99)
    assert moe.moe is not None
    assert (moe.moe.dense_layers, moe.mlp_hidden_size) == ((0,), 99)


@pytest.mark.parametrize(
    ("family", "key", "value", "right"),
    [
        ("illada", "architectures", ["LlamaForCausalLM"], "['ILLaDAForCausalLM']"),
        ("illada", "attention_bias", True, "False"),
        ("illada", "attention_dropout", 0.1, "0.0"),
        ("illada", "hidden_act", "gelu", "'silu'"),
        ("illada", "layer_norm_eps", 1e-5, "None"),
        ("illada", "mlp_bias", True, "False"),
        ("illada", "resid_pdrop", 0.1, "0.0"),
        ("llada_moe", "architectures", ["LLaDAModelLM"], "['LLaDAMoEModelLM']"),
        ("llada_moe", "attention_bias", True, "False"),
        ("llada_moe", "clip_qkv", 8.0, "None"),
        ("llada_moe", "hidden_act", "gelu", "'silu'"),
        ("llada_moe", "moe_router_enable_expert_bias", True, "False"),
        ("llada_moe", "qk_layernorm", False, "True"),
        ("llada_moe", "shared_expert_intermediate_size", 512, "None"),
        ("fast_dllm", "architectures", ["Qwen2ForCausalLM"], "['Fast_dLLM_QwenForCausalLM']"),
        ("fast_dllm", "attention_dropout", 0.1, "0.0"),
        ("fast_dllm", "hidden_act", "gelu", "'silu'"),
        ("fast_dllm", "use_sliding_window", True, "False"),
    ],
)
def test_unsupported_settings_are_refused(tmp_path: Path, family: str, key: str, value: Any, right: str) -> None:
    with pytest.raises(ValueError, match="computes") as refused:
        load_config(_directory(tmp_path, PUBLISHED[family] | {key: value}))
    assert str(refused.value) == f"{tmp_path}/config.json has {key} = {value!r}; d1 computes {key} = {right} only"


@pytest.mark.parametrize(
    ("family", "changes", "sentence"),
    [
        ("llada_moe", {"moe_layer_freq": [1] * 15}, "it should be a list of 0 or 1 for each of 16 layers"),
        ("llada_moe", {"moe_layer_freq": 1}, "has moe_layer_freq = 1; it should be a list of 0 or 1 for each of 16"),
        ("llada_moe", {"num_experts_per_tok": 65}, "experts_per_token 65 is more than the 64 experts"),
        ("fast_dllm", {"bd_size": 0}, "makes no policy: block_length: Input should be greater than 0"),
    ],
)
def test_invalid_configs_are_refused(tmp_path: Path, family: str, changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match="config") as refused:
        load_config(_directory(tmp_path, PUBLISHED[family] | changes))
    assert sentence in str(refused.value)


@pytest.mark.parametrize(("family", "token"), [("illada", "<[MASK]>"), ("llada_moe", "<|mask|>")])
def test_without_a_mask_token_the_tokenizer_is_named(tmp_path: Path, family: str, token: str) -> None:
    directory = _directory(tmp_path, PUBLISHED[family], {"<mask>": 7})
    with pytest.raises(ValueError, match="has no token") as refused:
        load_config(directory)
    sentence = f"has no mask_token_id, and the tokenizer beside it has no token {token}"
    assert str(refused.value) == f"{tmp_path}/config.json {sentence}"
