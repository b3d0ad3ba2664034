"""See headrace.spark."""
