"""Readers of driving data. Imports only regard.data.

- `driving_log`: reads logs of camera frames with the driver's steering, throttle and brake
- `traffic_scenes`: reads scenes, lists of cars and other objects on a road, with the driver's action
"""
