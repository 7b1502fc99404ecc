"""Checks of a request against a policy: its ids, its canvas, its parameters, its grammar and its finished blocks."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from learner.model.config import TransformerConfig
from rollout.canvas import Canvas
from rollout.field_error import FieldError
from rollout.request import MAX_SEED, Cache, Committed, Request, SamplingParams, canvas_grammar_of, canvas_of

MAX_GRAMMAR_CELLS = 2**20
"""Maximum states of a grammar times slots of the completion: a step then takes tenths of a second of a core."""


def check_params(params: SamplingParams, config: TransformerConfig) -> None:
    """Raise FieldError, naming the field, if the policy's family does not support these parameters."""
    if not config.is_block_causal:
        params.check_whole_blocks()
        if params.edits:
            raise FieldError(
                "{editing_threshold} is for block-causal policies, and this one is bidirectional: leave it out"
            )
    elif params.cache is not Cache.NONE:
        raise FieldError(
            f"{{cache}} {params.cache} is for bidirectional policies; a block-causal one remembers its finished blocks "
            "exactly in any case: leave it out"
        )


def check_request(request: Request, config: TransformerConfig) -> None:
    """Raise ValueError, for a field's value FieldError, if the policy cannot serve this request."""
    prompt, params, vocab = request.prompt_ids, request.params, config.vocab_size
    if not prompt:
        raise FieldError("{prompt_ids} is empty; a completion needs at least one token before it")
    check_ids("prompt_ids", prompt, vocab)
    if config.mask_token_id in prompt:
        raise FieldError(
            f"{{prompt_ids}} has the mask id {config.mask_token_id}; slots to fill belong in the completion"
        )
    check_params(params, config)
    canvas = canvas_of(request, config)
    if canvas.end > config.max_sequence_length:
        of_blocks = f" in blocks of {params.block_length}" if canvas.num_slots > params.gen_length else ""
        raise FieldError(
            f"{{prompt_ids}} of {len(prompt)} and {{gen_length}} {params.gen_length}{of_blocks} make {canvas.end} "
            f"tokens; the policy takes at most {config.max_sequence_length}"
        )
    check_seed(request.seed)
    check_ids("forbidden_ids", params.forbidden_ids, vocab)
    if len({*params.forbidden_ids, config.mask_token_id}) >= vocab:
        raise FieldError("{forbidden_ids} forbids every token")
    check_ids("stop_ids", params.stop_ids or (), vocab)
    check_ids("fixed_tokens", request.fixed_tokens.values(), vocab)
    for slot, token in request.fixed_tokens.items():
        if not 0 <= slot < params.gen_length:
            raise FieldError(f"{{fixed_tokens}} has slot {slot}; the completion has slots 0 to {params.gen_length - 1}")
        if token == config.mask_token_id:
            raise FieldError(f"{{fixed_tokens}} gives the mask id {token} to slot {slot}; leave that slot out")
    _check_grammar(request, config)
    if request.num_step_answers:
        _check_step_answers(request, config)
    _check_levels(request, config)
    if request.committed is not None:
        _check_committed(request.committed, canvas, config)


def _check_grammar(request: Request, config: TransformerConfig) -> None:
    grammar, params = request.grammar, request.params
    if grammar is None:
        return
    if len(grammar.class_of) != config.vocab_size:
        raise ValueError(f"grammar has classes of {len(grammar.class_of)} tokens; the policy has {config.vocab_size}")
    if params.edits:
        raise FieldError("{editing_threshold} is not for {grammar}: what fits was committed; leave one out")
    if grammar.num_states * params.gen_length > MAX_GRAMMAR_CELLS:
        raise FieldError(
            f"{{grammar}} has an automaton of {grammar.num_states} states: with one so large {{gen_length}} is at most "
            f"{MAX_GRAMMAR_CELLS // grammar.num_states}"
        )
    fewest, most = grammar.fewest_tokens, min(grammar.most_tokens, params.gen_length)
    if fewest is None or fewest > most:
        needs = "has no text" if fewest is None else f"needs {fewest} tokens at least"
        raise FieldError(f"{{grammar}} {needs}, and the completion has room for {most}")
    of_canvas = canvas_grammar_of(request, config)
    if of_canvas is not None and not of_canvas.is_possible:
        raise FieldError("{grammar} has no text that fits what is given or forbidden")


def _check_step_answers(request: Request, config: TransformerConfig) -> None:
    if config.is_block_causal:
        raise ValueError(
            "num_step_answers needs a bidirectional policy: a block-causal one predicts one block at a time"
        )
    if request.params.cache is not Cache.NONE:
        raise FieldError(
            f"num_step_answers predicts the whole canvas, and {{cache}} {request.params.cache} a part of it"
        )
    if request.grammar is not None or request.committed is not None:
        raise ValueError("num_step_answers is not for a request with a grammar or finished blocks")


def _check_levels(request: Request, config: TransformerConfig) -> None:
    params, num_levels = request.params, len(request.node_seeds) + 1
    if num_levels == 1:
        return
    if not params.has_even_shares or params.edits or config.is_block_causal:
        raise ValueError("node_seeds needs a bidirectional policy and a schedule whose number of steps is given")
    if (num_steps := params.num_block_steps * params.num_blocks) % num_levels:
        raise ValueError(
            f"{num_levels - 1} node_seeds make {num_levels} levels, which must divide the {num_steps} denoise steps"
        )


def _check_committed(committed: Committed, canvas: Canvas, config: TransformerConfig) -> None:
    num_slots = len(committed)
    if not canvas.is_boundary(num_slots) or num_slots > canvas.num_slots:
        first = canvas.block_end(canvas.prompt_length) - canvas.prompt_length
        after = f" after the first {first}" if first != canvas.block_length else ""
        raise ValueError(
            f"committed has {num_slots} slots; whole blocks are multiples of {canvas.block_length}{after} up to "
            f"{canvas.num_slots}"
        )
    if any(len(getattr(committed, column.name)) != num_slots for column in fields(Committed)):
        raise ValueError("committed has columns of unequal length")
    check_ids("committed", committed.token_ids.tolist(), config.vocab_size)
    if config.mask_token_id in committed.token_ids:
        raise ValueError(f"committed has the mask id {config.mask_token_id}; a finished block has no masks")


def check_seed(seed: int) -> None:
    """Raise FieldError if random draws cannot be keyed by the seed."""
    if not 0 <= seed <= MAX_SEED:
        raise FieldError(f"{{seed}} {seed} is not between 0 and 2**63 - 1")


def check_ids(name: str, ids: Any, vocab_size: int) -> None:
    """Raise FieldError, naming the field, for an id outside the policy's vocabulary."""
    for token in ids:
        if not 0 <= token < vocab_size:
            raise FieldError(f"{{{name}}} has {token}; the policy's token ids are 0 to {vocab_size - 1}")
