"""`regard bench sweep`: random realistic calls, each compared with the fastest alternative in torch.

- `cases`: `Case`, the record of one call, and its line of Python
- `drawing`: a case from a seed, an index and a kind of device
- `ordinary`: a fixed list of ordinary calls
- `tensors`: the inputs of a case, its masks and biases as dense tensors
- `plain_forms`: attention in a few torch operations, for peers and for the float64 reference
- `contests`: the contenders of a case, regard's call first
- `attention_contest`: attention calls and their peers
- `linear_contest`: linear attention and its peers
- `layer_contest`: layers and blocks and their peers
- `fused_peers`: SDPA, FlexAttention and varlen_attn
- `error_budgets`: errors relative to their allowed size
- `timing`: interleaved wall-clock time, host time, kernels, memory
- `compile_ahead`: compiles the cases of a sweep in several processes before the first measurement
- `report`: the results of each case as text, and the distribution of the ratios
- `command`: the command `regard bench sweep`
"""
