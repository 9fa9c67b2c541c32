"""Optimised functions on tensors. They import no other part of `regard`, and Triton only in `triton/`; no argument is
an instance of a class of `core`.

The docstring of each function names the reference implementation whose results it must equal. The calling code decides
whether a kernel applies to a call: `core/backends` for attention, `models` for recurrent loops, `decode` for search.

- `additive/`: additive scores on the CPU, the sine series, and the function that calls the CUDA kernels;
- `recurrent/`: a GRU over sequences and GRU decoders with attention, with their backward passes;
- `triton/`: the kernels written in Triton; each module is imported in the function that launches it;
- `dot_attention`: attention with dot products on the CPU by `dot_attention.c`;
- `local_attention`: local attention with dot products on the CPU by `local_attention.c`;
- `unit_rows`: rows divided by their norm, for cosine scores, on the CPU by `unit_rows.c`;
- `entmax_rows`: sparsemax and entmax attention on CUDA, a block of whole rows at a time;
- `linear_blocks`: linear attention on the CPU, with its backward pass;
- `linear_loops`: linear attention on the CPU by `linear_attention.c`, with its backward pass;
- `performer_products`: linear attention with Performer features by torch's products of matrices on CUDA;
- `weight_sums`: the weight that each key receives, and the entropy of each query, on the CPU from the log-sum-exp;
- `cross_entropy`: output layer and cross-entropy without all logits in memory at once;
- `products`: matrix products on the CPU, by MKL or oneDNN;
- `cuda_graphs`: a loop of small CUDA kernels recorded once and replayed;
- `compilation`: functions compiled to C++ at their first call, and cached;
- `native_library`: C files of this package, compiled once for a machine and loaded from the user's cache; the text of
  `vectors.h` (SIMD vectors), `bfloat16.h` (products of bfloat16 matrices) and `regions.h` (division of work among
  threads) precedes the files of a library;
- `derivatives`: the error raised when a backward pass that has no derivative is differentiated;
- `availability`: whether Triton is installed, the current GPU, and whether a CUDA graph is being captured;
- `device_memory`: the working memory that a computation may take on a device;
- `dtypes`: groups of dtypes.
"""
