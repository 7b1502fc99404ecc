"""Table of algorithms: the estimator, objective and advantage of each paper.

`learner.algorithm` in a recipe selects a row. Other settings in the recipe's `learner` section override it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

DEFAULT = "diffu-grpo"
"""The algorithm of a recipe that names none."""

METHOD = (
    "advantage",
    "filters",
    "estimator",
    "objective",
    "value",
    "consistency",
    "max_staleness",
    "imitation_coef",
    "step_gain_coef",
)
"""Settings that belong to an algorithm, and not to a task or a machine. `max_staleness` is one of them, because few
algorithms can correct for off-policy completions."""

_OFF_BY_NULL = ("value", "consistency")

_TRACERL: Mapping[str, Any] = {
    "inner_updates": 1,
    "num_minibatches": 16,
    "advantage": "correct_z",
    "filters": {"min_accuracy": 0.2, "max_accuracy": 0.8},
    "objective": {
        "name": "clipped_ratio",
        "clip_low": 0.2,
        "clip_high": 0.2,
        "kl_against": "old",
        "kl_coef": 0.01,
    },
}

# 8 steps of each completion, in four optimizer steps.
_EGSPO: Mapping[str, Any] = {
    "inner_updates": 4,
    "group_size": 8,
    "estimator": {
        "name": "trajectory",
        "steps_per_segment": 1,
        "num_sampled": 2,
        "proposal": "top_entropy",
        "slots": "denoised",
    },
    "objective": {"name": "clipped_ratio", "level": "part", "clip_low": 0.2, "clip_high": 0.5},
}

ALGORITHMS: Mapping[str, Mapping[str, Any]] = {
    "diffu-grpo": {"estimator": {"name": "one_step"}, "objective": {"name": "clipped_ratio"}},
    "diffu-grpo-parity": {
        "inner_updates": 12,
        "estimator": {"name": "one_step", "p_mask_prompt": 0.15, "prompt_mask": "micro_step"},
        "objective": {"name": "clipped_ratio", "normalize_by": "group"},
    },
    "wd1": {
        "inner_updates": 12,
        "advantage": "softmax_pair",
        "estimator": {"name": "one_step", "p_mask_prompt": 0.15},
        "objective": {"name": "weighted_likelihood", "normalize_by": "group_sum"},
    },
    "coupled-grpo": {
        "inner_updates": 2,
        "group_size": 10,
        "advantage": "leave_one_out",
        "estimator": {"name": "random_masks", "min_ratio": 0.2, "max_ratio": 0.8, "coupled": True},
        "objective": {"name": "clipped_ratio", "kl_coef": 0.01},
    },
    "unigrpo": {
        "advantage": "group_z",
        "estimator": {
            "name": "random_masks",
            "min_ratio": 0.0,
            "max_ratio": 1.0,
            "ratios": "spread",
            "coupled": False,
        },
        "objective": {"name": "clipped_ratio", "clip_low": 0.2, "clip_high": 0.2, "normalize_by": "row"},
    },
    "spg": {
        "inner_updates": 4,
        "estimator": {"name": "block_masks", "num_draws": 2},
        "objective": {"name": "sandwich", "beta": 1.5, "mix": 0.5},
    },
    "spg-eubo": {
        "inner_updates": 4,
        "estimator": {"name": "block_masks", "num_draws": 2},
        "objective": {"name": "sandwich", "beta": 1.5, "mix": 1.0},
    },
    "espo": {
        "inner_updates": 8,
        "advantage": "leave_one_out",
        "estimator": {"name": "elbo", "num_draws": 2, "counts": "group", "complement": True},
        "objective": {
            "name": "clipped_ratio",
            "level": "sequence",
            "clip_low": 0.2,
            "clip_high": 0.2,
            "kl": "k2",
            "kl_coef": 1e-3,
        },
    },
    "gdpo": {
        "advantage": "group_z",
        "estimator": {"name": "elbo", "num_draws": 2, "counts": "quadrature", "complement": False},
        "objective": {"name": "clipped_ratio", "level": "sequence", "kl_coef": 0.0},
    },
    "stepmerge": {
        "estimator": {"name": "trajectory", "num_segments": 8, "p_mask_prompt": 0.15},
        "objective": {"name": "clipped_ratio"},
    },
    "tracerl": {
        **_TRACERL,
        "group_size": 8,
        "estimator": {"name": "trajectory", "steps_per_segment": 8},
        "objective": {**_TRACERL["objective"], "kl_sums_tokens": True, "normalize_by": "part"},
    },
    "tracerl-value": {
        **_TRACERL,
        "group_size": 16,
        "estimator": {"name": "trajectory", "steps_per_segment": 1},
        "value": {"gamma": 1.0, "lam": 1.0, "clip": 0.2},
    },
    "cj-grpo": {
        "inner_updates": 1,
        "advantage": "group_z",
        "estimator": {"name": "trajectory", "steps_per_segment": 1},
        "objective": {
            "name": "clipped_ratio",
            "clip_low": 0.2,
            "clip_high": 0.2,
            "kl_coef": 0.0,
            "normalize_by": "part",
        },
    },
    "mapg": {
        "inner_updates": 12,
        "group_size": 4,
        "advantage": "leave_one_out",
        "estimator": {
            "name": "trajectory",
            "num_segments": 32,
            "num_shown_steps": 1,
            "num_sampled": 12,
            "weigh": "value",
            "scores_order": True,
        },
        "objective": {
            "name": "clipped_ratio",
            "level": "sequence",
            "clip_low": 3e-4,
            "clip_high": 4e-4,
            "kl_coef": 0.0,
            "normalize_by": "row",
            "order_temperature": 1.0,
        },
    },
    "bgpo": {
        "inner_updates": 1,
        "group_size": 8,
        "advantage": "group_z",
        "estimator": {
            "name": "elbo",
            "num_draws": 16,
            "counts": "row",
            "complement": False,
            "masks": "fixed",
            "values": "draws",
        },
        "objective": {"name": "linear_bound"},
    },
    "ebpo": {
        "inner_updates": 1,
        "group_size": 8,
        "advantage": "group_z",
        "estimator": {
            "name": "elbo",
            "num_draws": 16,
            "counts": "block",
            "complement": False,
            "slots": "text",
            "masks": "fixed",
        },
        # The ratio is of whole bounds, not of bounds per token as in ESPO.
        "objective": {
            "name": "clipped_ratio",
            "level": "sequence",
            "per_slot": False,
            "clip_low": 0.2,
            "clip_high": 0.2,
            "kl_coef": 0.0,
        },
    },
    "stabledrl": {
        "inner_updates": 2,
        "group_size": 16,
        "estimator": {"name": "block_masks", "num_draws": 2},
        "objective": {
            "name": "sandwich",
            "beta": 1.5,
            "mix": 0.5,
            "weigh_by_length": False,
            "self_normalized": True,
            "normalize_by": "group_sum",
        },
    },
    "dmpo": {
        "inner_updates": 8,
        "group_size": 16,
        "estimator": {"name": "elbo", "num_draws": 2, "counts": "ratio", "complement": True},
        "objective": {"name": "distribution_matching", "alpha": 0.04},
    },
    "agrpo": {
        "inner_updates": 1,
        "group_size": 8,
        "estimator": {
            "name": "trajectory",
            "steps_per_segment": 1,
            "num_sampled": 24,
            "proposal": "entropy",
            "slots": "denoised",
            "law": "sampler",
            "weigh": "mean",
        },
        "objective": {
            "name": "clipped_ratio",
            "clip_low": 0.2,
            "clip_high": 0.2,
            "old": "sampler",
            "kl_coef": 0.0,
            "normalize_by": "row_sum",
        },
    },
    "egspo": _EGSPO,
    "egspo-sa": {**_EGSPO, "step_gain_coef": 0.5},
    "mdpo": {
        "inner_updates": 1,
        "group_size": 8,
        "advantage": "group_z",
        "estimator": {"name": "predictions", "num_states": 8},
        "objective": {
            "name": "clipped_ratio",
            "level": "canvas_token",
            "clip_low": 0.2,
            "clip_high": 0.2,
            "kl": "k2",
            "kl_coef": 0.02,
            "weigh_by_confidence": True,
            "weigh_by_unmasking": True,
            "normalize_by": "part",
        },
    },
    "d-treerpo": {
        "group_size": 16,
        "advantage": "leave_one_out",
        "estimator": {"name": "trajectory", "branches": (4, 4)},
        "objective": {
            "name": "clipped_ratio",
            "clip_low": 0.4,
            "clip_high": 0.4,
            "kl_coef": 0.01,
            "normalize_by": "part",
        },
        "consistency": {"max_coef": 3e-3, "growth": 2.0, "max_temperature": 2.0, "cooling": 0.7},
    },
    "justgrpo": {
        "inner_updates": 1,
        "group_size": 16,
        "advantage": "group_z",
        "estimator": {"name": "trajectory", "steps_per_segment": 1, "requires_block_length": 1},
        "objective": {"name": "clipped_ratio", "clip_low": 0.2, "clip_high": 0.2, "kl_coef": 0.0},
    },
    "forkgrpo": {
        "inner_updates": 1,
        "group_size": 16,
        "advantage": "group_z",
        "estimator": {"name": "trajectory", "steps_per_segment": 1, "only": "fallback"},
        "objective": {"name": "clipped_ratio", "clip_low": 0.2, "clip_high": 0.2, "kl_coef": 0.0},
    },
    "vrpo": {
        "inner_updates": 1,
        "estimator": {"name": "elbo", "num_draws": 8, "counts": "row", "complement": False},
        "objective": {"name": "preference", "beta": 0.2},
    },
    "lightningrl": {
        "inner_updates": 1,
        "group_size": 32,
        "advantage": "round_part_z",
        # Keeps groups with at least one correct completion: 1 of 32 is a share of 0.03.
        "filters": {"min_accuracy": 0.01, "min_speed_range": 0.01},
        "estimator": {"name": "trajectory", "blocks_per_segment": 1},
        "objective": {
            "name": "clipped_ratio",
            "clip_low": 0.2,
            "clip_high": 0.2,
            "kl_coef": 0.01,
            "nll_coef": 0.1,
            "normalize_by": "row",
        },
    },
    "tba": {
        "inner_updates": 1,
        "group_size": 20,
        "estimator": {"name": "trajectory", "steps_per_segment": 1, "law": "sampler"},
        "objective": {"name": "trajectory_balance", "beta": 0.014},
    },
    "rldf": {
        "inner_updates": 1,
        "group_size": 4,
        "advantage": "group_z",
        "estimator": {"name": "sampled_states", "num_sampled": 4, "temperature": 1.0},
        "objective": {
            "name": "clipped_ratio",
            "level": "canvas_token",
            "clip_low": 0.2,
            "clip_high": 0.2,
            "kl_coef": 0.01,
            "min_probability": 0.6,
            "normalize_by": "part",
        },
    },
    "opdlm": {
        "inner_updates": 1,
        "num_minibatches": 16,
        "group_size": 2,
        "estimator": {"name": "block_states", "scores_end": False},
        "objective": {"name": "distillation", "reverse_kl": 0.0},
    },
    "d-opsd": {
        "inner_updates": 4,
        "group_size": 8,
        "filters": {"first_correct": True},
        "estimator": {"name": "step_states"},
        "objective": {
            "name": "distillation",
            "reverse_kl": 1.0,
            "top_k": 20,
            "renormalize_top_k": True,
            "pointwise_clip": 0.05,
            "future_share": 0.25,
        },
    },
}
"""By name: settings of the recipe's section `learner`. Learning rates and batch sizes are left to the recipe, because
published ones are for 8 B parameters and eight GPUs."""


def with_algorithm(section: Mapping[str, Any]) -> dict[str, Any]:
    """Fill in the settings of `algorithm` that a recipe's section `learner` leaves out.

    Single settings of `estimator` and `objective` can be overridden. With another `name` they are taken from the recipe
    alone. A `value` or `consistency` of null switches that part of an algorithm off. Raises ValueError if there is no
    such algorithm.
    """
    name = section.get("algorithm", DEFAULT)
    if not isinstance(name, str):
        return dict(section)
    if name not in ALGORITHMS:
        raise ValueError(f"there is no algorithm {name!r}; there are {', '.join(ALGORITHMS)}")
    filled = dict(section)
    for key, preset in ALGORITHMS[name].items():
        said = section.get(key)
        if key in _OFF_BY_NULL and key in section and said is None:
            continue
        if isinstance(preset, Mapping) and (said is None or isinstance(said, Mapping)):
            said = said or {}
            is_other = "name" in said and said["name"] != preset.get("name", said["name"])
            filled[key] = dict(said) if is_other else {**preset, **said}
        elif key not in section:
            filled[key] = preset
    return filled
