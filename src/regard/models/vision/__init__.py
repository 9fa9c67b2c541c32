"""Models of images. Of regard, they import `models`, `nn` and `core`.

- `image_encoder`: `ImageEncoder`, which encodes the cells of a feature map as a memory
- `convolutional`: a small convolutional network
- `efficientnet`: EfficientNet-Lite0
- `visual_attention`: `RecurrentVisualAttention`, which classifies images from glimpses, trained by REINFORCE
- `camera_driver`: `CameraDriver`, which steers by the frames of a camera
"""
