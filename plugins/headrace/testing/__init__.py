"""Public test tools, for this package and for packages that build on it."""
