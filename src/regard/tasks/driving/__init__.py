"""Driving over objects: traffic scenes as vectors, social attention, a controller, and the closed loop."""
