"""Stage 1: masked supervised fine-tuning (SFT)."""
