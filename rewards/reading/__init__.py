"""What a text says: answers, numbers, expressions, ours and the first d1's way."""
