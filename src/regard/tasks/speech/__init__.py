"""Speech recognition: the transcript of a recording, with the time of each symbol (word or character).

This folder has the files that every task has (see `regard.tasks`), and:
- `files`: reads the training and evaluation data from the user's files
- `log_mel_frames`: converts recordings to log-mel frames, and frames to images
"""
