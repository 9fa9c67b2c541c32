"""Loops of recurrent networks over whole sequences, with backward passes written by hand. Imports torch and kernels.

- `gru`: the step of a GRU: its definition, and the forms that the loops use;
- `sequence_cpu`, `sequence_cuda`: a GRU over a sequence;
- `bahdanau`: a GRU decoder with additive attention in Bahdanau's order, on CUDA and in torch operations;
- `bahdanau_cpu`: the same for the CPU;
- `luong`: a GRU decoder in Luong's order with input feeding.
"""
