"""Loops of recurrent networks over whole sequences, with their own backward passes. Imports torch and kernels.

- `gru`: one step of a GRU: its definition, and the implementations that the loops use;
- `sequence_cpu`, `sequence_cuda`: a GRU over a sequence, on the CPU and on CUDA;
- `bahdanau`: a GRU decoder with additive attention in Bahdanau's order, on CUDA and in torch operations;
- `bahdanau_cpu`: a GRU decoder with additive attention in Bahdanau's order, on the CPU;
- `luong`: a GRU decoder with additive attention in Luong's order with input feeding.
"""
