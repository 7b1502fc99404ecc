import json
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from learner.model.checkpoint import save_checkpoint
from learner.model.tokenizer import EOS, SPECIAL_TOKENS, ChatTokenizer, make_tokenizer
from learner.model.transformer import Transformer

# Special tokens of Dream's checkpoints in order; the first one's id follows the last merge.
DREAM_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "<|beginoftext|>", "<|mask|>")
DREAM_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    directory = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(["solve 3 7 19 = 24", "<answer>3*7</answer>"] * 5, directory, 320)
    return ChatTokenizer(directory)


def test_digits_and_tags_are_single_tokens(tokenizer: ChatTokenizer) -> None:
    assert tokenizer.tokens(tokenizer.encode_plain("<answer>19</answer>")) == ["<answer>", "1", "9", "</answer>"]


def test_a_prompt_ends_where_the_assistant_begins(tokenizer: ChatTokenizer) -> None:
    ids = tokenizer.encode_chat([{"role": "user", "content": " 3 7 "}])
    assert tokenizer.tokens(ids) == ["<|user|>", "3", " ", "7", "<|assistant|>"]


def test_special_tokens_have_the_first_ids(tokenizer: ChatTokenizer) -> None:
    assert [tokenizer.token_id(token) for token in SPECIAL_TOKENS] == [0, 1, 2, 3]
    assert tokenizer.eos_id == tokenizer.token_id(EOS)


@given(st.text())
@settings(max_examples=200)
def test_any_text_round_trips(tokenizer: ChatTokenizer, text: str) -> None:
    assume(not any(token in text for token in SPECIAL_TOKENS))
    assert tokenizer.decode(tokenizer.encode_plain(text)) == text


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no tokenizer\.json"):
        ChatTokenizer(tmp_path)


@pytest.fixture
def dream_files(tmp_path: Path) -> Path:
    """A tokenizer laid out as in Dream's repositories: two BPE files, and Python code that would leave a trace
    if run."""
    directory = tmp_path / "dream"
    directory.mkdir()
    merges = [("h", "e"), ("he", "l"), ("\u0120", "w")]
    tokens = sorted(pre_tokenizers.ByteLevel.alphabet()) + ["".join(pair) for pair in merges]
    vocab = {token: index for index, token in enumerate(tokens)}
    (directory / "vocab.json").write_text(json.dumps(vocab, ensure_ascii=False), encoding="utf-8")
    lines = ["#version: 0.2", *(" ".join(pair) for pair in merges)]
    (directory / "merges.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    added = {
        str(len(vocab) + index): {"content": token, "normalized": False, "special": token != "<tool_call>"}
        for index, token in enumerate(DREAM_SPECIAL)
    }
    config = {
        "added_tokens_decoder": added,
        "additional_special_tokens": ["<|beginoftext|>", "<|mask|>"],
        "auto_map": {"AutoTokenizer": ["tokenization_dream.DreamTokenizer", None]},
        "bos_token": "<|beginoftext|>",
        "chat_template": DREAM_TEMPLATE,
        "eos_token": "<|endoftext|>",
        "mask_token": "<|mask|>",
        "pad_token": "<|endoftext|>",
        "tokenizer_class": "DreamTokenizer",
        "unk_token": None,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    trace = f"open({str(tmp_path / 'trace')!r}, 'w')\nraise SystemExit\n"
    (directory / "tokenization_dream.py").write_text(trace)
    return directory


def test_dreams_tokenizer_files_are_read_without_running_code(dream_files: Path, tmp_path: Path) -> None:
    tokenizer = ChatTokenizer(dream_files)
    assert [tokenizer.token_id(token) for token in DREAM_SPECIAL] == [259, 260, 261, 262, 263, 264]
    assert (len(tokenizer), tokenizer.eos_id) == (265, 259)
    ids = tokenizer.encode_chat([{"role": "user", "content": "hello w12"}])
    assert tokenizer.tokens(ids) == [
        *("<|im_start|>", "u", "s", "e", "r", "\n", "hel", "l", "o", " w", "1", "2", "<|im_end|>", "\n"),
        *("<|im_start|>", "a", "s", "s", "i", "s", "t", "a", "n", "t", "\n"),
    ]
    assert tokenizer.decode([*tokenizer.encode_plain("hello \u00e9 <tool_call>"), 261, 259, 264]) == (
        "hello \u00e9 <tool_call>"
    )
    assert not (tmp_path / "trace").exists()


def test_saving_a_checkpoint_copies_dreams_tokenizer(dream_files: Path, policy: Transformer, tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "saved", policy.config, policy.state_dict(), dream_files)
    messages = [{"role": "user", "content": "hello"}]
    assert ChatTokenizer(tmp_path / "saved").encode_chat(messages) == ChatTokenizer(dream_files).encode_chat(messages)
    assert not (tmp_path / "saved" / "tokenization_dream.py").exists()


def test_lladas_config_keys_are_accepted(tmp_path: Path) -> None:
    make_tokenizer(["solve 3 7 19 = 24"], tmp_path, 300)
    special = {
        str(index): {"content": token, "normalized": False, "special": True}
        for index, token in enumerate(SPECIAL_TOKENS)
    }
    # Unusual keys of LLaDA-8B-Instruct's tokenizer_config.json; its template always adds the assistant header.
    config = {
        "add_bos_token": False,
        "added_tokens_decoder": special,
        "bos_token": "<|user|>",
        "chat_template": "{% for message in messages %}{% set content = message['content'] | trim %}"
        "{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}"
        "{{ '<|assistant|>' }}",
        "cls_token": "[CLS]",
        "eos_token": EOS,
        "fast_tokenizer": True,
        "gmask_token": "[gMASK]",
        "merges_file": None,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "trust_remote_code": True,
        "vocab_file": None,
    }
    (tmp_path / "chat_template.jinja").unlink(missing_ok=True)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    llada = ChatTokenizer(tmp_path)
    ids = llada.encode_chat([{"role": "user", "content": " 3 7 "}])
    assert llada.tokens(ids) == ["<|user|>", "3", " ", "7", "<|assistant|>"]
    assert llada.eos_id == llada.token_id(EOS)
