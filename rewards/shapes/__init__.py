"""The shapes world: a grammar, a renderer and an exact verifier of 32x32 scenes."""
