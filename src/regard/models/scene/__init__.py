"""Models of traffic scenes. Of regard, they import `models`, `nn` and `core`.

- `object_encoder`: `SceneEncoder`, which encodes the objects of a scene
- `controller`: `Controller`, which chooses actions of the ego vehicle
"""
