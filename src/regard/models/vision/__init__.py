"""Models of images. Imports models, nn and core.

- `image_encoder`: `ImageEncoder`: cells of a feature map as a memory
- `convolutional`: a small convolutional network
- `efficientnet`: EfficientNet-Lite0
- `visual_attention`: `RecurrentVisualAttention`: glimpses, trained by REINFORCE
- `camera_driver`: `CameraDriver`: controls from frames
"""
