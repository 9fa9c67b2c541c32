"""Models that read sound. Imports models.

- `pyramidal_encoder`: `SpeechEncoder`
"""
