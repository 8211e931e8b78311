"""The versions of a dataset: its log, differences, names and branches."""
