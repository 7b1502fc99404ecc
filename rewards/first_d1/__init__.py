"""What the first d1 did, its defects included, so that its numbers can be compared: protocol and reward `d1`."""
