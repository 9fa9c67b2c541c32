"""Decoding: greedy decoding, beam search and sampling with any step function.

Decoding is independent of the models: a step function returns the logits of the next token. Of regard only
`regard.kernels` is imported.

- `records`: the step function, the limits of a search, and hypotheses;
- `greedy`, `sample`: one hypothesis for each row; `generation_loop`: the loop that both use;
- `beam`: beam search; `beam_state`: the state of a search and its update; `backpointers`: hypotheses recovered from
  backpointers;
- `graph_search`: beam search with fixed shapes, with each step captured as one CUDA graph;
- `ranking`: the best tokens of each row, where the lowest index wins a tie;
- `penalties`: length penalties.
"""
