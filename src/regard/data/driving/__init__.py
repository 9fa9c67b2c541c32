"""Driving: readers. Imports only regard.data.

- `driving_log`: camera frames with controls
- `traffic_scenes`: scenes of objects with actions
"""
