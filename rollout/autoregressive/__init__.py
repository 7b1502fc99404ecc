"""Generation by an autoregressive model: its token ids in, responses out."""
