"""`regard bench sweep`: random calls that people make, each beside the best of what they would write instead.

- `cases`: one call as a record, and as a line of Python
- `drawing`: a case from a seed, an index and a kind of device
- `tensors`: the inputs of a case, its masks and biases as dense tensors
- `plain_forms`: attention in a few lines of torch, for peers and for the float64 reference
- `contests`: what competes in a case, regard's call first
- `attention_contest`: attention calls and their peers
- `linear_contest`: linear attention and its peers
- `layer_contest`: layers and blocks and their peers
- `fused_peers`: SDPA, FlexAttention and varlen_attn
- `error_budgets`: the error in budgets
- `timing`: wall clock in turns, host time, kernels, memory
- `report`: one line for each case, and the distribution
- `command`: the command
"""
