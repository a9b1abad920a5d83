"""What to measure when a GPU is at hand: one script of under ten minutes, `python -m bench.gpu`."""
