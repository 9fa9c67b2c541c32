"""Driving: over objects with social attention and the closed loop, by the frames of a camera, and in highway-env."""
