"""The receiver job: its application in Spark, its process, and how it launches receivers."""
