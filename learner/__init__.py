"""The policy, its SFT and RL updates, and their sharding. Needs torch; never imports ray."""
