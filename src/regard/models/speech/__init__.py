"""Models of speech. Imports models.

- `pyramidal_encoder`: `SpeechEncoder`
"""
