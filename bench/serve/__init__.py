"""Octavo and other engines side by side on one machine: python -m bench.serve."""
