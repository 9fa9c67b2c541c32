"""Speech recognition: the transcript of a recording, with the time of each symbol.

Beside the files that every task has (`regard.tasks`):
- `files`: the user's recordings
- `log_mel_frames`: recordings as log-mel frames
"""
