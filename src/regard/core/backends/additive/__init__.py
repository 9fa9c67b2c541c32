"""Fused additive (Bahdanau) attention: Triton kernels for CUDA, a blocked form for the CPU.  Imports torch alone."""
