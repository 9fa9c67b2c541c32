"""Decoding: greedy, beam and sampling over any step function. Knows no model: imports torch and `kernels` alone.

- `records`: the step function, the limits of a search, and hypotheses;
- `greedy`, `sample`: one hypothesis for each row; `generation_loop`: the loop they share;
- `beam`: beam search; `beam_state`: where it stands after a step; `backpointers`: hypotheses read backwards;
- `graph_search`: beam search with fixed shapes, on CUDA a step replayed as one graph;
- `ranking`: the best tokens of each row, ties to the lowest index;
- `penalties`: length penalties.
"""
