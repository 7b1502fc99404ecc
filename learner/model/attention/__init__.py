"""Attention: rotary embeddings, masks, and unpadded (varlen) rows."""
