"""Models of speech. Of regard, they import `models` only.

- `pyramidal_encoder`: `SpeechEncoder`, which encodes frames of audio
"""
