"""The mathematics: scores, normalisers, masks, and the one call. Imports torch and `kernels` alone.

The call:
- `attention`: `attention` and `explain`, the public edge;
- `problem`: a checked call, all that a backend needs;
- `dispatch`: which backend serves it, one table;
- `backends/`: ways to compute it;
- `scores`, `custom`: the score of a query and a key, of this library or of the caller;
- `normalizers`, `hard`: from scores to weights; sampling one key;
- `masks`, `clauses`, `spans`: which pairs may attend, as the simple parts that kernels know, for some rows and columns;
- `biases`: what is added to scores;
- `requests`, `recompute`, `summaries`: which weights to return, and how they are computed where a backend does not
  have them, plainly or by kernels;
- `kernel_scores`: additive scores by a kernel on CUDA, where rows of scores are formed;
- `merging`, `key_parts`: attention over parts of the keys, joined.

Checks and conditions:
- `nonfinite`: NaN and Inf that a mask must keep out;
- `backward_checks`: inputs changed before the backward pass, second derivatives;
- `transforms`, `graph_breaks`: calls inside torch.func and torch.compile;
- `sharding`: sequences spread over a process group;
- `torch_names`: keywords of torch's attention and what to write instead.

Other attention:
- `linear`, `features`, `linear_masks`, `linear_kernel`: attention in linear time, plainly or by a kernel;
- `local`: attention around a centre.
"""
