"""Additive scores w · tanh(q + k) without a hidden layer for each pair in memory. Imports torch and numpy.

- `exponential`: all pairs on the CPU by exponentials of rows;
- `pair_loops`: its loops over pairs in C (`pair_loops.c`), where there is a C compiler;
- `native_attention`: attention on the CPU by one call of that C code, with its backward pass;
- `logistic`: all pairs on the CPU by the logistic function, where compiling would cost more time than it saves;
- `query_scores`: one query for each row of a batch, for loops over steps on the CPU;
- `fused`: attention on CUDA: checks, and the call of the Triton kernels with every activation as tanh, |x| or gelu;
- `small_calls`: which calls on CUDA store their scores;
- `series`: sine series for activations, with their fits in `series.json`;
- `autotuning`: tile sizes measured on a device and cached in a file.
"""
