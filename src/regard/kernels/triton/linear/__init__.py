"""Kernels of linear attention, in chunks of positions. Each pass recomputes the features; sums are in float32.

- `full`, `full_kernels`: attention with elu features in half precision without a causal mask;
- `operator`: the differentiable function with elu or Performer features for all other calls, and its launches;
- `log_features`: logarithms of features, and running sums over chunks;
- `forward`, `backward`: the kernels of the two passes;
- `products`, `causal_products`: attention with elu features by PyTorch's matrix products;
- `elu_rows`, `elu_chunks`: the kernels that run between these matrix products.
"""
