"""Compiled train steps: lowering, ahead-of-time files, and the cache of a run."""
