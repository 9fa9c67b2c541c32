"""Models that read a traffic scene: an encoder of objects, and a controller. Imports models, nn and core."""
