"""Additive scores w · tanh(q + k) without storing the hidden layer of all pairs. Imports torch and numpy.

- `exponential`: scores of all pairs on the CPU, by exponentials computed once for each query and each key;
- `pair_loops`: the loops of `exponential` in C (`pair_loops.c`), where there is a C compiler;
- `native_attention`: attention on the CPU by one call of `pair_loops.c`, with its backward pass;
- `logistic`: scores of all pairs on the CPU by the logistic function, where compiling would take longer than it saves;
- `query_scores`: scores of one query for each row of a batch, for loops over steps on the CPU;
- `fused`: attention on CUDA: checks, and the call of the Triton kernels with every activation as tanh, |x| or gelu;
- `small_calls`: which calls on CUDA store their scores;
- `series`: sine series for activations, with their fits in `series.json`;
- `autotuning`: tile sizes measured on a device and cached in a file.
"""
