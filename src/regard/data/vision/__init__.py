"""Readers of image files, of images with captions, and of images with questions. Imports only regard.data."""
