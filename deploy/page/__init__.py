"""The page at `/`: it asks the policy and shows the completion while it is denoised."""
