"""Decoding: greedy, beam and sampling over any step function.

It is independent of models, and imports torch and `kernels` alone.

- `records`: the step function, the limits of a search, and hypotheses;
- `greedy`, `sample`: one hypothesis for each row; `generation_loop`: the loop they share;
- `beam`: beam search; `beam_state`: its state and its step; `backpointers`: hypotheses recovered from backpointers;
- `graph_search`: beam search with fixed shapes, with each step captured as one CUDA graph;
- `ranking`: the best tokens of each row, ties to the lowest index;
- `penalties`: length penalties.
"""
