"""Image captioning, with attention over the cells of the image for each word.

This folder has the files that every task has (see `regard.tasks`), and:
- `files`: reads the training and evaluation data from the user's files
"""
