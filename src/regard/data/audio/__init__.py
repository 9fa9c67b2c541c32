"""Sound: readers. Imports only regard.data.

- `sound_files`: samples of WAV and other files, resampling
- `transcripts`: recordings with transcripts
"""
