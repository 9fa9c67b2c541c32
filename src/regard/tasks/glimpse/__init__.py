"""Image classification from a few glimpses: small parts of the image at locations that the model learns to choose.

This folder has the files that every task has (see `regard.tasks`), and:
- `placing`: places digits at new positions in each training step
- `grey_images`: reads and writes grey images
"""
