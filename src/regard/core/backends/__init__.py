"""The backends: each reports why it cannot compute a call, estimates its memory, and computes it.

The files of this folder:

- `reference`: the specification, in torch operations over the whole matrix; `plain_form`: the same formula in fewer
  operations;
- `sdpa`: torch's fused kernels, called through `torch_sdpa`; `returned_layout`: the memory layout of gradients that
  cuDNN's kernel receives; `mask_blocks`: masks as tensors for torch's kernels; `banded`, `alibi_numbers`: windows, and
  ALiBi on the CPU, by torch's kernels; `flash`, `flash_cuda`: attention over a part of the keys with its log-sum-exp,
  on the CPU and on CUDA;
- `flex`: FlexAttention on CUDA, and the kernel for plain windows; `ranges`: the kernel for bands, lengths, segments,
  biases, softcaps and sigmoid weights;
- `per_sequence`: padding and documents on the CPU, a kernel call for each sequence;
- `short`: short sequences on CUDA; `dot_loops`: dot products on the CPU, by one call of compiled code (`loops`);
- `additive`: additive scores, on the CPU and on CUDA;
- `blocked`: any score, normaliser and mask, in blocks; `block_grid`: the division of the score matrix into blocks;
  `online_normalizers`: normalisers that receive a row block by block; `sparse_rows`: sparsemax and entmax on CUDA;
- `decoding_step`: attention of a few queries on CUDA, used by `sdpa` and `additive`;
- `local_kernels`: local attention with dot products, on the CPU and on CUDA, used by `core/local`;
- `kernel_arguments`: mask and bias as tensors and numbers, for kernels that evaluate them pair by pair;
- `result`: the record that a backend returns.
"""
