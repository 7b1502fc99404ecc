"""Quantized linear layers: frozen 4-bit weights of a learner (NF4), and FP8 rollouts of a sampler."""
