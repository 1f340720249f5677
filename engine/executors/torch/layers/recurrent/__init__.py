"""State space layers and the convolution before them."""
