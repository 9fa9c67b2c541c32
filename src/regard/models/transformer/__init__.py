"""The Transformer. Of regard, this package imports `models`, `nn`, `core` and `kernels`.

- `encoder_decoder`: `TransformerEncoder`, `TransformerDecoder`
- `stacks`: stacks of layers without embeddings
- `token_input`: embeddings with positions
- `beams`: the state of beam search
- `beam_layers`: the decoder's layers in beam search
- `layer_compilation`: one compilation for each type of layer
"""
