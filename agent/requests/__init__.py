"""Calls as frozen records, read and checked once."""
