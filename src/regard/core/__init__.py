"""The mathematics of attention: scores, normalisers, masks, and `attention`. It imports torch and `kernels` alone.

The call:
- `attention`: `attention` and `explain`, the public functions;
- `problem`: the checked arguments of a call, as every backend takes them;
- `dispatch`: the table from which a call's backend is chosen;
- `signatures`, `recent_calls`: the key under which that choice is stored; a faster check for calls made before;
- `backends/`: the implementations of the call;
- `scores`, `custom`: the score of a query and a key, of this library or of the caller;
- `normalizers`, `hard`: from scores to weights; sampling one key;
- `masks`, `clauses`, `spans`: which pairs may attend; masks as simple rules for kernels; ranges of rows and columns;
- `tensor_arguments`: checks of integers, positions, lengths and shapes that several records share;
- `mask_cache`: results computed from a mask object, stored as long as the object exists;
- `biases`: what is added to scores;
- `requests`, `recompute`, `summaries`: which weights to return, and how they are computed where a backend does not
  return them, in torch operations or by kernels;
- `kernel_scores`: additive scores by a kernel on CUDA, where rows of scores are formed;
- `merging`, `key_parts`: attention over parts of the keys, joined.

Checks and conditions:
- `nonfinite`: NaN and Inf at masked positions, which must not reach the output;
- `backward_checks`: inputs changed before the backward pass, second derivatives;
- `transforms`, `graph_breaks`: calls inside torch.func and torch.compile;
- `sharding`: sequences spread over a process group;
- `torch_names`: keywords of torch's attention and what to write instead.

Other attention:
- `linear`, `features`, `linear_masks`, `linear_kernel`: attention in linear time, in torch operations or by a kernel;
- `local`: attention around a centre.
"""
