"""Model families: the only doors to diffusers."""
