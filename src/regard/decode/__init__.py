"""Decoding: greedy, beam and sampling over any step function. Knows no model: it takes callables and records."""
