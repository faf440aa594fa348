"""Search procedures: which trial trains on, which one stops."""
