"""Parts of `benchmarks/make_model.py`, which makes the shipped model from nothing."""
