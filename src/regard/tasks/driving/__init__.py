"""Driving: actions and steering from the objects of a scene, from a camera, and in highway-env.

This folder has the files that every task has (see `regard.tasks`), and:
- `camera_material`: reads the frames of a driving log as training and evaluation data
- `camera_network`: builds the network that drives from camera frames
- `camera_predictor`: computes controls from camera frames with a trained network
- `camera_scoring`: squared errors of the controls of the network and of baselines
- `replay`: a simulated drive of the model, step by step
- `highway`: scenes, planner and episodes of the simulator highway-env
- `highway_view`: converts an episode of highway-env to a trace (labelled attention maps)
- `imitation`: imitation learning from the planner in highway-env (DAgger)
"""
