"""The page at `/`: a prompt denoised before one's eyes, and a run's curves."""
