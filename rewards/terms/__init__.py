"""What a recipe adds to a task's reward."""
