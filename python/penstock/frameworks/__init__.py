"""Leaves that need other libraries: Arrow."""
