"""Fast code as plain functions on tensors. Imports torch alone, and Triton in `triton/`; knows no records.

Each function names the plain function that it must equal. Who calls a kernel decides whether it serves: `core/backends`
for attention, `models` for recurrent loops, `decode` for search.

- `additive/`: additive scores on the CPU, the sine series, and the entry to the CUDA kernels;
- `recurrent/`: a GRU over sequences and GRU decoders with attention, with their backward passes;
- `triton/`: the kernels written in Triton; each module is imported in the function that launches it;
- `entmax_rows`: sparsemax and entmax attention on CUDA, a block of whole rows at a time;
- `linear_blocks`: linear attention on the CPU, with its backward pass;
- `weight_sums`: received weights and entropy on the CPU, from the log-sum-exp;
- `cross_entropy`: output layer and cross-entropy without whole logits;
- `products`: matrix products on the CPU, by MKL or oneDNN;
- `cuda_graphs`: a loop of small CUDA kernels recorded once and replayed;
- `compilation`: a function compiled to C++ when first called, and kept;
- `native_library`: a C file of this package, compiled once for a machine and loaded from the user's cache;
- `derivatives`: the error of a backward pass that cannot be differentiated again;
- `availability`: is Triton installed, is a CUDA graph being captured;
- `dtypes`: groups of dtypes.
"""
