"""Renoising sampler, for policies without a mask token: denoises random ids, renoises uncertain slots."""
