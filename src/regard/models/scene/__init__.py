"""Models of traffic scenes. Imports models, nn and core.

- `object_encoder`: `SceneEncoder`
- `controller`: `Controller`: actions of the ego vehicle
"""
