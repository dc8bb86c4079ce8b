"""Wires the other packages into a running system; nobody imports it."""
