"""Autoregressive teacher of on-policy distillation (`opdlm`), of the policy's size, trained on all labels."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.nn.functional import cross_entropy

from actors.plan import RunPlan
from actors.training.sft.data import load_sft_data
from benchmarks.algorithms.local_run import make_sft_checkpoint
from deploy.recipe.recipe import Recipe, Stages
from deploy.runs.run_directory import make_spec
from learner.model.adapter import read_chain
from learner.model.checkpoint import load_policy, load_weights, save_checkpoint
from learner.model.config import TransformerConfig
from learner.model.networks import make_model
from learner.model.tokenizer import ChatTokenizer
from learner.model.transformer import init_weights
from learner.objectives.distillation import causal_config
from learner.sft.documents import Documents

_STEPS, _BATCH, _LR = 1500, 64, 1e-3
_FINE_TUNING = (150, 16, 5e-5)
"""The same three for a pretrained teacher."""


def teacher_of(recipe: Recipe) -> Path:
    """Return where the recipe's teacher is saved."""
    return recipe.run_dir / "teacher"


def make_teacher(recipe: Recipe) -> Path:
    """Return the checkpoint of the recipe's teacher, and train it by next-token prediction if it does not exist.

    The teacher of an adapted language model is that model before its adaptation.
    """
    directory, student = teacher_of(recipe), make_sft_checkpoint(recipe)
    if directory.is_dir():
        return directory
    shape = load_policy(student).config
    config = TransformerConfig.model_validate(shape.model_dump() | {"family": "a2d-llama", "predicts_next": True})
    model = make_model(causal_config(config))
    num_steps, batch_size, lr = _STEPS, _BATCH, _LR
    if recipe.model.checkpoint is None:
        init_weights(model, seed=recipe.seed)
    else:
        model.load_state_dict(load_weights(read_chain(recipe.model.checkpoint).weights).state_dict())
        num_steps, batch_size, lr = _FINE_TUNING
    documents, optimizer = _labels(recipe, student), torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, num_steps)
    generator = torch.Generator().manual_seed(recipe.seed)
    for _ in range(num_steps):
        batch = documents.select(torch.randint(documents.num_rows, (batch_size,), generator=generator))
        slots_S = torch.arange(batch.ids.shape[1])
        is_trained_BS = (slots_S >= batch.prompt_lengths[:, None]) & (slots_S < batch.lengths[:, None])
        loss = cross_entropy(model(batch.ids)[is_trained_BS], batch.ids[is_trained_BS])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    save_checkpoint(directory, config, model.state_dict(), student)
    return directory


def _labels(recipe: Recipe, student: Path) -> Documents:
    """Return the demonstrations of all problems of the rounds."""
    sft = recipe.sft.model_copy(update={"num_labels": recipe.num_train_problems})
    spec, tokenizer = make_spec(recipe.model_copy(update={"sft": sft}), Stages.ALL), ChatTokenizer(student)
    return load_sft_data(spec, RunPlan(spec, tokenizer), tokenizer).train
