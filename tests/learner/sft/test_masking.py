from dataclasses import replace

import pytest
import torch

from learner.model.config import TransformerConfig
from learner.model.networks import make_model
from learner.model.transformer import Transformer, init_weights
from learner.parallel.sharding import ShardedPolicy
from learner.sft.config import SftConfig
from learner.sft.documents import Documents, TokenizedExample, make_documents
from learner.sft.learner import EVALUATION_T, SftLearner, evaluation_loss
from learner.sft.masking import MaskedDocuments, mask_documents, masked_logps, plan_sft, sft_rows

CONFIG = SftConfig(num_labels=12, num_steps=1, batch_size=6, num_warmup_steps=0)
PACKED = CONFIG.model_copy(update={"eos_padding": "ignored", "packing": True})
MASK_ID, EOS_ID = 38, 39


def _examples(num_examples: int = 12, num_slots: int = 8) -> list[TokenizedExample]:
    """Return examples with prompts of 3 to 6 tokens, and completions of 1 token up to the whole canvas."""
    generator = torch.Generator().manual_seed(1)

    def draw(low: int, high: int) -> tuple[int, ...]:
        length = int(torch.randint(low, high + 1, (), generator=generator))
        return tuple(torch.randint(0, 38, (length,), generator=generator).tolist())

    return [
        TokenizedExample(prompt_ids=draw(3, 6), completion_ids=draw(1, num_slots), num_slots=num_slots)
        for _ in range(num_examples)
    ]


def _documents(*, trains_padding: bool = True, num_examples: int = 12) -> Documents:
    return make_documents(_examples(num_examples), EOS_ID, trains_padding=trains_padding)


def _plan(documents: Documents, step: int = 0, seed: int = 0, batch_size: int = 6) -> MaskedDocuments:
    return plan_sft(documents, MASK_ID, step, seed, batch_size)


def test_each_epoch_is_a_permutation_of_all_labels() -> None:
    rows = torch.cat([sft_rows(10, 4, step, seed=1) for step in range(5)])
    assert sorted(rows[:10].tolist()) == list(range(10))
    assert sorted(rows[10:].tolist()) == list(range(10))
    assert rows[:10].tolist() != rows[10:].tolist()


def test_padding_is_trained_on_or_ignored_after_the_first_eos() -> None:
    short, full = (TokenizedExample(prompt_ids=(1, 2), completion_ids=ids, num_slots=3) for ids in ((5,), (5, 6, 7)))
    trained = make_documents([short, full], EOS_ID, trains_padding=True)
    assert trained.ids.tolist() == [[1, 2, 5, EOS_ID, EOS_ID], [1, 2, 5, 6, 7]]
    assert (trained.prompt_lengths.tolist(), trained.lengths.tolist()) == ([2, 2], [5, 5])
    ignored = make_documents([short, full], EOS_ID, trains_padding=False)
    assert torch.equal(ignored.ids, trained.ids)
    assert ignored.lengths.tolist() == [4, 5]
    assert (trained.num_trained, ignored.num_trained) == (6, 5)
    assert make_documents([short], EOS_ID, trains_padding=False).ids.tolist() == [[1, 2, 5, EOS_ID]]


@pytest.mark.parametrize("predicts_next", [True, False])
def test_the_first_slot_is_trained_on_only_if_predicted(config: TransformerConfig, predicts_next: bool) -> None:
    texts = [TokenizedExample(prompt_ids=(), completion_ids=(5, 6, 7)[:length], num_slots=length) for length in (3, 1)]
    documents = make_documents([*texts, *_examples(1)], EOS_ID, trains_padding=False)
    policy = config.model_copy(update={"predicts_next": predicts_next})
    lengths = documents.predicted_by(policy).prompt_lengths.tolist()
    assert lengths == [*([1, 1] if predicts_next else [0, 0]), int(documents.prompt_lengths[2])]
    model = make_model(policy)
    init_weights(model, seed=0)
    learner, asked = SftLearner(ShardedPolicy(model, None), CONFIG, documents, seed=0), []
    model.register_forward_pre_hook(lambda _module, given: asked.append(given[0][:, 0]))
    learner.step(0, lr=0.0)
    evaluation_loss(ShardedPolicy(model, None), documents, batch_size=3)
    assert any((first == MASK_ID).any() for first in asked) == (not predicts_next)


@pytest.mark.parametrize("trains_padding", [True, False])
def test_exactly_the_trained_slots_can_be_masked(trains_padding: bool) -> None:
    documents = _documents(trains_padding=trains_padding)
    was_masked = torch.zeros_like(documents.ids, dtype=torch.bool)
    for step in range(40):
        masked = _plan(documents, step)
        assert torch.equal(masked.ids == MASK_ID, masked.ids != documents.ids)
        assert torch.equal((masked.ids == MASK_ID).nonzero(), torch.stack((masked.rows, masked.columns), dim=1))
        assert torch.equal(masked.targets, documents.ids[masked.rows, masked.columns])
        was_masked[masked.rows, masked.columns] = True
    columns = torch.arange(documents.ids.shape[1])
    trained = (columns >= documents.prompt_lengths[:, None]) & (columns < documents.lengths[:, None])
    assert torch.equal(was_masked, trained)


def test_mask_ratio_is_uniform_and_weights_are_its_inverse() -> None:
    many = replace(_documents().select(torch.zeros(3000, dtype=torch.long)), sample_keys=torch.arange(3000))
    masked = _plan(many, batch_size=3000)
    # E[1/t * masked] = 1: the weighted number of masked slots is the number of slots.
    assert abs(masked.weights.sum().item() / (3000 * 8) - 1) < 0.03
    assert masked.weights.min() >= 1
    assert abs(len(masked.targets) / (3000 * 8) - 0.5) < 0.02


def test_mask_ratios_of_a_batch_are_stratified() -> None:
    documents, found = _documents(num_examples=8), []
    for step in range(30):
        places = torch.arange(step * 8, step * 8 + 8)
        # With many slots per document, each has a masked one whose weight shows its t.
        masked = _plan(replace(documents, sample_keys=places), step, batch_size=8)
        ratios = dict(zip(masked.rows.tolist(), (1 / masked.weights).tolist(), strict=True))
        eighths = sorted(int((ratio - 1e-3) / (1 - 1e-3) * 8) for ratio in ratios.values())
        assert len(set(eighths)) == len(eighths), "no two in one eighth"
        found.append(next(iter(ratios.values())))
    assert max(found) > 0.85
    assert min(found) < 0.25
    assert len(set(found)) > 25


@pytest.mark.parametrize("trains_padding", [True, False])
@pytest.mark.parametrize("sft", [CONFIG, PACKED], ids=["unpacked", "packed"])
@pytest.mark.parametrize("normalize_by", ["row", "slot"])
def test_loss_equals_a_row_by_row_loop(
    policy: Transformer, sft: SftConfig, trains_padding: bool, normalize_by: str
) -> None:
    documents, total, num_slots, means = _documents(trains_padding=trains_padding), 0.0, 0, []
    sft = sft.model_copy(update={"normalize_by": normalize_by})
    for place, row in enumerate(sft_rows(12, 6, 0, seed=3).tolist()):
        one = replace(documents.select(slice(row, row + 1)), sample_keys=torch.tensor([place]))
        masked = _plan(one, seed=3)
        with torch.no_grad():
            logp = policy(masked.ids[:, : int(one.lengths[0])]).log_softmax(-1)[0]
        loss, size = -(logp[masked.columns, masked.targets] * masked.weights).sum().item(), int(one.lengths[0])
        total, num_slots = total + loss, num_slots + size - int(one.prompt_lengths[0])
        means.append(loss / (size - int(one.prompt_lengths[0])))
    metrics = SftLearner(ShardedPolicy(policy, None), sft, documents, seed=3).step(0, lr=0.0)
    by_row, by_slot = sum(means) / 6, total / num_slots
    assert metrics["loss"] == pytest.approx(by_row if normalize_by == "row" else by_slot, abs=1e-5)
    assert (by_row == pytest.approx(by_slot, abs=1e-6)) == trains_padding, "they differ where lengths do"


def test_packing_changes_no_gradient(policy: Transformer) -> None:
    """Holds for packing into rows and for concatenation into one row, alone and together."""
    masked, shapes = _plan(_documents(trains_padding=False)), []
    policy.register_forward_pre_hook(lambda _module, arguments: shapes.append(len(arguments[0])))
    gradients = []
    for packing, concatenates_rows in ((False, False), (True, False), (False, True), (True, True)):
        policy.zero_grad()
        logps_N = masked_logps(policy, masked, packing=packing, concatenates_rows=concatenates_rows)
        (logps_N * masked.weights).sum().backward()
        gradients.append({name: weight.grad.clone() for name, weight in policy.named_parameters()})
    assert shapes[0] > shapes[1] > shapes[2] == shapes[3] == 1
    for name, gradient in gradients[0].items():
        assert gradient.abs().max() > 0, name
        for others in gradients[1:]:
            torch.testing.assert_close(others[name], gradient, atol=1e-4, rtol=1e-4, msg=name)


def test_packed_documents_do_not_attend_to_each_other(policy: Transformer) -> None:
    documents = _documents(trains_padding=False)
    masked = _plan(documents)
    others = masked.rows != 4
    changed = replace(masked, ids=masked.ids.index_fill(0, torch.tensor([4]), 7))
    with torch.no_grad():
        before, after = (masked_logps(policy, one, packing=True) for one in (masked, changed))
    assert torch.equal(before[others], after[others])
    assert (before[~others] != after[~others]).all()


def test_packing_takes_fewer_slots(policy: Transformer) -> None:
    examples = [
        TokenizedExample(prompt_ids=(1, 2), completion_ids=(3,) * count, num_slots=12) for count in (9, 2, 1, 4, 1, 1)
    ]
    # A step that masks some slots of each.
    masked, shapes = _plan(make_documents(examples, EOS_ID, trains_padding=False), step=16), []
    hook = policy.register_forward_pre_hook(lambda _module, arguments: shapes.append(arguments[0].shape))
    with torch.no_grad():
        masked_logps(policy, masked)
        masked_logps(policy, masked, packing=True)
    hook.remove()
    assert shapes == [(6, 12), (3, 12)], "12, 7 and 5, three times 4"


@pytest.mark.parametrize("family", ["llada", "sdar", "llada2_moe"])
def test_rows_without_a_masked_slot_run_with_zero_loss(
    config: TransformerConfig, moe_config: TransformerConfig, family: str
) -> None:
    """A rank with few documents may have no masked slot, while others wait for its forward and backward passes."""
    blocks = TransformerConfig(**config.model_dump() | {"family": "sdar", "block_length": 4, "qk_norm": True})
    policy = make_model({"llada": config, "sdar": blocks, "llada2_moe": moe_config}[family])
    init_weights(policy, seed=0)
    masked = mask_documents(_documents().select(slice(0, 2)), MASK_ID, torch.full((2,), 1e-6), (0, 0))
    assert len(masked.targets) == 0
    logps = masked_logps(policy, masked)
    assert logps.shape == (0,)
    logps.sum().backward()
    assert all(weight.grad is None or not weight.grad.any() for weight in policy.parameters())


def test_evaluation_loss_is_the_mean_over_a_fixed_grid_of_t(policy: Transformer) -> None:
    documents = _documents(trains_padding=False)
    evaluated = evaluation_loss(ShardedPolicy(policy, None), documents, batch_size=5)
    assert EVALUATION_T == (0.0625, 0.1875, 0.3125, 0.4375, 0.5625, 0.6875, 0.8125, 0.9375)
    assert evaluated.loss == pytest.approx(sum(evaluated.loss_at_t) / 8)
    masked = mask_documents(documents, MASK_ID, torch.full((12,), 0.5625), (0, 4))
    with torch.no_grad():
        total = -(masked_logps(policy, masked)).sum().item() / 0.5625
    assert evaluated.loss_at_t[4] == pytest.approx(total / documents.num_trained, rel=1e-5)


def test_evaluation_loss_is_deterministic_and_leaves_no_gradient(policy: Transformer) -> None:
    sharded, documents = ShardedPolicy(policy, None), _documents()
    first = evaluation_loss(sharded, documents, batch_size=12)
    torch.manual_seed(5)
    assert evaluation_loss(sharded, documents, batch_size=12) == first
    assert evaluation_loss(sharded, documents, batch_size=5).loss == pytest.approx(first.loss, rel=1e-5)
    assert all(weight.grad is None for weight in policy.parameters())


@pytest.mark.parametrize("family", ["llada", "sdar"])
def test_evaluation_loss_respects_the_micro_batch_size(config: TransformerConfig, family: str) -> None:
    """Documents of 5 to 14 slots. A limit that splits nothing leaves the result bit-identical."""
    blocks = config.model_dump() | {"family": "sdar", "block_length": 4, "qk_norm": True}
    model = make_model(config if family == "llada" else TransformerConfig(**blocks))
    init_weights(model, seed=0)
    policy, documents, sizes = ShardedPolicy(model, None), _documents(trains_padding=False), []
    model.register_forward_pre_hook(lambda _module, arguments: sizes.append(arguments[0].shape))
    whole = evaluation_loss(policy, documents, batch_size=12)
    assert len(sizes) == 8
    largest = max(size.numel() for size in sizes)
    assert evaluation_loss(policy, documents, batch_size=12, micro_batch_tokens=largest) == whole
    sizes.clear()
    for limit in (30, 12):
        cut = evaluation_loss(policy, documents, batch_size=12, micro_batch_tokens=limit)
        assert cut.loss_at_t == pytest.approx(whole.loss_at_t, rel=1e-5)
        assert all(size.numel() <= limit or size[0] == 1 for size in sizes)
        assert len(sizes) > 3 * 8
        sizes.clear()


def test_sft_lowers_training_and_evaluation_loss(policy: Transformer) -> None:
    config = SftConfig(num_labels=12, num_steps=120, batch_size=12, lr=1e-2)
    sharded, documents = ShardedPolicy(policy, None), _documents()
    before = evaluation_loss(sharded, documents, batch_size=12)
    learner = SftLearner(sharded, config, documents, seed=0)
    losses = [learner.step(step, config.lr_at(step, step / 120))["loss"] for step in range(120)]
    assert sum(losses[-10:]) < 0.2 * sum(losses[:10])
    assert evaluation_loss(sharded, documents, batch_size=12).loss < 0.2 * before.loss
    assert learner.num_trained == 120 * 12 * 8


REFUSED = {
    "packing is true and eos_padding is trained": {"packing": True, "num_labels": 3},
    "num_labels is missing; without data it is needed": {},
    "max_tokens is 9 and data is missing": {"max_tokens": 9, "num_labels": 3},
    "attention_annealing_steps is 2 and num_steps is 1: the stage would end before attention is open; take at most 1": {
        "attention_annealing_steps": 2,
        "num_labels": 3,
    },
    "num_samples is 3 and num_eval is 2: samples complete the prompts of": {
        "num_samples": 3,
        "num_eval": 2,
        "num_labels": 3,
    },
}


@pytest.mark.parametrize(("sentence", "fields"), REFUSED.items())
def test_incompatible_fields_are_refused(sentence: str, fields: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=sentence):
        SftConfig(num_steps=1, **fields)  # type: ignore[arg-type]
    if "data" in sentence:
        assert SftConfig(num_steps=0, **fields).config_error is not None, "a stage that is skipped needs no examples"  # type: ignore[arg-type]
