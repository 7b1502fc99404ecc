"""Hardware ceilings of the device: matmul, copy and attention rates."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.gpu.setting import Row, Setting, normal, taken_s
from learner.hardware import peak_flop_per_s


def ceilings(setting: Setting) -> Iterator[Row]:
    """Measure matmuls, copies, and attention with and without a mask."""
    yield from _products(setting)
    yield from _copies(setting)
    yield from _attention(setting)


def _products(setting: Setting) -> Iterator[Row]:
    width, rows, square = setting.shape.d_model, 8 * setting.canvas_tokens, setting.product
    stated = peak_flop_per_s(torch.device(setting.device))
    for name, (m, k, n) in {
        "square": (square, square, square),
        "attention's, 8 canvases": (rows, width, width),
        "feed-forward's, 8 canvases": (rows, width, 3 * width),
        "feed-forward's, 1 block": (setting.block_length, width, 3 * width),
        "head's, 8 x 16 slots": (128, width, setting.shape.vocab_size),
    }.items():
        left, right = normal(setting, m, k), normal(setting, k, n)
        rate = 2 * m * k * n / taken_s(setting, partial(torch.matmul, left, right))
        yield {
            "what": f"product in bfloat16, {name}",
            "tflop_per_s": rate / 1e12,
            "of_stated": stated and rate / stated,
        }


def _copies(setting: Setting) -> Iterator[Row]:
    here = torch.empty(setting.copied_bytes, dtype=torch.uint8, device=setting.device)
    there = torch.empty_like(here)
    host = torch.empty(setting.copied_bytes, dtype=torch.uint8)
    if setting.device == "cuda":
        host = host.pin_memory()
    for name, target, source in (("on the device", there, here), ("to it", here, host), ("from it", host, here)):
        seconds = taken_s(setting, partial(target.copy_, source))
        yield {"what": f"copy {name}", "gb_per_s": setting.copied_bytes / seconds / 1e9}


def _attention(setting: Setting) -> Iterator[Row]:
    heads, tokens = setting.shape.num_heads, setting.canvas_tokens
    batch, size = 8, setting.shape.d_model // heads
    query = normal(setting, batch, heads, tokens, size)
    lengths = torch.linspace(tokens // 2, tokens, batch, device=setting.device).long()
    mask = (torch.arange(tokens, device=setting.device) < lengths[:, None])[:, None, None, :]
    for name, shown in {"no mask": None, "padding masked": mask}.items():
        attend = partial(scaled_dot_product_attention, query, query, query, attn_mask=shown)
        rate = 4 * batch * heads * tokens**2 * size / taken_s(setting, attend)
        yield {"what": f"attention of 8 canvases, {name}", "tflop_per_s": rate / 1e12}
