"""Tiny autoregressive checkpoints with a byte-level tokenizer, as directories and GGUF files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

END, TURN, END_OF_TURN = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
RESERVED = "<|reserved_special_token_0|>"
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_TEXTS = ["what is the capital of France?", "the sky is blue because of light", "3 + 4 = 7, and 9 - 2 = 7"]


def write_tokenizer(directory: Path, specials: Sequence[str] = (END, TURN, END_OF_TURN, RESERVED)) -> int:
    """Train a tokenizer with these special tokens first; return its number of tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=list(specials), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(_TEXTS, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END_OF_TURN, pad_token=END_OF_TURN)
    fast.chat_template = TEMPLATE
    fast.save_pretrained(directory)
    return len(fast)


def write_source(
    directory: Path,
    architecture: str = "llama",
    *,
    specials: Sequence[str] = (END, TURN, END_OF_TURN, RESERVED),
    spare_rows: int = 0,
    dtype: torch.dtype = torch.float32,
    **changes: Any,
) -> Any:
    """Write a random model of two layers with its tokenizer; return the model."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    num_tokens = write_tokenizer(directory, specials)
    keys = {
        "vocab_size": num_tokens + spare_rows,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": True,
    }
    config = CONFIG_MAPPING[architecture](**keys | changes)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).to(dtype).eval()
    model.save_pretrained(directory)
    return model


def write_gguf(path: Path, source: Path, kind: str = "Q8_0", **fields: Any) -> None:
    """Write a directory's tiny Llama, whose head is tied, as a GGUF file; `fields` adds or overrides metadata."""
    import gguf
    from safetensors.torch import load_file

    config = json.loads((source / "config.json").read_text())
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    _add_tokenizer(writer, json.loads((source / "tokenizer.json").read_text()))
    for name, value in fields.items():
        (writer.add_uint16 if isinstance(value, int) else writer.add_string)(name.replace("__", "."), value)
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    for name, tensor in load_file(source / "model.safetensors").items():
        theirs, numbers = names.get_name(name, (".weight",)), tensor.float().numpy()
        for module, num_heads in heads.items():
            if f".{module}." in f"{theirs}.":
                numbers = _interleaved(numbers, num_heads)
        quantisation = gguf.GGMLQuantizationType[kind if numbers.ndim > 1 else "F32"]
        writer.add_tensor(theirs, gguf.quantize(numbers, quantisation), raw_dtype=quantisation)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _interleaved(numbers: np.ndarray, num_heads: int) -> np.ndarray:
    """Reorder to llama.cpp's layout, where the two elements of a rotary pair are adjacent."""
    rows = numbers.reshape(num_heads, 2, numbers.shape[0] // num_heads // 2, *numbers.shape[1:])
    return rows.swapaxes(1, 2).reshape(numbers.shape)


def _add_tokenizer(writer: Any, tokenizer: dict[str, Any]) -> None:
    import gguf

    tokens = sorted(tokenizer["model"]["vocab"], key=tokenizer["model"]["vocab"].__getitem__)
    special = {added["content"] for added in tokenizer["added_tokens"]}
    kinds = [gguf.TokenType.CONTROL if token in special else gguf.TokenType.NORMAL for token in tokens]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(TEMPLATE)
