"""The Transformer. Imports models, nn, core and kernels.

- `encoder_decoder`: `TransformerEncoder`, `TransformerDecoder`
- `stacks`: stacks of layers without embeddings
- `token_input`: embeddings with positions
- `beams`: the state of beam search
- `beam_layers`: the layers for grouped hypotheses
- `layer_compilation`: one compilation for each kind of layer
"""
