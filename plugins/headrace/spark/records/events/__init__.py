"""Change events of databases as Arrow's columns."""
