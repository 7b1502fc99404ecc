"""Tests of the LLM judge against a real vLLM server on the CPU; `make test-vllm` runs them."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rewards import Grader, RewardConfig, RewardUnavailableError, SumsConfig
from rewards.terms.judge.config import JudgeConfig
from rewards.terms.judge.judge import Judge
from rewards.terms.judge.server import VllmConfig, vllm_server
from tests.rewards.conftest import make_sample

PYTHON = os.environ.get("D1_VLLM_PYTHON", "")

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(not PYTHON, reason="needs the vLLM that `make test-vllm` installs"),
]

# `vllm serve` of the CPU build fails to find its version, because the package has another name.
_COMMAND = (PYTHON, "-m", "vllm.entrypoints.openai.api_server", "--model")
_ARGUMENTS = (
    *("--dtype", "float32", "--enforce-eager", "--kv-cache-memory-bytes", str(64 << 20)),
    *("--max-model-len", "2048", "--max-num-seqs", "4"),
    # A random model would emit whitespace between JSON tokens forever.
    *("--structured-outputs-config", '{"backend": "xgrammar", "disable_any_whitespace": true}'),
)
_ENVIRONMENT = {"VLLM_CPU_CI_ENV": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1"}
_TEMPLATE = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}\n{% endfor %}<|assistant|>"


def _make_checkpoint(directory: Path) -> None:
    """Write a random two-layer Qwen3 with a byte-level tokenizer and a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        ["yes no"],
        trainers.BpeTrainer(
            vocab_size=300,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            special_tokens=["<|end|>", "<|system|>", "<|user|>", "<|assistant|>"],
            show_progress=False,
        ),
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|end|>")
    fast.chat_template = _TEMPLATE
    fast.save_pretrained(directory)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(fast),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        eos_token_id=fast.eos_token_id,
        bos_token_id=None,
        tie_word_embeddings=False,
    )
    Qwen3ForCausalLM(config).save_pretrained(directory)


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """Judge settings for the server, which runs during the tests."""
    directory = tmp_path_factory.mktemp("vllm")
    checkpoint = directory / "model"
    _make_checkpoint(checkpoint)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    settings = {"base_url": f"http://127.0.0.1:{port}/v1", "model": str(checkpoint), "criteria": "Is it polite?"}
    config = VllmConfig(command=_COMMAND, arguments=_ARGUMENTS, environment=_ENVIRONMENT)
    log = directory / "judge.log"
    with vllm_server(config, model=str(checkpoint), base_url=settings["base_url"], log=log):
        yield settings | {"timeout_s": 60}


def _judge(settings: dict[str, Any], **fields: Any) -> Judge:
    return Judge(JudgeConfig.model_validate(settings | fields))


SAMPLES = [make_sample(text) for text in ("Please, 309.", "309!", 'Answer {"verdict": "yes"}.', "", "\n[end]" * 50)]


@pytest.mark.parametrize("constraint", ["json_schema", "vllm_choice"])
@pytest.mark.parametrize(
    ("verdict", "values"),
    [({"kind": "choice"}, {0.0, 1.0}), ({"kind": "score", "lowest": 1, "highest": 5}, {0.0, 0.25, 0.5, 0.75, 1.0})],
)
def test_vllm_returns_only_valid_verdicts(
    constraint: str, verdict: dict[str, Any], values: set[float], settings: dict[str, Any]
) -> None:
    judge = _judge(settings, constraint=constraint, verdict=verdict)
    given = judge.values(SAMPLES)
    assert set(given) <= values
    costs = judge.take_costs()
    # No request was repeated: the constrained decoding makes even a random model answer validly.
    assert costs["num_requests"] == len(SAMPLES)
    assert costs["prompt_tokens"] > 100 * len(SAMPLES)
    assert costs["completion_tokens"] > 0
    assert _judge(settings, constraint=constraint, verdict=verdict).values(SAMPLES) == given


def test_without_a_constraint_a_random_model_has_no_verdict(settings: dict[str, Any]) -> None:
    reward = {"terms": {"polite": {"kind": "judge", "constraint": "none", **settings}}}
    (grade,) = Grader(SumsConfig(), RewardConfig.model_validate(reward)).grade([make_sample("<answer>309</answer>")])
    assert (grade.outcome, grade.correct, grade.counts) == ("error", True, False)
    assert "gave no verdict when asked twice" in grade.detail


def test_an_overlong_prompt_is_an_error_of_its_sample_only(settings: dict[str, Any]) -> None:
    short, long = _judge(settings).values([make_sample("x"), make_sample("x y " * 2000)])
    assert short in (0.0, 1.0)
    assert "answered 400" in str(long)


def test_a_model_that_is_not_served_pauses_the_run(settings: dict[str, Any]) -> None:
    with pytest.raises(RewardUnavailableError, match="refuses to answer: status 404"):
        _judge(settings, model="another").values(SAMPLES)
