"""Sampler of diffusion language models: token ids in, completions out. No text, rewards or Ray."""
