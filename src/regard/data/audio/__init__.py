"""Readers of sound files and of their transcripts. Imports only regard.data.

- `sound_files`: reads the samples of WAV and other sound files, and resamples them
- `transcripts`: reads lists of recordings with their transcripts
"""
