"""Models that read sound. Imports models, nn and core."""
