"""The mathematics of attention: scores, normalisers, masks, biases and the one call over them. Imports torch only."""
