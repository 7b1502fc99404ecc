"""Sampling from policies without a mask token: canvases of random ids, denoised by renoising what is uncertain."""
