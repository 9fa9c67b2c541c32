"""Glimpses: the class of an image from a few small looks at it, and where to look."""
