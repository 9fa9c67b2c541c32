"""How each kind of attention call is captured while a model runs. Imports look and core.

- `captured_call`: the call, its check and gradient
- `sdpa_calls`: F.scaled_dot_product_attention
- `flex_calls`: FlexAttention
- `multihead_modules`: nn.MultiheadAttention and nn.Transformer
- `softmax_calls`: hand-written attention
- `score_matrices`: its scores, traced back to queries and keys
- `transformers_calls`: Hugging Face transformers
- `regard_calls`: regard.attention
- `missed_modules`: attention modules without a captured call
"""
