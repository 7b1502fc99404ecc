"""What a text says: answers, numbers, expressions."""
