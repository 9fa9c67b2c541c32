"""Linear attention by kernels, in chunks of positions: features recomputed in each pass, sums in float32.

- `operator`: the differentiable function, and the launches;
- `log_features`: logarithms of features, and running sums over chunks;
- `forward`, `backward`: the two passes;
- `products`, `causal_products`: attention with elu features by torch's products of matrices;
- `elu_rows`, `elu_chunks`: what is computed between these products.
"""
