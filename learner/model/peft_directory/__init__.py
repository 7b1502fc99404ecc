"""Reading of peft adapter directories: their config, and their matrices under our names."""
