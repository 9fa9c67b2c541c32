"""Models that read images: encoders, recurrent visual attention, a camera driver. Imports models, nn and core."""
