"""Captioning: a caption of a picture, with attention over its cells for each word.

Beside the files that every task has (`regard.tasks`):
- `files`: the user's pictures with captions
"""
