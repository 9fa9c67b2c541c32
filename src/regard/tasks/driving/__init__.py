"""Driving: actions and steering from the objects of a scene, from a camera, and in highway-env.

Beside the files that every task has (`regard.tasks`):
- `camera_material`: the frames of a driving log
- `camera_network`: the camera driver from its settings
- `camera_predictor`: controls from frames
- `camera_scoring`: squared errors and those of baselines
- `replay`: a drive of the model, step by step
- `highway`: highway-env: scenes, planner, episodes
- `highway_view`: an episode as a trace
- `imitation`: learning from the planner (DAgger)
"""
