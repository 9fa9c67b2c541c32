"""Additive attention in Triton. Reference implementation: `regard.core.backends.reference` with an `Additive` score.

- `operator`: the operation registered with torch, with its gradient;
- `score_operator`: the scores alone, with their gradient;
- `forward`, `backward`: which kernels run in which order, and on which buffers;
- `plan`: tile sizes, shapes, and how a kernel is launched;
- `buffers`: preprocessed copies of query, key and value for the main kernels;
- `prepare`, `series_features`: the kernels that write these buffers;
- `pairs`: which pairs may attend, biases and dropout, inside a kernel;
- `exact`, `exact_gradient`: scores pair by pair, and their gradients;
- `stored`: the launches for small and middle sizes, which store their scores;
- `stored_scores`, `stored_gradient`: the kernels of these;
- `series_scores`, `series_gradient`: scores by the sine series on tensor cores, and their gradients;
- `bias_gradient`: the gradient of a bias.
"""
