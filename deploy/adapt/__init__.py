"""`d1 adapt`: converts an autoregressive model into a diffusion policy and trains it."""
