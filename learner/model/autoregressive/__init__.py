"""Conversion of autoregressive language models into diffusion policies with bidirectional attention."""
