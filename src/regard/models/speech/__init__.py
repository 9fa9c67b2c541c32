"""Models of speech. Of regard, they import `models` and `core`.

- `pyramidal_encoder`: `SpeechEncoder`, which encodes frames of audio
"""
