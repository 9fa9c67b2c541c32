"""Models that read a traffic scene. Imports models, nn and core.

- `object_encoder`: `SceneEncoder`
- `controller`: `Controller`: actions of the ego vehicle
"""
