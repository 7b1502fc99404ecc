"""Renoising sampler, for policies without a mask token: random ids are denoised, uncertain slots renoised."""
