"""Where the figures in the documentation come from."""
