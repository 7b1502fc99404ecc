"""Block-causal families: attention between blocks, and rows of clean canvases with noisy block states."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from learner.model.checkpoint import load_policy, save_checkpoint
from learner.model.checkpoint_files import load_config
from learner.model.config import TransformerConfig
from learner.model.networks import make_model
from learner.model.transformer import Transformer, init_weights

LENGTH, BLOCK = 18, 4


@pytest.fixture
def model(config: TransformerConfig) -> Transformer:
    changes = {"family": "sdar", "block_length": BLOCK, "qk_norm": True, "head_width": 12}
    model = make_model(TransformerConfig(**config.model_dump() | changes))
    init_weights(model, seed=0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.add_(0.5 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)))
    return model


@pytest.fixture(params=[False, True], ids=["at the slot", "at the slot before"])
def either(request: pytest.FixtureRequest, model: Transformer) -> Transformer:
    """Also with an output that predicts the next slot, so that the preceding block predicts a block's first slot."""
    model.config = model.config.model_copy(update={"predicts_next": request.param})
    return model


def _rows(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 38, (count, LENGTH), generator=torch.Generator().manual_seed(seed))


def _masked(ids: torch.Tensor) -> torch.Tensor:
    is_masked = torch.rand(ids.shape, generator=torch.Generator().manual_seed(2)) < 0.5
    return torch.where(is_masked, 38, ids)


def _beside(
    model: Transformer, noisy: torch.Tensor, clean: torch.Tensor, block: int = BLOCK, **others: object
) -> torch.Tensor:
    """Return the logits of canvases, each block after the clean blocks before it, from rows [clean | noisy]."""
    rows, length = clean.shape
    columns = torch.arange(length).repeat(2).expand(rows, -1)
    chunks = torch.cat((torch.full((length,), -1), torch.arange(length) // block)).expand(rows, -1)
    queries = torch.arange(length, 2 * length).expand(rows, -1)
    ids = torch.cat((clean, noisy), dim=1)
    return model(ids, None, queries, columns_BL=columns, states_BL=chunks, **others)


@pytest.mark.parametrize(("name", "block"), [("sdar-tiny", 4), ("sdar-moe-tiny", 4), ("llada2-tiny", 8)])
def test_logits_equal_the_original_code(shared: Path, name: str, block: int) -> None:
    """With heads wider than d_model / num_heads and query-key norms, and with experts of both kinds. The config of
    LLaDA2 omits its training block length of 8."""
    directory = shared / "fixtures" / name
    expected = load_file(directory / "expected.safetensors")
    policy, lengths = load_policy(directory), torch.full((3,), block)
    with torch.inference_mode():
        logits = policy(expected["input_ids"], block_lengths_B=lengths)
        beside_clean = _beside(policy, expected["input_ids"], expected["clean_ids"], block, block_lengths_B=lengths)
    torch.testing.assert_close(logits, expected["logits"], atol=5e-4, rtol=0)
    torch.testing.assert_close(beside_clean, expected["noisy_logits"], atol=5e-4, rtol=0)


# Uncompiled FlexAttention warns that it is slow.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("flex", [False, True])
def test_a_slot_attends_to_its_block_and_earlier_ones(model: Transformer, flex: bool) -> None:
    ids = _rows(2)
    with torch.no_grad():
        before = model(ids, flex=flex)
        for column in range(LENGTH):
            changed = ids.clone()
            changed[:, column] = (ids[:, column] + 1) % 38
            differs, begin = (model(changed, flex=flex) - before).abs().amax(-1), column // BLOCK * BLOCK
            assert (differs[:, :begin] < 1e-6).all()
            assert differs[:, begin:].min() > 1e-6


def test_rows_may_have_different_block_lengths(model: Transformer) -> None:
    ids, lengths = _rows(3), torch.tensor([4, 7, 16])
    with torch.no_grad():
        together = model(ids, block_lengths_B=lengths)
        for row, length in enumerate(lengths.tolist()):
            alone = make_model(model.config.model_copy(update={"block_length": length}))
            alone.load_state_dict(model.state_dict())
            torch.testing.assert_close(together[row], alone(ids[row : row + 1])[0], atol=1e-5, rtol=0)
    assert (together[0] - together[2]).abs().max() > 1e-3


# Uncompiled FlexAttention warns that it is slow.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("flex", [False, True])
def test_noisy_blocks_in_one_row_equal_separate_forwards(either: Transformer, flex: bool) -> None:
    clean = _rows(2)
    noisy = _masked(clean)
    with torch.no_grad():
        logits = _beside(either, noisy, clean, flex=flex)
        for row in range(2):
            for begin in range(0, LENGTH, BLOCK):
                alone = torch.cat((clean[row, :begin], noisy[row, begin : begin + BLOCK]))[None]
                found = logits[row, begin : begin + BLOCK]
                torch.testing.assert_close(found, either(alone)[0, begin:], atol=1e-5, rtol=0)


def test_states_of_a_block_in_one_row_do_not_attend_to_each_other(either: Transformer) -> None:
    """Two states of the third block and padding, in a row without a clean third block."""
    clean = _rows(1)[:, :12]
    states = torch.tensor([[38, 3, 38, 5], [1, 38, 38, 38]])
    ids = torch.cat((clean[:, :8], states.view(1, 8), torch.full((1, 3), 7)), dim=1)
    columns = torch.tensor([[*range(8), *range(8, 12), *range(8, 12), 0, 0, 0]])
    chunks = torch.tensor([[-1] * 8 + [0] * 4 + [1] * 4 + [-2] * 3])
    with torch.no_grad():
        found = either(ids, columns_BL=columns, states_BL=chunks)[0]
        for number, state in enumerate(states):
            alone = either(torch.cat((clean[0, :8], state))[None])[0]
            torch.testing.assert_close(found[8 + 4 * number : 12 + 4 * number], alone[8:], atol=1e-5, rtol=0)
            torch.testing.assert_close(found[:8], alone[:8], atol=1e-5, rtol=0)


def test_the_gradient_of_noisy_blocks_equals_that_of_separate_forwards(either: Transformer) -> None:
    clean = _rows(1)
    noisy = _masked(clean)
    weight = torch.randn(LENGTH, 40, generator=torch.Generator().manual_seed(3))
    (_beside(either, noisy, clean)[0] * weight).sum().backward()
    found = {name: parameter.grad.clone() for name, parameter in either.named_parameters()}
    either.zero_grad()
    for begin in range(0, LENGTH, BLOCK):
        alone = torch.cat((clean[0, :begin], noisy[0, begin : begin + BLOCK]))[None]
        (either(alone)[0, begin:] * weight[begin : begin + BLOCK]).sum().backward()
    for name, parameter in either.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, atol=1e-4, rtol=1e-4)


def test_blocks_of_one_give_the_autoregressive_likelihood(either: Transformer) -> None:
    clean = _rows(1)
    blocks = torch.tensor([1])
    with torch.no_grad():
        at_once = _beside(either, torch.full_like(clean, 38), clean, 1, block_lengths_B=blocks)[0]
        for slot in range(LENGTH):
            canvas = torch.cat((clean[0, :slot], torch.tensor([38])))[None]
            torch.testing.assert_close(at_once[slot], either(canvas, block_lengths_B=blocks)[0, -1], atol=1e-5, rtol=0)


def test_missing_ids_are_read_from_neighbouring_files(shared: Path, tmp_path: Path) -> None:
    """Configs on the hub have neither mask id nor block length; `<|im_end|>` is only in generation_config.json."""
    original = shared / "fixtures" / "sdar-tiny"
    whole = load_config(original)
    assert (whole.mask_token_id, whole.stop_ids, whole.block_length) == (510, (509, 506), 4)
    for path in original.iterdir():
        shutil.copyfile(path, tmp_path / path.name)
    raw = json.loads((original / "config.json").read_text())
    del raw["mask_token_id"], raw["block_size"]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert load_config(tmp_path) == whole
    (tmp_path / "tokenizer_config.json").unlink()
    assert load_config(tmp_path) == whole
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match="the tokenizer beside it has no token") as refused:
        load_config(tmp_path)
    assert str(refused.value) == (
        f"{tmp_path}/config.json has no mask_token_id, and the tokenizer beside it has no token <|MASK|>"
    )


def test_stop_ids_are_saved_with_the_checkpoint(model: Transformer, tmp_path: Path) -> None:
    config = model.config.model_copy(update={"other_stop_ids": (7, 9)})
    save_checkpoint(tmp_path / "saved", config, model.state_dict(), tmp_path)
    assert load_config(tmp_path / "saved") == config
    assert load_policy(tmp_path / "saved").is_cache_exact


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"family": "sdar"}, "block_length is None; a policy of the family sdar is block-causal and has one"),
        ({"block_length": 4}, "block_length is 4; a policy of the family llada is bidirectional and has none"),
        ({"head_width": 7}, "head_width 7 must be even"),
        ({"other_stop_ids": (38,)}, "mask_token_id and one of other_stop_ids are both 38; they must differ"),
        ({"other_stop_ids": (40,)}, "other_stop_ids has 40, no id of a vocabulary of 40"),
    ],
)
def test_invalid_configs_are_refused(config: TransformerConfig, changes: dict[str, object], sentence: str) -> None:
    with pytest.raises(ValueError, match="Value error") as refused:
        TransformerConfig(**config.model_dump() | changes)
    assert sentence in str(refused.value)
