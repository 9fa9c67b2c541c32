"""Additive attention in Triton. Reference implementation: `regard.core.backends.reference` with an `Additive` score.

- `operator`: additive attention as a differentiable operator registered with torch;
- `score_operator`: additive scores as a differentiable function;
- `forward`, `backward`: the sequence of kernel launches of the two passes, and their buffers;
- `plan`: tile sizes, shapes, and how a kernel is launched;
- `buffers`: preprocessed copies of query, key and value for the main kernels;
- `prepare`, `series_features`: the kernels that write these buffers;
- `pairs`: device functions for masks, biases and dropout of pairs;
- `exact`, `exact_gradient`: kernels for scores computed pair by pair, and their gradients;
- `stored`: the launches for small and middle sizes, which store all scores;
- `stored_scores`, `stored_gradient`: the kernels that `stored` launches;
- `series_scores`, `series_gradient`: kernels for scores by the sine series on tensor cores, and their gradients;
- `bias_gradient`: the gradient of a table of relative biases.
"""
