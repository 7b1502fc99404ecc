from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from learner.model.attention.rotary import rope_tables, rotate, rotate_by_halves
from learner.model.checkpoint import load_policy
from learner.model.config import Family, TransformerConfig
from learner.model.networks import make_model
from learner.model.targets import query_grid
from learner.model.transformer import Transformer


def test_logits_equal_the_original_llada_code(shared: Path) -> None:
    directory = shared / "fixtures" / "llada-tiny"
    expected = load_file(directory / "expected.safetensors")
    with torch.no_grad():
        logits = load_policy(directory)(expected["input_ids"])
    torch.testing.assert_close(logits, expected["logits"], atol=1e-4, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "width"), [(1, 2), (3, 10), (2, 64)])
def test_rotation_by_halves_is_bit_identical(
    config: TransformerConfig, dtype: torch.dtype, heads: int, width: int
) -> None:
    """Computed in float32, then rounded, as in the original implementations."""
    config = config.model_copy(update={"d_model": width, "num_heads": 1, "num_kv_heads": 1})
    x = torch.randn(2, 33, heads * width, generator=torch.Generator().manual_seed(0)).to(dtype)
    x_BHLE = x.unflatten(-1, (heads, width)).transpose(1, 2)
    whole = rope_tables(33, config, x.device)
    columns = torch.stack((torch.arange(33), torch.arange(33).flip(0)))
    for rope in (whole, (whole[0][columns][:, None], whole[1][columns][:, None])):
        rotated, expected = rotate_by_halves(x_BHLE, rope), rotate(x_BHLE, rope)
        assert rotated.dtype is dtype
        assert torch.equal(rotated, expected)
        assert not torch.equal(rotated, x_BHLE)


@pytest.mark.parametrize("family", ["llada", "dream"])
def test_padding_does_not_change_logits(policy: Transformer, family: Family) -> None:
    other = make_model(policy.config.model_copy(update={"family": family, "predicts_next": family == "dream"}))
    other.load_state_dict(policy.state_dict())
    short, long = torch.randint(0, 38, (1, 9)), torch.randint(0, 38, (1, 20))
    batch = torch.full((2, 20), policy.config.pad_token_id)
    batch[0, :9], batch[1] = short[0], long[0]
    with torch.no_grad():
        together = other(batch, torch.tensor([9, 20]))
        torch.testing.assert_close(together[0, :9], other(short)[0], atol=1e-5, rtol=0)
        torch.testing.assert_close(together[1], other(long)[0], atol=1e-5, rtol=0)


def test_attention_is_bidirectional(policy: Transformer) -> None:
    ids = torch.randint(0, 38, (1, 8))
    changed = ids.clone()
    changed[0, 7] = (ids[0, 7] + 1) % 38
    with torch.no_grad():
        difference = (policy(ids) - policy(changed)).abs().amax(-1)[0]
    assert (difference > 1e-6).all()


def test_logits_of_selected_slots_equal_those_of_all(policy: Transformer) -> None:
    ids, slots = torch.randint(0, 38, (4, 8)), torch.tensor([0, 3, 9, 30, 31])
    with torch.no_grad():
        asked = policy(ids, None, *query_grid(slots, 4, 8))
        torch.testing.assert_close(asked, policy(ids).flatten(0, 1)[slots])


def test_a_canvas_that_is_too_long_is_refused(policy: Transformer) -> None:
    with pytest.raises(ValueError, match="65 tokens exceeds max_sequence_length 64"):
        policy(torch.zeros(1, 65, dtype=torch.long))


def test_grouped_query_attention_equals_repeated_keys(config: TransformerConfig, policy: Transformer) -> None:
    full = Transformer(config.model_copy(update={"num_kv_heads": 4}))
    weights = policy.state_dict()
    for name in [name for name in weights if "k_proj" in name or "v_proj" in name]:
        weights[name] = weights[name].view(2, 8, 32).repeat_interleave(2, dim=0).reshape(32, 32)
    full.load_state_dict(weights)
    ids = torch.randint(0, 38, (2, 8))
    with torch.no_grad():
        torch.testing.assert_close(full(ids), policy(ids))


@pytest.mark.parametrize(("field", "value"), [("num_heads", 5), ("num_kv_heads", 3)])
def test_heads_must_divide(config: TransformerConfig, field: str, value: int) -> None:
    with pytest.raises(ValueError, match=f"{field} {value} must"):
        TransformerConfig(**config.model_dump() | {field: value})


def _packed(lengths: list[int], width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a row of consecutive random documents, and the document index of each slot."""
    documents = torch.full((1, width), -1)
    documents[0, : sum(lengths)] = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    ids = torch.randint(0, 38, (1, width), generator=torch.Generator().manual_seed(0))
    return ids, documents


def _of_family(policy: Transformer, family: str) -> Transformer:
    changes = {
        "predicts_next": family == "dream",
        "qkv_bias": family == "dream",
        "block_length": 4 if family == "sdar" else None,
    }
    model = make_model(policy.config.model_copy(update={"family": family, **changes}))
    model.load_state_dict(policy.state_dict(), strict=False)
    return model


# Uncompiled FlexAttention warns that it is slow.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("flex", [False, True])
@pytest.mark.parametrize("family", ["llada", "dream", "sdar"])
def test_packed_documents_have_the_logits_of_separate_ones(policy: Transformer, family: str, flex: bool) -> None:
    model, (ids, documents) = _of_family(policy, family), _packed([6, 9, 3], width=20)
    with torch.no_grad():
        together = model(ids, documents_BL=documents, flex=flex)[0]
        for first, last in ((0, 6), (6, 15), (15, 18)):
            alone = model(ids[:, first:last])[0]
            torch.testing.assert_close(together[first:last], alone, atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", ["llada", "dream", "sdar"])
def test_packed_documents_do_not_affect_each_other(policy: Transformer, family: str) -> None:
    model, (ids, documents) = _of_family(policy, family), _packed([6, 9, 3], width=20)
    changed = torch.where(documents == 1, (ids + 1) % 38, ids)
    queries = torch.arange(20)[None]
    with torch.no_grad():
        before = model(ids, None, queries, documents_BL=documents)[0]
        after = model(changed, None, queries, documents_BL=documents)[0]
    others = torch.tensor([*range(6), *range(15, 20)])
    assert torch.equal(before[others], after[others])
    assert (before[6:15] - after[6:15]).abs().amax(-1).min() > 1e-6
