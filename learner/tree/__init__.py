"""Rollout trees: completions that share their first denoise steps, and what their siblings teach (d-TreeRPO)."""
