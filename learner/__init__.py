"""Trajectories in, weights out: credit, objective, the DeepSpeed engine. Imports the pure parts of `rollout`."""
