"""From an autoregressive checkpoint to a diffusion policy: what `d1 adapt` does before the run's SFT stage."""
