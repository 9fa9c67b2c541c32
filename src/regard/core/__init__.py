"""The mathematics of attention: scores, normalisers, masks, and `attention`. Of this project it imports only `kernels`.

The call:
- `attention`: `attention` and `explain`, the public functions;
- `problem`: the record of a call's checked arguments, which every backend receives;
- `dispatch`: the table from which a call's backend is chosen;
- `attended`: the result of attention;
- `signatures`: the cache key under which the chosen backend is stored; `recent_calls`: a faster lookup of that choice
  for repeated calls;
- `backends/`: the implementations of attention;
- `scores`, `custom`: the scores of this library; score functions given by the caller;
- `normalizers`, `hard`: the functions from scores to weights; hard attention, which samples one key;
- `masks`, `clauses`, `spans`: which pairs may attend; masks as simple rules for kernels; ranges of rows and columns;
- `tensor_arguments`: checks of integers, positions, lengths and shapes that several records share;
- `mask_cache`: results computed from a mask object, stored as long as the object exists;
- `biases`: terms that are added to the scores;
- `requests`, `recompute`, `summaries`: which weights to return, and how they are computed where a backend does not
  return them, in torch operations or by kernels;
- `kernel_scores`: additive scores by a kernel on CUDA, for code that stores rows of scores;
- `merging`, `key_parts`: the merge of attention over parts of the keys; attention over one part.

Checks and conditions:
- `nonfinite`: NaN and Inf at masked positions, which must not reach the output;
- `backward_checks`: inputs changed before the backward pass, second derivatives;
- `transforms`, `graph_breaks`: calls inside torch.func and torch.compile;
- `sharding`: sequences spread over a process group;
- `torch_names`: keywords of torch's attention and what to write instead;
- `fields`: the fields of a record as text and as an HTML table.

Other attention:
- `linear`, `features`, `linear_masks`, `linear_kernel`: attention in linear time, in torch operations or by a kernel;
- `local`: attention to a window of keys around a centre.
"""
