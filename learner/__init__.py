"""The policy and how it improves. Needs torch; never imports ray."""
