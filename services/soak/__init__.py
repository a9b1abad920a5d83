"""Random load and random faults on real processes, and the proof that neither cost a token, a block or a stream."""
