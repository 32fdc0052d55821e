"""ResNet (arXiv:1512.03385)."""
