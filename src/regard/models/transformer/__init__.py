"""The Transformer. Imports models, nn, core and kernels.

- `encoder_decoder`: `TransformerEncoder`, `TransformerDecoder`
- `stacks`: stacks of layers without embeddings
- `token_input`: embeddings with positions
- `beams`: the state of beam search
- `beam_layers`: the layers for grouped hypotheses
- `training_step`: loss without logits, compilation, CUDA graph of a step
"""
