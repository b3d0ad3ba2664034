"""The two Spark applications (receiver job, batch), the data sources that they read and write, and the state."""
