"""Readers of sound files, and of recordings with transcripts. Imports only regard.data."""
