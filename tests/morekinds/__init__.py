"""Tiny programs of many kinds: several steps, and what a user does between and around them."""
