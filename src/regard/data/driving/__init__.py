"""Readers of driving logs and of traffic scenes. Imports only regard.data."""
