"""Glimpses: the class of an image from a few glimpses at learned locations.

Beside the files that every task has (`regard.tasks`):
- `placing`: digits at new positions in each step
- `grey_images`: grey images in and out of files
"""
