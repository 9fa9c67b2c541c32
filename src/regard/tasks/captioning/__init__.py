"""Image captioning, with attention over the cells of the image for each word.

This folder has the files that every task has (see `regard.tasks`), and:
- `files`: the data of a run that come from the user's files
"""
