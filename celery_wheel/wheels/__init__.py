"""Timing wheels: pure data structures, standard library only."""
