"""Test tools for packages that build on headrace."""
