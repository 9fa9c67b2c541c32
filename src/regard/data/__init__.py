"""Data: built-in worlds with gold attention, and readers of real files. Imports nothing of regard."""
