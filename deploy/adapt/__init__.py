"""`d1 adapt`: from an autoregressive model to a run that trains it as a diffusion policy."""
