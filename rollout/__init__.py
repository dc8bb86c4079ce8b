"""Prompt in, trajectories out: noise, kernels, clean estimates, previews. Imports none of our other
packages."""
