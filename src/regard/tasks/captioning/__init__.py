"""Captioning: what a picture shows, and where each word of it was seen."""
